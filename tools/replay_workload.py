"""Traffic made up after published statistics: an industrial console, and a mix of questions and documents."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hostcache import SchedulerConfig

from .replay_cost import MachineCost
from .replay_trace import TraceRequest

__all__ = ["INDUSTRIAL", "MIXED", "WORKLOADS", "Quantiles", "RequestKind", "Workload", "capacity", "generate"]

DAY = 86400.0

SHARES = (0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
"""Shares of all values that do not exceed the value given for each."""


@dataclass(frozen=True)
class Quantiles:
    """A distribution of token counts, by its values at `SHARES`; in between it runs straight.

    Attributes:
        values: as many as `SHARES`, ascending.
        most: what is longer is cut to this.
    """

    values: Sequence[int]
    most: int

    def draw(self, uniform: float) -> int:
        """The value at a share from 0 up to 1."""
        upper = bisect.bisect_right(SHARES, uniform)
        low, high = SHARES[upper - 1], SHARES[upper]
        start, end = self.values[upper - 1], self.values[upper]
        return min(round(start + (end - start) * (uniform - low) / (high - low)), self.most)

    @property
    def mean(self) -> float:
        """Mean of what is drawn, to a part in a thousand."""
        return sum(self.draw((point + 0.5) / 1000) for point in range(1000)) / 1000


COMMANDS = Quantiles((2, 3, 4, 5, 7, 9, 12, 14, 18, 61), most=64)
"""Spoken commands to an assistant: the 5,007 sentences of SLURP's devel and test parts (Bastianelli et al., "SLURP: A
Spoken Language Understanding Resource Package", EMNLP 2020; github.com/pswietojanski/slurp), as SmolLM2 cuts them."""

SHORT_ANSWERS = Quantiles((6, 6, 7, 9, 13, 24, 55, 90, 252, 1899), most=128)
"""`GeneratedTokens` of the code service in Azure's trace of 2023 (8,819 requests; Patel et al., "Splitwise", ISCA 2024;
github.com/Azure/AzurePublicDataset): answers that a program reads."""

QUESTIONS = Quantiles((2, 123, 181, 237, 397, 434, 991, 1010, 1022, 1024), most=1024)
"""`ContextTokens` of the conversation service in the same data set, where they are at most 1024: half of its 19,366."""

ANSWERS = Quantiles((7, 45, 63, 86, 105, 174, 397, 419, 532, 1000), most=512)
"""`GeneratedTokens` of those."""

DOCUMENTS = Quantiles((1800, 1820, 1840, 1900, 2000, 2100, 2160, 2180, 2196, 2200), most=2200)
"""Some 2000 tokens. A choice, near the mean of the code service's `ContextTokens`, 2048."""

DOCUMENT_ANSWERS = Quantiles((15, 31, 37, 46, 67, 101, 138, 161, 237, 757), most=256)
"""`GeneratedTokens` of the conversation service where `ContextTokens` exceed 2048: 14 per cent of it."""

BURSTINESS = 1.09
"""Standard deviation over mean of the gaps between arrivals, of the conversation service: about those of Poisson."""


