"""What outlives an engine: conversations that are saved, and pinned prefixes that come back from disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.codec import FP16
from hostcache.errors import BadStateFile, RequestRefused, UsageError
from npu.engine import Engine
from npu.sampler import SamplingParams
from tests.npu.tiny import TinyLlama, write_tiny_llama

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
TEXT = "a long way over the hill in the rain and back again before the night"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("sessions") / "tiny.gguf", TinyLlama(tied_head=False))


def started(model: Path, folder: Path | None = None, pool_bytes: int = 1 << 20) -> Engine:
    return Engine.load(model, pool_bytes=pool_bytes, cache_dir=model.parent, prefix_folder=folder)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with started(model) as engine:
        yield engine


def answer(engine: Engine, tokens: NDArray[np.int32], **options: str) -> list[int]:
    request = engine.add_request(tokens, EIGHT, **options)  # type: ignore[arg-type] # salt and prompt_version
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return [token for output in outputs if output.request_id == request for token in output.token_ids]


def talked(engine: Engine) -> NDArray[np.int32]:
    """A conversation that an engine has had: a prompt and its answer."""
    prompt = engine.tokenizer.encode(TEXT)
    return np.append(prompt, np.array(answer(engine, prompt), np.int32))


def test_a_session_goes_on_in_another_engine_as_it_would_have_in_this(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    """The same tokens come, from KV that was computed before: only the last token and what is new are computed."""
    tokens = talked(engine)
    assert engine.sessions.save(tmp_path / "talk", tokens, note=b"beside") == len(tokens) - 1
    more = np.append(tokens, engine.tokenizer.encode(" and then", bos=False))
    expected = answer(engine, more)
    with started(model) as other:
        session = other.sessions.load(tmp_path / "talk")
        assert np.array_equal(session.tokens, tokens)
        assert (session.note, session.restored) == (b"beside", len(tokens) - 1)
        assert answer(other, more) == expected
        assert other.scheduler.stats.hit_tokens == len(tokens) - 1
        assert other.scheduler.stats.computed_tokens == len(more) - len(tokens) + 1 + 7
    with started(model) as fresh:
        assert answer(fresh, more) == expected
        assert fresh.scheduler.stats.hit_tokens == 0


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_sessions_and_kept_prompts_of_a_lean_codec_come_back_in_it(model: Path, tmp_path: Path, kv: str) -> None:
    def lean() -> Engine:
        return Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, prefix_folder=tmp_path / "kept", kv=kv)

    with lean() as engine:
        tokens = talked(engine)
        whole = len(tokens) // 16 * 16
        assert engine.sessions.save(tmp_path / "talk", tokens) == len(tokens) - 1
        assert engine.sessions.save(tmp_path / "rich", tokens, kv="fp16") == 0  # nothing was computed in that
        assert engine.sessions.keep(tokens) == whole
        more = np.append(tokens, engine.tokenizer.encode(" and then", bos=False))
        expected = answer(engine, more)
    with lean() as other:
        with pytest.raises(UsageError, match=f"was saved with codec '{kv}', not 'fp16'"):
            other.sessions.load(tmp_path / "talk", kv="fp16")
        assert other.sessions.load(tmp_path / "talk").restored == len(tokens) - 1
        assert answer(other, more) == expected
    with lean() as other:  # from the folder
        assert answer(other, more) == expected
        assert other.scheduler.stats.hit_tokens == whole


def test_a_session_that_was_evicted_keeps_its_tokens(model: Path, tmp_path: Path) -> None:
    with started(model) as engine:
        tokens = talked(engine)
        engine.prefix.invalidate()
        assert engine.sessions.save(tmp_path / "talk", tokens) == 0
    with started(model) as other:
        session = other.sessions.load(tmp_path / "talk")
        assert (len(session.tokens), session.restored) == (len(tokens), 0)


def test_a_session_of_other_options_or_another_tenant_is_refused_and_kept(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "talk"
    engine.sessions.save(path, talked(engine), salt="mine")
    for salt, why in (("", "another salt"), ("yours", "another salt")):
        with pytest.raises(UsageError, match=why):
            engine.sessions.load(path, salt=salt)
    with (
        Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent, activations="fp32") as other,
        pytest.raises(UsageError, match="another model, or other options, versions or hardware"),
    ):
        other.sessions.load(path, salt="mine")
    engine.sessions.load(path, salt="mine")
    assert os.listdir(tmp_path) == ["talk"]


def test_a_damaged_session_is_refused_and_the_engine_goes_on(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    tokens = talked(engine)
    engine.sessions.save(path, tokens)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    engine.prefix.invalidate()
    with pytest.raises(BadStateFile, match=r"damaged; it was set aside as talk\.bad"):
        engine.sessions.load(path)
    assert os.listdir(tmp_path) == ["talk.bad"]
    assert engine.prefix.of(FP16).resident == 0
    assert len(answer(engine, tokens)) == 8


def test_sessions_are_not_touched_within_a_step_or_after_the_end(engine: Engine, tmp_path: Path) -> None:
    tokens = talked(engine)
    with engine._guard.step():
        for call in (
            lambda: engine.sessions.save(tmp_path / "talk", tokens),
            lambda: engine.sessions.load(tmp_path / "talk"),
        ):
            with pytest.raises(UsageError, match="a step is under way already"):
                call()
    engine.close()
    with pytest.raises(UsageError, match="this engine is closed"):
        engine.sessions.save(tmp_path / "talk", tokens)
    assert os.listdir(tmp_path) == []


def test_ids_outside_the_vocabulary_are_not_saved(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="token id 100000 is outside"):
        engine.sessions.save(tmp_path / "talk", [100_000])
    with pytest.raises(RequestRefused, match="is text or a list of token ids"):
        engine.sessions.save(tmp_path / "talk", ["a", "b"])
    assert os.listdir(tmp_path) == []


def test_a_pinned_prompt_comes_back_from_disk_after_a_restart(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path) as engine:
        prompt = engine.tokenizer.encode(TEXT)
        whole = len(prompt) // 16 * 16
        assert engine.sessions.pin(TEXT, "console", 3600) == whole > 16
        assert engine.scheduler.stats.computed_tokens == len(prompt)
        assert engine.prefix.pinned == whole // 16
        asked = np.append(prompt[:whole], engine.tokenizer.encode(" what now?", bos=False))
        expected = answer(engine, asked)
        assert engine.sessions.pin(TEXT, "console", 3600) == whole
        assert engine.cache.pool.used == whole // 16
    assert len(os.listdir(tmp_path)) == 1
    with started(model, tmp_path) as again:
        assert answer(again, asked) == expected
        assert again.scheduler.stats.hit_tokens == whole
        assert again.scheduler.stats.computed_tokens == len(asked) - whole + 7
    with started(model, tmp_path) as third:
        assert third.sessions.pin(TEXT, "console", 3600) == whole
        assert third.scheduler.stats.computed_tokens == 0
        assert third.prefix.unpin("console") == 1


def test_a_prompt_is_pinned_without_a_folder_and_for_one_tenant(engine: Engine) -> None:
    whole = engine.sessions.pin(TEXT, "console", 3600, salt="mine", prompt_version="1")
    prompt = engine.tokenizer.encode(TEXT)
    assert engine.prefix.of(FP16).known_tokens(engine.namespace("mine", "1"), prompt) == whole
    assert engine.prefix.of(FP16).known_tokens(engine.namespace("", "1"), prompt) == 0
    assert engine.prefix.invalidate(prompt_version="1") > 0
    assert engine.prefix.pinned == 0


def test_a_damaged_folder_costs_a_computation_and_nothing_else(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(model, tmp_path) as engine:
        whole = engine.sessions.pin(TEXT, "console", 3600)
    (name,) = os.listdir(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[-40] ^= 1
    (tmp_path / name).write_bytes(data)
    with started(model, tmp_path) as again:
        assert again.sessions.pin(TEXT, "console", 3600) == whole
        assert again.scheduler.stats.computed_tokens > whole
    assert "a kept prefix is computed again" in caplog.text
    assert sorted(os.listdir(tmp_path)) == [name, name + ".bad"]


def test_a_folder_that_cannot_be_used_leaves_nothing_open(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(UsageError, match="prefixes cannot be kept in"):
            started(model, tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_prompt_is_kept_without_a_pin_for_those_with_its_salt(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path) as engine:
        prompt = engine.tokenizer.encode(TEXT)
        whole = len(prompt) // 16 * 16
        assert engine.sessions.keep(prompt, salt="tenant") == 0  # nothing is known of it
        answer(engine, prompt, salt="tenant")
        assert engine.sessions.keep(prompt) == 0
        assert engine.sessions.keep(prompt, salt="tenant") == whole > 0
        assert engine.prefix.pinned == 0
    with started(model, tmp_path) as again:
        answer(again, prompt)
        assert again.scheduler.stats.hit_tokens == 0
        answer(again, prompt, salt="tenant")
        assert again.scheduler.stats.hit_tokens == min(whole, len(prompt) - 1)
    with started(model) as engine:  # no folder
        answer(engine, prompt)
        assert engine.sessions.keep(prompt) == 0
