"""The sampling options of `rockpage run`, through the command itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.npu.tiny import TinyLlama, write_tiny_llama
from tools.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("run") / "tiny.gguf", TinyLlama(tied_head=False))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))


def run(model: Path, *options: str) -> int:
    return main(["run", str(model), "--prompt", "in the rain", "--pool", "1MiB", *options])


def answer(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> dict[str, Any]:
    assert run(model, "--json", *options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_schema_from_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["é", 12]}, "minItems": 2, "maxItems": 3}')
    options = ("--json-schema", str(schema), "--temperature", "1.5", "--seed", "4")
    assert run(model, *options) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(r'\[("é"|12)(, ("é"|12)){1,2}\]\n', text)
    structured = answer(capsys, model, *options)
    assert structured["text"] + "\n" == text
    assert structured["finish_reason"] == "stop"


def test_an_answer_without_words_is_explained(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = ("--logit-bias", "2=100")  # the tiny model's token that ends answers
    assert run(model, *end) == 0
    assert capsys.readouterr() == ("\n", "the model ended the text at once; --chat puts it as a question\n")
    assert run(model, *end, "--json") == 0
    assert capsys.readouterr().err == ""  # it says so itself: one id, and why it ended
    assert run(model, "--max-tokens", "1", "--logit-bias", "2=-100") == 0
    assert capsys.readouterr().err == ""


def test_log_probabilities_come_with_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, model, "--max-tokens", "4", "--ignore-eos")
    assert "logprobs" not in plain
    entries = answer(capsys, model, "--max-tokens", "4", "--ignore-eos", "--logprobs", "2")["logprobs"]
    assert [entry["id"] for entry in entries] == plain["ids"]
    for entry in entries:
        assert set(entry) == {"id", "text", "logprob", "top"}
        assert len(entry["top"]) == 2
        # Greedy: the token is the most likely one.
        assert entry["top"][0] == {key: entry[key] for key in ("id", "text", "logprob")}
        assert 0 > entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]
    assert run(model, "--logprobs", "2") == 2
    assert "--logprobs needs --json" in complaint(capsys)


def test_a_bias_of_two_tokens_and_a_penalty_for_repeating_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forced = ("--logit-bias", "70=90", "--logit-bias", "71=90", "--max-tokens", "24", "--ignore-eos")
    assert set(answer(capsys, model, *forced)["ids"]) <= {70, 71}
    # Each time one of them is taken it falls back by 2, and so sooner or later behind the other.
    assert set(answer(capsys, model, *forced, "--frequency-penalty", "2")["ids"]) == {70, 71}
    banned = answer(capsys, model, *forced, "--logit-bias", "70=-100")["ids"]  # the last word on a token counts
    assert banned == [71] * 24


def test_penalties_and_typical_sampling_reach_the_sampler(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--temperature", "2", "--seed", "3", "--max-tokens", "16", "--ignore-eos")
    plain = answer(capsys, model, *drawn)["ids"]
    assert answer(capsys, model, *drawn)["ids"] == plain
    for option in (("--typical-p", "0.2"), ("--frequency-penalty", "2"), ("--presence-penalty", "2")):
        assert answer(capsys, model, *drawn, *option)["ids"] != plain


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--frequency-penalty", "3"), "frequency_penalty is 3.0"),
        (("--presence-penalty", "nan"), "presence_penalty is nan"),
        (("--typical-p", "0"), "typical_p is 0.0"),
        (("--logit-bias", "7=101"), "logit_bias is {7: 101.0}"),
        (("--logit-bias", "272=1"), "token id 272 is outside 0..271"),
        (("--logprobs", "21", "--json"), "logprobs is 21"),
        (("--json-schema", "/no/such/file"), "cannot read /no/such/file"),
    ],
)
def test_bad_values_are_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], match: str
) -> None:
    assert run(model, *options) == 2
    assert match in complaint(capsys)


def test_a_schema_that_cannot_be_used_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "uniqueItems": true}')
    assert run(model, "--json-schema", str(schema)) == 2
    assert "the JSON schema cannot be used: Unimplemented keys" in complaint(capsys)


@pytest.mark.parametrize("text", ["7", "7:1", "seven=1", "7=much", "=1", "7=", "1.5=2"])
def test_a_bias_is_an_id_and_a_number(model: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(model, "--logit-bias", text)
    assert stopped.value.code == 2
    assert f"'{text}' is not a token id and a number" in complaint(capsys)
