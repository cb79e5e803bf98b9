"""Windows: a token sees only the newest ones and the first ones, so that blocks in between go back to the pool."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from .errors import UsageError

__all__ = ["MAX_TOKENS", "AttentionWindow", "WindowLayout", "blocks_at_most"]

MAX_TOKENS = 2**31 - 1
"""Windows travel as int32."""


@dataclass(frozen=True)
class AttentionWindow:
    """What a token sees of those before it.

    The token at position p sees the positions below `sinks`, and `p - tokens + 1` up to p itself.

    Attributes:
        tokens: newest tokens that it sees, itself included.
        sinks: first tokens of the sequence that it sees besides.

    Raises:
        UsageError: one of them is no integer, or out of range.
    """

    tokens: int
    sinks: int = 0

    def __post_init__(self) -> None:
        integers = isinstance(self.tokens, numbers.Integral) and isinstance(self.sinks, numbers.Integral)
        if not (integers and 1 <= self.tokens <= MAX_TOKENS and 0 <= self.sinks <= MAX_TOKENS):
            raise UsageError(
                f"a window holds 1..{MAX_TOKENS} tokens behind 0..{MAX_TOKENS} sinks, got {self.tokens} behind "
                f"{self.sinks}",
                tokens=self.tokens,
                sinks=self.sinks,
            )


@dataclass(frozen=True)
class WindowLayout:
    """What one sequence's window means for its blocks: which of them go when, and when its positions are turned.

    The blocks that hold the sinks stay. Behind them is a gap, which grows by whole blocks, as soon as no further token
    sees anything of a block. All of that follows from the sequence's length alone, so that a sequence that is computed
    again from its first token comes to the same KV.

    A sequence that slides goes on past the model's context. K was rotated by a token's position, and where the next
    position would reach the context, all tokens behind the sinks are turned back by the gap: they follow the sinks as
    if nothing had been in between (as in StreamingLLM: Xiao et al., arXiv 2309.17453).

    Attributes:
        window: what a token sees.
        block_tokens: tokens per block.
        largest_chunk: most tokens of a prompt that one step computes.
        context_length: positions there are, for a sequence that slides; None: it ends before they do.
        of_model: whether the window is the model's own, so that whoever computes the same tokens gets the same KV.
    """

    window: AttentionWindow
    block_tokens: int
    largest_chunk: int
    context_length: int | None = None
    of_model: bool = False

    @property
    def front(self) -> int:
        """Tokens of the blocks that hold the sinks."""
        return -(-self.window.sinks // self.block_tokens) * self.block_tokens

    @property
    def most_blocks(self) -> int:
        """Blocks that the sequence holds at most while a step computes it, and one more if it slides: to turn into."""
        window = -(-(self.window.tokens + self.largest_chunk) // self.block_tokens) + 1
        return self.front // self.block_tokens + window + (self.context_length is not None)

    @property
    def shown(self) -> int:
        """The window's tokens as a step's plan has them: 0 for the model's own, which its layers know."""
        return 0 if self.of_model else self.window.tokens

    @property
    def fits_context(self) -> bool:
        """Whether turning makes room for a block: sinks, window and a block fit into the context."""
        return self.context_length is None or self.front + self.window.tokens + self.block_tokens <= self.context_length

    @property
    def shareable(self) -> int:
        """Leading tokens whose KV is the same as without this window."""
        return MAX_TOKENS if self.of_model else self.window.tokens

    def lent_at_most(self, shareable: int, published: int) -> int:
        """Blocks behind the front that a sequence may yet publish: they do not come back if others hold them then.

        Args:
            shareable: leading tokens that it may publish.
            published: blocks that it has published.
        """
        # Where the gap begins, publishing ends.
        most = min(shareable, self.gap_grows_at(0) + self.largest_chunk)
        return max(0, most // self.block_tokens - max(published, self.front // self.block_tokens))

    def gap_at(self, computed: int) -> int:
        """Tokens behind the front that no token from position `computed` on sees; whole blocks."""
        return max(0, (computed - self.window.tokens + 1) // self.block_tokens * self.block_tokens - self.front)

    def unseen_at(self, computed: int) -> int:
        """Tokens that the one at position `computed` does not see."""
        return max(0, computed - self.window.tokens + 1 - self.window.sinks)

    def gap_grows_at(self, gap: int) -> int:
        """The next position for which the gap is larger than `gap`."""
        return self.front + gap + self.block_tokens + self.window.tokens - 1

    def turn_at(self, turned: int) -> int:
        """The position in front of which a sequence that was turned by `turned` so far must be turned again."""
        return MAX_TOKENS if self.context_length is None else self.context_length + turned

    def attended(self, position: int) -> int:
        """Tokens in front of a position that are in the table."""
        return min(position, self.front + self.window.tokens)


def blocks_at_most(layout: WindowLayout | None, blocks: int) -> int:
    """Of a sequence's blocks, how many it holds at one time; without a window all."""
    return blocks if layout is None else min(blocks, layout.most_blocks)
