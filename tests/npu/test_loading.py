"""What an engine is made of: loaded by typed options, and given back whole."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hostcache.cache import PagedKVCache
from hostcache.errors import UsageError
from hostcache.scheduler_config import SchedulerConfig
from hostcache.swap import SwapSpace
from npu.cpu import CpuAttention
from npu.engine import Engine
from npu.loading import LoadOptions, load_parts
from npu.tiled_decoder import TiledDecoder
from tests.npu.tiny import TinyLlama, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("loading") / "tiny.gguf", TinyLlama(tied_head=False))


def test_options_are_typed_as_what_they_are_passed_to() -> None:
    """A type checker sees to one half: that no option is wrong. The other half is that none is missing."""
    _, *options = inspect.signature(load_parts).parameters.values()
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    typed = {name: hint.__forward_arg__ for name, hint in LoadOptions.__annotations__.items()}
    assert typed == {option.name: option.annotation for option in options}


def test_an_option_that_does_not_exist_is_no_option(model: Path) -> None:
    with pytest.raises(TypeError, match="pool_byte"):
        Engine.load(model, pool_byte=1 << 20)  # type: ignore[call-arg] # what is tested


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was closed, in order."""
    names: list[str] = []

    def record(part: type[Any]) -> None:
        close = part.close

        def recorded(self: object) -> None:
            names.append(part.__name__)
            close(self)

        monkeypatch.setattr(part, "close", recorded)

    for part in (CpuAttention, PagedKVCache, SwapSpace, TiledDecoder):
        record(part)
    return names


def test_a_load_that_fails_at_its_last_part_gives_back_the_others(model: Path, closed: list[str]) -> None:
    with pytest.raises(UsageError, match="no runtime is called 'gpu'"):
        load_parts(model, runtime="gpu", pool_bytes=1 << 20, swap_bytes=1 << 20, cache_dir=model.parent)
    assert closed == ["SwapSpace", "PagedKVCache", "TiledDecoder"]


def test_an_engine_that_cannot_be_made_of_its_parts_gives_all_back(model: Path, closed: list[str]) -> None:
    (model.parent / "file").write_text("")
    with pytest.raises(UsageError, match="prefixes cannot be kept in"):
        Engine.load(
            model,
            runtime="cpu",
            pool_bytes=1 << 20,
            swap_bytes=1 << 20,
            cache_dir=model.parent,
            prefix_folder=model.parent / "file",
        )
    assert sorted(closed) == ["CpuAttention", "PagedKVCache", "SwapSpace", "TiledDecoder"]
    assert closed[-1] == "PagedKVCache"  # the others hold on to it


def test_the_queue_is_as_the_options_say(model: Path) -> None:
    """Others stay as the scheduler has them by itself."""
    options: LoadOptions = {
        "max_waiting": 3,
        "ageing_seconds": 7.5,
        "client_weights": {"alarms": 4.0},
        "max_preemptions": 0,
    }
    usual: LoadOptions = {"pool_bytes": 1 << 20, "cache_dir": model.parent}
    asked = usual.copy()
    asked.update(options)
    with Engine.load(model, **asked) as engine:
        config = engine.scheduler.config
        assert {name: getattr(config, name) for name in options} == options
    with Engine.load(model, **usual) as engine:
        assert engine.scheduler.config == SchedulerConfig(config.context_length)
    with pytest.raises(UsageError, match="max_waiting must be at least 1, got 0"):
        Engine.load(model, max_waiting=0)
