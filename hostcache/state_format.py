"""The bytes of a file of saved KV, as docs/state-files.md describes them: what the header says, and the digests.

Nothing here touches a file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .block_layout import BlockLayout
from .codec import FP16, Codec, codec_named
from .errors import UsageError
from .geometry import KVGeometry
from .namespace import Namespace

__all__ = [
    "DIGEST_BYTES",
    "MAGIC",
    "MOST_HEADER_BYTES",
    "PREAMBLE",
    "VERSION",
    "FormatError",
    "OtherVersion",
    "StateHeader",
    "StateKind",
    "content_digest",
    "encode_header",
    "section_digest",
]

StateKind = Literal["prefix", "session"]
"""What a file was written for: a prefix that comes back by itself, or a session that somebody asks for."""

MAGIC = b"\x89RPKV\r\n\x1a"
"""As PNG's: no text, and transfers that change line ends or bit 7 show at once."""

VERSION = 2
"""Of the format; 1 knew fp16 alone. Magic, version, sizes of the preamble and the header's digest stay where they are
in all versions."""

PREAMBLE = struct.Struct("<8sII32s")
"""Magic, version, bytes of the header, digest of these three and the header."""

DIGEST_BYTES = 32
"""Of every digest: BLAKE2b-256."""

MOST_HEADER_BYTES = 1 << 20
"""More is no header: adapter and prompt version are names."""

ELEMENTS = "[layer][k|v][kv_head][token][head_dim], little-endian"
ROWS = "[layer][k|v][kv_head] of rows as BlockLayout 1 has them, little-endian"
"""Of codecs with scales. The number changes when what the same bytes mean does."""


class FormatError(ValueError):
    """Bytes that nobody wrote like that."""


class OtherVersion(ValueError):
    """A whole header, of another version of the format."""


