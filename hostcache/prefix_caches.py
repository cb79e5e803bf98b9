"""The prefix caches of all codecs that one pool serves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from .blocks import BlockPool
from .codec import Codec
from .errors import UsageError
from .namespace import Namespace
from .pins import PinRoom
from .prefix import PrefixCache

__all__ = ["PrefixCaches", "PrefixSource"]


class PrefixSource(Protocol):
    """What the scheduler asks of what is known of prompts: `PrefixCaches`, or the `PrefixCache` of a single codec.

    Attributes:
        on_invalidate: see `PrefixCache`.
    """

    on_invalidate: Callable[[Namespace | None, str | None], object] | None

    @property
    def pinned(self) -> int:
        """Blocks that are pinned."""

    def of(self, codec: Codec) -> PrefixCache:
        """What is known of prompts in blocks of that codec, or UsageError if it is not served."""

    def expire_pins(self) -> int:
        """End the pins whose time is over; returns how many."""


class PrefixCaches:
    """One prefix cache for each codec: a prompt's KV in one is of no use to another.

    The codecs share the room for pins, and no two of their nodes have the same number.

    Args:
        pools: by codec name, as `PagedKVCache.pools`; each cache becomes the evictor of its pool.
        wrap: as for `PrefixCache`.
        max_pinned: most extents with a pinned block, of all codecs together; None: half of the pool.
        clock: seconds, for the end of pins.

    Attributes:
        caches: by codec name.

    Example:
        >>> import numpy as np
        >>> from hostcache import KVGeometry, Namespace, UnbackedCache
        >>> from hostcache.codec import FP16, INT8
        >>> from hostcache.prefix_caches import PrefixCaches
        >>> cache = UnbackedCache(KVGeometry(layers=1, kv_heads=1, head_dim=64), blocks=4, leanest=INT8)
        >>> prefix, mine = PrefixCaches(cache.pools), Namespace("my model")
        >>> prompt, table = np.arange(16, dtype=np.int32), cache.table(INT8)
        >>> table.append(16)
        >>> lean = prefix.of(INT8)
        >>> node = lean.publish(lean.match(mine, prompt).node, prompt, table.blocks[0])  # once it has been computed
        >>> lean.known_tokens(mine, prompt), prefix.of(FP16).known_tokens(mine, prompt)
        (16, 0)
    """

    def __init__(
        self,
        pools: Mapping[str, BlockPool],
        wrap: Callable[[bytes], bytes] | None = None,
        *,
        max_pinned: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        extents = next(iter(pools.values())).extents
        room, numbers = PinRoom(extents, max_pinned), itertools.count(1)
        self.caches = {
            name: PrefixCache(pool, wrap, max_pinned=room, clock=clock, numbers=numbers) for name, pool in pools.items()
        }

    @property
    def on_invalidate(self) -> Callable[[Namespace | None, str | None], object] | None:
        """Whom each cache calls; see `PrefixCache`."""
        return next(iter(self.caches.values())).on_invalidate

    @on_invalidate.setter
    def on_invalidate(self, call: Callable[[Namespace | None, str | None], object] | None) -> None:
        for cache in self.caches.values():
            cache.on_invalidate = call

    @property
    def pinned(self) -> int:
        """Blocks that are pinned, of whatever codec."""
        return sum(cache.pinned for cache in self.caches.values())

    def of(self, codec: Codec) -> PrefixCache:
        """What is known of prompts in blocks of that codec.

        Raises:
            UsageError: the pool does not serve it.
        """
        try:
            return self.caches[codec.name]
        except KeyError:
            raise UsageError(
                f"this pool serves {', '.join(self.caches)} and no {codec.name}: open it for {codec.name}",
                codec=codec.name,
            ) from None

    def expire_pins(self) -> int:
        """End the pins whose time is over; returns how many."""
        return sum(cache.expire_pins() for cache in self.caches.values())

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; returns how many."""
        return sum(cache.unpin(owner) for cache in self.caches.values())

    def invalidate(self, *, namespace: Namespace | None = None, prompt_version: str | None = None) -> int:
        """Forget in every codec's cache what `PrefixCache.invalidate` would; returns the blocks forgotten."""
        return sum(
            cache.invalidate(namespace=namespace, prompt_version=prompt_version) for cache in self.caches.values()
        )

    def check(self) -> None:
        """Prove that trees, indices and pools agree. O(nodes): for tests and idle moments.

        Raises:
            BlockStateError: what does not agree.
        """
        for cache in self.caches.values():
            cache.check()
