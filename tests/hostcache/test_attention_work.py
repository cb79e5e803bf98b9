"""How much attention a step is, for those that compute no more than they must and for those that pad."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache import StepPlan
from hostcache.attention_work import AttendedTokens, AttentionWork, PaddedTiles
from tests.hostcache.bench import HOME, Bench

TILES = PaddedTiles(tiles=(1, 16, 64), buckets=(64, 128, 256, 512, 1024, 2048), reserved=2, staging_rows=20)


@pytest.mark.parametrize(
    ("before", "count", "work"),
    [
        (0, 16, (16 + 20) * 64),
        (46, 16, (16 + 20) * 64),  # 62 tokens, and two that are reserved
        (47, 16, (16 + 20) * 128),
        (0, 17, (64 + 20) * 64),  # what does not fit the small tile takes the large one
        (1000, 1, (1 + 20) * 1024),
        (1022, 1, (1 + 20) * 2048),
        (448, 80, (64 + 20) * 1024 + (16 + 20) * 1024),  # 448 + 64 + 2 are more than 512
        (64, 65, (64 + 20) * 256 + (1 + 20) * 256),
        (3000, 16, (16 + 20) * (3016 + 2)),  # no bucket holds it
    ],
)
def test_a_chunk_is_as_much_as_its_tiles_over_their_buckets(before: int, count: int, work: int) -> None:
    assert TILES.of_chunk(before, count) == work


def test_rows_with_a_window_are_computed_over_that_and_themselves() -> None:
    assert TILES.of_chunk(2000, 80, most=100) == (64 + 20) * 256 + (16 + 20) * 128
    assert AttendedTokens().of_chunk(98, 4, most=100) == 99 + 100 + 100 + 100


def test_a_decoding_row_is_a_tile_by_itself() -> None:
    assert TILES.of_decodes(np.array([62, 63, 500], np.int32)) == (1 + 20) * (64 + 128 + 512)
    assert AttendedTokens().of_decodes(np.array([62, 63, 500], np.int32)) == 625


@pytest.mark.parametrize("work", [TILES, AttendedTokens()], ids=["padded", "exact"])
@given(st.integers(0, 2500), st.integers(0, 300), st.floats(1e-4, 0.5))
def test_rows_within_a_time_are_the_most_that_it_holds(
    work: AttentionWork, before: int, most: int, limit: float
) -> None:
    def seconds(rows: int) -> float:
        return 1e-3 * rows + 1e-6 * work.of_chunk(before, rows)

    rows = work.rows_within(limit, 1e-3, 1e-6, before, most)
    assert 0 <= rows <= most
    assert seconds(rows) <= limit * (1 + 1e-6)
    assert rows == most or seconds(rows + 1) > limit * (1 - 1e-6)


def test_a_step_is_as_much_as_its_decoding_rows_and_its_chunks() -> None:
    bench = Bench(blocks=100, context_length=300, max_rows=100, prefill_chunk=70)
    bench.submit(100)
    for _ in range(2):
        bench.step()
    bench.submit(120, start=500)
    bench.step()
    plan = bench.scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(101, 1), (70, 50)]
    assert TILES.of_step(plan) == (1 + 20) * 128 + (64 + 20) * 128
    assert AttendedTokens().of_step(plan) == 102 + sum(range(71, 121))


STEP, ROW = 18e-3, 1.5e-3
TOKEN = {1: 4e-6, 16: 28e-6, 64: 67e-6}
"""The demo's model with the emulated NPU on an x86-64 machine: seconds of a step, a row, and a tile for each token of
its bucket."""


def emulated_seconds(plan: StepPlan) -> float:
    """What a step takes there: nothing of it is in proportion to anything that the scheduler counts."""
    taken = STEP + ROW * plan.rows
    for chunk in plan.chunks:
        for first in range(0, chunk.count, 64):
            rows = min(64, chunk.count - first)
            tile = next(size for size in TOKEN if size >= rows)
            taken += TOKEN[tile] * next(b for b in TILES.buckets if b >= chunk.start + first + rows + 2)
    return taken


def latency(step_seconds: float | None, chunk: int) -> tuple[float, list[float]]:
    """A document's wait for its first token, and the gaps of four sessions meanwhile: the third of three documents'."""
    limits = {"context_length": 3000, "max_rows": chunk + 4, "max_sequences": 5, "prefill_chunk": chunk}
    bench = Bench(blocks=3000, step_seconds=step_seconds, work=TILES, **limits)
    random = np.random.default_rng(4)
    for _ in range(4):
        bench.scheduler.submit(random.integers(10, 1000, 200), HOME, 2500)
    gaps: list[float] = []
    for _ in range(3):
        for _ in range(10):
            plan = bench.scheduler.schedule()
            commit(bench, plan, emulated_seconds(plan))
        document = bench.scheduler.submit(random.integers(1000, 50000, 2000), HOME, 1)
        gaps.clear()
        while not document.finished:
            plan = bench.scheduler.schedule()
            gaps.append(emulated_seconds(plan) * (1 + 0.05 * float(random.uniform(-1, 1))))
            commit(bench, plan, gaps[-1])
    return sum(gaps), gaps


def commit(bench: Bench, plan: StepPlan, seconds: float) -> None:
    samples = len(plan.logit_rows)
    bench.scheduler.commit(plan, [7] * samples, [False] * samples, seconds=seconds)


def test_on_padded_tiles_budgets_are_kept_and_documents_wait_twice_as_long_at_most() -> None:
    """But for the least one: 125 steps of a smallest tile take twice as long by themselves, as all decode in each."""
    unchunked, _ = latency(None, 2000)
    tile = STEP + 20 * ROW + TOKEN[16] * 2048 + 4 * TOKEN[1] * 512
    for times, longest_wait in ((1, 2.05), (1.25, 2), (1.5, 2), (2, 2), (3, 2), (4, 2)):
        wait, gaps = latency(times * tile, 256)
        assert np.quantile(gaps, 0.95) <= max(times, 1.2) * tile
        assert wait <= longest_wait * unchunked
        assert max(gaps) <= 0.35 * unchunked