@dataclass(frozen=True)
class RequestKind:
    """Requests of one sort.

    Attributes:
        share: of all requests.
        prompt: tokens behind the shared prefix.
        output: tokens of the answer.
        prefixed: whether each begins with one of the workload's prefixes.
        priority: of all of them.
    """

    share: float
    prompt: Quantiles
    output: Quantiles
    prefixed: bool = True
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Traffic of several sorts from several clients. What no source is named for is a choice.

    Attributes:
        name: of the workload.
        kinds: their shares add up to 1.
        prefixes: how many shared prefixes there are.
        prefix_tokens: tokens of each.
        clients: how many there are, equally busy.
        context_length: what a session must be able to hold.
        aborted: share of requests whose client gives up, if they last that long.
        patience_seconds: mean time after which those do.
        daily_swing: by how much of the mean the rate rises and falls over a day.
    """

    name: str
    kinds: Sequence[RequestKind]
    prefixes: int
    prefix_tokens: int
    clients: int
    context_length: int
    aborted: float
    patience_seconds: float
    daily_swing: float


INDUSTRIAL = Workload(
    name="industrial",
    kinds=(
        RequestKind(0.97, COMMANDS, SHORT_ANSWERS),
        RequestKind(0.03, COMMANDS, SHORT_ANSWERS, priority=1),  # alarms
    ),
    prefixes=1,
    prefix_tokens=256,
    clients=24,
    context_length=512,
    aborted=0.002,
    patience_seconds=10.0,
    daily_swing=0.2,
)
"""Consoles of a plant: short commands behind one system prompt, day and night."""

MIXED = Workload(
    name="mixed",
    kinds=(
        RequestKind(0.86, QUESTIONS, ANSWERS),
        RequestKind(0.14, DOCUMENTS, DOCUMENT_ANSWERS, prefixed=False),
    ),
    prefixes=4,
    prefix_tokens=128,
    clients=12,
    context_length=2560,
    aborted=0.01,
    patience_seconds=60.0,
    daily_swing=0.2,
)
"""Short questions behind a few system prompts, and documents to be summed up, by day more than by night."""

WORKLOADS = {workload.name: workload for workload in (INDUSTRIAL, MIXED)}


def capacity(workload: Workload, cost: MachineCost, config: SchedulerConfig, blocks: int, block_tokens: int) -> float:
    """Requests a second at which a machine is busy all the time, with as many sequences in each step as fit.

    A prompt's own tokens are computed, those of its shared prefix are not. A sequence is in a step for each chunk of
    its prompt and for each token of its answer but the first; the step as such is shared by all that run. That the pool
    is never filled to the last block, and that preempted sequences are computed twice, is left out.

    Args:
        workload: what requests are like.
        cost: of the machine's steps.
        config: how many sequences run, and what chunks their prompts are cut into.
        blocks: blocks of the pool.
        block_tokens: tokens per block.
    """
    rows = steps = own = read = 0.0  # means of a request; the last two are summed over its steps
    for kind in workload.kinds:
        prompt, output = kind.prompt.mean, kind.output.mean
        rows += kind.share * (prompt + output - 1)
        taken = kind.share * (max(1.0, prompt / config.prefill_chunk) + output - 1)
        steps += taken
        tokens = prompt + output / 2  # half of the answer is there on average
        own += taken * (tokens + block_tokens / 2)  # half of the last block is empty
        read += taken * (tokens + kind.prefixed * workload.prefix_tokens)
    room = blocks * block_tokens - workload.prefixes * workload.prefix_tokens
    running = min(config.max_sequences, max(1.0, room / (own / steps)))
    return 1 / (rows * cost.row + steps * cost.step / running + read * cost.token)


def generate(workload: Workload, rates: Sequence[float], seconds: float, seed: int) -> Iterator[TraceRequest]:
    """Requests in order of arrival; the same arguments give the same ones.

    Args:
        workload: what they are like.
        rates: mean requests a second; several: each for an equal part of the time.
        seconds: how long requests arrive.
        seed: of the random numbers.
    """
    draw = random.Random(seed)  # noqa: S311 - traffic, no secrets; its numbers stay the same from one Python to the next
    shape = 1 / BURSTINESS**2
    # Upper bounds of all but the last share: a number from 0 up to 1 falls between two of them.
    bounds = list(itertools.accumulate(kind.share for kind in workload.kinds[:-1]))
    now = 0.0
    while True:
        rate = rates[min(int(now / seconds * len(rates)), len(rates) - 1)]
        swing = 1 + workload.daily_swing * math.sin(2 * math.pi * now / DAY)
        now += draw.gammavariate(shape, 1 / shape) / (rate * swing)
        if now >= seconds:
            return
        kind = workload.kinds[bisect.bisect_right(bounds, draw.random())]
        yield _request(workload, kind, now, draw)


def _request(workload: Workload, kind: RequestKind, arrival: float, draw: random.Random) -> TraceRequest:
    arrival = round(arrival, 6)
    prompt, output = kind.prompt.draw(draw.random()), kind.output.draw(draw.random())
    client = f"{workload.name}-{draw.randrange(workload.clients)}"
    prefix, prefix_tokens, abort = "", 0, math.inf
    if kind.prefixed:
        prefix, prefix_tokens = f"{workload.name}-prompt-{draw.randrange(workload.prefixes)}", workload.prefix_tokens
    if draw.random() < workload.aborted:
        abort = round(arrival + 0.001 + draw.expovariate(1 / workload.patience_seconds), 6)
    return TraceRequest(arrival, prefix_tokens + prompt, output, prefix, prefix_tokens, client, kind.priority, abort)
