"""Which codec an engine's requests get if nobody names one."""

from __future__ import annotations

from dataclasses import dataclass

from hostcache.codec import FP16, INT8, Codec, codec_named
from hostcache.geometry import KVGeometry

from .memory_plan import blocks_in

__all__ = ["KvChoice", "choose_kv"]

CHOSEN = (FP16, INT8)
"""What may be chosen, from the richest; int4 costs quality that somebody must have agreed to, see docs/codecs.md."""


@dataclass(frozen=True)
class KvChoice:
    """How requests store their KV if they do not say, and why.

    Attributes:
        codec: how.
        reason: for people.
        reduced: whether fp16 was given up for want of room.
    """

    codec: Codec
    reason: str
    reduced: bool = False


def choose_kv(
    asked: str | None, geometry: KVGeometry, pool_bytes: int, *, context: int | None, sessions: int
) -> KvChoice:
    """As asked; or, if nobody asked, fp16 where what is planned fits into the pool, and int8 where it does not.

    Args:
        asked: name of a codec; None leaves it to what is planned.
        geometry: of the model.
        pool_bytes: the pool's.
        context: tokens that each session must be able to hold; None: nothing is planned, so everything fits.
        sessions: of that length that must fit at once, if they share nothing.

    Raises:
        UsageError: there is no such codec.
    """
    if asked is not None:
        return KvChoice(codec_named(asked), "as asked for")
    if context is None:
        return KvChoice(FP16, "no length is planned")
    what = f"{sessions} sessions of {context} tokens" if sessions > 1 else f"a session of {context} tokens"
    room = {codec.name: blocks_in(geometry, codec, pool_bytes) for codec in CHOSEN}
    fitting = [name for name, blocks in room.items() if blocks >= sessions * geometry.blocks_for(context)]
    if FP16.name in fitting:
        return KvChoice(FP16, f"room for {what}")
    tokens = {name: blocks * geometry.block_tokens for name, blocks in room.items()}
    reason = f"for in fp16 the pool holds {tokens[FP16.name]} tokens, too few for {what}"
    if not fitting:
        reason += f"; so are its {tokens[INT8.name]} in int8"
    return KvChoice(INT8, reason, reduced=True)
