"""`rockpage bench e2e` and `prefix`: both sides compute the same tokens, and a peer that is missing is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hostcache.errors import DeviceError, MissingExtra
from npu.sampler import SamplingParams
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools import bench_memory
from tools.bench_e2e_run import Decoding, open_sides, prefill_works, random_prompts
from tools.bench_prefix_run import our_answers, peer_answers
from tools.llama_peer import NO_PEER, LlamaCpp

from .command_line import assert_refused, run_here
from .fake_llama import FakeLlama

MODEL = TinyLlama(context_length=2048)
"""272 tokens: the ids that are drawn, 16 to 255, are among them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf", MODEL)


@pytest.fixture(autouse=True)
def cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    return fake


@pytest.fixture
def no_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


def test_the_peer_decodes_what_ours_chose(model: Path, llama: FakeLlama) -> None:
    """Steps may be taken in any order in which the peer is never two ahead."""
    with open_sides(model, threads=1) as sides:
        race = Decoding(sides, sequences=2, steps=4)
        ours, theirs = race.works
        llama.calls.clear()
        for work in (ours, theirs, theirs, ours, ours, theirs):
            assert work() > 0
        assert [[sequence for sequence, _, _ in call] for call in llama.calls] == [[0, 1]] * 3
        answers = list(race.answers.values())
        for number in range(2):
            given = [
                (position, token) for call in llama.calls for sequence, position, token in call if sequence == number
            ]
            # 128 tokens of the prompt were computed, and the first of the answer is the first to be given.
            assert given == list(zip(range(128, 131), answers[number], strict=False))
        assert len(race.agreed) == 4  # of six: at its second step the peer was ahead of ours
        race.end()
        assert sides.ours.idle
    assert llama.closed == ["batch", "context", "model"]


def test_both_prefill_the_same_prompts_and_none_twice(
    model: Path, llama: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sides(model, threads=1) as sides:
        seen: list[list[int]] = []
        add = sides.ours.add_request

        def watched(prompt: list[int], params: SamplingParams) -> int:
            seen.append(prompt)
            return add(prompt, params)

        monkeypatch.setattr(sides.ours, "add_request", watched)
        works = prefill_works(sides)
        for work in works * 2:
            work()
        assert sides.ours.idle
    assert [[token for _, _, token in call] for call in llama.calls] == seen
    assert [len(prompt) for prompt in seen] == [256, 256]
    assert seen[0][:16] != seen[1][:16]
    assert seen[0][:16] != random_prompts(1, 128)[0][:16]  # nor do those that decode begin so


def test_answers_behind_a_shared_prompt(model: Path, llama: FakeLlama) -> None:
    (shared,), own = random_prompts(1, 256), random_prompts(3, 16)
    with open_sides(model, threads=1) as sides:
        answers = our_answers(sides.ours, shared, own, salt="a")
        assert answers == [our_answers(sides.ours, shared, [tail], salt="b")[0] for tail in own]
        assert [len(answer) for answer in answers] == [32] * 3
        assert sides.theirs is not None
        # The token behind n is n modulo 256: behind 272 of prompt, 16 and those that follow it.
        assert peer_answers(sides.theirs, shared, own) == [list(range(16, 48))] * 3
    assert [len(call) for call in llama.calls] == [256, 48, *[3] * 31]


def test_all_cases_are_rows(
    model: Path, llama: FakeLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    footprints = {"ours": {"resident": 90, "private": 60}, "theirs": {"resident": 100, "private": 50}}
    monkeypatch.setattr(bench_memory, "_probe", lambda side, *_: footprints[side])
    outcome = run_here(capsys, "bench", "e2e", str(model), "--also", str(model), "--times", "2", "--json")
    rows = json.loads(outcome.out)["rows"]
    assert [(row["case"], row["target"], row["stretch"], row["better"]) for row in rows] == [
        ("decode, 1 sequence", 1.2, 1.5, "higher"),
        ("decode, 8 sequences", 1.7, 2.5, "higher"),
        ("prefill of 256 tokens", 1.6, 3.0, "higher"),
        ("decode, 1 sequence, tiny.gguf", None, None, "higher"),
        ("decode, 8 sequences, tiny.gguf", None, None, "higher"),
        ("prefill of 256 tokens, tiny.gguf", None, None, "higher"),
        ("resident memory, 8 sequences, context of 4096", 1.15, 1.0, "lower"),
        ("private memory, 8 sequences, context of 4096", 1.15, 1.0, "lower"),
    ]
    assert [row["ratio"] for row in rows[-2:]] == [0.9, 1.2]
    assert outcome.status == 1  # 1.2 is above 1.15


def test_the_memory_of_our_process_is_measured_there(model: Path) -> None:
    """It holds a pool of 4096 tokens of 2 layers, 2 heads and 16 elements: 1 MiB, and an interpreter."""
    footprint = bench_memory._probe("ours", model, 1)
    assert footprint is not None
    assert 10 << 20 < footprint["private"] < footprint["resident"] < 400 << 20


def test_a_process_that_fails_is_no_missing_peer(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is None; all else is an error that says whose it is, with the last words of it."""
    with pytest.raises(DeviceError, match=r"ended with 1, ours: .*no\.gguf"):
        bench_memory._probe("ours", tmp_path / "no.gguf", 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = tmp_path / "llama_cpp.py"
    peer.write_text("raise RuntimeError('a broken build')")
    with pytest.raises(DeviceError, match="ended with 1, theirs: RuntimeError: a broken build"):
        bench_memory._probe("theirs", model, 1)
    peer.write_text("raise ModuleNotFoundError('llama_cpp')")
    assert bench_memory._probe("theirs", model, 1) is None


@pytest.mark.usefixtures("no_llama")
def test_a_missing_peer_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"resident": 90, "private": 60}
    monkeypatch.setattr(bench_memory, "_probe", lambda side, *_: ours if side == "ours" else None)
    for kind, times in (("e2e", "2"), ("prefix", "1")):
        answer = json.loads(run_here(capsys, "bench", kind, str(model), "--times", times, "--json").out)
        assert answer["rows"][0]["peer_s"] is None
        assert NO_PEER in json.dumps(answer)
    with pytest.raises(MissingExtra, match="llama-cpp-python is not installed"):
        LlamaCpp(model, sequences=1, context=16)


def test_what_the_peer_cannot_do_is_an_error(llama: FakeLlama) -> None:
    peer = LlamaCpp(Path("model.gguf"), sequences=1, context=4)
    assert peer.compute([(0, [7, 8, 9])]) == [3]
    with pytest.raises(DeviceError, match="llama_decode returned 1 for 2 tokens: the context is full"):
        peer.compute([(0, [7, 8])])
    llama.loads = False
    with pytest.raises(DeviceError, match=r"llama\.cpp does not load model\.gguf"):
        LlamaCpp(Path("model.gguf"), sequences=1, context=4)


@pytest.mark.parametrize("kind", ["e2e", "prefix"])
def test_numbers_are_positive(model: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for option in ("--times", "--threads"):
        outcome = run_here(capsys, "bench", kind, str(model), option, "0")
        assert_refused(outcome, f"{option} must be 1 or more, got 0")
