"""Beam search: the most likely answers, kept side by side in forks of the paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import FP16, Codec
from hostcache.errors import OutOfBlocks, RequestFailed, RequestRefused, UsageError
from hostcache.prefix import Namespace
from hostcache.request import Request
from hostcache.scheduler import SchedulerConfig
from hostcache.step import Chunk, StepPlan

__all__ = ["BeamAnswer", "BeamParams", "BeamSearch"]


@dataclass(frozen=True)
class BeamParams:
    """How answers are searched for.

    Attributes:
        width: answers that are kept at each length, and returned at most.
        max_tokens: tokens of an answer, at most.
        length_penalty: an answer's score is its log-probability over its length to this power; above 0 it favours long
            ones (Hugging Face transformers' `length_penalty`).
        early_stopping: end when `width` answers are complete; otherwise, when no other can score higher any more.

    Raises:
        UsageError: a value is outside its range.

    Example:
        >>> from npu.beam import BeamParams
        >>> BeamParams(width=4).score(-6.0, length=3)
        -2.0
    """

    width: int
    max_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("max_tokens", self.max_tokens)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}", name=name, value=value)
        if not -10 <= self.length_penalty <= 10:  # false for NaN, too
            raise UsageError(f"length_penalty must be from -10 to 10, got {self.length_penalty}", name="length_penalty")

    def score(self, logprob: float, length: int) -> float:
        """What an answer of `length` tokens is ranked by."""
        return logprob / math.pow(length, self.length_penalty)


@dataclass(frozen=True)
class BeamAnswer:
    """One answer found.

    Attributes:
        tokens: its ids, the end token included if it has one.
        logprob: natural logarithm of its probability.
        score: what it is ranked by.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float


@dataclass(frozen=True, eq=False)
class _Beam:
    """An answer that goes on; its table holds KV of all its tokens but the newest."""

    request: Request
    logprob: float


class BeamSearch:
    """Searches for answers over a pool that nobody else takes blocks of meanwhile.

    Args:
        params: width, length, and how answers are ranked.
        end_ids: tokens that end an answer.
        cache: the pool.
        config: limits of a step.
        compute: runs the model over a plan, float32 `[len(logit_rows), vocabulary]`.
        codec: how KV is stored meanwhile.

    Raises:
        UsageError: the beams do not fit into one step.
    """

    def __init__(
        self,
        params: BeamParams,
        end_ids: Collection[int],
        cache: PagedKVCache,
        config: SchedulerConfig,
        compute: Callable[[StepPlan], NDArray[np.float32]],
        *,
        codec: Codec = FP16,
    ) -> None:
        if params.width > config.max_rows:
            raise UsageError(f"width {params.width} exceeds max_rows {config.max_rows}: every beam needs a row")
        self._params = params
        self._end_ids = end_ids
        self._cache = cache
        self._config = config
        self._compute = compute
        self._codec = codec

    def run(self, prompt: NDArray[np.int32], namespace: Namespace) -> list[BeamAnswer]:
        """The best answers found, the best first, at most `width`; every block goes back, whatever happens.

        Args:
            prompt: int32, at least one token.
            namespace: of the sequences; nothing is published in it.

        Raises:
            RequestRefused: the prompt and the longest answer exceed the context, or the prompt exceeds the pool.
            RequestFailed: the pool has no room for the beams, or the model's numbers are broken.
        """
        params = self._params
        longest, pool = len(prompt) + params.max_tokens, self._cache.pool_of(self._codec)
        if not len(prompt) or longest > self._config.context_length:
            raise RequestRefused(
                f"a prompt of {len(prompt)} tokens and {params.max_tokens} to generate must have 2 to "
                f"{self._config.context_length} tokens: give another prompt or ask for fewer tokens",
                prompt_tokens=len(prompt),
            )
        blocks = self._cache.geometry.blocks_for(len(prompt))
        if blocks > pool.available:
            raise RequestRefused(
                f"a prompt of {len(prompt)} tokens needs {blocks} blocks, {pool.available} are available: "
                "shorten it or give the pool more memory",
                blocks=blocks,
            )
        buffer = np.empty(longest, np.int32)
        buffer[: len(prompt)] = prompt
        beams = [_Beam(Request(0, buffer, len(prompt), len(prompt), namespace, self._cache.table(self._codec)), 0.0)]
        complete: list[BeamAnswer] = []
        try:
            logits = self._prefill(beams[0].request)
            for length in range(1, params.max_tokens + 1):
                beams = self._extend(beams, logits, complete, length)
                if not beams or self._decided(beams, complete, length):
                    break
                logits = self._decode(beams)
        except OutOfBlocks as error:
            raise RequestFailed(
                f"{len(beams)} beams of {beams[0].request.length} tokens have no room in the pool of {pool.total} "
                "blocks: search with fewer, ask for fewer tokens, or give the pool more memory",
                width=params.width,
                total=pool.total,
            ) from error
        finally:
            for beam in beams:
                beam.request.table.release()
        return complete

    def _prefill(self, request: Request) -> NDArray[np.float32]:
        """The logits behind a prompt."""
        logits = np.empty((0, 0), np.float32)
        for start in range(0, request.length, self._config.prefill_chunk):
            count = min(self._config.prefill_chunk, request.length - start)
            request.table.append(count)
            samples = start + count == request.length
            logits = self._compute(StepPlan.build([Chunk(request, start, count, samples=samples)]))
        return logits

    def _decode(self, beams: list[_Beam]) -> NDArray[np.float32]:
        """The logits behind each beam's newest token."""
        for beam in beams:
            beam.request.table.append(1)
        return self._compute(
            StepPlan.build([Chunk(beam.request, beam.request.length - 1, 1, samples=True) for beam in beams])
        )

    def _extend(
        self, beams: list[_Beam], logits: NDArray[np.float32], complete: list[BeamAnswer], length: int
    ) -> list[_Beam]:
        """The best ways to go on, in place of `beams`, whose blocks only those keep; what ends joins `complete`."""
        width, vocabulary = self._params.width, logits.shape[1]
        scores = _log_softmax(logits) + np.array([[beam.logprob] for beam in beams])
        heirs: list[_Beam] = []
        # Of twice as many, at least `width` go on if each beam has one way to end; as transformers does it.
        for rank, place in enumerate(_largest(scores.ravel(), width * (1 + len(self._end_ids)))):
            parent, token = beams[place // vocabulary], place % vocabulary
            logprob = float(scores.flat[place])
            ends = token in self._end_ids
            if (ends and rank < width) or length == self._params.max_tokens:
                tokens = (*parent.request.output.tolist(), token)
                complete.append(BeamAnswer(tokens, logprob, self._params.score(logprob, length)))
            elif not ends and len(heirs) < width:
                heirs.append(_heir(parent, token, logprob))
        complete.sort(key=lambda answer: -answer.score)
        del complete[width:]
        for beam in beams:
            beam.request.table.release()
        return heirs

    def _decided(self, beams: list[_Beam], complete: list[BeamAnswer], length: int) -> bool:
        """Whether what goes on cannot change the result any more, or need not."""
        params = self._params
        if len(complete) < params.width:
            return False
        # Log-probabilities only fall; with a positive penalty, the longest answer makes the least of that.
        best = max(beam.logprob for beam in beams)
        bound = max(params.score(best, at) for at in (length + 1, params.max_tokens))
        return params.early_stopping or bound <= complete[-1].score


def _heir(parent: _Beam, token: int, logprob: float) -> _Beam:
    """A fork of a beam that goes on with a token."""
    source = parent.request
    buffer = source.buffer.copy()
    buffer[source.length] = token
    table = source.table.fork()
    return _Beam(Request(source.id, buffer, source.length + 1, source.prompt_length, source.namespace, table), logprob)


def _largest(values: NDArray[np.float64], count: int) -> list[int]:
    """Places of the largest values above `-inf`, the largest first; of equal ones, the first."""
    count = min(count, len(values))
    least = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero((values >= least) & (values > -np.inf))
    return [int(place) for place in places[np.argsort(-values[places], kind="stable")][:count]]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural logarithms of probabilities, one row each.

    Raises:
        RequestFailed: a row holds NaN or `+inf`, or nothing but `-inf`.
    """
    rows = logits.astype(np.float64)
    peaks = rows.max(axis=1, keepdims=True)
    if not np.isfinite(peaks).all():
        raise RequestFailed(
            f"the best logits of the beams are {peaks.ravel().tolist()}; the model's numbers are broken: "
            "check the model file, or compute with fp32 activations"
        )
    rows -= peaks
    shifted: NDArray[np.float64] = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return shifted
