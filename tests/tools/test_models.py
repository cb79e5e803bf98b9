"""`rockpage models`, and every command on a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu.architectures import ARCHITECTURES
from npu.ggml import RUNNABLE_TYPES
from tests.npu.oracle import RandomModel, save_folder
from tests.npu.trained import byte_level
from tests.npu.trained import save_folder as save_tokenizer
from tools.main import main


def test_the_table_is_the_one_the_readers_go_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {family["name"] for family in table["architectures"]} == set(ARCHITECTURES) == {"llama", "qwen2", "qwen3"}
    assert [family["name"] for family in table["architectures"] if family["qkv_bias"]] == ["qwen2"]
    assert [family["name"] for family in table["architectures"] if family["qk_norm"]] == ["qwen3"]
    assert table["gguf"]["weights"] == [kind.name for kind in RUNNABLE_TYPES]
    assert table["huggingface"] == {
        "weights": ["F32", "F16", "BF16"],
        "rope_scaling": ["default", "linear", "llama3", "yarn"],
    }


def test_the_text_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for name in ("llama", "SmolLM2", "Qwen2.5", "Qwen3", "Q4_1", "BF16", "llama3", "yarn", "smollm"):
        assert name in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with everything: weights, configuration and tokenizer."""
    tokenizer = byte_level("qwen2")
    model = RandomModel("qwen2", 16, hidden=32, vocab=tokenizer.get_vocab_size())
    path = save_folder(model.build(), tmp_path_factory.mktemp("models") / "folder")
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    )
    return save_tokenizer(tokenizer, path)


def test_every_command_takes_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = ["--pool", "4MiB", "--threads", "1", "--context", "64", "--json"]

    assert main(["plan", str(folder), "--ram", "4GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * 2 * 2 * 16 * 2

    assert main(["tokenize", str(folder), "--text", "The spindle's bearing", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    assert ids == byte_level("qwen2").encode("The spindle's bearing", add_special_tokens=False).ids

    text = tmp_path / "text.txt"
    text.write_text("The spindle's bearing runs hot")
    assert main(["score", str(folder), "--text-file", str(text), *quick]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1

    assert main(["run", str(folder), "--prompt", "Alarm", "--max-tokens", "4", "--ignore-eos", *quick]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finish_reason"] == "length"

    monkeypatch.setenv("ROCKPAGE_MODEL", str(folder))  # in place of the demo's
    assert main(["run", "--chat", "--prompt", "Alarm", "--max-tokens", "2", *quick]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len(
        byte_level("qwen2").encode("<|im_start|>user\nAlarm<|im_end|>", add_special_tokens=False).ids
    )
