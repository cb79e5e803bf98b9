"""A device that uses an operand of the launch before is found out, whichever it is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache import KVGeometry, Region
from hostcache.errors import DeviceError
from npu import canary as module
from npu.canary import Canary
from npu.cpu import CpuAttention
from npu.device import AttentionJob
from npu.emulated_device import EmulatedDevice
from npu.launch import Launch, LaunchPlanner
from npu.staged import StagedAttention
from staging import Buckets, StagingArena, StagingBuffer
from tests.npu.paged import batch_of
from tests.npu.test_emulated_attention import BUCKETS, HEADS, World
from tests.staging.flat import noisy_cache

INPUTS = ("query", "keys", "values", "mask")


class Forgetful(EmulatedDevice):
    """Uses one operand as the run before of the same shapes had it; an old `out` is one that was not written.

    Attributes:
        operand: which.
    """

    operand = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._before: dict[tuple[int, ...], NDArray[np.float16]] = {}

    def _execute(self, job: AttentionJob, number: int, core: int) -> None:
        operand = self._seen(getattr(job, self.operand))
        before = self._before.get(operand.shape)
        if self.operand == "out":
            super()._execute(job, number, core)
            self._before[operand.shape] = operand.copy()
            if before is not None:
                operand[...] = before
            return
        now = self._before[operand.shape] = operand.copy()
        if before is not None:
            operand[...] = before
        super()._execute(job, number, core)
        operand[...] = now


@pytest.fixture
def from_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same questions in every run of a test, so that none passes by chance in some."""
    monkeypatch.setattr(module, "_launches", itertools.count())


@dataclass(frozen=True)
class Setting:
    """A launch of some geometry: of a few sequences' single rows, or of a tile."""

    geometry: KVGeometry
    group: int
    lengths: tuple[int, ...]
    rows: int
    tiled: bool

    def launch(self) -> tuple[Launch, int]:
        """Its plan, and the bytes that a buffer needs."""
        heads, lengths = self.group * self.geometry.kv_heads, list(self.lengths)
        planner = LaunchPlanner(self.geometry, 16, heads, Buckets((64, 128, 1024)), tiled=self.tiled)
        tables = [list(range(self.geometry.blocks_for(length))) for length in lengths]
        [cut] = planner.cut(batch_of(tables, lengths, [self.rows] * len(lengths)), np.arange(len(lengths)))
        return planner.launch(cut), -(-planner.buffer_bytes // 4096) * 4096


def settings_of(
    lengths: st.SearchStrategy[tuple[int, ...]], rows: st.SearchStrategy[int]
) -> st.SearchStrategy[Setting]:
    geometry = st.builds(KVGeometry, st.just(1), st.integers(1, 4), st.sampled_from([64, 80, 128]))
    return st.builds(Setting, geometry, st.integers(1, 5), lengths, rows, st.booleans())


DECODE = settings_of(st.lists(st.integers(1, 62), min_size=1, max_size=4).map(tuple), st.just(1))
TILE = settings_of(st.tuples(st.integers(64, 126)), st.sampled_from([2, 16, 64]))


def question(buffer: StagingBuffer, operand: str) -> NDArray[np.float16]:
    """What an operand holds of the question, by head."""
    layout = buffer.layout
    if operand in ("keys", "values"):
        found = layout.by_token(getattr(buffer, operand))[:, -2:]
    elif operand == "query":
        found = buffer.query[:, -4 if layout.mask_rows else -1 :]
    elif operand == "mask":
        found = buffer.mask[:, -4:].repeat(layout.kv_heads, axis=0)
    else:
        found = buffer.out
    return np.array(found).reshape(layout.heads, -1)


@settings(deadline=None, max_examples=80)
@given(
    case=st.tuples(DECODE, st.sampled_from(["query", "keys", "values", "out"]))
    | st.tuples(TILE, st.sampled_from([*INPUTS, "out"])),
    launched=st.integers(0, 1 << 40),
)
def test_a_head_is_refused_if_and_only_if_its_question_is_not_the_old_one(
    case: tuple[Setting, str], launched: int
) -> None:
    """Nothing is left to chance: a head whose old shift is the new one too is known by the bytes, and passes.

    With V and the result, which show in 32 channels at least, there is none.
    """
    setting, operand = case
    launch, nbytes = setting.launch()
    cache = noisy_cache(setting.geometry, blocks=16)
    cache.buffer.view(np.float16)[:] = np.random.default_rng(0).standard_normal(cache.buffer.nbytes // 2)
    region = Region.anonymous(nbytes)
    device = Forgetful(region.buffer, cores=1, tiled=setting.tiled)
    device.operand = operand
    buffer = StagingArena(region, 1, device).acquire()
    heads = setting.group * setting.geometry.kv_heads
    q = np.random.default_rng(1).standard_normal((launch.rows.size, heads, setting.geometry.head_dim), np.float32)

    def run() -> Canary:
        buffer.fill(cache, launch.plan, 0)
        canary = launch.write(buffer, q)
        buffer.sync_to_device()
        device.submit(AttentionJob.over(buffer), 0).wait()
        buffer.sync_from_device()
        return canary

    with mock.patch.object(module, "_launches", itertools.count(launched)):
        run().check(buffer.out)
        old = question(buffer, operand)
        buffer.release()
        buffer.acquire()
        canary = run()
    differ = len(buffer.out)
    if operand in ("query", "keys", "mask"):
        differ = int((old != question(buffer, operand)).any(axis=1).sum())
    if differ:
        with pytest.raises(DeviceError, match="do not answer this launch") as caught:
            canary.check(buffer.out)
        assert caught.value.values["stale"] == differ
    else:
        canary.check(buffer.out)


@pytest.mark.usefixtures("from_the_first_launch")
@pytest.mark.parametrize(
    ("rows", "operand"),
    [(rows, operand) for rows in (1, 10) for operand in (*INPUTS, "out") if (rows, operand) != (1, "mask")],
)
def test_a_device_that_goes_on_doing_so_changes_no_result_and_gets_no_more_jobs(rows: int, operand: str) -> None:
    """The first run is good; each after it has an operand of the run before, which was of the other layer."""
    world = World([50, 58], [rows, rows])
    device: list[Forgetful] = []

    def open_device(memory: NDArray[np.uint8]) -> Forgetful:
        device.append(Forgetful(memory, cores=2))
        device[0].operand = operand
        return device[0]

    runtime = StagedAttention(
        world.cache, HEADS, open_device, cores=2, buckets=BUCKETS, host=CpuAttention(world.cache, HEADS)
    )
    for step in range(6):
        layer = step % 2
        np.testing.assert_allclose(
            world.attend(runtime, layer), world.expected(layer), rtol=0, atol=world.bound("output", layer)
        )
    assert runtime.cores.quarantined == [0, 1]
    runtime.close()
