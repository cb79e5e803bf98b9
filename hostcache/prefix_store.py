"""Keeps prefixes in a folder, so that they come back from disk after a restart instead of being computed again."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .cache import PagedKVCache
from .codec import FP16, Codec
from .errors import BadStateFile, UsageError
from .namespace import Namespace
from .prefix_caches import PrefixSource
from .prefix_node import common_beginning
from .saved_prefix import restore_prefix, save_prefix
from .state_file import BAD_SUFFIX, StateReader, set_aside, state_bytes
from .state_format import StateHeader

__all__ = ["PrefixStore"]

SUFFIX = ".kv"
TEMPORARY = ".tmp"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Stored:
    """One file of the folder, as it was found or written.

    Attributes:
        path: the file.
        header: what it says of itself.
        tokens: int32, all of which it holds KV for.
    """

    path: Path
    header: StateHeader
    tokens: NDArray[np.int32]


class PrefixStore:
    """A folder of state files, one per prefix, bounded in bytes and age. It belongs to one cache, of all codecs.

    What is found there is proven before it is used (`StateReader`). Files of other models, options or versions are
    ignored until they are too old. A damaged one is set aside, and nothing that goes wrong with the folder later on
    ever fails a request: it is logged, and the prefix is computed.

    Several processes may share a folder; each knows the files that were there when it began, and its own.

    Args:
        folder: made if need be, mode 0700: the files hold prompts.
        cache: holds the KV.
        prefix: knows where; what it invalidates goes from the folder, too.
        max_bytes: most bytes of all files; those used longest ago go first.
        max_age: seconds after its last use at which a file goes.
        clock: seconds since the epoch, as the files' times are.

    Raises:
        UsageError: a limit is not positive, or the folder cannot be made or read.

    Example:
        >>> import numpy as np, tempfile
        >>> from hostcache import KVGeometry, Namespace, PagedKVCache, PrefixCache, PrefixStore
        >>> folder = tempfile.TemporaryDirectory()
        >>> def started():
        ...     cache = PagedKVCache.create(KVGeometry(layers=1, kv_heads=1, head_dim=64), nbytes=1 << 16)
        ...     prefix = PrefixCache(cache.pool)
        ...     return cache, prefix, PrefixStore(folder.name, cache, prefix, max_bytes=1 << 20)
        >>> cache, prefix, store = started()
        >>> mine, prompt = Namespace("my model"), np.arange(40, dtype=np.int32)
        >>> hit, table = prefix.match(mine, prompt), cache.table()
        >>> table.append(40)
        >>> node = prefix.publish(hit.node, prompt[:16], table.blocks[0])  # once its KV has been computed
        >>> store.save(mine, prompt)  # what is known of it
        16
        >>> cache, prefix, store = started()
        >>> store.restore(mine, prompt), prefix.known_tokens(mine, prompt)
        (16, 16)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        cache: PagedKVCache,
        prefix: PrefixSource,
        *,
        max_bytes: int = 1 << 30,
        max_age: float = 30 * 24 * 3600,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 1 or not max_age > 0:
            raise UsageError(
                f"a prefix store needs positive limits, got {max_bytes} bytes and {max_age} seconds",
                max_bytes=max_bytes,
                max_age=max_age,
            )
        self.folder = Path(folder)
        self._cache = cache
        self._prefix = prefix
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._stored: dict[Path, _Stored] = {}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(0)
            paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise UsageError(
                f"prefixes cannot be kept in {folder}: {error.strerror}; give a folder of your own", folder=str(folder)
            ) from error
        for path in paths:
            self._find(path)
        prefix.on_invalidate = self._invalidate

    def save(self, namespace: Namespace, tokens: NDArray[np.int32], codec: Codec = FP16) -> int:
        """Keep the beginning of a prompt, as far as its KV is in full blocks of the codec's pool.

        A file that holds just that is not written again: flash wears out.

        Returns:
            Tokens that the folder holds now; 0 if nothing is known of the prompt, or it is larger than the folder may
            be, or the disk refuses (which is logged).

        Raises:
            UsageError: the namespace is too long for a file, or the tokens are not int32.
        """
        prefix = self._prefix.of(codec)
        tokens = tokens[: prefix.known_tokens(namespace, tokens)].copy()
        if not len(tokens):
            return 0
        text = hashlib.blake2b(tokens.tobytes(), digest_size=16, person=codec.name.encode()).hexdigest()
        path = self.folder / f"{namespace.digest[:32]}-{text}{SUFFIX}"
        if path in self._stored and path.exists():
            self._touch(path)
            return len(tokens)
        nbytes = state_bytes(
            StateHeader.of("prefix", self._cache.geometry, namespace, tokens, computed=len(tokens), codec=codec)
        )
        if nbytes > self._max_bytes:
            _log.warning("a prefix of %d bytes is not kept: %s may hold %d", nbytes, self.folder, self._max_bytes)
            return 0
        try:
            self._make_room(nbytes, beside=path)
            header = save_prefix(path, self._cache, prefix, namespace, tokens, kind="prefix")
        except OSError as error:
            _log.warning("a prefix cannot be kept in %s: %s", self.folder, error.strerror)
            return 0
        self._stored[path] = _Stored(path, header, tokens)
        self._touch(path)
        return len(tokens)

    def restore(self, namespace: Namespace, prompt: NDArray[np.int32], codec: Codec = FP16) -> int:
        """Bring back what the folder holds of a prompt's beginning in a codec, and the pool does not.

        Returns:
            Tokens that were read from disk; 0 if the pool has as much already, or the file is damaged or gone (which
            is logged).

        Raises:
            UsageError: the tokens are not int32.
        """
        prefix = self._prefix.of(codec)
        known = prefix.known_tokens(namespace, prompt)
        best, most = None, known
        for stored in self._stored.values():
            if stored.header.namespace == namespace.digest and stored.header.codec == codec.name:
                common = common_beginning(stored.tokens, prompt)
                if common // stored.header.block_tokens * stored.header.block_tokens > most:
                    best, most = stored, common
        if best is None:
            return 0
        try:
            with StateReader(best.path) as reader:
                if not np.array_equal(reader.tokens, best.tokens):  # another process has replaced it meanwhile
                    raise UsageError(f"{best.path} is another file by now", path=str(best.path))
                restored = restore_prefix(reader, self._cache, prefix, namespace, most)
        except (BadStateFile, UsageError, OSError) as error:
            del self._stored[best.path]
            _log.warning(
                "a kept prefix is computed again: %s", str(error)
            )  # the error itself would keep its frames alive
            return 0
        self._touch(best.path)
        return restored

    def _find(self, path: Path) -> None:
        """Note what a file holds; one that is no good is not noted."""
        try:
            with StateReader(path) as reader:
                self._stored[path] = _Stored(path, reader.header, reader.tokens)
        except (BadStateFile, UsageError, OSError) as error:
            _log.warning("a kept prefix cannot be used: %s", str(error))
            if isinstance(error, BadStateFile) and path.exists():
                set_aside(path)  # no state file, and everything in this folder should be one

    def _invalidate(self, namespace: Namespace | None, prompt_version: str | None) -> None:
        """Forget as `PrefixCache.invalidate` does, what other processes have written meanwhile included."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path not in self._stored:
                self._find(path)
        for stored in list(self._stored.values()):
            header = stored.header
            if namespace is None:
                gone = prompt_version in (None, header.prompt_version)
            else:
                gone = header.namespace == namespace.digest
            if gone:
                self._remove(stored.path)

    def _make_room(self, needed: int, beside: Path | None = None) -> None:
        """Remove what is too old, and then what was used longest ago, until `needed` more bytes fit.

        Set-aside files count like others, and what a writer that was killed left behind goes with age.
        """
        found = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith((SUFFIX, SUFFIX + BAD_SUFFIX, TEMPORARY)) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, Path(entry.path)))
        total = needed + sum(size for _, size, path in found if path != beside)
        for used, size, path in sorted(found):
            # A board without a clock wakes up in 1970: a file from the future is not old.
            if path != beside and (total > self._max_bytes or self._clock() - used > self._max_age):
                self._remove(path)
                total -= size

    def _remove(self, path: Path) -> None:
        self._stored.pop(path, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error.strerror)

    def _touch(self, path: Path) -> None:
        """Note that a file was used now."""
        now = self._clock()
        try:
            os.utime(path, (now, now))
        except OSError as error:  # it only seems to be used less than it is
            _log.debug("%s: %s", path, error.strerror)
