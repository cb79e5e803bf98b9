"""What a window means for blocks, against a count of what each further token would see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache import AttentionWindow
from hostcache.errors import UsageError
from hostcache.window import WindowLayout

LAYOUTS = st.builds(
    lambda tokens, sinks, size, chunk: WindowLayout(AttentionWindow(tokens, sinks), size, chunk),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(1, 8),
    st.integers(1, 20),
)


def sees(layout: WindowLayout, row: int, position: int) -> bool:
    return position < layout.window.sinks or row - layout.window.tokens < position <= row


@given(layout=LAYOUTS, computed=st.integers(0, 120))
def test_a_block_goes_when_no_further_token_sees_it_and_no_sooner(layout: WindowLayout, computed: int) -> None:
    """Positions below the next one; what a token far behind sees, one in front of it saw, too, but for the sinks."""
    size = layout.block_tokens
    blocks = [range(start, start + size) for start in range(0, computed, size)]
    needed = [
        any(sees(layout, row, p) for p in block for row in range(computed, computed + layout.window.tokens + 1))
        for block in blocks
    ]
    # Those of the sinks stay; behind them go those that nobody sees.
    gone = [index for index, block in enumerate(blocks) if block[0] >= layout.front and not needed[index]]
    first = layout.front // size
    assert gone == list(range(first, first + layout.gap_at(computed) // size))


@given(layout=LAYOUTS, gap_blocks=st.integers(0, 9))
def test_the_gap_grows_where_it_is_said_to(layout: WindowLayout, gap_blocks: int) -> None:
    gap = gap_blocks * layout.block_tokens
    position = layout.gap_grows_at(gap)
    assert layout.gap_at(position - 1) <= gap < layout.gap_at(position)


@given(layout=LAYOUTS, computed=st.integers(0, 400), chunk=st.integers(1, 20))
def test_a_sequence_holds_no_more_than_promised(layout: WindowLayout, computed: int, chunk: int) -> None:
    """However long it is: front, window and the chunk that a step adds."""
    held = computed + min(chunk, layout.largest_chunk) - layout.gap_at(computed)
    assert -(-held // layout.block_tokens) <= layout.most_blocks


def test_a_window_out_of_range_is_refused() -> None:
    for tokens, sinks in ((0, 0), (-4, 0), (8, -1), (2**31, 0), (8, 2**31), (1.5, 0), (8, 0.5), ("8", 0), (8, None)):
        with pytest.raises(UsageError, match=f"got {tokens} behind {sinks}"):
            AttentionWindow(tokens, sinks)  # type: ignore[arg-type] # what is no integer is refused, too


def test_a_sequence_that_slides_needs_a_block_beside_sinks_and_window() -> None:
    """Sinks fill whole blocks: 5 of them take 8 tokens."""

    def fits(tokens: int) -> bool:
        return WindowLayout(AttentionWindow(tokens, sinks=5), 4, 16, context_length=64).fits_context

    assert fits(52)
    assert not fits(53)
