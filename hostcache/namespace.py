"""Whose KV may be shared with whom."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from .errors import UsageError

__all__ = ["Namespace"]


@dataclass(frozen=True)
class Namespace:
    """Whose KV may be shared with whom: requests share only when every field is equal.

    Attributes:
        numerics: names everything that changes KV bytes (weights, activation mode, dense runtime, RoPE, codec).
        adapter: content id of a LoRA adapter, never its name.
        salt: secret of a tenant; tenants with different salts never share.
        prompt_version: version of the application's prompts, so that old ones can be invalidated.

    Raises:
        UsageError: a field is not valid Unicode text.
    """

    numerics: str
    adapter: str = ""
    salt: str = ""
    prompt_version: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise UsageError(f"{name} is {value!r}; it must be text without surrogates", name=name, value=value)

    @property
    def digest(self) -> str:
        """BLAKE2b-256 of `key` in hex: names the namespace where its salt must not be read."""
        return hashlib.blake2b(self.key(), digest_size=32, person=b"rockpage space").hexdigest()

    def key(self) -> bytes:
        """The fields, each typed by its name and prefixed with its length, so that no two namespaces collide."""
        return self._key

    @cached_property
    def _key(self) -> bytes:
        parts = []
        for name in ("numerics", "adapter", "salt", "prompt_version"):
            value = getattr(self, name).encode()
            parts.append(struct.pack("<II", len(name), len(value)) + name.encode() + value)
        return b"".join(parts)
