"""Whether a waiting request fits now, and with which blocks it begins."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SwapError
from .prefix import PrefixHit
from .request import Request, SwappedTail
from .scheduler_state import SchedulerState

__all__ = ["Admission", "NotNow"]


@dataclass(frozen=True)
class NotNow:
    """Why a request is not admitted now.

    Attributes:
        missing: blocks that would have to come free.
        coming: it had better wait for a running request that computes what both begin with.
    """

    missing: int = 0
    coming: bool = False


class Admission:
    """Moves waiting requests into the running set.

    All of a request's tokens must fit, beside what running requests were promised and a watermark for their growth.
    What the prefix cache has of it is taken into use first, so that a hit on a block that nobody uses counts as a block
    less for others.

    Args:
        state: who waits, who runs, and what there is.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._geometry = state.cache.geometry
        self._state = state
        self._stats = state.stats
        self._running = state.running
        self._swap = state.swap
        self._watermark = state.config.watermark
        self._max_dedup_steps = state.config.max_dedup_steps

    def obstacle(self, request: Request) -> NotNow | None:
        """Why a waiting request cannot be admitted now; None: it can."""
        obstacle, hit = self._examine(request)
        self._give_back(request, hit)
        return obstacle

    def admit(self, request: Request) -> NotNow | None:
        """Let a waiting request run; or say why it cannot."""
        obstacle, hit = self._examine(request)
        if obstacle is not None:
            self._give_back(request, hit)
            return obstacle
        try:
            resumed = request.swapped is not None and self._swap_in(request, request.swapped, hit)
        except BaseException:  # no memory for a copy, say: it waits as before
            self._give_back(request, hit)
            raise
        request.swapped = None
        if not resumed:
            self._begin_with(request, hit)
        self._stats.prompt_tokens += request.length
        if not request.preemptions:  # what is computed again is not its client's fault
            request.account.charge_prompt(request.length - request.table.length)
        request.computed = request.hit_tokens = request.table.length
        request.node, request.published = hit.node, len(hit.blocks)
        request.let_go()
        self._running.add(request)
        return None

    def _examine(self, request: Request) -> tuple[NotNow | None, PrefixHit]:
        """What is in the way, and what the prefix cache has that is to be used."""
        shareable = request.tokens[: request.shareable + 1]  # of which a hit spares one
        hit = self._state.prefix_of(request).match(request.namespace, shareable)
        if self._is_coming(request, hit):
            return NotNow(coming=True), hit
        swapped = request.swapped
        if swapped is not None and self._is_of_use(swapped, hit):
            hit = self._cut(request, hit, swapped.first)  # the rest lies in the swap space
        missing = self._missing(request, hit)
        if missing > 0 and hit.partial >= 0:  # without it one block more may be available
            hit = self._cut(request, hit, len(hit.blocks))
            missing = self._missing(request, hit)
        return NotNow(missing) if missing > 0 else None, hit

    def _missing(self, request: Request, hit: PrefixHit) -> int:
        """Blocks that would have to come free, with the hit's blocks in use."""
        guaranteed, pool = self._running.has_guarantee(request), request.pool
        blocks = self._geometry.blocks_for(request.most_computed if guaranteed else request.length)
        blocks -= len(hit.blocks)  # a partial one is shared for now: what is appended behind it needs a copy
        layout = request.layout
        if layout is not None:
            most = layout.most_blocks - len(hit.blocks)
            if guaranteed:  # others may hold what its window passes of the hit, and of what it will publish
                most += max(0, len(hit.blocks) - layout.front // self._geometry.block_tokens)
                most += layout.lent_at_most(request.shareable, len(hit.blocks))
            blocks = min(blocks, most)
        if guaranteed:
            blocks = min(blocks, pool.total - len(hit.blocks))
        if not len(self._running):
            return blocks - pool.available
        return self._running.promised.missing(pool, blocks + max(1, int(pool.total * self._watermark)))

    def _cut(self, request: Request, hit: PrefixHit, count: int) -> PrefixHit:
        """The first `count` blocks of a hit; the others and the partial one go back."""
        node = hit.node
        for _ in range(len(hit.blocks) - count):
            assert node.parent is not None
            node = node.parent
        self._state.prefix_of(request).hold_node(node)
        self._give_back(request, PrefixHit(hit.blocks[count:], hit.node, hit.partial))
        return PrefixHit(hit.blocks[:count], node)

    def _is_coming(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a running request, not below this one, computes the block that this one would compute first."""
        if request.dedup_steps >= self._max_dedup_steps or request.swapped is not None:
            return False
        wanted = request.tokens[:-1][: request.shareable]  # a hit spares one token
        owner = self._running.coming.owner(hit.node, wanted, len(hit.blocks))
        return owner is not None and owner.level >= request.level

    def _begin_with(self, request: Request, hit: PrefixHit) -> None:
        size = self._geometry.block_tokens
        if hit.partial >= 0:
            request.table.adopt([*hit.blocks, hit.partial], len(hit.blocks) * size + hit.partial_tokens)
        else:
            request.table.adopt(hit.blocks, len(hit.blocks) * size)
        self._stats.hit_tokens += request.table.length

    def _is_of_use(self, swapped: SwappedTail, hit: PrefixHit) -> bool:
        """Whether what was swapped out continues the hit, and goes beyond it."""
        return swapped.first <= len(hit.blocks) and len(hit.blocks) * self._geometry.block_tokens < swapped.tokens

    def _swap_in(self, request: Request, swapped: SwappedTail, hit: PrefixHit) -> bool:
        """Begin with what was swapped out, behind the hit; False: it is lost, or of no use."""
        assert self._swap is not None
        if len(hit.blocks) != swapped.first:  # see `_examine`
            self._swap.drop(swapped.ticket)
            return False
        fresh = request.pool.allocate(swapped.ticket.blocks)
        try:
            self._swap.take(swapped.ticket, fresh)
        except SwapError:
            request.pool.release_all(fresh)
            return False
        except BaseException:
            request.pool.release_all(fresh)
            raise
        request.table.adopt(hit.blocks + fresh, swapped.tokens, swapped.gap)
        front = swapped.first * self._geometry.block_tokens
        self._stats.hit_tokens += front
        self._stats.swapped_in_tokens += swapped.tokens - front
        return True

    def _give_back(self, request: Request, hit: PrefixHit) -> None:
        request.pool.release_all([*hit.blocks, *([hit.partial] if hit.partial >= 0 else ())])
        self._state.prefix_of(request).release_node(hit.node)
