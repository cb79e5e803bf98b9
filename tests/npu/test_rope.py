"""Rotary frequencies against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
from numpy.testing import assert_allclose

from npu.rope import Rope, RopeScaling, llama3_factors, yarn_attention


def test_plain_frequencies() -> None:
    # theta ** (-2i / d): 1, then a quarter, a half and three quarters of the way down to 1 / theta.
    assert_allclose(Rope(10000.0).frequencies(8), [1, 0.1, 0.01, 0.001], rtol=1e-15)


def test_linear_scaling_slows_every_pair_alike() -> None:
    rope = Rope(10000.0, RopeScaling.LINEAR, 4.0)
    assert_allclose(rope.frequencies(8), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-15)


def test_factors_divide_each_its_own_pair() -> None:
    rope = Rope(10000.0, factors=(1.0, 2.0, 4.0, 8.0))
    assert_allclose(rope.frequencies(8), [1, 0.05, 0.0025, 0.000125], rtol=1e-15)


def test_llama_3_keeps_fast_pairs_slows_slow_ones_and_mixes_in_between() -> None:
    factors = llama3_factors(10000.0, 8, factor=8.0, low=1.0, high=4.0, original_context=1257)
    # 1257 positions are 200, 20, 2.0006 and 0.2 turns. A third of the third pair's way from 1 to 4 turns is done, so
    # its frequency is 0.3335 + 0.6665 / 8 = 0.41684 of what it was.
    assert_allclose(factors, [1, 1, 1 / 0.41684, 8], rtol=1e-4)


def test_yarn_ramps_from_pairs_that_turn_often_to_those_that_turn_rarely() -> None:
    # Pair i turns 630000 / 2 pi * 10 ** -i = 100268 * 10 ** -i times: 10000 times at i = 1.001, rounded down to 1, and
    # 120 times at i = 2.92, rounded up to 3. So 2 is half way.
    rope = Rope(10000.0, RopeScaling.YARN, 4.0, original_context=630000, beta_fast=10000.0, beta_slow=120.0)
    assert_allclose(rope.frequencies(8), [1, 0.1, (0.01 + 0.0025) / 2, 0.00025], rtol=1e-14)


def test_yarn_makes_attention_sharper_by_a_tenth_for_each_factor_of_e() -> None:
    assert_allclose([yarn_attention(math.e), yarn_attention(math.e**2), yarn_attention(math.e, 2.0)], [1.1, 1.2, 1.2])


def test_angles_stay_exact_at_the_end_of_long_contexts() -> None:
    """Float32 frequencies would be off by 131071 * 6e-8 / 2 radians here."""
    (_, second, *_) = Rope(500000.0).frequencies(64)
    assert_allclose(131071 * second, 131071 * math.exp(-math.log(500000) / 32), rtol=0, atol=1e-9)


def test_extreme_ramps_do_not_overflow() -> None:
    for beta in (5e-324, 1.7e308):
        rope = Rope(10000.0, RopeScaling.YARN, 4.0, original_context=64, beta_fast=beta, beta_slow=beta)
        assert np.isfinite(rope.frequencies(64)).all()


def test_yarn_attention_is_one_where_nothing_is_stretched() -> None:
    assert yarn_attention(1.0) == yarn_attention(0.5) == 1.0


def test_the_identity_tells_rotations_apart() -> None:
    plain = Rope(10000.0)
    others = [
        Rope(10001.0),
        Rope(10000.0, RopeScaling.LINEAR, 2.0),
        Rope(10000.0, RopeScaling.YARN, 2.0, original_context=4096),
        Rope(10000.0, factors=(1.0,) * 31 + (2.0,)),
        Rope(10000.0, attention=1.1),
    ]
    assert len({rope.identity(64) for rope in (plain, *others)}) == 6
    # The same angles by another way are the same rotation.
    assert Rope(10000.0, RopeScaling.LINEAR, 1.0).identity(64) == plain.identity(64)
