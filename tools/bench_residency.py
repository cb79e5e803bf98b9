"""`python -m tools.bench_residency`: staging a decode launch whole against appending a token to what stayed staged.

Both are measured in one process, in turn, so that their ratio holds on a busy machine, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu.sizes import format_size

if TYPE_CHECKING:
    from hostcache import PagedKVCache
    from staging import GatherPlan, StagingBuffer

__all__ = ["Result", "main", "measure"]

LAYERS = 4
"""Enough that each is out of the cache when its turn comes again, from 0.5 MB a layer on."""

SHAPES = ((1, 100), (1, 500), (1, 2000), (4, 500), (8, 500), (8, 2000))
"""Sequences, and tokens of each."""


@dataclass(frozen=True)
class Result:
    """Medians for one layer.

    Attributes:
        whole: seconds of a gather from scratch.
        grown: seconds of appending one token to each sequence.
        staged_bytes: of the launch.
    """

    whole: float
    grown: float
    staged_bytes: int


def measure(sequences: int, tokens: int, steps: int, kv_heads: int = 2, head_dim: int = 128) -> Result:
    """Stage `steps` steps of `sequences` that begin with `tokens` tokens and grow by one in each, both ways."""
    import numpy as np

    from hostcache import KVGeometry, PagedKVCache, Region
    from staging import Buckets, GatherPlan, Residency, StagingArena, StagingLayout
    from staging.coherent import CoherentMemory

    geometry = KVGeometry(LAYERS, kv_heads, head_dim)
    bucket = Buckets().fit(tokens + steps + 1)
    layout = StagingLayout(sequences, kv_heads, bucket, 8, head_dim, 0)
    cache = PagedKVCache.create(geometry, sequences * geometry.blocks_for(tokens + steps) * geometry.block_bytes)
    cache.buffer[:] = 1  # its pages are there already, but not in anybody's cache
    tables = [cache.table() for _ in range(sequences)]
    for position in range(tokens):  # in turn, as sequences that grow together get their blocks
        for table in tables:
            table.append(position < tokens)
    device = CoherentMemory()
    arena = StagingArena(Region.anonymous(StagingArena.bytes_for(1, layout.nbytes)), 1, device)
    staged = Region.anonymous(LAYERS * StagingArena.bytes_for(1, layout.nbytes))
    residency = Residency(cache, staged.buffer, 0, device, own_tokens=1)
    whole, grown = [], []
    for _ in range(steps):
        for table in tables:
            table.append(1)
        lengths = np.array([table.length for table in tables], np.int32)
        plan = GatherPlan.build(geometry, cache.blocks, np.stack([table.ids for table in tables]), lengths, layout)
        residency.begin_step()
        copy = residency.lend(plan, lengths, lengths - 1)
        assert copy is not None
        for layer in range(LAYERS):
            whole.append(_seconds(arena.acquire(), cache, plan, layer))
            resident = copy.acquire(layer)
            assert resident is not None
            grown.append(_seconds(resident, cache, plan, layer))
    return Result(statistics.median(whole), statistics.median(grown[LAYERS:]), layout.nbytes)


def _seconds(buffer: StagingBuffer, cache: PagedKVCache, plan: GatherPlan, layer: int) -> float:
    started = time.perf_counter()
    buffer.fill(cache, plan, layer)
    buffer.sync_to_device()
    seconds = time.perf_counter() - started
    buffer.release()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_residency", description=__doc__)
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="tokens appended (default: %(default)s)")
    args = parser.parse_args(arguments)
    print("sequences  tokens      staged     whole    appended     ratio")
    for sequences, tokens in SHAPES:
        result = measure(sequences, tokens, args.steps)
        print(
            f"{sequences:9}  {tokens:6}  {format_size(result.staged_bytes):>10}  {result.whole * 1e6:5.0f} us"
            f"  {result.grown * 1e6:7.1f} us  {result.whole / result.grown:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
