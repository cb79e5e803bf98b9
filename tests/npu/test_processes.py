"""What other processes, and other engines in this one, may and may not share."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.weights_cache import make_private
from tests.npu.tiny import TinyLlama, write_tiny_llama

ROOT = Path(__file__).parents[2]
MODELS = (TinyLlama(), TinyLlama(layers=3, heads=6, kv_heads=3, hidden=96, tied_head=False, seed=5))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("processes")
    return [write_tiny_llama(folder / f"{index}.gguf", model) for index, model in enumerate(MODELS)]


@pytest.mark.parametrize("runtime", ["cpu", "emulated"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(models: list[Path], runtime: str) -> None:
    command = [sys.executable, "-m", "tests.npu.fork_probe", str(models[0]), runtime]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    child, parent = report["child"], report["parent"]
    assert len(report["errors"]) == 2
    for message, values in report["errors"]:
        assert f"process {child} was forked from process {parent} after the engine had started, and" in message
        assert values == {"process": child, "opened_in": parent}
    assert report["sees_kv"] == 0  # nobody's conversation is in the child
    assert report["status"] == 7  # it closed the engine and left in the ordinary way
    assert report["text"] == report["alone"]


def test_nothing_of_a_prompt_reaches_a_file_and_the_cache_is_its_users_own(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "the boiler's code is 4711"
    cache, temporary = tmp_path / "home" / ".cache" / "rockpage", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = os.umask(0o022)
    try:
        with Engine.load(models[0], runtime="emulated", pool_bytes=1 << 20, cache_dir=cache) as engine:
            ids = engine.tokenizer.encode(secret)
            assert list(engine.generate(secret, SamplingParams(max_tokens=4, ignore_eos=True)))
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"weights.bin", "lock"}
    for path in files:
        content = path.read_bytes()
        assert secret.encode() not in content
        assert ids.tobytes() not in content
    folders = [path for path in (cache, *cache.rglob("*"), cache.parent, cache.parent.parent) if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_a_shared_cache_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private(tmp_path / "shared" / "weights" / "of a model")
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("shared", "shared/weights")]
    assert modes == [0o755, 0o700]


def test_two_engines_in_a_process_share_nothing(models: list[Path]) -> None:
    """Different models, runtimes and prompts, a step each in turn; then one is closed in the middle of the other."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    prompts = (list(range(10, 50)), list(range(30, 110)))
    runtimes = ("cpu", "emulated")

    def load(index: int) -> Engine:
        return Engine.load(models[index], runtime=runtimes[index], pool_bytes=1 << 20, cache_dir=models[index].parent)

    alone = []
    for index, prompt in enumerate(prompts):
        with load(index) as engine:
            alone.append("".join(engine.generate(prompt, params)))

    with load(0) as first, load(1) as second:
        engines = (first, second)
        texts = ["", ""]
        for engine, prompt in zip(engines, prompts, strict=True):
            engine.add_request(prompt, params)
        while not (first.idle and second.idle):
            for index, engine in enumerate(engines):
                texts[index] += "".join(output.text for output in engine.step())
        assert texts == alone

        assert first.cache.pool is not second.cache.pool
        used = first.cache.pool.used
        first.add_request(prompts[0], params)
        stream = second.generate(prompts[1], params)
        text = next(stream)
        assert first.cache.pool.used == used == 0  # the other's step did not touch it
        first.step()
        first.close()
        assert text + "".join(stream) == alone[1]
