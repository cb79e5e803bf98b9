"""The requests that run: their order, the blocks they hold, and the blocks they were promised."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from .decode_batch import RANK, DecodeBatch
from .dedup import ComingBlocks
from .extents import ExtentPool
from .prefix_caches import PrefixSource
from .promises import Promises
from .request import Request, RequestState
from .scheduler_config import SchedulerConfig
from .window import WindowLayout

__all__ = ["RunningSet"]


class RunningSet:
    """Requests that run, decoding ones apart from prompts that are still being computed.

    A prompt is promised the blocks it still needs, so that admission does not give them to others. A request that has
    lost its blocks `max_preemptions` times is promised all it can still come to, and those promises bind growth as well
    as admission: nobody has to take blocks from it again, and it need not give way.

    Args:
        prefix: where nodes are held, over the pools that blocks come from.
        config: limits.
        extents: the memory of these pools.
        block_tokens: tokens per block.

    Attributes:
        decoding: those that decode.
        prefilling: the others, in order of rank.
        coming: what the others will publish next.
        promised: what was promised to all.
        guaranteed: of that, what was promised to requests that must not be preempted.
    """

    def __init__(self, prefix: PrefixSource, config: SchedulerConfig, extents: ExtentPool, block_tokens: int) -> None:
        self.decoding = DecodeBatch(config.max_sequences, block_tokens)
        self.prefilling: list[Request] = []
        self.coming = ComingBlocks(block_tokens)
        self.promised = Promises()
        self.guaranteed = Promises()
        self._prefix = prefix
        self._max_preemptions = config.max_preemptions
        self._extents = extents

    def __len__(self) -> int:
        """Requests that run."""
        return len(self.decoding.requests) + len(self.prefilling)

    def lowest_first(self) -> Iterator[Request]:
        """All of them, the one that gives way first in front."""
        return heapq.merge(reversed(self.decoding.requests), reversed(self.prefilling), key=RANK, reverse=True)

    @property
    def lowest_level(self) -> int:
        """The lowest level there is; some request must run."""
        return min(requests[-1].level for requests in (self.decoding.requests, self.prefilling) if requests)

    def has_guarantee(self, request: Request) -> bool:
        """Whether the request has lost its blocks so often that it must not lose them again."""
        return request.preemptions >= self._max_preemptions

    def add(self, request: Request) -> None:
        """A request with its table and node runs from now on."""
        request.state = RequestState.RUNNING
        request.rank = (-request.level, request.id)
        bisect.insort(self.prefilling, request, key=RANK)
        self.update(request)

    def add_fork(self, child: Request, parent: Request) -> None:
        """A request runs from now on with all that its parent, which runs, has computed."""
        assert parent.node is not None
        self._prefix.of(parent.codec).hold_node(parent.node)
        child.table, child.node, child.published = parent.table.fork(), parent.node, parent.published
        child.computed = child.hit_tokens = parent.computed
        self.add(child)
        self.computed_chunk(child)
        self.update(parent)  # which needs a copy of its tail from now on

    def begin_decoding(self, request: Request) -> None:
        """All tokens but the newest have been computed."""
        self._take_out_of_prefilling(request)
        self.decoding.add(request)
        self.update(request)

    def pause_decoding(self, request: Request) -> None:
        """A decoding request computes several tokens in this step, like the end of a prompt."""
        self.decoding.remove(request)
        bisect.insort(self.prefilling, request, key=RANK)

    def computed_chunk(self, request: Request) -> None:
        """A prompt has been computed further, or to its end."""
        if request.remaining == 1 and not request.branches:  # those must be forked off first
            self.begin_decoding(request)
        else:
            self.update(request)

    def update(self, request: Request) -> None:
        """The request's table grew or shrank, or it published a block."""
        decodes = self.decoding.table_changed(request)
        if not decodes:
            self.coming.announce(request)
        table = request.table  # may already have slots for what the step in flight computes
        guaranteed = self.has_guarantee(request)
        if decodes and not guaranteed:
            self._promise(request, 0)
            return
        needed = table.blocks_needed((request.most_computed if guaranteed else request.length) - table.length)
        if request.layout is not None:
            needed = max(0, min(needed, self._most_blocks(request, request.layout) - len(table.blocks)))
        self._promise(request, min(needed, table.pool.total - len(table.blocks)))

    def _most_blocks(self, request: Request, layout: WindowLayout) -> int:
        """Blocks that a request with a window holds at most, counting those that it may pass and not get back."""
        if not self.has_guarantee(request):
            return layout.most_blocks
        lent = request.table.known_behind(layout.front) + layout.lent_at_most(request.shareable, request.published)
        return layout.most_blocks + lent

    def leave(self, request: Request) -> None:
        """A request runs no more: its blocks, node and promises go back."""
        if self.decoding.has(request):
            self.decoding.remove(request)
        else:
            self._take_out_of_prefilling(request)
        self._promise(request, 0)
        request.table.release()
        if request.node is not None:
            self._prefix.of(request.codec).release_node(request.node)
            request.node = None

    def _take_out_of_prefilling(self, request: Request) -> None:
        self.coming.withdraw(request)
        del self.prefilling[bisect.bisect_left(self.prefilling, request.rank, key=RANK)]

    def _promise(self, request: Request, blocks: int) -> None:
        change = blocks - request.promised
        if not change:
            return
        request.promised = blocks
        self.promised.change(request.pool, change)
        if self.has_guarantee(request):
            self.guaranteed.change(request.pool, change)
            self._extents.thrifty = self.guaranteed.total > 0
