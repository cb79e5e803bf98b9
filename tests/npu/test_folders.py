"""A model folder against the GGUF file that holds the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hostcache.request import FinishReason
from npu.decoder import Decoder
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.source import open_model
from tests.npu.driving import drive
from tests.npu.folders import write_folder
from tests.npu.reference import PlainSession, reference_logits
from tests.npu.tiny import TINY, write_tiny_llama

MODELS = {
    "llama": (replace(TINY, tied_head=False), 1),
    "llama, sharded": (TINY, 3),
    "qwen2": (replace(TINY, family="qwen2"), 1),
    "qwen3, sharded": (replace(TINY, family="qwen3", tied_head=False), 2),
}
IDS = [int(i) for i in np.random.default_rng(7).integers(0, TINY.vocab, 40)]


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_the_logits_of_its_weights(tmp_path: Path, name: str) -> None:
    model, shards = MODELS[name]
    gguf = write_tiny_llama(tmp_path / "tiny.gguf", model)
    expected = reference_logits(gguf, IDS)
    folder = write_folder(tmp_path / "folder", model, gguf, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    with open_model(folder) as source:
        decoder = Decoder.load(source, activations="fp32", cache_dir=tmp_path / "cache")
    logits = PlainSession(decoder).step(IDS)
    # Some tens of float32 operations lie on the way of each value, each with a relative error of 2^-24 = 6e-8.
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of a folder whose generation_config.json names ends besides its tokenizer's own, 2."""
    tmp = tmp_path_factory.mktemp("ends")
    gguf = write_tiny_llama(tmp / "tiny.gguf")
    folder = write_folder(tmp / "folder", TINY, gguf, eos_ids=(0, 50))
    with Engine.load(folder, pool_bytes=1 << 20, cache_dir=tmp) as engine:
        yield engine


@pytest.mark.parametrize("end", [0, 2, 50])
def test_every_end_that_a_folder_names_ends_an_answer(engine: Engine, end: int) -> None:
    """The bias makes it the most likely token; control tokens and ordinary ones end an answer alike."""
    request = engine.add_request("in the rain", SamplingParams(logit_bias={end: 100.0}, max_tokens=5))
    (output,) = drive(engine)[request]
    assert (output.token_ids, output.text, output.finish_reason) == ((end,), "", FinishReason.STOP)


def test_a_token_that_is_no_end_goes_on(engine: Engine) -> None:
    request = engine.add_request("in the rain", SamplingParams(logit_bias={1: 100.0}, max_tokens=5))
    outputs = drive(engine)[request]
    assert [token for output in outputs for token in output.token_ids] == [1] * 5
    assert outputs[-1].finish_reason is FinishReason.LENGTH
