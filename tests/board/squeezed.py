"""Serves from a pool while a neighbour eats the memory of their cgroup, and tells what it did: JSON on stdout.

Run it in a cgroup with a limit: `python -m tests.board.squeezed POOL_BYTES EATEN_BYTES SECONDS RESPOND`. No model runs;
what a step computes for a token, its id and its position, is written to the real pool and compared after every step.

The neighbour eats `EATEN_BYTES` in any case. Then it leaves 8 MiB of what the cgroup may have: whatever is given back
to the kernel it eats as well, until `SECONDS` have passed; then it ends. With `RESPOND` 0 nothing is done about it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, Namespace, PagedKVCache, PrefixCache, Request, Scheduler, SchedulerConfig
from hostcache.errors import RequestRefused
from hostcache.memory_budget import scarcest_budget
from hostcache.pressure import PressureLadder, PressureLimits
from hostcache.pressure_response import PressureResponse
from hostcache.pressure_watch import PressureWatch

__all__ = ["REQUESTS", "TOKENS"]

MIB = 1 << 20
GEOMETRY = KVGeometry(layers=8, kv_heads=2, head_dim=128)  # 128 KiB a block
REQUESTS = 8
TOKENS = 640
"""Of each request, its prompt included; eight of them fill 40 MiB."""

PACE_SECONDS = 0.04
"""Between two steps while the neighbour eats. Twelve seconds hold 300; a request has 380 left then, so none ends."""

EATER = """
import sys, time
from hostcache.memory_budget import scarcest_budget
held, eaten, end = [], int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    if len(held) << 20 < eaten or scarcest_budget().available > 8 << 20:
        held.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.03)
"""
"""33 MiB a second."""


@dataclass
class Server:
    """A scheduler over a pool, and the order in which things happened for the first time."""

    cache: PagedKVCache
    response: PressureResponse
    scheduler: Scheduler
    responds: bool
    happened: list[str] = field(default_factory=list)
    damaged: int = 0
    most_given: int = 0

    def note(self, what: str, is_so: bool) -> None:
        """Remember what is so for the first time."""
        if is_so and what not in self.happened:
            self.happened.append(what)

    def submit(self, number: int) -> Request:
        """A prompt of a sixteenth of the tokens, of which no other has one."""
        prompt = np.arange(TOKENS // 16, dtype=np.int32) + 1000 * number
        return self.scheduler.submit(prompt, Namespace("squeezed"), TOKENS - len(prompt))

    def step(self) -> None:
        """One step, as the engine does it: what is computed for a token is its id and its position."""
        if self.responds:
            self.response.tend()
        stats = self.response.stats
        self.note("give back", stats.given_bytes > 0)
        self.note("pause", stats.pauses > 0)
        self.note("shed", stats.shed > 0)
        plan = self.scheduler.schedule()
        self.response.after_schedule(plan.rows)
        if plan.rows:
            for layer in range(GEOMETRY.layers):
                keys, values = computed(plan.tokens, plan.positions)
                self.cache.write(layer, plan.slots, keys, values)
            self.scheduler.commit(plan, [7] * len(plan.logit_rows), [False] * len(plan.logit_rows))
        self.damaged += sum(not self.is_whole(request) for request in self.scheduler.running)
        self.most_given = max(self.most_given, stats.given_bytes - stats.taken_bytes)

    def is_whole(self, request: Request) -> bool:
        """Whether a running request's blocks hold in their last layer what was computed for it."""
        tokens = request.computed
        if not tokens:
            return True
        found = self.cache.read(GEOMETRY.layers - 1, request.table.blocks, tokens)
        expected = computed(request.tokens[:tokens], np.arange(tokens, dtype=np.int32))
        return all(np.array_equal(f, e.astype(np.float16)) for f, e in zip(found, expected, strict=True))


def computed(tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """K and V of some tokens, float32 `[rows, kv_heads, head_dim]`; fp16 holds the numbers."""
    for row in (tokens % 2048, positions % 2048):
        wide = np.repeat(row.astype(np.float32), GEOMETRY.kv_heads * GEOMETRY.head_dim)
        yield wide.reshape(len(row), GEOMETRY.kv_heads, GEOMETRY.head_dim)


def main(pool_bytes: str, eaten_bytes: str, seconds: str, respond: str) -> None:
    cache = PagedKVCache.create(GEOMETRY, int(pool_bytes))
    scheduler = Scheduler(cache, PrefixCache(cache.pool), SchedulerConfig(context_length=2 * TOKENS))
    budget = scarcest_budget()
    assert budget is not None
    limits = replace(PressureLimits.of(budget.limit), calm_seconds=1.0)
    watch = PressureWatch()
    response = PressureResponse(watch, PressureLadder(limits), cache.balloon(), scheduler)
    server = Server(cache, response, scheduler, respond == "1")
    requests = [server.submit(number) for number in range(REQUESTS)]
    for _ in range(TOKENS // 3):
        server.step()
    eater = subprocess.Popen([sys.executable, "-c", EATER, eaten_bytes, seconds])
    fewest = REQUESTS
    while eater.poll() is None:
        server.step()
        if server.responds:
            with suppress(RequestRefused):
                response.check_admissible()
        server.note("refuse", response.stats.refused > 0)
        fewest = min(fewest, len(scheduler.running))
        time.sleep(PACE_SECONDS)
    ended = time.monotonic()
    while (not scheduler.idle or cache.pool.withheld) and time.monotonic() < ended + 300:
        server.step()
        if scheduler.idle:
            time.sleep(0.05)
    cache.pool.check()
    report = {
        "owner": budget.owner,
        "sources": watch.sources,
        "happened": server.happened,
        "eater": eater.returncode,
        "damaged": server.damaged,
        "lengths": [request.length for request in requests],
        "reasons": [request.finish_reason.value if request.finish_reason else None for request in requests],
        "fewest_running": fewest,
        "most_given_bytes": server.most_given,
        "withheld": cache.pool.withheld,
        "recovered_s": time.monotonic() - ended,
    }
    response.close()
    cache.close()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
