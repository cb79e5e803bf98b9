"""The compiled scatter and block copy, against numpy's own float16 conversion and plain slicing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache._kv import ffi, lib
from hostcache.geometry import KVGeometry

ISAS = [isa for isa in ("plain", "avx2", "neon") if lib.rp_kv_use_isa(isa.encode()) == 0]
lib.rp_kv_use_isa(b"auto")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert lib.rp_kv_use_isa(request.param.encode()) == 0
    yield request.param
    lib.rp_kv_use_isa(b"auto")


def write(  # as the cache calls it: K and V rows lie `stride` floats apart in one array
    pool: NDArray[np.uint8],
    geometry: KVGeometry,
    *,
    layer: int,
    slots: list[int],
    rows: NDArray[np.float32],
    k_start: int = 0,
    v_start: int = 0,
) -> None:
    base = ffi.from_buffer("float[]", rows)
    stride = rows.shape[1]
    lib.rp_kv_write(
        ffi.from_buffer("uint8_t[]", pool),
        geometry.block_bytes,
        ffi.new("int64_t[3]", [geometry.row_bytes]),
        layer,
        geometry.block_tokens,
        geometry.kv_heads,
        geometry.head_dim,
        ffi.from_buffer("int64_t[]", np.array(slots, np.int64)),
        ffi.NULL,
        len(slots),
        base + k_start,
        stride,
        base + v_start,
        stride,
        ffi.NULL,
    )


def convert(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Run `values` through the kernel: one token of one head, as wide as there are values."""
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=len(values), block_tokens=1)
    pool = np.zeros(geometry.block_bytes, np.uint8)
    write(pool, geometry, layer=0, slots=[0], rows=values[np.newaxis])
    return pool.view(np.uint16)[: len(values)]


def test_a_plain_path_and_the_best_path_exist() -> None:
    assert ISAS[0] == "plain"
    assert lib.rp_kv_use_isa(b"avx512") == -1


@pytest.mark.usefixtures("isa")
def test_every_fp16_value_and_every_tie_between_two_rounds_as_numpy_does() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves[~np.isnan(halves)].astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    ties = (finite[:-1] + finite[1:]) / 2
    near = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)])
    values = np.concatenate([exact, ties, near])
    expected = values.astype(np.float16)
    np.testing.assert_array_equal(convert(values), expected.view(np.uint16))


@pytest.mark.usefixtures("isa")
def test_overflow_becomes_infinity_at_65520_and_nan_stays_nan() -> None:
    below = np.nextafter(np.float32(65520), np.float32(0))
    values = np.array([below, 65520, 65536, 3e38, np.inf, -below, -65520, -3e38], np.float32)
    inf = np.inf
    np.testing.assert_array_equal(convert(values).view(np.float16), [65504, inf, inf, inf, inf, -65504, -inf, -inf])

    nans = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF] * 2, np.uint32).view(np.float32)
    assert np.isnan(convert(nans).view(np.float16)).all()


@pytest.mark.usefixtures("isa")
def test_vector_paths_give_the_bits_of_the_plain_path_for_any_float() -> None:
    values = np.random.default_rng(7).integers(0, 1 << 32, 100_003, dtype=np.uint32).view(np.float32)
    converted = convert(values)
    lib.rp_kv_use_isa(b"plain")
    np.testing.assert_array_equal(converted, convert(values))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("head_dim", [8, 12, 64])
def test_rows_land_in_their_slot_and_nowhere_else(head_dim: int) -> None:
    geometry = KVGeometry(layers=3, kv_heads=2, head_dim=head_dim, block_tokens=16)
    blocks, layer = 4, 1
    rng = np.random.default_rng(1)
    pool = np.full(blocks * geometry.block_bytes, 0xA5, np.uint8)
    # q, k and v side by side, as a fused projection leaves them.
    width = 2 * head_dim
    fused = rng.standard_normal((5, 3 * width)).astype(np.float32)
    k, v = fused[:, width : 2 * width], fused[:, 2 * width :]
    slots = [3 * 16 + 15, -1, 0, 16, 1]

    expected = pool.copy()
    view = expected.view(np.float16).reshape(blocks, 3, 2, 2, 16, head_dim)
    for row, slot in enumerate(slots):
        if slot >= 0:
            view[slot // 16, layer, 0, :, slot % 16] = k[row].reshape(2, head_dim)
            view[slot // 16, layer, 1, :, slot % 16] = v[row].reshape(2, head_dim)

    write(pool, geometry, layer=layer, slots=slots, rows=fused, k_start=width, v_start=2 * width)
    np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_copy_takes_the_first_tokens_of_every_run(tokens: int) -> None:
    geometry = KVGeometry(layers=2, kv_heads=3, head_dim=8)
    pool = np.random.default_rng(2).integers(0, 256, 3 * geometry.block_bytes, dtype=np.uint8)
    expected = pool.copy()
    runs = expected.reshape(3, 2 * 2 * 3, geometry.block_tokens, 16)
    runs[2, :, :tokens] = runs[0, :, :tokens]

    lib.rp_kv_copy_block(
        ffi.from_buffer("uint8_t[]", pool), geometry.block_bytes, geometry.row_bytes, 2 * 2 * 3, 0, 16, 8, 0, 2, tokens
    )
    np.testing.assert_array_equal(pool, expected)
