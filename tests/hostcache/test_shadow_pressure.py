"""The shadow while memory comes and goes: what is given back loses its content at once, and nobody may miss it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.balloon import Balloon

from .shadow import Fault, ShadowEngine
from .test_shadow_oracle import SHAPES

NOISE = 0x3B
"""In each byte of memory that others have: fp16 0.904, which no digest holds."""


@dataclass
class NoisyRegion:
    """Gives bytes of a pool back by overwriting them; its pages are as large as the test wants."""

    buffer: NDArray[np.uint8]
    page_bytes: int
    gives_back: bool = True

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def give_back(self, offset: int, nbytes: int) -> bool:
        self.buffer[offset : offset + nbytes] = NOISE
        return True

    def populate(self, offset: int, nbytes: int) -> None:
        self.buffer[offset : offset + nbytes] = 0


@dataclass
class SqueezedShadow(ShadowEngine):
    """Traffic over a pool whose blocks are lent out, in granules that share blocks, and come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        block_bytes = self.cache.geometry.block_bytes
        pages = self.random.choice((block_bytes, block_bytes * 3 // 4, block_bytes * 5 // 2))
        region = NoisyRegion(self.cache.buffer, pages)
        self.balloon = Balloon(self.cache.extents, region, block_bytes)  # type: ignore[arg-type] # it has what is needed

    def random_event(self) -> None:
        super().random_event()
        draw, most = self.random.random(), self.cache.buffer.nbytes
        if draw < 0.15:
            cached = self.cache.pool.cached
            given = self.balloon.inflate(self.random.randint(1, most), self.random.choice((0, 1, 3)))
            self.seen["given back"] += given > 0
            self.seen["evicted"] += self.cache.pool.cached < cached
        elif draw < 0.30:
            self.seen["taken again"] += self.balloon.deflate(self.random.randint(1, most)) > 0

    def step(self) -> None:
        super().step()
        if not self.scheduler.running and self.scheduler.waiting and self.cache.pool.withheld:
            self.seen["held out"] += 1

    def check(self) -> None:
        if self.cache.pool.withheld:  # what was promised to anybody may be among it
            self.shed.update(request.id for request in self.live)
        super().check()
        for block in range(self.blocks):
            if block in self.cache.extents.withheld:
                continue
            if (self.memory[block].view(np.uint8) == NOISE).any(axis=-1).all():
                raise Fault(f"block {block} can be handed out, or holds something, and its memory is gone")
        if not self.live:
            self.balloon.deflate(self.cache.buffer.nbytes)


@pytest.mark.parametrize("runs", [90, pytest.param(500, marks=pytest.mark.long)])
def test_nobody_reads_what_was_given_back(runs: int) -> None:
    """200 steps each; 100,000 in the longer run."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        tokens, blocks = SHAPES[seed % len(SHAPES)]
        engine = SqueezedShadow(seed, tokens, blocks)
        engine.run(200)
        seen += engine.seen
        seen["preemptions"] += engine.scheduler.stats.preemptions
        seen["swapped"] += engine.scheduler.stats.swapped_out
    for event in ("given back", "taken again", "evicted", "held out", "preemptions", "swapped", "shed", "hit"):
        assert seen[event] >= 30, (event, seen)