@dataclass(frozen=True)
class StateHeader:
    """What a file says of itself, every option that decides what its bytes mean among it.

    Attributes:
        kind: see `StateKind`.
        layers: of the geometry, as are the next four.
        kv_heads: likewise.
        head_dim: likewise.
        block_tokens: likewise.
        itemsize: likewise.
        codec: name of the codec of K and V.
        layout: how they lie in a block.
        numerics: names everything that changes a bit of KV.
        adapter: of the namespace.
        prompt_version: of the namespace, so that a version can be forgotten.
        namespace: digest of the whole namespace, its salt included, which is nowhere in clear.
        tokens: how many ids the file holds.
        computed: for how many of them, from the first, it holds KV.
        note_bytes: bytes of the application's own note.
        contents: digest of note and ids, in hex.
    """

    kind: StateKind
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    itemsize: int
    codec: str
    layout: str
    numerics: str
    adapter: str
    prompt_version: str
    namespace: str
    tokens: int
    computed: int
    note_bytes: int
    contents: str

    @classmethod
    def of(
        cls,
        kind: StateKind,
        geometry: KVGeometry,
        namespace: Namespace,
        tokens: NDArray[np.int32],
        *,
        computed: int,
        note: bytes = b"",
        codec: Codec = FP16,
    ) -> StateHeader:
        """The header of a file that holds `tokens`, int32, and KV for the first `computed` of them."""
        return cls(
            kind=kind,
            **asdict(geometry),
            codec=codec.name,
            layout=_layout_of(codec),
            numerics=namespace.numerics,
            adapter=namespace.adapter,
            prompt_version=namespace.prompt_version,
            namespace=namespace.digest,
            tokens=len(tokens),
            computed=computed,
            note_bytes=len(note),
            contents=content_digest(note, tokens.tobytes()),
        )

    @classmethod
    def decode(cls, preamble: bytes, text: bytes) -> StateHeader:
        """Read a header back.

        Args:
            preamble: the file's first bytes, `PREAMBLE.size` of them.
            text: as many bytes behind it as the preamble says.

        Raises:
            FormatError: nobody wrote these bytes.
            OtherVersion: they are whole, but not of this version.
        """
        magic, version, size, digest = PREAMBLE.unpack(preamble)
        if magic != MAGIC or size != len(text) or digest != _header_digest(version, text):
            raise FormatError("its header is damaged")
        if version != VERSION:
            raise OtherVersion(f"its format is version {version}, this one reads version {VERSION}")
        try:
            header = cls(**json.loads(text))
            header.require_sound()
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"its header makes no sense ({error})") from error
        return header

    def require_sound(self) -> None:
        """Do nothing if the fields can all be true at once.

        Raises:
            FormatError: they cannot.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not (int if field.type == "int" else str):
                raise FormatError(f"{field.name} is {value!r}")
        try:
            self.block_bytes  # noqa: B018 - it refuses what is no geometry, and what no codec can store
        except UsageError as error:
            raise FormatError(str(error)) from error
        if self.kind not in ("prefix", "session") or not 0 <= self.computed <= self.tokens or self.note_bytes < 0:
            raise FormatError(f"{self.kind!r} with {self.computed} of {self.tokens} tokens")

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the KV."""
        return KVGeometry(self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block.

        Raises:
            UsageError: the fields are no geometry, or there is no such codec.
        """
        return BlockLayout(self.geometry, codec_named(self.codec)).block_bytes

    @property
    def blocks(self) -> int:
        """Blocks in the file."""
        return self.geometry.blocks_for(self.computed)

    @property
    def content_bytes(self) -> int:
        """Bytes of note and ids."""
        return self.note_bytes + 4 * self.tokens

    def tokens_in(self, block: int) -> int:
        """Tokens whose KV is in a block, by its place in the file."""
        return min(self.block_tokens, self.computed - block * self.block_tokens)

    def block_offset(self, block: int, start: int) -> int:
        """Where a block begins, if note and ids begin at `start`. The one behind the last is the file's size."""
        return start + self.content_bytes + block * (self.block_bytes + DIGEST_BYTES)

    def differences(self, namespace: Namespace, geometry: KVGeometry, codec: Codec = FP16) -> list[str]:
        """What keeps the file from being used with these, for a reader; empty if nothing does."""
        found = [
            f"{name} {mine!r}, not {theirs!r}"
            for name, mine, theirs in (
                *((name, getattr(self, name), value) for name, value in asdict(geometry).items()),
                ("codec", self.codec, codec.name),
                ("layout", self.layout, _layout_of(codec_named(self.codec))),
                ("adapter", self.adapter, namespace.adapter),
                ("prompt version", self.prompt_version, namespace.prompt_version),
            )
            if mine != theirs
        ]
        if self.numerics != namespace.numerics and self.codec == codec.name:  # the codec is part of them
            found.append("another model, or other options, versions or hardware that change its numbers")
        if not found and self.namespace != namespace.digest:
            found.append("another salt")
        return found


def encode_header(header: StateHeader) -> bytes:
    """Preamble and header, as the file begins.

    Raises:
        UsageError: the namespace is too long.
    """
    text = json.dumps(asdict(header), sort_keys=True).encode()
    if len(text) > MOST_HEADER_BYTES:
        raise UsageError(
            f"a namespace of {len(text)} bytes is too long for a state file: {MOST_HEADER_BYTES} at most",
            nbytes=len(text),
        )
    return PREAMBLE.pack(MAGIC, VERSION, len(text), _header_digest(VERSION, text)) + text


def content_digest(note: bytes, tokens: bytes) -> str:
    """BLAKE2b-256 of note and ids, in hex; the header says where one ends."""
    return hashlib.blake2b(note + tokens, digest_size=DIGEST_BYTES, person=b"rockpage content").hexdigest()


def section_digest(preamble: bytes, block: int, content: bytes) -> bytes:
    """BLAKE2b-256 of a block's bytes: a block of another file or another place does not pass.

    It is keyed by the preamble, which holds the digest of everything before, and salted by the block's place.
    """
    return hashlib.blake2b(
        content, digest_size=DIGEST_BYTES, key=preamble[-DIGEST_BYTES:], salt=struct.pack("<Q8x", block)
    ).digest()


def _layout_of(codec: Codec) -> str:
    return ROWS if codec.scaled else ELEMENTS


def _header_digest(version: int, text: bytes) -> bytes:
    start = struct.pack("<8sII", MAGIC, version, len(text))
    return hashlib.blake2b(start + text, digest_size=DIGEST_BYTES, person=b"rockpage header").digest()
