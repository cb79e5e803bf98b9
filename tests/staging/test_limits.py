"""The limits that benchmarks measure against do the work that they are to stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staging._limits import ffi, lib


@given(nbytes=st.integers(0, 300))
def test_a_copy_is_of_so_many_bytes(nbytes: int) -> None:
    source = np.random.default_rng(1).integers(1, 256, 300, dtype=np.uint8)
    target = np.zeros(300, np.uint8)
    lib.rp_limit_copy(ffi.from_buffer("uint8_t[]", source), ffi.from_buffer("uint8_t[]", target), nbytes)
    np.testing.assert_array_equal(target, np.where(np.arange(300) < nbytes, source, 0))


def test_runs_go_where_they_say() -> None:
    source, target = np.arange(20, dtype=np.uint8), np.zeros(8, np.uint8)
    runs = np.array([[10, 1, 3], [5, 6, 2], [0, 0, 0]], np.int64)
    lib.rp_limit_copy_runs(
        ffi.from_buffer("uint8_t[]", source),
        ffi.from_buffer("uint8_t[]", target),
        ffi.from_buffer("int64_t[]", runs),
        len(runs),
    )
    assert target.tolist() == [0, 10, 11, 12, 0, 0, 5, 6]


@given(steps=st.integers(0, 9), shift=st.integers(0, 31))
def test_every_byte_is_read(steps: int, shift: int) -> None:
    """Aligned or not; one that was left out would be missing in the sum."""
    source = np.random.default_rng(steps).integers(0, 256, steps * 256 + shift, dtype=np.uint8)
    expected = sum(int.from_bytes(source[at : at + 8], "little") for at in range(shift, len(source), 8)) % (1 << 64)
    assert lib.rp_limit_read(ffi.from_buffer("uint8_t[]", source) + shift, steps * 256) == expected


@given(times=st.integers(0, 4))
def test_the_same_bytes_are_read_so_many_times(times: int) -> None:
    source = np.full(512, 1, np.uint8)
    words = 64 * 0x0101010101010101
    assert lib.rp_limit_reread(ffi.from_buffer("uint8_t[]", source), 512, times) == times * words % (1 << 64)
