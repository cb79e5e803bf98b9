"""A Hugging Face folder becomes one GGUF file that answers as the folder does, less what its weights lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from hostcache.errors import UnsupportedModel
from npu.carried_metadata import carried_metadata
from npu.convert import convert_model
from npu.decoder import Decoder
from npu.gguf import GGUFFile
from npu.requantise import Weights
from npu.source import open_model
from npu.text import template_of, tokenizer_of
from tests.npu.oracle import FAMILIES, VOCAB, judge, save_folder
from tests.npu.reference import PlainSession

SPECIAL = ("<|begin|>", "<|end|>", "<|user|>")
IDS = np.random.default_rng(5).integers(0, VOCAB, 48).tolist()


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Three control tokens, one for each byte, and one that a merge makes: as many as the model has rows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate([*SPECIAL, *alphabet, "ar"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "r")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(name: str, folder: Path) -> tuple[Any, Path]:
    """A model as transformers runs it, and the folder it is saved in."""
    model = FAMILIES[name].build()
    save_folder(model, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}))
    return model, folder


def convert(folder: Path, weights: Weights, out: Path) -> None:
    with open_model(folder) as source:
        convert_model(source, carried_metadata(source), weights, out)


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.03), ("int4", 0.35)])
@pytest.mark.parametrize("family", ["llama-128-llama3", "qwen2-96-yarn", "qwen3-80-yarn"])
def test_the_file_scores_like_transformers(tmp_path: Path, family: str, weights: Weights, bound: float) -> None:
    model, folder = save(family, tmp_path / "model")
    convert(folder, weights, tmp_path / "out.gguf")
    expected = judge(model, IDS)
    with open_model(tmp_path / "out.gguf") as opened:
        decoder = Decoder.load(opened, activations="fp32", cache_dir=tmp_path / "cache")
    logits = PlainSession(decoder).step(IDS)
    # Each product errs by the weights' 0.5 or 8.5 %; a dozen of them on the way add in quadrature: 3.5 times that.
    assert np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()) < bound


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    _, folder = save("qwen2-64-tied", tmp_path / "model")
    convert(folder, "int8", tmp_path / "out.gguf")
    with open_model(folder) as source, GGUFFile.open(tmp_path / "out.gguf") as out:
        before, after = tokenizer_of(source), tokenizer_of(out)
        assert out.metadata["general.name"] == "model"
    text = "Alarm 315: 2.5 bar<|end|> ü"
    assert after.encode(text, special=True).tolist() == before.encode(text, special=True).tolist()
    assert (after.bos_id, after.eos_ids, after.add_bos) == (0, frozenset({1}), False)


@pytest.mark.parametrize("own_for_tools", [False, True])
def test_the_chat_templates_come_along(tmp_path: Path, own_for_tools: bool) -> None:
    _, folder = save("qwen2-64-tied", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")
    if own_for_tools:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    convert(folder, "int8", tmp_path / "out.gguf")
    with GGUFFile.open(tmp_path / "out.gguf") as out:
        template = template_of(out)
        assert out.metadata.get("tokenizer.chat_templates") == (["tool_use"] if own_for_tools else None)
    assert template is not None
    messages, tools = [{"role": "user", "content": "hot?"}], [{"name": "measure"}]
    assert template.render(messages) == "<|user|>hot?<|end|>"
    written = template.render(messages, tools=tools)
    assert written == ("1 tools" if own_for_tools else "<|user|>hot?<|end|>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    _, folder = save("qwen2-64-tied", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer.json; write one with transformers"):
        convert(folder, "int8", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
