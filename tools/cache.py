"""`rockpage cache`: where repacked weights lie, how much room they take, and how to get it back."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Subparsers, add_command

if TYPE_CHECKING:
    from npu.cache_room import CacheEntry

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage cache
rockpage cache --clear"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage cache`."""
    parser = add_command(
        subparsers, "cache", run, summary="show the cache of repacked weights, or clear it", example=EXAMPLE
    )
    parser.add_argument("--clear", action="store_true", help="remove what no process uses; a load repacks it")


def run(args: argparse.Namespace) -> int:
    """Print the folder, its limit and its entries, the least recently used first; 0.

    Raises:
        UsageError: no folder can be named, or `ROCKPAGE_CACHE_SIZE` is no size.
        OSError: the folder cannot be read, or not be written in order to clear it.
    """
    from npu.cache_room import cache_limit, clear, entries_of
    from npu.weights_cache import default_cache_dir

    weights, limit = default_cache_dir() / "weights", cache_limit()
    if args.clear:
        clear(weights)
    entries = entries_of(weights)
    nbytes = sum(entry.nbytes for entry in entries)
    if args.json:
        listed = [_as_json(entry) for entry in entries]
        print(json.dumps({"folder": str(weights), "bytes": nbytes, "limit_bytes": limit, "entries": listed}))
        return 0
    print(f"{weights}: {format_size(nbytes)} of {format_size(limit)} (ROCKPAGE_CACHE_SIZE)")
    for entry in entries:
        used = "in use" if entry.in_use else time.strftime("used %Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"  {entry.folder.name:<42}{format_size(entry.nbytes):>12}  {used}")
    return 0


def _as_json(entry: CacheEntry) -> dict[str, object]:
    return {"name": entry.folder.name, "bytes": entry.nbytes, "used": entry.used, "in_use": entry.in_use}
