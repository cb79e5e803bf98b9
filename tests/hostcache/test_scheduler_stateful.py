"""The scheduler under any sequence of calls, against the shadow: Hypothesis looks for the shortest that breaks it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.hostcache.codec_shadow import CodecShadow
from tests.hostcache.shadow import ShadowEngine
from tests.hostcache.windowed_shadow import WindowedShadow


class SchedulerAgainstShadow(RuleBasedStateMachine):
    """Requests of all priorities and clients, with and without deadlines, forked, aborted, preempted and swapped."""

    shadow = ShadowEngine

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.shadow(0)
        self.withheld: list[int] = []

    @initialize(seed=st.integers(0, 2**16), blocks=st.sampled_from((3, 6, 16)))
    def begin(self, seed: int, blocks: int) -> None:
        """The seed chooses the limits, and whether there is a swap space."""
        self.engine = self.shadow(seed, blocks=blocks)

    @rule(seed=st.integers(0, 2**16))
    def submit(self, seed: int) -> None:
        self.engine.random.seed(seed)
        self.engine.submit()

    @rule(seed=st.integers(0, 2**16))
    def fork(self, seed: int) -> None:
        self.engine.random.seed(seed)
        self.engine.fork()

    @precondition(lambda self: self.engine.live)
    @rule(seed=st.integers(0, 2**16))
    def abort(self, seed: int) -> None:
        self.engine.random.seed(seed)
        self.engine.abort("between steps")

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 5))
    def step(self, seed: int, steps: int) -> None:
        """Some are rolled back, and in some a request is aborted."""
        self.engine.random.seed(seed)
        for _ in range(steps):
            waiting, before = self.engine.scheduler.waiting, self.engine.scheduler.stats.finished
            stuck = not self.engine.scheduler.running and not self.engine.fences and not self.withheld
            self.engine.step()
            if waiting and stuck:
                moved = self.engine.scheduler.running or self.engine.scheduler.stats.finished > before
                assert moved, "requests wait, none runs, and nothing happens"

    @rule(seed=st.integers(0, 2**16))
    def fence(self, seed: int) -> None:
        self.engine.random.seed(seed)
        self.engine.hold_fence()

    @rule(tenths=st.integers(1, 30))
    def pass_time(self, tenths: int) -> None:
        self.engine.now += tenths / 10

    @rule(seed=st.integers(0, 2**16))
    def invalidate(self, seed: int) -> None:
        self.engine.random.seed(seed)
        self.engine.invalidate()

    @rule()
    def shed(self) -> None:
        self.engine.shed_lowest()

    @rule()
    def pause_or_resume(self) -> None:
        self.engine.pause_or_resume()

    @rule(count=st.integers(1, 4))
    def withhold_or_restore(self, count: int) -> None:
        """The machine takes free blocks, or gives them back."""
        extents = self.engine.cache.extents
        if self.withheld:
            extents.restore(self.withheld)
            self.withheld = []
            return
        self.withheld = sorted(extents.free)[:count]
        extents.withhold(self.withheld)

    @invariant()
    def agree(self) -> None:
        if self.withheld:  # whoever cannot grow now gives way, whatever it was promised
            self.engine.shed |= {request.id for request in self.engine.live}
        self.engine.check()

    def teardown(self) -> None:
        """Whatever happened, all ends when time has passed: nobody starves, nothing is left."""
        engine = self.engine
        for held in engine.fences:
            held.fence.release()
        engine.fences.clear()
        engine.cache.extents.restore(self.withheld)
        engine.scheduler.resume_admission()
        for _ in range(3000):
            if engine.scheduler.idle:
                break
            engine.step()
            engine.check()
        assert engine.scheduler.idle
        engine.run(0)


class WindowsAgainstShadow(SchedulerAgainstShadow):
    """The same where tokens see little, and some requests go on past the context."""

    shadow = WindowedShadow


class CodecsAgainstShadow(SchedulerAgainstShadow):
    """The same where requests of three codecs take the memory from each other."""

    shadow = CodecShadow


@pytest.mark.parametrize("shadow", [ShadowEngine, WindowedShadow, CodecShadow])
def test_a_run_is_the_same_every_time(shadow: type[ShadowEngine]) -> None:
    runs = []
    for _ in range(2):
        engine = shadow(7, blocks=9)
        engine.run(300)
        runs.append((engine.seen, engine.scheduler.stats, engine.now))
    assert runs[0] == runs[1]


TestSchedulerAgainstShadow = SchedulerAgainstShadow.TestCase
TestSchedulerAgainstShadow.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestWindowsAgainstShadow = WindowsAgainstShadow.TestCase
TestWindowsAgainstShadow.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

TestCodecsAgainstShadow = CodecsAgainstShadow.TestCase
TestCodecsAgainstShadow.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
