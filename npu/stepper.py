"""One step of all requests: scheduled, computed, sampled, and then committed or taken back."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RequestFailed
from hostcache.pressure_response import PressureResponse
from hostcache.request import FinishReason, Request, RequestState
from hostcache.scheduler import Scheduler

from .model_runner import ModelRunner
from .speculation import PromptLookup
from .stream import RequestOutput, Stream

__all__ = ["Stepper"]

NO_TOKEN = -1
"""In place of a token that nothing asks for: that of a request that failed, or behind a proposal that is wrong."""


class Stepper:
    """Takes steps over the streams of an engine.

    Args:
        scheduler: says what is computed, and is told what came of it.
        runner: computes it.
        streams: of the requests that have not ended, by id. Shared with the engine, which adds to it; a stream whose
            request has ended is removed.
        pressure: what is done when memory is short; None: nothing. The engine closes it.
        lookup: proposes tokens for those that decode; None: nobody does.
        stopwatch: seconds, by which the scheduler learns what steps take.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        streams: dict[int, Stream],
        pressure: PressureResponse | None = None,
        lookup: PromptLookup | None = None,
        *,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._streams = streams
        self._pressure = pressure
        self._lookup = lookup
        self._stopwatch = stopwatch

    def step(self) -> list[RequestOutput]:
        """Take one step; whatever goes wrong in it, the requests are as before it.

        Returns:
            One entry per request that got a token or ended.
        """
        if self._pressure is not None:
            self._pressure.tend()
        plan = self._scheduler.schedule(self._drafts())
        if self._pressure is not None:
            self._pressure.after_schedule(plan.rows)
        outputs = []
        if plan.rows:
            sampling, started = plan.sampling, self._stopwatch()
            try:
                logits = self._runner.compute(plan)
                sampled = self._sample_all(sampling, logits)
            except BaseException:
                self._scheduler.rollback(plan)
                raise
            tokens, stops = [token for token, _ in sampled], [ends for _, ends in sampled]
            lengths = {request: request.length for request in sampling}
            self._scheduler.commit(plan, tokens, stops, seconds=self._stopwatch() - started)
            outputs = [
                self._output(self._streams[request.id], request.tokens[length:].tolist())
                for request, length in lengths.items()
                if request.doomed is None
            ]
        # Requests that ended without a token in this step: failed, in the plan or before it.
        ended = [request_id for request_id, stream in list(self._streams.items()) if stream.request.finished]
        return outputs + [self._streams.pop(request_id).last() for request_id in ended]

    def _drafts(self) -> dict[Request, NDArray[np.int32]]:
        """What may follow the tokens of those that decode."""
        if self._lookup is None:
            return {}
        requests = [stream.request for stream in self._streams.values()]
        decoding = [r for r in requests if r.state is RequestState.RUNNING and r.remaining == 1]
        return {request: self._lookup.propose(request.tokens) for request in decoding}

    def _sample_all(self, sampling: list[Request], logits: NDArray[np.float32]) -> list[tuple[int, bool]]:
        """A token for each row, and whether it ends its answer; `NO_TOKEN` behind a proposal that is wrong."""
        sampled: list[tuple[int, bool]] = []
        ahead: dict[Request, int] = {}  # rows of the request so far
        for request, row in zip(sampling, logits, strict=True):
            count = ahead[request] = ahead.get(request, -1) + 1
            if count and sampled[-1] != (request.buffer[request.length + count - 1], False):
                sampled.append((NO_TOKEN, False))
            else:
                sampled.append(self._sample(request, row, count))
        return sampled

    def _sample(self, request: Request, logits: NDArray[np.float32], ahead: int) -> tuple[int, bool]:
        try:
            return self._streams[request.id].sample(logits, ahead)
        except RequestFailed as error:  # this row is broken; the others are not
            self._scheduler.end(request, FinishReason.FAILED, error)
            return NO_TOKEN, False

    def _output(self, stream: Stream, tokens: list[int]) -> RequestOutput:
        text = ""
        for count, token in enumerate(tokens, 1):
            text += stream.push(token)
            if stream.stopped:  # what was accepted behind a stop string is no part of the answer
                del tokens[count:]
                self._scheduler.end(stream.request, FinishReason.STOP)
                break
        if not stream.request.finished:
            return stream.output(tuple(tokens), text)
        del self._streams[stream.request.id]
        return stream.last(tuple(tokens), text)
