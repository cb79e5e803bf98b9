"""The compiled gather and clear, token by token, against slicing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staging import Place
from staging._gather import ffi, lib
from staging.buffer import _c_place

HEADS, TOKENS = 3, 12
PATTERN = np.arange(1, 17, dtype=np.uint8)  # more than any mark


class Operand(NamedTuple):
    """An operand whose every byte has a place that is told by one formula."""

    pieces: int
    piece_bytes: int
    mark_bytes: int
    tiled: bool

    @property
    def token_bytes(self) -> int:
        return self.pieces * self.piece_bytes + self.mark_bytes

    @property
    def place(self) -> Place:
        token, piece = self.token_bytes, self.piece_bytes
        if self.tiled:
            token, piece = self.piece_bytes, self.piece_bytes * TOKENS
        return Place(self.token_bytes * TOKENS, token, piece, self.piece_bytes, self.pieces, self.mark_bytes)

    def put(self, target: NDArray[np.uint8], head: int, token: int, content: NDArray[np.uint8]) -> None:
        """Write a token's bytes, its mark included, one at a time."""
        for i, byte in enumerate(content.tolist()):
            piece, within = divmod(i, self.piece_bytes) if i < self.pieces * self.piece_bytes else (self.pieces, 0)
            if piece == self.pieces:
                within = i - self.pieces * self.piece_bytes
            start = piece * self.piece_bytes * TOKENS + token * self.piece_bytes
            if not self.tiled:
                start = token * self.token_bytes + piece * self.piece_bytes
            target[head * self.token_bytes * TOKENS + start + within] = byte


operands = st.one_of(
    st.builds(Operand, st.just(1), st.sampled_from([6, 16, 32]), st.sampled_from([0, 16]), st.just(value=False)),
    # In tiles a mark is one tile more.
    st.builds(Operand, st.integers(1, 3), st.just(16), st.sampled_from([0, 16]), st.just(value=True)),
)
run = st.tuples(st.integers(0, HEADS - 1), st.integers(0, TOKENS), st.integers(0, TOKENS)).map(
    lambda r: (r[0], r[1], min(r[2], TOKENS - r[1]))
)


@given(operand=operands, runs=st.lists(run, max_size=6), shift=st.integers(0, 64), data=st.data())
def test_gather_puts_each_token_in_its_place_and_touches_nothing_else(
    operand: Operand, runs: list[tuple[int, int, int]], shift: int, data: st.DataObject
) -> None:
    own = operand.pieces * operand.piece_bytes
    source = np.random.default_rng(3).integers(0, 256, 2048 + shift, dtype=np.uint8)
    table = [(data.draw(st.integers(0, 2048 - own * TOKENS)), *each) for each in runs]
    target = np.full(HEADS * TOKENS * operand.token_bytes + 16, 0xEE, np.uint8)
    expected = target.copy()
    for start, head, first, tokens in table:
        for t in range(tokens):
            content = source[shift + start + t * own : shift + start + (t + 1) * own]
            operand.put(expected, head, first + t, np.concatenate([content, PATTERN[: operand.mark_bytes]]))
    lib.rp_gather(
        ffi.from_buffer("uint8_t[]", source),
        shift,
        ffi.from_buffer("uint8_t[]", target),
        _c_place(operand.place),
        ffi.from_buffer("int64_t[]", np.array(table, np.int64).reshape(-1, 4)),
        len(table),
        ffi.from_buffer("uint8_t[]", PATTERN),
    )
    np.testing.assert_array_equal(target, expected)


@given(operand=operands, runs=st.lists(run, max_size=6))
def test_clear_zeroes_and_marks_its_tokens_only(operand: Operand, runs: list[tuple[int, int, int]]) -> None:
    target = np.full(HEADS * TOKENS * operand.token_bytes + 16, 0xEE, np.uint8)
    expected = target.copy()
    nothing = np.zeros(operand.pieces * operand.piece_bytes, np.uint8)
    for head, first, tokens in runs:
        for t in range(tokens):
            operand.put(expected, head, first + t, np.concatenate([nothing, PATTERN[: operand.mark_bytes]]))
    lib.rp_clear(
        ffi.from_buffer("uint8_t[]", target),
        _c_place(operand.place),
        ffi.from_buffer("int64_t[]", np.array(runs, np.int64).reshape(-1, 3)),
        len(runs),
        ffi.from_buffer("uint8_t[]", PATTERN),
    )
    np.testing.assert_array_equal(target, expected)
