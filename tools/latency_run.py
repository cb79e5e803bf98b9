"""Documents that arrive among sessions that decode: how long those wait for their tokens, and the document for its."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError
from hostcache.step_budget import TILE_ROWS
from npu.engine import Engine
from npu.loading import load_parts
from npu.model import ModelConfig
from npu.runtimes import RuntimeName
from npu.sampler import SamplingParams
from npu.source import open_model

__all__ = ["Machine", "Setting", "Traffic", "Waits", "measure"]

PROMPT_TOKENS = 200
"""Of each session; it matters little beside a document."""

QUIET_STEPS = 10
"""Steps between two documents, in which the sessions only decode."""

TILES = 5
"""Prompts of one smallest tile behind each document, which say what such a step costs on the machine at that time."""

TILE_AT = 0.95
"""Where in a document they begin: as far in as the step that the 95th percentile of the gaps is about."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Machine:
    """What computes, and how its time is taken.

    Attributes:
        runtime: of attention.
        threads: that compute.
        clock: in seconds, of the measurement and of the scheduler's budget: `time.perf_counter`, or
            `time.process_time`, which with one thread leaves out the time that other programs had the core.
    """

    runtime: RuntimeName
    threads: int = 1
    clock: Clock = time.perf_counter


@dataclass(frozen=True)
class Setting:
    """How prompts are cut.

    Attributes:
        name: of the setting.
        chunk: most prompt tokens of a sequence in a step; 0: all of them.
        step_seconds: the budget of a step; None: none.
    """

    name: str
    chunk: int = 0
    step_seconds: float | None = None


@dataclass(frozen=True)
class Traffic:
    """What arrives: documents one after the other, among sessions that decode all the while.

    Attributes:
        sessions: that decode.
        documents: that arrive.
        tokens: of a document.

    Raises:
        UsageError: one of them is too small to measure anything.
    """

    sessions: int = 4
    documents: int = 3
    tokens: int = 2000

    def __post_init__(self) -> None:
        for name, least in (("sessions", 1), ("documents", 1), ("tokens", 4 * TILE_ROWS)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}", name=name)

    @property
    def steps(self) -> int:
        """Most steps that it takes, where prompts are computed by the smallest tile."""
        begin = self.sessions * -(-PROMPT_TOKENS // TILE_ROWS)
        return begin + self.documents * (QUIET_STEPS + -(-self.tokens // TILE_ROWS) + TILES)


@dataclass
class Waits:
    """Seconds that were measured under one setting.

    Attributes:
        decode: of steps in which the sessions only decode.
        tile: of steps with one smallest tile beside that, late in a document.
        gaps: between two tokens of a session, where a document was being computed between them.
        first_token: from a document's arrival to its first token.
        elapsed: of all this, as a clock on the wall shows it.
        computed: of that, what the process had a core for, summed over its threads.
    """

    decode: list[float] = field(default_factory=list)
    tile: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    computed: float = 0.0


def measure(model: Path, setting: Setting, traffic: Traffic, machine: Machine, waits: Waits) -> None:
    """Run the traffic once under a setting, and add what was measured to `waits`.

    Raises:
        UsageError: the model's context does not hold it.
        RockpageError: the model or the machine cannot be used, see `npu.engine.Engine.load`.
    """
    context = max(PROMPT_TOKENS + traffic.steps, traffic.tokens) + 1
    with open_model(model) as source:
        config = ModelConfig.from_gguf(source)
    if config.context_length < context:
        raise UsageError(
            f"{traffic.documents} documents of {traffic.tokens} tokens need a context of {context}, the model's is "
            f"{config.context_length}: fewer or shorter ones fit",
            context=context,
        )
    # One document at a time; those before it stay cached only where there is room.
    blocks = (traffic.sessions + 1) * config.geometry.blocks_for(context) + TILES
    chunk = setting.chunk or traffic.tokens
    parts = load_parts(
        model,
        runtime=machine.runtime,
        threads=machine.threads,
        pool_bytes=blocks * config.geometry.block_bytes,
        context_length=context,
        max_rows=chunk + traffic.sessions,
        max_sequences=traffic.sessions + 1,
        prefill_chunk=chunk,
        step_seconds=setting.step_seconds,
        watch_memory=False,
    )
    with Engine(replace(parts, stopwatch=machine.clock)) as engine:
        elapsed, computed = time.perf_counter(), time.process_time()
        _Run(engine, traffic, waits, machine.clock).run()
        waits.elapsed += time.perf_counter() - elapsed
        waits.computed += time.process_time() - computed


class _Run:
    """The traffic through one engine. The tokens are random, the same ones in each run."""

    def __init__(self, engine: Engine, traffic: Traffic, waits: Waits, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._traffic = traffic
        self._waits = waits
        self._random = np.random.default_rng(1)
        self._last: dict[int, float] = {}  # when each session's newest token came

    def run(self) -> None:
        block = self._engine.cache.geometry.block_tokens
        known = int(self._traffic.tokens * TILE_AT) // block * block
        self._begin()
        for _ in range(self._traffic.documents):
            for _ in range(QUIET_STEPS):
                self._waits.decode += self._step().values()
            document = self._tokens(self._traffic.tokens)
            started = self._clock()
            self._waits.gaps += self._answer(document)
            self._waits.first_token.append(self._clock() - started)
            for _ in range(TILES):  # what is known is cached, so that one tile is left to compute
                self._waits.tile += self._answer(np.append(document[:known], self._tokens(TILE_ROWS)))

    def _begin(self) -> None:
        """Bring all sessions to where they decode."""
        endless = SamplingParams(max_tokens=self._traffic.steps, ignore_eos=True)
        for _ in range(self._traffic.sessions):
            self._last[self._engine.add_request(self._tokens(PROMPT_TOKENS), endless)] = self._clock()
        while len(self._step()) < self._traffic.sessions:
            pass

    def _tokens(self, count: int) -> NDArray[np.int64]:
        return self._random.integers(self._engine.tokenizer.vocab_size, size=count)

    def _answer(self, prompt: NDArray[np.int64]) -> list[float]:
        """The sessions' gaps until this prompt has an answer, of one token."""
        request = self._engine.add_request(prompt, SamplingParams(max_tokens=1))
        gaps: list[float] = []
        while True:
            came = self._step()
            gaps += [gap for number, gap in came.items() if number != request]
            if request in came:
                return gaps

    def _step(self) -> dict[int, float]:
        """Take a step; for each request that got a token the seconds since its last one, 0 for its first."""
        outputs = self._engine.step()
        now = self._clock()
        gaps = {}
        for output in outputs:
            if output.error is not None:
                raise output.error
            gaps[output.request_id] = now - self._last.get(output.request_id, now)
            if output.request_id in self._last:
                self._last[output.request_id] = now
        return gaps
