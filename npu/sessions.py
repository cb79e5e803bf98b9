"""What an engine keeps beyond its own life: sessions that somebody saves, prefixes that come back by themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import Codec
from hostcache.namespace import Namespace
from hostcache.prefix_caches import PrefixCaches
from hostcache.prefix_store import PrefixStore
from hostcache.saved_prefix import restore_prefix, save_prefix
from hostcache.state_file import StateReader

from .interrupts import held_signals
from .sampling_params import SamplingParams
from .step_guard import StepGuard
from .token_ids import prompt_ids

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["KeptState", "Session", "Sessions"]


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

    def __init__(self, cache: PagedKVCache, prefix: PrefixCaches, folder: str | os.PathLike[str] | None) -> None:
        self._cache = cache
        self._prefix = prefix
        self._store = None if folder is None else PrefixStore(folder, cache, prefix)

    def recall(self, namespace: Namespace, tokens: NDArray[np.int32], codec: Codec) -> int:
        """Bring the beginning of a prompt back from the folder; returns the tokens known of it in full blocks."""
        if self._store is not None:
            self._store.restore(namespace, tokens, codec)
        return self._prefix.of(codec).known_tokens(namespace, tokens)

    def pin(self, namespace: Namespace, tokens: NDArray[np.int32], codec: Codec, owner: str, seconds: float) -> int:
        """Pin what is known of a prompt's beginning, and keep it in the folder; returns the tokens that are pinned.

        Raises:
            UsageError: more than may be pinned, or `seconds` is not positive.
        """
        pinned = self._prefix.of(codec).pin(namespace, tokens, owner, seconds)
        self.keep(namespace, tokens[:pinned], codec)
        return pinned

    def keep(self, namespace: Namespace, tokens: NDArray[np.int32], codec: Codec) -> int:
        """Keep what is known of a prompt's beginning in the folder; returns the tokens it holds, 0 without a folder."""
        return 0 if self._store is None else self._store.save(namespace, tokens, codec)

    def save(self, path: Path, namespace: Namespace, tokens: NDArray[np.int32], codec: Codec, note: bytes) -> int:
        """Save a conversation; returns the tokens whose KV is in the file.

        Raises:
            UsageError: the namespace is too long.
            OSError: the file cannot be written; one that was there is there still.
        """
        prefix = self._prefix.of(codec)
        return save_prefix(path, self._cache, prefix, namespace, tokens, kind="session", note=note).computed

    def load(self, path: Path, namespace: Namespace, codec: Codec) -> Session:
        """Load a conversation; what there is no room for in the pool will be computed.

        Raises:
            BadStateFile: the file is damaged, and was set aside, or is no state file.
            UsageError: it was saved with another model or other options; it stays.
            OSError: it cannot be read.
        """
        with StateReader(path) as reader:
            prefix = self._prefix.of(codec)
            known = prefix.known_tokens(namespace, reader.tokens)
            restored = restore_prefix(reader, self._cache, prefix, namespace)
            return Session(reader.tokens, reader.note, known + restored)


class Sessions:
    """Saves, loads and pins for an engine, between its steps; `Engine.sessions` gives one.

    Args:
        engine: computes what is to be pinned.
        kept: its files.
        guard: its steps'.
    """

    def __init__(self, engine: Engine, kept: KeptState, guard: StepGuard) -> None:
        self._engine = engine
        self._kept = kept
        self._guard = guard

    def pin(
        self,
        prompt: str | ArrayLike,
        owner: str,
        seconds: float,
        *,
        salt: str = "",
        prompt_version: str = "",
        kv: str | None = None,
    ) -> int:
        """Keep what prompts begin with in the pool, and in `prefix_folder`: read from there, or else computed now.

        Args:
            prompt: as in `Engine.add_request`.
            owner: for `engine.prefix.unpin(owner)`.
            seconds: how long it stays pinned at most.
            salt: whose prompts it is for.
            prompt_version: likewise.
            kv: likewise.

        Returns:
            Tokens that are pinned: the full blocks of the prompt.

        Raises:
            UsageError: more than may be pinned, `seconds` is not positive, or as in `Engine.generate`.
            RequestRefused: it can never fit.
            RequestFailed: it could not be computed.
        """
        engine = self._engine
        tokens = prompt_ids(prompt, engine.tokenizer)
        namespace, codec = engine.namespace(salt, prompt_version, kv), engine.codec(kv)
        whole = tokens.size // engine.cache.geometry.block_tokens * engine.cache.geometry.block_tokens
        if self._kept.recall(namespace, tokens, codec) < whole:
            once = SamplingParams(max_tokens=1)
            for _ in engine.generate(tokens, once, salt=salt, prompt_version=prompt_version, kv=kv):
                pass
        with held_signals(), self._guard.step():
            return self._kept.pin(namespace, tokens, codec, owner, seconds)

    @held_signals()
    def keep(self, prompt: str | ArrayLike, *, salt: str = "", prompt_version: str = "", kv: str | None = None) -> int:
        """Keep what was computed of a prompt in `prefix_folder`, as far as it is in the pool; nothing is pinned.

        Args:
            prompt: as in `Engine.add_request`.
            salt: as the prompt's.
            prompt_version: likewise.
            kv: likewise.

        Returns:
            Tokens that the folder holds now: full blocks of the prompt. 0: nothing is known of it, there is no folder,
            or the disk refuses (which is logged).

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        with self._guard.step():
            engine = self._engine
            ids = prompt_ids(prompt, engine.tokenizer)
            return self._kept.keep(engine.namespace(salt, prompt_version, kv), ids, engine.codec(kv))

    @held_signals()
    def save(
        self,
        path: str | os.PathLike[str],
        tokens: ArrayLike,
        *,
        note: bytes = b"",
        salt: str = "",
        prompt_version: str = "",
        kv: str | None = None,
    ) -> int:
        """Save a conversation, its KV included as far as it is in the pool, in the place of a file that is there.

        Of one with a window, that is what lies within the first window: the rest depends on it, and is not shared.

        Args:
            path: the file; see docs/state-files.md.
            tokens: ids of the prompt and its answer, or more of such.
            note: what to keep beside them.
            salt: as the conversation's.
            prompt_version: likewise.
            kv: likewise.

        Returns:
            Tokens whose KV is in the file.

        Raises:
            UsageError: an id is outside the vocabulary.
            OSError: the file cannot be written; one that was there is there still.
        """
        with self._guard.step():
            engine = self._engine
            ids = prompt_ids(tokens, engine.tokenizer)
            return self._kept.save(Path(path), engine.namespace(salt, prompt_version, kv), ids, engine.codec(kv), note)

    @held_signals()
    def load(
        self, path: str | os.PathLike[str], *, salt: str = "", prompt_version: str = "", kv: str | None = None
    ) -> Session:
        """Load a conversation; a prompt that begins with its tokens goes on from there.

        Args:
            path: the file.
            salt: as it was saved with.
            prompt_version: likewise.
            kv: likewise.

        Raises:
            BadStateFile: the file is damaged, and was set aside, or is no state file.
            UsageError: it was saved with another model, other options or another salt; it stays.
            OSError: it cannot be read.
        """
        with self._guard.step():
            namespace = self._engine.namespace(salt, prompt_version, kv)
            return self._kept.load(Path(path), namespace, self._engine.codec(kv))
