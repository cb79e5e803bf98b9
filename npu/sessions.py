"""What an engine keeps beyond its own life: sessions that somebody saves, prefixes that come back by themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.namespace import Namespace
from hostcache.prefix import PrefixCache
from hostcache.prefix_store import PrefixStore
from hostcache.saved_prefix import restore_prefix, save_prefix
from hostcache.state_file import StateReader

__all__ = ["KeptState", "Session"]


@dataclass(frozen=True, eq=False)
class Session:
    """A conversation as it was saved.

    Attributes:
        tokens: int32 `[n]`, all of them.
        note: what was saved beside them.
        restored: leading tokens whose KV is in the pool now: a prompt that begins with them has them computed already,
            unless others need the blocks first.
    """

    tokens: NDArray[np.int32]
    note: bytes
    restored: int


class KeptState:
    """Files of one engine's KV; see docs/state-files.md.

    Args:
        cache: holds the KV.
        prefix: knows where.
        folder: where pinned prefixes are kept; None keeps none.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, cache: PagedKVCache, prefix: PrefixCache, folder: str | os.PathLike[str] | None) -> None:
        self._cache = cache
        self._prefix = prefix
        self._store = None if folder is None else PrefixStore(folder, cache, prefix)

    def recall(self, namespace: Namespace, tokens: NDArray[np.int32]) -> int:
        """Bring the beginning of a prompt back from the folder; returns the tokens known of it in full blocks."""
        if self._store is not None:
            self._store.restore(namespace, tokens)
        return self._prefix.known_tokens(namespace, tokens)

    def pin(self, namespace: Namespace, tokens: NDArray[np.int32], owner: str, seconds: float) -> int:
        """Pin what is known of a prompt's beginning, and keep it in the folder; returns the tokens that are pinned.

        Raises:
            UsageError: more than may be pinned, or `seconds` is not positive.
        """
        pinned = self._prefix.pin(namespace, tokens, owner, seconds)
        if self._store is not None:
            self._store.save(namespace, tokens[:pinned])
        return pinned

    def save(self, path: Path, namespace: Namespace, tokens: NDArray[np.int32], note: bytes) -> int:
        """Save a conversation; returns the tokens whose KV is in the file.

        Raises:
            UsageError: the namespace is too long.
            OSError: the file cannot be written; one that was there is there still.
        """
        return save_prefix(path, self._cache, self._prefix, namespace, tokens, kind="session", note=note).computed

    def load(self, path: Path, namespace: Namespace) -> Session:
        """Load a conversation; what there is no room for in the pool will be computed.

        Raises:
            BadStateFile: the file is damaged, and was set aside, or is no state file.
            UsageError: it was saved with another model or other options; it stays.
            OSError: it cannot be read.
        """
        with StateReader(path) as reader:
            known = self._prefix.known_tokens(namespace, reader.tokens)
            restored = restore_prefix(reader, self._cache, self._prefix, namespace)
            return Session(reader.tokens, reader.note, known + restored)
