"""How likely a model finds a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.codec import FP16, Codec
from hostcache.errors import RequestFailed, RequestRefused
from hostcache.prefix import Namespace
from hostcache.request import Request
from hostcache.scheduler import SchedulerConfig
from hostcache.step import Chunk, StepPlan

__all__ = ["Score", "forced_logits", "log_softmax_at", "score_ids"]


@dataclass(frozen=True)
class Score:
    """A text under the model, each token given all before it.

    Attributes:
        logprobs: float64 `[n - 1]`, natural logarithm of the probability of tokens 1..n-1.
        top1: int32 `[n - 1]`, the most likely token at each of those positions.

    Example:
        >>> import numpy as np
        >>> from npu.score import Score
        >>> halves = Score(logprobs=np.log([0.5, 0.5]), top1=np.array([7, 9], np.int32))
        >>> round(halves.perplexity, 6)  # as if each token had been drawn from two
        2.0
    """

    logprobs: NDArray[np.float64]
    top1: NDArray[np.int32]

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability; infinite beyond float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(-self.logprobs.mean()))


def log_softmax_at(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Log-probability of one target per row.

    Args:
        logits: float32 `[n, vocabulary]`.
        targets: int32 `[n]`, ids.

    Returns:
        float64 `[n]`, natural logarithms.

    Raises:
        RequestFailed: a row holds NaN or `+inf`, or nothing but `-inf`.
    """
    rows = logits.astype(np.float64)
    peak = rows.max(axis=1)
    broken = np.flatnonzero(~np.isfinite(peak))
    if broken.size:
        raise RequestFailed(
            f"the best logit in front of token {targets[broken[0]]} is {peak[broken[0]]}; the model's numbers are "
            "broken: check the model file, or compute with fp32 activations",
            token=int(targets[broken[0]]),
            logit=float(peak[broken[0]]),
        )
    total: NDArray[np.float64] = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    picked: NDArray[np.float64] = rows[np.arange(len(rows)), targets]
    return np.subtract(picked, total)


def score_ids(
    ids: NDArray[np.int32],
    namespace: Namespace,
    cache: PagedKVCache,
    config: SchedulerConfig,
    compute: Callable[[StepPlan], NDArray[np.float32]],
    *,
    codec: Codec = FP16,
) -> Score:
    """Teacher-force a text through the paged cache, in chunks, and give its blocks back.

    Args:
        ids: int32, the text, all in the vocabulary.
        namespace: of the sequence; nothing is published in it.
        cache: the pool.
        config: limits of a step.
        compute: runs the model over a plan, float32 `[len(logit_rows), vocabulary]`.
        codec: how its KV is stored meanwhile.

    Raises:
        RockpageError: as `forced_logits`.
        RequestFailed: the model's numbers are broken.
    """
    logprobs: list[NDArray[np.float64]] = []
    top1: list[NDArray[np.int32]] = []
    done = 1
    for logits in forced_logits(ids, namespace, cache, config, compute, codec=codec):
        logprobs.append(log_softmax_at(logits, ids[done : done + len(logits)]))
        top1.append(logits.argmax(axis=1).astype(np.int32))
        done += len(logits)
    return Score(np.concatenate(logprobs), np.concatenate(top1))


def forced_logits(
    ids: NDArray[np.int32],
    namespace: Namespace,
    cache: PagedKVCache,
    config: SchedulerConfig,
    compute: Callable[[StepPlan], NDArray[np.float32]],
    *,
    codec: Codec = FP16,
) -> Iterator[NDArray[np.float32]]:
    """What a model makes of a text, chunk by chunk: the logits in front of each token but the first.

    The arguments are those of `score_ids`. The blocks go back when the iterator ends or is closed.

    Yields:
        float32 `[tokens of the chunk, vocabulary]`.

    Raises:
        UsageError: the pool does not serve the codec.
        RequestRefused: fewer than two tokens, or more than the context or the pool holds.
    """
    if ids.ndim != 1 or not 2 <= len(ids) <= config.context_length:
        raise RequestRefused(
            f"a text to score has 2 to {config.context_length} tokens, got {ids.size}: give a longer one, or split it",
            shape=ids.shape,
        )
    blocks = cache.geometry.blocks_for(len(ids))
    pool = cache.pool_of(codec)
    if blocks > pool.available:
        raise RequestRefused(
            f"{len(ids)} tokens need {blocks} blocks, {pool.available} are available: "
            "shorten the text or give the pool more memory",
            blocks=blocks,
        )
    request = Request(0, ids, len(ids), len(ids), namespace, cache.table(codec))
    try:
        for start in range(0, len(ids) - 1, config.prefill_chunk):  # the last token's own logits are not needed
            stop = min(start + config.prefill_chunk, len(ids) - 1)
            request.table.append(stop - start)
            plan = StepPlan.build([Chunk(request, start, stop - start, samples=False)])
            yield compute(dataclasses.replace(plan, logit_rows=np.arange(plan.rows, dtype=np.int64)))
    finally:
        request.table.release()
