"""The keywords that say how a request is queued, and whose KV it may share."""

from __future__ import annotations

from typing import TypedDict

from hostcache.window import AttentionWindow

from .overflow import OverflowPolicy

__all__ = ["QueueOptions"]


class QueueOptions(TypedDict, total=False):
    """The keywords of `Engine.add_request`, and of whatever passes them on to it.

    Attributes:
        salt: only requests with the same salt share KV.
        prompt_version: only requests with the same version share KV.
        priority: higher ones go first (default 0); see `Scheduler.submit` for this and the next three.
        client: who asks.
        deadline: when it fails if it has not ended, a value of `time.monotonic()`; None: never.
        max_queue_seconds: how long it may wait to be admitted; None: as long as it takes.
        overflow: what happens where prompt and answer exceed the context (default `"stop"`), see
            `npu.overflow.OverflowPolicy`.
        window: what each of its tokens sees, so that blocks in between go back to the pool; None: everything, or what
            the model's own windows show, or, for an answer that must slide, the largest window that the context allows
            beside 4 sinks and an eighth that is kept free.
        kv: how its KV is stored, `"fp16"`, `"int8"` or `"int4"`, the engine's `kv` or a richer one; None: as the engine
            has it. It shares KV only with requests that store it alike.
    """

    salt: str
    prompt_version: str
    priority: int
    client: str
    deadline: float | None
    max_queue_seconds: float | None
    overflow: OverflowPolicy
    window: AttentionWindow | None
    kv: str | None
