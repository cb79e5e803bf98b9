"""Sizes on the command line, read strictly."""

from __future__ import annotations

import argparse

from npu import sizes

__all__ = ["parse_size"]


def parse_size(text: str) -> int:
    """Read a size as `npu.sizes.parse_size` does; argparse shows the text of no other error.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
