"""What fuzzing starts from is sound: nothing of it is refused, so that a refusal is for what was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu.gguf import GGUFFile
from npu.huggingface import HuggingFaceFolder
from npu.model import ModelConfig
from npu.text import template_of, tokenizer_of
from npu.weights import plan_weights
from tests.fuzz.gguf_files import GGUFCase
from tests.fuzz.gguf_seeds import SEEDS as GGUF_SEEDS
from tests.fuzz.hf_folders import SEEDS as FOLDER_SEEDS
from tests.fuzz.hf_folders import FolderCase


def load(source: GGUFFile | HuggingFaceFolder) -> None:
    tokenizer = tokenizer_of(source)
    assert tokenizer.decode(tokenizer.encode("ab", bos=False)) == "ab"
    assert template_of(source) is not None
    assert plan_weights(source, ModelConfig.from_gguf(source), "int8").nbytes > 0


@pytest.mark.parametrize("seed", GGUF_SEEDS)
def test_files(tmp_path: Path, seed: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUFCase(seed).to_bytes())
    with GGUFFile.open(path) as source:
        load(source)


@pytest.mark.parametrize("seed", FOLDER_SEEDS)
def test_folders(tmp_path: Path, seed: str) -> None:
    FolderCase(seed).write(tmp_path)
    with HuggingFaceFolder.open(tmp_path) as source:
        load(source)
