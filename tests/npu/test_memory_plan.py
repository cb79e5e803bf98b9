"""The plan's arithmetic, against values computed by hand for the reference 1.1B model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostcache.codec import INT4, INT8
from hostcache.geometry import KVGeometry
from npu.memory_plan import MemoryPlan, resident_weights, runtime_bytes, step_bytes
from npu.weights import Activations, Form, PackedMatrix, WeightsPlan

MIB = 2**20
REFERENCE = KVGeometry(layers=24, kv_heads=2, head_dim=128)


def plan(
    *, ram: int = 4096 * MIB, pool: int = 192 * MIB, context: int | None = None, limit: int | None = None
) -> MemoryPlan:
    return MemoryPlan(
        geometry=REFERENCE,
        ram_bytes=ram,
        reserve_bytes=500 * MIB,
        weights_bytes=1000 * MIB,
        staging_bytes=16 * MIB,
        device_bytes=8 * MIB,
        runtime_bytes=84 * MIB,
        pool_asked=pool,
        context=context,
        context_limit=limit,
    )


def test_the_reference_pool_is_512_blocks_of_384_kib() -> None:
    assert REFERENCE.bytes_per_token == 24 * 1024
    assert REFERENCE.block_bytes == 384 * 1024
    assert plan().pool_blocks == 512
    assert plan().pool_bytes == 192 * MIB


def test_constants_of_int4_are_counted_where_it_is_used() -> None:
    """Of each of 24 layers and 2 heads: 128 offsets and three matrices of 128 x 128, 4 bytes each: 9.02 MiB."""
    exact, int4 = plan(), replace(plan(), codec=INT4)
    assert exact.constants_bytes == replace(plan(), codec=INT8).constants_bytes == 0
    assert int4.constants_bytes == 24 * 2 * (128 + 3 * 128 * 128) * 4
    assert int4.process_bytes - int4.pool_bytes == exact.process_bytes - exact.pool_bytes + int4.constants_bytes


def test_256_short_sessions_fit_where_preallocation_holds_4() -> None:
    assert plan().sessions(32) == 256
    assert plan().preallocated_sessions(32) == 4


@pytest.mark.parametrize(
    ("tokens", "paged", "preallocated"),
    # 512 blocks over ceil(tokens / 16); 192 MiB over 48 MiB, which is 2048 tokens.
    [(1, 512, 4), (16, 512, 4), (17, 256, 4), (128, 64, 4), (512, 16, 4), (2048, 4, 4), (4096, 2, 2), (8193, 0, 0)],
)
def test_sessions_by_length(tokens: int, paged: int, preallocated: int) -> None:
    assert plan().sessions(tokens) == paged
    assert plan().preallocated_sessions(tokens) == preallocated


def test_a_pool_takes_whole_blocks_of_what_it_was_given() -> None:
    almost_two = plan(pool=2 * 384 * 1024 - 1)
    assert almost_two.pool_blocks == 1
    assert almost_two.pool_bytes == 384 * 1024


def test_the_sum_decides() -> None:
    exact = plan(ram=(500 + 1000 + 24 + 84 + 192) * MIB)
    assert exact.process_bytes == 1300 * MIB
    assert exact.needed_bytes == 1800 * MIB
    assert exact.fits
    assert exact.pool_limit_bytes == exact.pool_bytes
    short = plan(ram=1800 * MIB - 1)
    assert not short.fits
    # One byte is short, so the largest pool is one block smaller: 511 * 384 KiB = 191.6 MiB.
    assert short.pool_limit_bytes == 511 * 384 * 1024
    assert short.obstacles() == ["1.76 GiB are needed and 1.76 GiB are there: a pool of 191.6 MiB would fit"]


def test_no_pool_fits_beside_weights_that_are_too_large() -> None:
    tiny = plan(ram=1000 * MIB)
    assert tiny.pool_limit_bytes == 0
    assert tiny.obstacles() == ["1.76 GiB are needed and 1000.0 MiB are there: no pool would fit"]


def test_a_pool_below_one_block_is_an_obstacle() -> None:
    (obstacle,) = plan(pool=384 * 1024 - 1, context=16).obstacles()
    assert "holds no block" in obstacle


def test_a_context_must_fit_into_the_pool() -> None:
    assert plan(context=8192).fits
    (obstacle,) = plan(context=8193).obstacles()
    assert obstacle == (
        "a context of 8193 tokens takes 513 blocks and the pool has 512: ask for 192.4 MiB or a shorter context"
    )


def test_a_context_must_fit_the_model() -> None:
    assert plan(context=2048, limit=2048).fits
    (obstacle,) = plan(context=2049, limit=2048).obstacles()
    assert obstacle == "a context of 2049 tokens is beyond the 2048 of the model"


def test_every_obstacle_is_named() -> None:
    assert len(plan(ram=1000 * MIB, context=8193, limit=2048).obstacles()) == 3


def matrix(form: Form, rows: int, columns: int, block: int = 32) -> PackedMatrix:
    return PackedMatrix(form=form, block=block, sources=("x",), source_rows=(rows,), columns=columns, arrays={})


def test_weights_count_as_their_kernels_keep_them() -> None:
    def resident(form: Form, activations: Activations, block: int = 32) -> int:
        return resident_weights(WeightsPlan({("x",): (matrix(form, 10, 64, block),)}, nbytes=0), activations)

    # 640 weights are 20 blocks. 4 bits of 32 weights are 16 bytes; scales, sums and offsets are float32.
    assert resident(Form.Q4, "int8") == 20 * 24
    assert resident(Form.Q4, "fp32") == 20 * 20
    assert resident(Form.Q4_OFFSET, "int8") == 20 * 28
    assert resident(Form.Q4_OFFSET, "fp32") == 20 * 24
    assert resident(Form.Q8, "int8") == 20 * 40
    assert resident(Form.Q8_OFFSET, "int8") == 20 * 44
    assert resident(Form.Q8_HALVES, "fp32") == 20 * 44
    assert resident(Form.Q8, "int8", block=16) == 40 * (16 + 8)  # half the weights, and as many numbers beside them
    assert resident(Form.DENSE, "int8", 1) == resident(Form.DENSE, "fp32", 1) == 640 * 4


def test_every_matrix_counts() -> None:
    q, k, v = matrix(Form.Q4, 64, 32), matrix(Form.Q4, 32, 32), matrix(Form.DENSE, 32, 32, block=1)
    plan = WeightsPlan({("q", "k", "v"): (q, k), ("v",): (v,)}, nbytes=0)
    assert resident_weights(plan, "fp32") == (64 + 32) * 20 + 32 * 128


def test_the_runtime_grows_with_layers_and_vocabulary() -> None:
    base = runtime_bytes(0, 0)
    assert 50 * MIB < base < 100 * MIB
    assert runtime_bytes(24, 0) - base == 24 * 340 * 1024
    assert runtime_bytes(0, 1000) - base == 530_000


@pytest.mark.parametrize(
    ("hidden", "ffn", "measured"),
    # What processes grew by from one row to 256, with ONNX Runtime 1.32; SmolLM2-135M, Qwen2.5-0.5B, and 1.1B.
    [(576, 1536, 18.6), (896, 4864, 49.3), (1536, 8064, 77.6)],
)
def test_a_full_step_takes_what_was_measured(hidden: int, ffn: int, measured: float) -> None:
    assert step_bytes(hidden, ffn, 256) / MIB == pytest.approx(measured, rel=0.05)
    assert step_bytes(hidden, ffn, 512) == 2 * step_bytes(hidden, ffn, 256)
