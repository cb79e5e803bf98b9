"""Who names no codec gets fp16 where what is planned fits, int8 where it does not, and int4 never."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache import KVGeometry
from hostcache.errors import UsageError
from npu.engine import Engine
from npu.kv_choice import KvChoice, choose_kv
from npu.loading import LoadOptions
from tests.npu.tiny import TinyLlama, write_tiny_llama

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=64)
POOL = 8448
"""Two extents of 4224 bytes, which hold two blocks of int8 each: 16 tokens of 64 bytes and a scale of 2, K and V. Of
fp16, whose blocks have 4096 bytes, it holds two as well."""


def choose(context: int | None, sessions: int = 1, asked: str | None = None) -> KvChoice:
    return choose_kv(asked, GEOMETRY, POOL, context=context, sessions=sessions)


@pytest.mark.parametrize(
    ("context", "sessions", "codec", "reason"),
    [
        (None, 99, "fp16", "no length is planned"),
        (32, 1, "fp16", "room for a session of 32 tokens"),
        (16, 2, "fp16", "room for 2 sessions of 16 tokens"),
        (33, 1, "int8", "for in fp16 the pool holds 32 tokens, too few for a session of 33 tokens"),
        (64, 1, "int8", "for in fp16 the pool holds 32 tokens, too few for a session of 64 tokens"),
        (32, 2, "int8", "for in fp16 the pool holds 32 tokens, too few for 2 sessions of 32 tokens"),
        (
            65,
            1,
            "int8",
            "for in fp16 the pool holds 32 tokens, too few for a session of 65 tokens; so are its 64 in int8",
        ),
        (
            16,
            5,
            "int8",
            "for in fp16 the pool holds 32 tokens, too few for 5 sessions of 16 tokens; so are its 64 in int8",
        ),
    ],
)
def test_the_richer_of_two_in_which_all_fit(context: int | None, sessions: int, codec: str, reason: str) -> None:
    choice = choose(context, sessions)
    assert (choice.codec.name, choice.reason) == (codec, reason)
    assert choice.reduced == (codec != "fp16")


@pytest.mark.parametrize("asked", ["fp16", "int8", "int4"])
def test_what_is_asked_for_is_taken(asked: str) -> None:
    choice = choose(65, asked=asked)
    assert (choice.codec.name, choice.reason, choice.reduced) == (asked, "as asked for", False)


def test_no_other_codec_is_known() -> None:
    with pytest.raises(UsageError, match="int3"):
        choose(None, asked="int3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("choice") / "tiny.gguf", TinyLlama(context_length=400))


@pytest.mark.parametrize(
    ("options", "kv"),
    [
        ({}, "fp16"),
        ({"context_length": 192}, "fp16"),
        ({"context_length": 193}, "int8"),
        ({"context_length": 96, "planned_sessions": 3}, "int8"),
        ({"context_length": 193, "kv": "fp16"}, "fp16"),
    ],
)
def test_an_engine_is_opened_for_what_its_context_needs(model: Path, options: LoadOptions, kv: str) -> None:
    """A pool of 12 blocks of fp16, for 192 tokens; without a context, as much as fits is good enough."""
    pool = 12 * KVGeometry(layers=2, kv_heads=2, head_dim=16).block_bytes
    usual: LoadOptions = {"pool_bytes": pool, "cache_dir": model.parent}
    usual.update(options)
    with Engine.load(model, **usual) as engine:
        assert engine.kv_choice is not None
        assert engine.kv_choice.codec is engine.codec() is engine.cache.leanest
        assert engine.codec().name == kv


def test_less_than_a_session_is_not_planned(model: Path) -> None:
    with pytest.raises(UsageError, match="planned_sessions must be 1 or more, got 0"):
        Engine.load(model, planned_sessions=0)
