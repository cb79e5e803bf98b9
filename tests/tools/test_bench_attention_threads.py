"""Two threads are judged by what the machine can give two threads at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hostcache import KVGeometry
from staging._limits import ffi
from tools import bench_attention_sweep, bench_attention_threads
from tools.bench_attention_sweep import Shape, Sweep
from tools.bench_attention_threads import reading, threads_rows
from tools.bench_rows import Timing, Work

if TYPE_CHECKING:
    from hostcache._cffi import CData

SHAPE = Shape(KVGeometry(layers=2, kv_heads=1, head_dim=16), 2, 1, 16)


@pytest.mark.parametrize(
    ("kernel", "machine", "verdict"),
    [
        (1.4, 1.9, "missed"),
        (1.4, 1.5, "missed"),
        (1.4, 0.97, "no free core: 2 threads that only read gain 0.97x"),
        (1.6, 1.9, "met"),
        (1.6, 0.97, "met"),
    ],
)
def test_what_the_machine_cannot_do_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, kernel: float, machine: float, verdict: str
) -> None:
    """Minima count: the medians say the contrary."""
    times = [Timing(1 / kernel, 9), Timing(1, 1), Timing(0.5, 0.6), Timing(1 / machine, 0.1), Timing(1, 1)]

    def measured(works: list[Work], times_each: int, warm_up: int) -> list[Timing]:
        assert (len(works), times_each, warm_up) == (5, 3, 1)
        return times

    monkeypatch.setattr(bench_attention_threads, "take_turns", measured)
    attention, memory, limit = threads_rows(SHAPE, "plain", 3)
    assert attention.verdict == verdict
    assert attention.misses_target == (verdict == "missed")
    assert attention.ratio == pytest.approx(kernel)
    assert limit.ratio == pytest.approx(machine)
    assert memory.ratio == pytest.approx(0.5 * kernel)
    assert limit.target is memory.target is None


@pytest.mark.parametrize("threads", [1, 2])
def test_all_bytes_of_a_batch_are_read_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    read: list[tuple[CData, int]] = []

    class Spy:
        def rp_limit_read(self, piece: CData, nbytes: int) -> None:
            read.append((piece, nbytes))

    with Sweep(SHAPE, "plain") as sweep, ThreadPoolExecutor(1) as second:
        monkeypatch.setattr(bench_attention_sweep, "lib", Spy())
        assert sweep.read(second if threads == 2 else None) > 0
        begin = ffi.from_buffer("uint8_t *", sweep.cache.buffer)
        pieces = sorted((start - begin, start - begin + nbytes) for start, nbytes in read)
        nbytes = SHAPE.geometry.layers * sweep.layer_bytes
        del begin, read[:]  # a pool that somebody points into is not closed
    assert pieces == ([(0, nbytes)] if threads == 1 else [(0, nbytes // 2), (nbytes // 2, nbytes)])


@pytest.mark.parametrize(("threads", "again"), [(1, 4), (2, 2)])
def test_threads_share_what_is_read(monkeypatch: pytest.MonkeyPatch, threads: int, again: int) -> None:
    """256 KiB in pieces of 64 KiB: four times by one, twice by each of two, and each has a piece of its own."""
    read = []

    class Spy:
        def rp_limit_reread(self, piece: object, nbytes: int, times: int) -> None:
            read.append((id(piece), nbytes, times))

    monkeypatch.setattr(bench_attention_threads, "lib", Spy())
    with ThreadPoolExecutor(1) as second:
        assert reading(256 << 10, second if threads == 2 else None)() > 0
    assert [one[1:] for one in read] == [(64 << 10, again)] * threads
    assert len({one[0] for one in read}) == threads
