"""Keeps what was measured of models' keys on disk, so that a model is measured once.

    $XDG_CACHE_HOME/rockpage/keys/
        lock                            held while something is added or removed
        <key>-int4-<version>/keys.bin   the SHA-256 of what follows, then the constants

A damaged file is measured anew instead of believed. `cache_room.py` bounds the folder's size.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
from pathlib import Path

from .cache_room import CacheRoom, cache_limit, open_sound
from .key_balance import KeyBalance
from .weights_cache import make_private

__all__ = ["KeyCache"]

_VERSION = 1  # of the file
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class KeyCache:
    """Constants of models.

    Args:
        cache_dir: root of the cache, beside the weights.

    Attributes:
        room: the entries.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.room = CacheRoom(cache_dir / "keys", "keys.bin")

    def find(self, key: str, shape: tuple[int, int, int]) -> KeyBalance | None:
        """The constants that were kept under a key.

        Args:
            key: names all that they depend on.
            shape: layers, KV heads and elements of a head.

        Returns:
            None if there are none, or if their file is damaged, which is logged.
        """
        path, content = self._path(key), b""

        def is_sound(file: io.BufferedReader) -> bool:
            nonlocal content
            digest, content = file.read(_DIGEST_BYTES), file.read()
            return hashlib.sha256(content).digest() == digest and len(content) == _nbytes(shape)

        file = open_sound(path, is_sound)
        if file is None:
            if path.exists():
                _log.warning("%s cannot be used and is measured anew", path)
            return None
        file.close()
        return KeyBalance.frombuffer(content, shape)

    def keep(self, key: str, balance: KeyBalance) -> None:
        """Keep constants under a key, in the place of those that are there; what was used longest ago makes room.

        A folder that cannot be written is named in the log.

        Raises:
            UsageError: `ROCKPAGE_CACHE_SIZE` is no size.
        """
        limit, path, content = cache_limit(), self._path(key), balance.tobytes()
        try:
            make_private(self.room.folder)
            with self.room.writing():
                self.room.make_room(_DIGEST_BYTES + len(content), limit, beside=path.parent)
                with self.room.new_file(path.parent) as unfinished, unfinished.open("wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            _log.warning("%s cannot be written, so it is measured again at the next start: %s", path, error)

    def _path(self, key: str) -> Path:
        return self.room.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-int4-{_VERSION}" / self.room.file


def _nbytes(shape: tuple[int, int, int]) -> int:
    """Bytes of a model's constants: an offset and two rows of matrices, float32, for each element of a head."""
    return 4 * math.prod(shape) * (1 + 2 * shape[2])
