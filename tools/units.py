"""Sizes on the command line, read strictly and written in MiB."""

from __future__ import annotations

import argparse

from npu import sizes

__all__ = ["format_mib", "parse_size"]


def parse_size(text: str) -> int:
    """Read a size as `npu.sizes.parse_size` does; argparse shows the text of no other error.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def format_mib(size: int) -> str:
    """A size for people: MiB with one decimal."""
    return f"{size / 2**20:.1f} MiB"
