"""Drives an engine for the tests that look at what comes out of it."""

from __future__ import annotations

from npu.engine import Engine
from npu.stream import RequestOutput

__all__ = ["drive", "text_of"]


def drive(engine: Engine) -> dict[int, list[RequestOutput]]:
    """Step until nothing is left; every output by request."""
    outputs: dict[int, list[RequestOutput]] = {}
    while not engine.idle:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.cache.pool.used == 0
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)
