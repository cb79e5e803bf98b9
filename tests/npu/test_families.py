"""Every family against Hugging Face's transformers in float32, from folders and from GGUF files.

Logits are of unit order here (the first test says so), so bounds are absolute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.scheduler import SchedulerConfig
from npu.decoder import Attend, Decoder
from npu.engine import Engine
from npu.ggml import RUNNABLE_TYPES
from npu.loading import EngineParts
from npu.runtimes import open_runtime
from npu.sampler import SamplingParams
from npu.source import open_model
from tests.npu.oracle import CONTEXT, FAMILIES, VOCAB, RandomModel, judge, save_folder, save_gguf
from tests.npu.reference import PlainSession
from tests.npu.toy_tokenizer import toy

EXACT = 1e-4
"""Of a decoder with float32 KV and activations."""

PAGED = 2e-3
"""Of the engine, whose KV is fp16: each of some hundred products and sums loses 2^-11 of one operand."""

DECODED = 64

IDS = np.random.default_rng(5).integers(0, VOCAB, 40 + DECODED).tolist()


def load(path: Path, cache: Path) -> Decoder:
    with open_model(path) as source:
        return Decoder.load(source, activations="fp32", max_rows=64, cache_dir=cache)


# The others take their time; those of the default run have every family, scaling and kind of head among them.
QUICK = ("llama-64-tied", "llama-128-llama3", "qwen2-96-yarn", "qwen3-80-yarn", "mistral-64-window", "qwen2-64-window")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """A model as transformers runs it, and ours from the folder it was saved in."""
    model = FAMILIES[request.param].build()
    tmp = tmp_path_factory.mktemp("family")
    return model, load(save_folder(model, tmp / "model"), tmp)


def test_prefill_and_decode_give_transformers_logits(family: tuple[Any, Decoder]) -> None:
    model, decoder = family
    expected = judge(model, IDS)
    assert 0.5 < expected.std() < 2
    session = PlainSession(decoder)
    prefill = session.step(IDS[:40])
    decoded = [session.step([token])[0] for token in IDS[40:]]
    np.testing.assert_allclose(np.stack([*prefill, *decoded]), expected, rtol=0, atol=EXACT)


class Recorder:
    """A decoder that keeps the logits it gave."""

    def __init__(self, decoder: Decoder) -> None:
        self.fingerprint, self.numerics = decoder.fingerprint, decoder.numerics
        self.logits: NDArray[np.float32] = np.zeros((0, VOCAB), np.float32)
        self._decoder = decoder

    def forward(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], logit_rows: NDArray[np.int64], attend: Attend
    ) -> NDArray[np.float32]:
        self.logits = self._decoder.forward(tokens, positions, logit_rows, attend)
        return self.logits

    def close(self) -> None:
        pass  # the decoder serves other tests


def serve(decoder: Decoder, prompts: list[list[int]]) -> list[tuple[list[int], NDArray[np.float32]]]:
    """Answer all prompts at once: of each, its answer and the logits that its tokens were chosen by."""
    recorder = Recorder(decoder)
    cache = PagedKVCache.create(decoder.geometry, 8 << 20)
    runtime = open_runtime("cpu", cache, decoder.config.heads, windows=decoder.config.windows)
    config = SchedulerConfig(context_length=CONTEXT, max_rows=64, max_sequences=8, prefill_chunk=16)
    with Engine(EngineParts(recorder, toy(), cache, runtime, config)) as engine:
        params = SamplingParams(max_tokens=DECODED, ignore_eos=True)
        answers: dict[int, tuple[list[int], list[NDArray[np.float32]]]] = {
            engine.add_request(np.array(prompt), params): ([], []) for prompt in prompts
        }
        while not engine.idle:
            for output, logits in zip(engine.step(), recorder.logits, strict=True):
                answers[output.request_id][0].extend(output.token_ids)
                answers[output.request_id][1].append(logits)
    return [(tokens, np.stack(rows)) for tokens, rows in answers.values()]


def test_a_batch_of_mixed_lengths_through_the_engine(family: tuple[Any, Decoder]) -> None:
    model, decoder = family
    prompts = [IDS[:1], IDS[1:18], IDS[3:70]]
    for prompt, (answer, logits) in zip(prompts, serve(decoder, prompts), strict=True):
        assert len(answer) == DECODED
        expected = judge(model, prompt + answer)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=PAGED)


def check_gguf(random: RandomModel, matrix_type: str, tmp_path: Path) -> None:
    """A file gives the logits that transformers gives with the weights the file's quants stand for."""
    model = random.build()
    decoder = load(save_gguf(random, model, tmp_path / "model.gguf", matrix_type), tmp_path)
    expected = judge(model, IDS)
    assert 0.5 < expected.std() < 2
    session = PlainSession(decoder)
    logits = [*session.step(IDS[:40]), *(session.step([token])[0] for token in IDS[40:])]
    np.testing.assert_allclose(np.stack(logits), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_of_each_family(tmp_path: Path, name: str) -> None:
    check_gguf(FAMILIES[name], "Q8_0", tmp_path)


# Each type once, the families in turn, with and without a head of its own; columns fill blocks of 256.
TYPED = [
    (kind.name, RandomModel(("llama", "qwen2", "qwen3")[number % 3], 64, hidden=256, ffn=256, tied=number % 2 == 0))
    for number, kind in enumerate(RUNNABLE_TYPES)
]


@pytest.mark.parametrize(("matrix_type", "random"), TYPED, ids=[f"{kind}-{random.family}" for kind, random in TYPED])
def test_gguf_files_of_each_type(tmp_path: Path, matrix_type: str, random: RandomModel) -> None:
    check_gguf(random, matrix_type, tmp_path)


@pytest.mark.parametrize("name", ["qwen2-64-tied", "qwen3-80-yarn"])
def test_int8_gives_a_token_the_same_bits_in_a_step_of_any_size(tmp_path: Path, name: str) -> None:
    """Biases and norms of heads work on one row at a time, as all that sharing KV rests on must."""
    path = save_gguf(FAMILIES[name], FAMILIES[name].build(), tmp_path / "model.gguf", "Q8_0")
    with open_model(path) as source:
        decoder = Decoder.load(source, activations="int8", max_rows=64, cache_dir=tmp_path)
    whole, single = PlainSession(decoder), PlainSession(decoder)
    logits = whole.step(IDS[:24])
    np.testing.assert_array_equal(np.stack([single.step([token])[0] for token in IDS[:24]]), logits)
    np.testing.assert_array_equal(single.k, whole.k)
    np.testing.assert_array_equal(single.v, whole.v)
