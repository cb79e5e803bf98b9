"""Reads a model's rotation from GGUF's `rope.*` keys and its frequency factors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hostcache.errors import BadModelFile

from .ggml import GGMLType
from .keys import Keys
from .rope import Rope, RopeScaling, yarn_attention

if TYPE_CHECKING:
    from .source import ModelSource

__all__ = ["FACTORS", "read_rope"]

FACTORS = "rope_freqs.weight"
"""The tensor that holds divisors of the frequencies, one for each pair."""

_MOST_POSITIONS = 2**31  # they are int32

# Variants of yarn that other families have; what stands here is what leaving the key out means.
_USUAL_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}


def read_rope(source: ModelSource, architecture: str, head_dim: int, context_length: int) -> Rope:
    """Read the rotation as llama.cpp would.

    Args:
        source: an open model.
        architecture: prefix of its keys.
        head_dim: elements of a head.
        context_length: positions the model was made for.

    Raises:
        BadModelFile: a value or the table of factors cannot be.
        UnsupportedModel: a scaling other than none, linear and yarn with its usual parameters.
    """
    keys = Keys(source.path, source.metadata)
    rope = _read_scaling(keys, f"{architecture}.rope", context_length, _read_factors(source, head_dim))
    with np.errstate(over="ignore", invalid="ignore"):
        largest_angles = rope.frequencies(head_dim) * _MOST_POSITIONS
    if not np.isfinite(largest_angles).all() or rope.attention > float(np.finfo(np.float32).max):
        keys.contradict(f"{architecture}.rope.freq_base", rope.theta, f"its angles overflow ({rope})")
    return rope


def _read_scaling(keys: Keys, prefix: str, context_length: int, factors: tuple[float, ...]) -> Rope:
    theta = keys.number(f"{prefix}.freq_base", 10000.0)
    # Older files give a factor without a type, or under an older name: both are linear. Zero stands for none.
    factor = keys.number(f"{prefix}.scaling.factor", 0.0) or keys.number(f"{prefix}.scale_linear", 0.0) or 1.0
    name = keys.text(f"{prefix}.scaling.type", "linear" if factor != 1 else "none")
    known = [kind.value for kind in RopeScaling]
    if name not in known:
        keys.refuse(f"RoPE scaling of type '{name}'", f"rockpage runs {', '.join(known)}, and frequency factors")
    scaling = RopeScaling(name)
    trained = Rope(theta, attention=keys.number(f"{prefix}.scaling.attn_factor", 1.0), factors=factors)
    if scaling is RopeScaling.NONE:
        return trained
    if scaling is RopeScaling.LINEAR:
        return replace(trained, scaling=scaling, factor=factor)
    if theta <= 1:
        keys.contradict(f"{prefix}.freq_base", theta, "yarn takes its logarithm")
    for key, usual in _USUAL_YARN.items():
        if (value := keys.number(f"{prefix}.scaling.{key}", usual)) != usual:
            keys.refuse(f"RoPE scaling with {key} {value}", f"rockpage runs yarn with {usual}")
    return replace(
        trained,
        scaling=scaling,
        factor=factor,
        original_context=keys.integer(f"{prefix}.scaling.original_context_length", context_length),
        attention=trained.attention * yarn_attention(factor),
        beta_fast=keys.number(f"{prefix}.scaling.yarn_beta_fast", trained.beta_fast),
        beta_slow=keys.number(f"{prefix}.scaling.yarn_beta_slow", trained.beta_slow),
    )


def _read_factors(source: ModelSource, head_dim: int) -> tuple[float, ...]:
    info = source.tensors.get(FACTORS)
    if info is None:
        return ()
    path = str(source.path)
    factors = source.data(FACTORS).view("<f4") if info.type is GGMLType.F32 else np.zeros(0, np.float32)
    if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise BadModelFile(
            f"{path}: tensor '{FACTORS}' is {list(info.shape)} {info.type.name}; {head_dim // 2} positive numbers in"
            " F32 are called for: fetch the file again",
            path=path,
            tensor=FACTORS,
            shape=info.shape,
        )
    return tuple(factors.tolist())
