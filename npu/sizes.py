"""Sizes as people write them, for the command line and the environment."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["format_size", "parse_size"]

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)(?: ?([A-Za-z]+))?")
_LARGEST = 2**63 - 1  # what off_t, and so any file or mapping, can hold


def parse_size(text: str) -> int:
    """Read a size: `1.1GB` is 1.1 * 10^9 bytes, `4GiB` is 4 * 2^30, a bare number is bytes.

    Returns:
        Bytes, at least 1; a fraction of a byte is dropped.

    Raises:
        ValueError: not a number, a unit that is not exactly one of those (`4G` could be either), zero, or beyond 2^63.
            Its text is for the user; the caller makes its own kind of error of it.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2] or "B") if match else None
    if match is None or unit is None:
        raise ValueError(
            f"'{text}' is not a size: write a number and one of B, kB, MB, GB (powers of 1000), "
            "KiB, MiB, GiB (powers of 1024)"
        )
    size = int(Fraction(match[1]) * unit)
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"'{text}' must lie between 1 byte and 2^63 bytes")
    return size


def format_size(size: int) -> str:
    """A number of bytes for people: in MiB, and from a gibibyte on in GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
