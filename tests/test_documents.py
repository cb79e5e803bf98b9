"""What README.md and docs/ tell a reader to type works, what they show is what comes out, what they point to is there.

The README's program is in `test_readme.py`.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from npu.doctor import ANYWHERE, FOR_ITS_NPU, ON_A_BOARD
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tests.tools.command_line import run_here
from tools.main import _parser

ROOT = Path(__file__).parents[1]
PACKAGES = ("hostcache", "staging", "npu", "tools")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "bash", "python", "console", "text")
BLOCKS = [(path.name, *block) for path in DOCUMENTS for block in FENCE.findall(path.read_text(encoding="utf-8"))]
"""Document, language and text of each fenced block."""


def commands(wanted: str) -> list[list[str]]:
    """Words of each line of the blocks in one language."""
    lines = (line for _, language, text in BLOCKS if language == wanted for line in text.splitlines())
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


SHELL_LINES = commands("sh")
BOARD_LINES = commands("bash")
SYSTEM_COMMANDS = {"sudo", "docker", "scp", "echo", "export", "python3", "."}
PATH_SPAN = re.compile(r"`((?:hostcache|staging|npu|tools|tests|docs)/[\w./*]*)`|\]\(([\w./]+)\)")


def test_every_block_says_what_it_is() -> None:
    """`sh` and `python` are run, `console` shows what a command prints, `text` is a drawing or a file.

    `bash` is for a board, for root or for the network: its commands are parsed.
    """
    assert [(name, text) for name, language, text in BLOCKS if language not in LANGUAGES] == []
    # The first is compared below, the second where the measure is taken, in board/test_memory.py.
    assert [text.partition("\n")[0] for _, language, text in BLOCKS if language == "console"] == [
        "$ make demo",
        "$ .venv/bin/python -m tests.board.memory",
    ]
    assert sorted(name for name, language, _ in BLOCKS if language == "python") == [
        "README.md",
        "api.md",
        "board-doctor.md",
    ]


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


@pytest.mark.parametrize("words", BOARD_LINES, ids=" ".join)
def test_a_command_for_a_board_is_one_that_there_is(words: list[str]) -> None:
    if words[0] == "sudo" and words[1] == "rockpage":
        words = words[1:]
    match words:
        case ["rockpage", *arguments]:
            assert callable(_parser().parse_args(arguments).run)
        case ["make", target]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", requirement]:
            extras = re.search(r"^(?:rockpage|\.)\[([\w,]+)\]$", requirement)
            assert extras
            project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            assert [
                extra for extra in extras[1].split(",") if not re.search(rf"^{extra} = \[", project, re.MULTILINE)
            ] == []
        case [program, *_]:
            assert program in SYSTEM_COMMANDS


@pytest.mark.parametrize(
    "arguments", [["selftest", "--graph", "x"], ["no-such-command"], ["run", "--runtime", "no-such-runtime"]]
)
def test_a_command_that_there_is_not_is_seen(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(arguments)


def test_the_board_that_python_asks_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is none it prints nothing."""
    (code,) = (text for name, language, text in BLOCKS if (name, language) == ("board-doctor.md", "python"))
    exec(code, {})
    capsys.readouterr()


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


# --- messages ---------------------------------------------------------------------------------------------------------

OTHERS_WORDS = {
    "Can not find dynamic library on RK3588!",
    "Please specify the target in init_runtime!",
    "some necessary files are missing in the container",
    "RKNN init failed",
    "RKNN_ERR_FAIL",
    "failed to open rknpu module",
    "Invalid RKNN model version",
    "failed to allocate handle",
    "Catch exception when set npu core mode.",
    "failed to submit!",
    "run returned -1: RKNN_ERR_FAIL",
    "heap cma: Cannot allocate memory, CmaFree 71.5 MiB",
    "heap system: Cannot allocate memory, MemAvailable …",
    "heap cma: Permission denied",
}
"""Of the vendor and of the system, which rockpage passes on."""


def messages() -> list[str]:
    """Every string of the packages, without what is put into it; implicit concatenations are one."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for part in PACKAGES for path in (ROOT / part).glob("*.py")]
    texts = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts.append("".join(p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)))
    return texts


def is_said(quoted: str, texts: list[str]) -> bool:
    """Whether a message holds these words, in this order; what has digits or dots in it may be anything."""
    known = (word.strip("|") for word in re.split(r"\s*\S*(?:\d|\.\.\.|…)\S*\s*", quoted))
    pattern = re.compile(".*".join(re.escape(word) for word in known if word), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_errors_that_are_explained_are_those_that_there_are() -> None:
    text = (ROOT / "docs" / "board.md").read_text(encoding="utf-8")
    table = text.partition("## What an error means")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    quoted = {span for cell in first_cells for span in re.findall(r"`([^`]+)`", cell)}
    texts = messages()
    assert len(quoted) > 40
    assert sorted(span for span in quoted - OTHERS_WORDS if not is_said(span, texts)) == []
    assert quoted >= OTHERS_WORDS


def test_a_message_that_nobody_says_is_seen() -> None:
    texts = ["the graphs in  are for  KV heads, the model has ", "a job on core   in  s: the NPU hangs"]
    assert is_said("the graphs in ... are for 3 KV heads, the model has ...", texts)
    assert not is_said("the graphs in ... are of 3 KV heads", texts)
    assert not is_said("the model has ... the graphs in", texts)


def test_the_doctors_manual_has_every_check_in_order() -> None:
    manual = (ROOT / "docs" / "board-doctor.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", manual, re.MULTILINE)
    assert named == [f.__name__ for f in ANYWHERE + ON_A_BOARD + FOR_ITS_NPU]
