"""Windows and sliding, from end to end: a model says what a float64 forward with the same mask and turns says.

The reference keeps no cache: for every row it rotates all keys anew, to where they are for that row. So it knows of no
blocks that go back, no turns that add up, and no blocks that are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hostcache.errors import RequestRefused, UsageError
from hostcache.request import FinishReason
from hostcache.window import AttentionWindow
from npu.engine import Engine
from npu.loading import LoadOptions
from npu.sampler import SamplingParams
from npu.stream import RequestOutput
from tests.npu.driving import drive
from tests.npu.reference import Sight, log_softmax, reference_logits
from tests.npu.tiny import TinyLlama, write_tiny_llama

if TYPE_CHECKING:
    from typing_extensions import Unpack

CONTEXT = 64
SLIDING = AttentionWindow(24, sinks=4)
SIGHT = Sight(window=24, sinks=4, context=CONTEXT)
PROMPT = [5 + 7 * index % 200 for index in range(30)]
LONG = SamplingParams(
    max_tokens=400, ignore_eos=True, logprobs=0, temperature=1.0, seed=11
)  # wanders, where greedy repeats

NEAR = 4e-3
"""Log-probabilities differ by less, and by 0.2 or more if one token too many is seen, or one position is wrong.

Keys and values are rounded to fp16, by up to 2**-11 of themselves, and keys once more whenever they are turned; what
attention makes of them changes by about as much, and logits, which are of order 1, by some of that for each layer.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("windows") / "tiny.gguf", TinyLlama(tied_head=False))


def load(model: Path, blocks: int = 64, **options: Unpack[LoadOptions]) -> Engine:
    """With exact activations, over a pool of that many blocks of 4 KiB."""
    usual: LoadOptions = {"activations": "fp32", "cache_dir": model.parent, "context_length": CONTEXT}
    usual |= {"pool_bytes": blocks * 4096}
    usual |= options
    return Engine.load(model, **usual)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with load(model) as engine:
        yield engine


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def farthest(model: Path, prompt: list[int], outputs: list[RequestOutput], sight: Sight) -> float:
    """How far a log-probability that came with an answer is from the reference's, at most."""
    answer = tokens_of(outputs)
    ids = prompt + answer
    wanted = log_softmax(reference_logits(model, ids[:-1], sight)[len(prompt) - 1 :])
    told = [entry.logprob for output in outputs for entry in output.logprobs]
    return float(np.abs(wanted[np.arange(len(answer)), answer] - told).max())


@pytest.mark.parametrize("sinks", [0, 4, 20])
def test_a_window_within_the_context_is_a_masked_attention(model: Path, sinks: int) -> None:
    with load(model, context_length=256) as engine:
        params = SamplingParams(max_tokens=150, ignore_eos=True, logprobs=0, temperature=1.0, seed=3)
        request = engine.add_request(PROMPT, params, window=AttentionWindow(40, sinks))
        outputs = drive(engine)[request]
    assert farthest(model, PROMPT, outputs, Sight(window=40, sinks=sinks)) < NEAR
    for other in (Sight(window=41, sinks=sinks), Sight(window=40, sinks=sinks + 1), Sight()):
        assert farthest(model, PROMPT, outputs, other) > 10 * NEAR  # one token too many shows


@pytest.mark.parametrize("prompt_tokens", [30, 200])
def test_an_answer_slides_far_past_the_context(model: Path, engine: Engine, prompt_tokens: int) -> None:
    """Its prompt may lie behind the context already. It holds what its window and sinks take, however long it grows."""
    prompt = (PROMPT * 7)[:prompt_tokens]
    request = engine.add_request(prompt, LONG, overflow="slide", window=SLIDING)
    outputs, most = [], 0
    while not engine.idle:
        outputs += engine.step()
        most = max(most, engine.cache.pool.used)
    assert {output.request_id for output in outputs} == {request}
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(tokens_of(outputs)) == 400
    assert farthest(model, prompt, outputs, SIGHT) < NEAR
    for other in (replace(SIGHT, context=CONTEXT + 1), replace(SIGHT, block=8), replace(SIGHT, context=0)):
        assert farthest(model, prompt, outputs, other) > 10 * NEAR  # one position too far shows
    assert (
        most * 16 <= 16 + 24 + CONTEXT + 16
    )  # a block of sinks, the window, a chunk that the context allows, one to turn


