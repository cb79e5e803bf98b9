"""Saves tokens and their KV to a file, and reads them back only if every byte is as it was written.

The format is described in docs/state-files.md. A file appears under its name when it is complete and on disk
(`whole_file.py`), so a power cut leaves the old one or the new one. It holds a prompt's ids and what was said, so only
its owner may read it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from .cache import PagedKVCache
from .codec import FP16, SCALE_BYTES, Codec, codec_named
from .errors import BadStateFile, UsageError
from .namespace import Namespace
from .state_format import (
    DIGEST_BYTES,
    MAGIC,
    MOST_HEADER_BYTES,
    PREAMBLE,
    FormatError,
    OtherVersion,
    StateHeader,
    content_digest,
    encode_header,
    section_digest,
)
from .whole_file import whole_file

__all__ = ["BAD_SUFFIX", "StateReader", "save_state", "set_aside", "state_bytes"]

BAD_SUFFIX = ".bad"
"""Behind the name of a file that was set aside."""


def set_aside(path: Path) -> str:
    """Put `BAD_SUFFIX` behind a file's name, in the place of an earlier one; says what was done."""
    aside = path.with_name(path.name + BAD_SUFFIX)
    try:
        path.replace(aside)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror}): remove it"
    return f"it was set aside as {aside.name}"


def state_bytes(header: StateHeader) -> int:
    """Bytes of the file with this header."""
    return header.block_offset(header.blocks, len(encode_header(header)))


def save_state(
    path: Path,
    cache: PagedKVCache,
    blocks: Sequence[int],
    header: StateHeader,
    tokens: NDArray[np.int32],
    *,
    note: bytes = b"",
) -> None:
    """Write a state file, mode 0600, in the place of one that is there.

    Args:
        path: its name; the folder exists.
        cache: holds the KV.
        blocks: ids, in order, which the caller keeps from changing; as many as the header's computed tokens need.
        header: `StateHeader.of` the same tokens and note.
        tokens: int32 `[n]`.
        note: the application's own.

    Raises:
        UsageError: the blocks are not as many, or the namespace is too long.
        OSError: the folder cannot be written, or the disk is full. What was there is there still.
    """
    if len(blocks) != header.blocks:
        raise UsageError(f"{header.computed} tokens have {header.blocks} blocks, got {len(blocks)}", blocks=len(blocks))
    start = encode_header(header)
    with whole_file(path, 0o600, replace=True) as fd:
        _write(fd, start + note + tokens.tobytes())
        for index, block in enumerate(blocks):
            content = _without_rest(cache, block, header.tokens_in(index), codec_named(header.codec))
            _write(fd, content)
            _write(fd, section_digest(start[: PREAMBLE.size], index, content))


class StateReader:
    """An open state file, header, ids and note of which are proven. A context manager.

    A damaged file is set aside: renamed, with `BAD_SUFFIX` behind its name, in the place of an earlier one. What does
    not even begin like a state file is left alone: it may be anybody's.

    Args:
        path: the file.

    Attributes:
        path: as given.
        header: what it says of itself.
        tokens: int32 `[header.tokens]`.
        note: the application's own.

    Raises:
        BadStateFile: it is damaged, or no state file.
        UsageError: it is of another version of the format, or no regular file.
        OSError: it cannot be read; `FileNotFoundError` if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Without O_NONBLOCK opening a FIFO would wait for a writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path} is no regular file: give the name of a state file", path=str(path))
            self._identity = (status.st_dev, status.st_ino)
            self._preamble = self._read(0, PREAMBLE.size)
            if not self._preamble.startswith(MAGIC):
                raise BadStateFile(
                    f"{path} does not begin as a state file does; it was left as it is: give another name",
                    path=str(path),
                )
            self.header, self.note, self.tokens = self._read_contents(status.st_size)
        except BaseException:
            self.close()
            raise

    def require(self, namespace: Namespace, cache: PagedKVCache, codec: Codec = FP16) -> None:
        """Do nothing if the file's KV may be used in a namespace of a cache, in blocks of a codec.

        Raises:
            UsageError: it was computed with another model, other options or for somebody else; the message says what
                differs. The file stays.
        """
        differences = self.header.differences(namespace, cache.geometry, codec)
        if differences:
            raise UsageError(
                f"{self.path} was saved with {'; '.join(differences)}: use it as it was saved, or give another name",
                path=str(self.path),
                differences=differences,
            )

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """One block's bytes, proven.

        Args:
            block: its place in the file.

        Returns:
            uint8 `[header.block_bytes]`, read-only.

        Raises:
            BadStateFile: they are not what was written.
            OSError: they cannot be read.
        """
        offset, size = self.header.block_offset(block, self._start), self.header.block_bytes
        section = self._read(offset, size + DIGEST_BYTES)
        if section_digest(self._preamble, block, section[:size]) != section[size:]:
            self._refuse(f"block {block} is damaged")
        return np.frombuffer(section, np.uint8, size)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_contents(self, size: int) -> tuple[StateHeader, bytes, NDArray[np.int32]]:
        """Header, note and ids of a file of `size` bytes."""
        try:
            if len(self._preamble) < PREAMBLE.size:
                raise FormatError(f"it ends at byte {size}")
            header_bytes = PREAMBLE.unpack(self._preamble)[2]
            if header_bytes > MOST_HEADER_BYTES:
                raise FormatError(f"its header has {header_bytes} bytes")
            header = StateHeader.decode(self._preamble, self._read(PREAMBLE.size, header_bytes))
            self._start = PREAMBLE.size + header_bytes
            expected = header.block_offset(header.blocks, self._start)
            if size != expected:
                raise FormatError(f"it has {size} bytes, not {expected}")
            content = self._read(self._start, header.content_bytes)
            note, tokens = content[: header.note_bytes], content[header.note_bytes :]
            if content_digest(note, tokens) != header.contents:
                raise FormatError("its ids or its note are damaged")
        except FormatError as error:
            self._refuse(str(error))
        except OtherVersion as error:
            raise UsageError(
                f"{self.path} cannot be read: {error}; use the rockpage that wrote it, or give another name",
                path=str(self.path),
            ) from error
        return header, note, np.frombuffer(tokens, dtype="<i4").astype(np.int32)

    def _read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes, fewer only where the file ends."""
        pieces = []
        while count and (piece := os.pread(self._fd, count, offset)):
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return b"".join(pieces)

    def _refuse(self, reason: str) -> NoReturn:
        """Set the file aside, unless another has its name by now, and say why.

        Raises:
            BadStateFile: always.
        """
        done = "another file has its name by now"
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                done = set_aside(self.path)
        raise BadStateFile(f"{self.path}: {reason}; {done}", path=str(self.path), reason=reason)


def _without_rest(cache: PagedKVCache, block: int, tokens: int, codec: Codec) -> bytes:
    """A block's bytes with zeros behind its first `tokens` tokens, where somebody else's KV may lie, and as padding.

    A copy: an error that is raised while they are written must not hold on to the pool, which closes behind it.
    """
    layout = cache.layout(codec)
    copy = cache.view(block, codec).copy()
    rows = copy.reshape(-1, layout.row_bytes)
    rows[:, tokens * layout.token_bytes : layout.payload_bytes] = 0
    rows[:, layout.payload_bytes + tokens * layout.groups * SCALE_BYTES :] = 0
    return copy.tobytes()


def _write(fd: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
