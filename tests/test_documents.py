"""What README.md and docs/ tell a reader to type works, what they show is what comes out, what they point to is there.

The README's program is in `test_readme.py`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.npu.tiny import TinyLlama, write_tiny_llama
from tests.tools.command_line import run_here

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "python", "console", "text")
BLOCKS = [(path.name, *block) for path in DOCUMENTS for block in FENCE.findall(path.read_text(encoding="utf-8"))]
"""Document, language and text of each fenced block."""

SHELL_LINES = [
    shlex.split(line, comments=True)
    for _, language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.strip()
]
PATH_SPAN = re.compile(r"`((?:hostcache|staging|npu|tools|tests|docs)/[\w./*]*)`|\]\(([\w./]+)\)")


def test_every_block_says_what_it_is() -> None:
    """`sh` and `python` are run, `console` shows what a command prints, `text` is a drawing."""
    assert [(name, text) for name, language, text in BLOCKS if language not in LANGUAGES] == []
    # The first is compared below, the second where the measure is taken, in board/test_memory.py.
    assert [text.partition("\n")[0] for _, language, text in BLOCKS if language == "console"] == [
        "$ make demo",
        "$ .venv/bin/python -m tests.board.memory",
    ]
    assert sorted(name for name, language, _ in BLOCKS if language == "python") == ["README.md", "api.md"]


@pytest.fixture
def beside_the_files(tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the documents name; the demo's model needs no network."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:400])
    write_tiny_llama(tmp_path / "model-f16.gguf", TinyLlama(matrix_type="F16"))
    (tmp_path / "trace.jsonl").symlink_to(ROOT / "docs/traces/mixed.jsonl")
    (tmp_path / "folder-or-file").symlink_to(tmp_path / "model-f16.gguf")
    monkeypatch.setenv("ROCKPAGE_MODEL", str(demo_model))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", SHELL_LINES, ids=" ".join)
@pytest.mark.usefixtures("beside_the_files")
def test_a_command_works(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case [".", activate]:
            assert activate == ".venv/bin/activate"  # made by venv in the Makefile's VENV
            assert "VENV := .venv\n" in (ROOT / "Makefile").read_text()
        case ["rockpage", *arguments]:
            if arguments[0] == "run":
                arguments += ["--max-tokens", "2"]
            outcome = run_here(capsys, *arguments)
            assert (outcome.status, outcome.err) == (0, "")
            assert outcome.out.strip()
        case _:
            pytest.fail(f"nothing here runs {words}")


def test_the_demo_prints_what_the_readme_shows(
    demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_MODEL", str(demo_model))
    shown = next(text for _, language, text in BLOCKS if language == "console")
    _, *lines = shown.splitlines()
    printed = run_here(capsys, "demo", "--max-tokens", "4").out.splitlines()
    assert printed[0] == lines[0]  # tokens in common, blocks, size of the pool
    questions = [line for line in printed if re.match(r"  \d \| > ", line)]
    assert questions == [line for line in lines if re.match(r"  \d \| > ", line)]

    def labels(lines: list[str]) -> list[str]:
        return [re.split(r"  +", line.strip())[0] for line in lines[lines.index("", 2) + 1 :]]

    assert labels(printed) == labels(lines)
    assert all(", 16 of them shared" in next(line for line in one if "fullest" in line) for one in (printed, lines))


def test_an_engine_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (text for name, language, text in BLOCKS if (name, language) == ("api.md", "python"))
    exec(code, {})
    assert capsys.readouterr().out == "[8 8] FinishReason.LENGTH\n"  # two tokens were asked for, 8 was sampled


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_pointed_to_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [span for span, _ in PATH_SPAN.findall(text) if span and not list(ROOT.glob(span.rstrip("/")))]
    missing += [link for _, link in PATH_SPAN.findall(text) if link and not (document.parent / link).exists()]
    assert missing == []


def test_a_path_that_leads_nowhere_is_seen() -> None:
    text = "`npu/engine.py`, `npu/_attention*.c`, `tests/hostcache/` and [models](docs/models.md), `hostcache.errors`"
    assert PATH_SPAN.findall(text) == [
        ("npu/engine.py", ""),
        ("npu/_attention*.c", ""),
        ("tests/hostcache/", ""),
        ("", "docs/models.md"),
    ]
