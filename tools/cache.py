"""`rockpage cache`: what was made once and is kept, how much room it takes, and how to get that back."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Subparsers, add_command

if TYPE_CHECKING:
    from npu.cache_room import CacheEntry, CacheRoom

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage cache
rockpage cache --clear"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage cache`."""
    parser = add_command(
        subparsers, "cache", run, summary="show the cache of repacked weights and graphs, or clear it", example=EXAMPLE
    )
    parser.add_argument("--clear", action="store_true", help="remove what no process uses; it can be made again")


def run(args: argparse.Namespace) -> int:
    """Print the folders, their limit and their entries, the least recently used first; 0.

    Raises:
        UsageError: no folder can be named, or `ROCKPAGE_CACHE_SIZE` is no size.
        OSError: the folder cannot be read, or not be written in order to clear it.
    """
    from npu.cache_room import cache_limit
    from npu.key_cache import KeyCache
    from npu.rknn_cache import CompileCache
    from npu.weights_cache import default_cache_dir, weights_room

    root, limit = default_cache_dir(), cache_limit()
    weights, graphs, keys = weights_room(root), CompileCache.default().room, KeyCache(root).room
    rooms = (weights, graphs, keys)
    if args.clear:
        for room in rooms:
            room.clear()
    if args.json:
        others = {"graphs": _room_as_json(graphs, limit), "keys": _room_as_json(keys, limit)}
        print(json.dumps({**_room_as_json(weights, limit), **others}))
    else:
        print("\n".join(line for room in rooms for line in _lines(room, limit)))
    return 0


def _room_as_json(room: CacheRoom, limit: int) -> dict[str, object]:
    entries = room.entries()
    nbytes, listed = sum(entry.nbytes for entry in entries), [_as_json(entry) for entry in entries]
    return {"folder": str(room.folder), "bytes": nbytes, "limit_bytes": limit, "entries": listed}


def _as_json(entry: CacheEntry) -> dict[str, object]:
    return {"name": entry.folder.name, "bytes": entry.nbytes, "used": entry.used, "in_use": entry.in_use}


def _lines(room: CacheRoom, limit: int) -> list[str]:
    entries = room.entries()
    nbytes = format_size(sum(entry.nbytes for entry in entries))
    lines = [f"{room.folder}: {nbytes} of {format_size(limit)} (ROCKPAGE_CACHE_SIZE)"]
    for entry in entries:
        used = "in use" if entry.in_use else time.strftime("used %Y-%m-%d %H:%M", time.localtime(entry.used))
        lines.append(f"  {entry.folder.name:<42}{format_size(entry.nbytes):>12}  {used}")
    return lines
