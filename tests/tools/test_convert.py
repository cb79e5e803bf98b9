"""`rockpage convert`: what it says, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from npu.gguf import GGUFFile
from tests.npu.folders import write_folder
from tests.npu.tiny import TINY, write_tiny_llama
from tools.main import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source.gguf", replace(TINY, matrix_type="F16", embedding_type="F16"))


def test_convert_tells_what_became_of_the_tensors(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.with_name("out.gguf")
    assert main(["convert", str(source), "--weights", "int4", "--out", str(out)]) == 0
    *parts, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in parts] == [
        ["14", "tensors", "Q4_1"],  # seven matrices a layer
        ["1", "tensors", "Q8_0"],
        ["5", "tensors", "F32"],  # two norms a layer, and the last
    ]
    assert "relative error 7." in parts[0] or "relative error 8." in parts[0]
    assert parts[2].endswith("copied")
    assert last.startswith(f"{out}: 0.1 MiB, from 0.2 MiB")


def test_convert_answers_in_json(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.with_name("out.gguf")
    assert main(["convert", str(source), "--weights", "int8", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    with GGUFFile.open(out) as opened:
        assert answer["bytes"] == opened.size
        types = {info.type.name for info in opened.tensors.values()}
    matrices, vectors = answer["parts"]
    assert types == {"Q8_0", "F32"} == {matrices["type"], vectors["type"]}
    assert (matrices["copied"], matrices["tensors"], vectors["copied"], vectors["tensors"]) == (False, 15, True, 5)
    assert 0.004 < matrices["relative_error"] < 0.0065
    assert vectors["relative_error"] == 0.0


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_folder_becomes_a_file_that_runs(
    tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "folder", TINY, write_tiny_llama(tmp_path / "tiny.gguf"), eos_ids=(0, 2), shards=2)
    out = tmp_path / "out.gguf"
    assert main(["convert", str(folder), "--weights", weights, "--out", str(out), "--json"]) == 0
    matrices, *_ = json.loads(capsys.readouterr().out)["parts"]
    assert (matrices["type"], matrices["tensors"]) == {"int4": ("Q4_1", 14), "int8": ("Q8_0", 15)}[weights]

    # Template, tokenizer and ends come along: three control tokens, three line ends, and of the tiny vocabulary
    # u-s-er, in- the- -r-a-in and a-s-s-i-s-t-an-t.
    chat = ["--chat", "--prompt", "in the rain", "--pool", "1MiB", "--max-tokens", "6", "--json"]
    for model in (folder, out):
        assert main(["run", str(model), *chat, "--ignore-eos"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["prompt_tokens"], len(answer["ids"])) == (3 + 3 + 3 + 6 + 8, 6)
        assert main(["run", str(model), *chat, "--logit-bias", "0=100"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["ids"], answer["text"], answer["finish_reason"]) == ([0], "", "stop")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.gguf", "--weights", "int8", "--out", "out.gguf"], "cannot open model file none.gguf: No such file"),
        (["source.gguf", "--weights", "int8", "--out", "source.gguf"], "source.gguf is there already; remove it or"),
        (["source.gguf", "--weights", "int8", "--out", "no/out.gguf"], "no: No such file or directory"),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(
    source: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    assert main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert os.listdir() == ["source.gguf"]


def test_a_model_that_could_not_be_run_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", replace(TINY, value_type="MXFP4"))
    assert main(["convert", str(source), "--weights", "int8", "--out", str(tmp_path / "out.gguf")]) == 2
    assert "is MXFP4; rockpage converts from F32, F16, BF16" in capsys.readouterr().err
