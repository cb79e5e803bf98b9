"""The keywords that say how a request is queued and whose KV it may share."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["QueueOptions"]


class QueueOptions(TypedDict, total=False):
    """The keywords of `Engine.add_request`, which says what they are, for those who pass them on."""

    salt: str
    prompt_version: str
    priority: int
    client: str
    deadline: float | None
    max_queue_seconds: float | None