def slid(model: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    """What a request says that is alone."""
    with load(model) as engine:
        request = engine.add_request(prompt, params, overflow="slide", window=SLIDING)
        return tokens_of(drive(engine)[request])


def test_branches_and_forks_slide_apart_and_each_as_if_it_were_alone(model: Path, engine: Engine) -> None:
    params = replace(LONG, max_tokens=200)
    ids = engine.add_branches(PROMPT, 3, params, overflow="slide", window=SLIDING)
    outputs: dict[int, list[RequestOutput]] = {request: [] for request in ids}
    while len(outputs[ids[0]]) < 100:  # which has been turned by then
        for output in engine.step():
            outputs[output.request_id].append(output)
    begun = tokens_of(outputs[ids[0]])
    fork = engine.fork(ids[0], replace(params, seed=5))
    for request, later in drive(engine).items():
        outputs.setdefault(request, []).extend(later)
    for index, request in enumerate(ids):
        assert tokens_of(outputs[request]) == slid(model, PROMPT, replace(params, seed=11 + index))
    assert len(tokens_of(outputs[fork])) == 200 - len(begun)
    assert tokens_of(outputs[fork]) != tokens_of(outputs[ids[0]])[len(begun) :]
    assert farthest(model, PROMPT + begun, outputs[fork], SIGHT) < NEAR


def test_guesses_change_no_answer_that_slides(model: Path) -> None:
    greedy = SamplingParams(max_tokens=300, ignore_eos=True)
    with load(model, speculate=6) as engine:
        request = engine.add_request(PROMPT, greedy, overflow="slide", window=SLIDING)
        answer = tokens_of(drive(engine)[request])
        assert engine.scheduler.stats.accepted_tokens > 0
    assert answer == slid(model, PROMPT, greedy)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_whoever_gives_way_says_what_it_would_have_said(model: Path, swap_bytes: int) -> None:
    """Three requests in a pool for two: what is computed again lets go, and is turned, at the same tokens."""
    prompts, params = [[number, *PROMPT] for number in (7, 8, 9)], replace(LONG, max_tokens=200)
    with load(model, 9, swap_bytes=swap_bytes) as engine:
        ids = [engine.add_request(prompt, params, overflow="slide", window=SLIDING) for prompt in prompts]
        outputs = drive(engine)
        stats = engine.scheduler.stats
        assert stats.preemptions > 0
        assert (stats.swapped_out > 0) == (swap_bytes > 0)
    for request, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(outputs[request]) == slid(model, prompt, params)


def test_a_window_that_leaves_no_block_free_cannot_slide(engine: Engine) -> None:
    """16 tokens for the sinks, the window and a block must fit into 64."""
    with pytest.raises(RequestRefused, match="a window of 33 tokens and one block more exceed the context of 64"):
        engine.add_request(PROMPT, LONG, overflow="slide", window=AttentionWindow(33, sinks=4))
    engine.add_request(PROMPT, replace(LONG, max_tokens=100), overflow="slide", window=AttentionWindow(32, sinks=4))
    drive(engine)


def test_without_a_window_of_its_own_an_answer_slides_with_the_largest(model: Path, engine: Engine) -> None:
    request = engine.add_request(PROMPT, LONG, overflow="slide")
    outputs = drive(engine)[request]
    assert farthest(model, PROMPT, outputs, Sight(window=32, sinks=4, context=CONTEXT)) < NEAR


def test_what_is_saved_of_an_answer_that_slid_is_what_others_could_share(engine: Engine, tmp_path: Path) -> None:
    """Full blocks within the first window: the KV of what follows depends on the window."""
    request = engine.add_request(PROMPT, replace(LONG, max_tokens=100), overflow="slide", window=SLIDING)
    said = PROMPT + tokens_of(drive(engine)[request])
    assert engine.sessions.save(tmp_path / "slid.kv", said) == 16
    assert engine.sessions.load(tmp_path / "slid.kv").tokens.tolist() == said


def test_a_model_whose_layers_have_windows_slides_with_them(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "windowed.gguf", TinyLlama(tied_head=False, window=24))
    with load(path) as engine:
        with pytest.raises(UsageError, match="windows of their own, of 24 tokens: leave window out"):
            engine.add_request(PROMPT, LONG, overflow="slide", window=SLIDING)
        request = engine.add_request(PROMPT, LONG, overflow="slide")
        outputs = drive(engine)[request]
    assert farthest(path, PROMPT, outputs, Sight(window=24, context=CONTEXT)) < NEAR


def test_a_model_with_a_layer_that_sees_everything_cannot_slide(tmp_path: Path) -> None:
    model = TinyLlama(tied_head=False, window=24, sliding=(True, False))
    with load(write_tiny_llama(tmp_path / "mixed.gguf", model)) as engine:
        with pytest.raises(UsageError, match="a window and layers that see everything: it cannot slide"):
            engine.add_request(PROMPT, LONG, overflow="slide")
        engine.add_request(PROMPT, LONG)
        outputs, most = [], 0
        while not engine.idle:
            outputs += engine.step()
            most = max(most, engine.cache.pool.used)
    assert outputs[-1].finish_reason is FinishReason.CONTEXT
    assert most == CONTEXT // 16  # nothing was let go of


@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_on_a_device_that_is_fed_copies_answers_slide_as_well(model: Path, resident_bytes: int) -> None:
    """What stays staged from step to step is that of a table whose blocks go, and whose keys are turned."""
    prompts, params = [[number, *PROMPT] for number in (7, 8)], replace(LONG, max_tokens=150)
    with load(model, runtime="emulated", resident_bytes=resident_bytes) as engine:
        ids = [engine.add_request(prompt, params, overflow="slide", window=SLIDING) for prompt in prompts]
        outputs = drive(engine)
    for request, prompt in zip(ids, prompts, strict=True):
        assert farthest(model, prompt, outputs[request], SIGHT) < NEAR
