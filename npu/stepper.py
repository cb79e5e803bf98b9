"""One step of all requests: scheduled, computed, sampled, and then committed or taken back."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RequestFailed
from hostcache.pressure_response import PressureResponse
from hostcache.request import FinishReason, Request
from hostcache.scheduler import Scheduler

from .model_runner import ModelRunner
from .stream import RequestOutput, Stream

__all__ = ["Stepper"]


class Stepper:
    """Takes steps over the streams of an engine.

    Args:
        scheduler: says what is computed, and is told what came of it.
        runner: computes it.
        streams: of the requests that have not ended, by id. Shared with the engine, which adds to it; a stream whose
            request has ended is removed.
        pressure: what is done when memory is short; None: nothing. The engine closes it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        streams: dict[int, Stream],
        pressure: PressureResponse | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._streams = streams
        self._pressure = pressure

    def step(self) -> list[RequestOutput]:
        """Take one step; whatever goes wrong in it, the requests are as before it.

        Returns:
            One entry per request that got a token or ended.
        """
        if self._pressure is not None:
            self._pressure.tend()
        plan = self._scheduler.schedule()
        if self._pressure is not None:
            self._pressure.after_schedule(plan.rows)
        outputs = []
        if plan.rows:
            sampling, started = plan.sampling, time.monotonic()
            try:
                logits = self._runner.compute(plan)
                sampled = [self._sample(request, row) for request, row in zip(sampling, logits, strict=True)]
            except BaseException:
                self._scheduler.rollback(plan)
                raise
            tokens, stops = [token for token, _ in sampled], [ends for _, ends in sampled]
            self._scheduler.commit(plan, tokens, stops, seconds=time.monotonic() - started)
            outputs = [
                self._output(self._streams[request.id], token)
                for request, (token, _) in zip(sampling, sampled, strict=True)
                if request.doomed is None
            ]
        # Requests that ended without a token in this step: failed, in the plan or before it.
        ended = [request_id for request_id, stream in list(self._streams.items()) if stream.request.finished]
        return outputs + [self._streams.pop(request_id).last() for request_id in ended]

    def _sample(self, request: Request, logits: NDArray[np.float32]) -> tuple[int, bool]:
        try:
            return self._streams[request.id].sample(logits)
        except RequestFailed as error:  # this row is broken; the others are not
            self._scheduler.end(request, FinishReason.FAILED, error)
            return 0, False

    def _output(self, stream: Stream, token: int) -> RequestOutput:
        text = stream.push(token)
        if stream.stopped:
            self._scheduler.end(stream.request, FinishReason.STOP)
        if not stream.request.finished:
            return stream.output(token, text)
        del self._streams[stream.request.id]
        return stream.last((token,), text)
