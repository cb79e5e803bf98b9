"""The compiled gather and zero runs, against slicing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staging._gather import ffi, lib


@given(data=st.data(), shift=st.integers(0, 64))
def test_gather_copies_each_run_and_touches_nothing_else(data: st.DataObject, shift: int) -> None:
    source = np.random.default_rng(3).integers(0, 256, 1024 + shift, dtype=np.uint8)
    # Destinations follow each other with gaps, as rows of a staging buffer do; sources may repeat and overlap.
    runs = data.draw(st.lists(st.tuples(st.integers(0, 768), st.integers(0, 9), st.integers(0, 256)), max_size=8))
    rows: list[tuple[int, int, int]] = []
    at = 0
    for start, gap, size in runs:
        rows.append((start, at + gap, size))
        at += gap + size
    target = np.full(at + 16, 0xEE, np.uint8)
    expected = target.copy()
    for start, to, size in rows:
        expected[to : to + size] = source[shift + start : shift + start + size]

    table = np.array(rows, np.int64).reshape(-1, 3)
    lib.rp_gather(
        ffi.from_buffer("uint8_t[]", source),
        shift,
        ffi.from_buffer("uint8_t[]", target),
        ffi.from_buffer("int64_t[]", table),
        len(rows),
    )
    np.testing.assert_array_equal(target, expected)


def test_zero_clears_its_runs_only() -> None:
    target = np.full(32, 7, np.uint8)
    runs = np.array([[0, 3], [10, 0], [30, 2]], np.int64)
    lib.rp_zero(ffi.from_buffer("uint8_t[]", target), ffi.from_buffer("int64_t[]", runs), len(runs))
    assert target.tolist() == [0, 0, 0] + [7] * 27 + [0, 0]
