"""The compiled gather and clear, token by token, against slicing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from staging import Place
from staging._gather import ffi, lib

BLOCK_TOKENS, SEQUENCES = 4, 2
TOKENS = 12
HIDDEN = 0x1234


class Operand(NamedTuple):
    """An operand whose every byte has a place that is told by one formula."""

    pieces: int
    piece_bytes: int
    mark_bytes: int
    tiled: bool

    @property
    def own_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def token_bytes(self) -> int:
        return self.own_bytes + self.mark_bytes

    @property
    def place(self) -> Place:
        token, piece = self.token_bytes, self.piece_bytes
        if self.tiled:
            token, piece = self.piece_bytes, self.piece_bytes * TOKENS
        return Place(self.token_bytes * TOKENS, token, piece, self.piece_bytes, self.pieces, self.mark_bytes)

    def put(self, target: NDArray[np.uint8], head: int, token: int, content: bytes, mark: int) -> None:
        """Write a token's bytes piece by piece, its mark behind them as a piece more."""
        whole = content + (mark.to_bytes(2, "little") + bytes(self.mark_bytes))[: self.mark_bytes]
        for piece, at in enumerate(range(0, len(whole), self.piece_bytes)):
            part = whole[at : at + self.piece_bytes]
            start = piece * self.piece_bytes * TOKENS + token * self.piece_bytes
            if not self.tiled:
                start = token * self.token_bytes + at
            start += head * self.token_bytes * TOKENS
            target[start : start + len(part)] = np.frombuffer(part, np.uint8)


class Case(NamedTuple):
    """Blocks of some heads, and where they go."""

    kv_heads: int
    keys: Operand
    values: Operand

    @property
    def row_bytes(self) -> int:
        return BLOCK_TOKENS * self.keys.own_bytes

    @property
    def layer_bytes(self) -> int:
        return 2 * self.kv_heads * self.row_bytes

    @property
    def values_offset(self) -> int:
        return SEQUENCES * self.kv_heads * TOKENS * self.keys.token_bytes + 64

    @property
    def nbytes(self) -> int:
        return self.values_offset + SEQUENCES * self.kv_heads * TOKENS * self.values.token_bytes + 64


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows of less and of more than is copied at once; K with and without marks; tiles of 16 bytes."""
    tiled = draw(st.booleans())
    pieces, piece_bytes = (
        (draw(st.integers(2, 4)), 16) if tiled else (1, draw(st.sampled_from([16, 80, 128, 256, 528])))
    )
    values = Operand(pieces, piece_bytes, 0, tiled)
    return Case(draw(st.integers(1, 3)), values._replace(mark_bytes=draw(st.sampled_from([0, 16]))), values)


first_and_tokens = st.tuples(st.integers(0, TOKENS - 1), st.integers(1, BLOCK_TOKENS)).map(
    lambda run: (run[0], min(run[1], BLOCK_TOKENS - run[0] % BLOCK_TOKENS))
)


@settings(deadline=None)
@given(
    case=cases(),
    runs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, SEQUENCES - 1), first_and_tokens), max_size=6),
    tails=st.lists(
        st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, TOKENS - 1), st.integers(0, TOKENS)), max_size=3
    ),
    layer=st.integers(0, 1),
)
def test_each_token_is_put_in_its_place_and_nothing_else_is_touched(
    case: Case,
    runs: list[tuple[int, int, tuple[int, int]]],
    tails: list[tuple[int, int, int]],
    layer: int,
) -> None:
    block_bytes = 2 * case.layer_bytes
    pool = np.random.default_rng(3).integers(0, 256, 6 * block_bytes, dtype=np.uint8)
    buffer = np.full(case.nbytes, 0xEE, np.uint8)
    expected = buffer.copy()
    operands = ((case.keys, 0), (case.values, case.values_offset))
    for block, sequence, (first, tokens) in runs:
        for kv, (operand, offset) in enumerate(operands):
            for head in range(case.kv_heads):
                for token in range(first, first + tokens):
                    row = block * block_bytes + layer * case.layer_bytes + (kv * case.kv_heads + head) * case.row_bytes
                    start = row + token % BLOCK_TOKENS * operand.own_bytes
                    content = pool[start : start + operand.own_bytes].tobytes()
                    operand.put(expected[offset:], sequence * case.kv_heads + head, token, content, 0)
    clears = [(head, first, min(tokens, TOKENS - first)) for head, first, tokens in tails]
    for operand, offset in operands:
        for head, first, tokens in clears:
            for token in range(first, first + tokens):
                operand.put(expected[offset:], head, token, bytes(operand.own_bytes), HIDDEN)

    table = np.array([(block * block_bytes, sequence, *run) for block, sequence, run in runs], np.int64).reshape(-1, 4)
    c_runs = ffi.from_buffer("int64_t[]", table)
    c_tails = ffi.from_buffer("int64_t[]", np.array(clears, np.int64).reshape(-1, 3))
    rows = (case.layer_bytes, case.kv_heads * case.row_bytes, case.row_bytes, BLOCK_TOKENS, case.kv_heads)
    parts = ffi.new("rp_part[]", [((*rows, case.values.own_bytes // 2, 0), c_runs, len(table))])
    places = [vars(operand.place) for operand, _ in operands]
    plan = ffi.new("rp_plan *", (*places, 0, case.values_offset, parts, 1, c_tails, len(clears), HIDDEN))
    lib.rp_stage(plan, ffi.from_buffer("uint8_t[]", pool), layer, ffi.from_buffer("uint8_t[]", buffer))
    np.testing.assert_array_equal(buffer, expected)
