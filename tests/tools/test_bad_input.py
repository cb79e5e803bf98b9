"""Options, texts, files and surroundings that cannot be used: one line on stderr, status 2, and no waiting."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from tests.npu.tiny import write_tiny_llama
from tests.tools.command_line import assert_refused, run_apart, run_here

HELLO = ["--prompt", "hello", "--max-tokens", "3"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A context of 512 tokens, one for each byte of `xxx`; blocks of 4 KiB."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


# Options

OPTIONS: dict[str, tuple[str, ...]] = {
    "--pool=0": ("--pool", "'0' must lie between 1 byte and 2^63 bytes"),
    "--pool=-1": ("--pool", "'-1' is not a size"),
    "--pool=1e99GiB": ("--pool", "'1e99GiB' is not a size"),
    "--pool=4095": ("4095 bytes does not hold one block of 4096 bytes", "give it at least that much"),
    "--pool=1000000GiB": ("does not fit into the memory of", "use a smaller model or pool"),
    "--pool=9223372036854775807": ("does not fit into the memory of", "use a smaller model or pool"),
    "--threads=0": ("threads must be at least 1, got 0",),
    "--threads=-1": ("threads must be at least 1, got -1",),
    "--threads=1000000000": ("threads must be at most 64, got 1000000000",),
    "--threads=two": ("--threads", "'two'"),
    "--context=0": ("a context of 0 is not within 1..512",),
    "--context=513": ("a context of 513 is not within 1..512",),
    "--context=4": ("a prompt of 4 tokens and 1 to generate exceed the context of 4", "shorten the prompt"),
    "--prefill-chunk=0": ("prefill_chunk must be at least 1, got 0",),
    "--step-ms=0": ("step_seconds must be positive and finite, got 0.0",),
    "--step-ms=soon": ("--step-ms", "'soon'"),
    "--runtime=npu": ("--runtime", "'npu'", "emulated"),
    "--emulate-rounding=none": ("--emulate-rounding", "'none'"),
    "--activations=int4": ("--activations", "'int4'"),
    "--max-tokens=0": ("max_tokens is 0",),
    f"--max-tokens={'9' * 5000}": ("--max-tokens", "invalid int value"),
    "--temperature=-1": ("temperature is -1.0",),
    "--temperature=nan": ("temperature is nan",),
    "--temperature=1e400": ("temperature is inf",),
    "--top-k=-1": ("top_k is -1",),
    "--top-p=0": ("top_p is 0.0",),
    "--top-p=1.5": ("top_p is 1.5",),
    "--min-p=2": ("min_p is 2.0",),
    "--repetition-penalty=0": ("repetition_penalty is 0.0",),
    "--seed=-1": ("seed is -1",),
    f"--seed={2**64}": ("seed is 18446744073709551616",),
    "--stop=": ("stop is ('',)", "non-empty"),
    "--stop=\udcff": (r"stop is ('\udcff',)", "without surrogates"),
    "--system=\udcff": ("not valid Unicode", r"'\udcff'"),
    "--prompt-file=-": ("the text or a file, not both",),
    "--no-such\noption": ("unrecognized arguments: --no-such option",),
    "another\x1b[2Jmodel": ("unrecognized arguments: another?[2Jmodel",),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: ascii(option[:30]))
def test_an_option(capsys: pytest.CaptureFixture[str], model: str, option: str) -> None:
    assert_refused(run_here(capsys, "run", model, *HELLO, option), *OPTIONS[option])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score", "MODEL", "--text-file", "a", "--ids-file", "b"], "not allowed with"),
        (["tokenize", "MODEL", "--text", "a", "--text-file", "b"], "not both"),
        (["plan", "MODEL", "--geometry", "layers=1,kv_heads=1,head_dim=8", "--weights", "1"], "either a MODEL, or"),
        (["plan", "--geometry", "layers=1,kv_heads=1,head_dim=8"], "together with --weights"),
        (["demo", "MODEL", "--max-tokens", "0"], "max_tokens is 0"),
        (["demo", "MODEL", "--threads", "0"], "threads must be at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], words: str
) -> None:
    assert_refused(run_here(capsys, *(model if word == "MODEL" else word for word in arguments)), words)


# Texts

LONG = "x" * 600

TEXTS: dict[str, tuple[list[str], bytes, str]] = {
    "no prompt": (["run"], b"", "the prompt is empty"),
    "no prompt to chat about": (["run", "--chat"], b"", "the prompt is empty"),
    "a prompt not in UTF-8": (["run"], b"caf\xe9", "byte 3 is 0xe9"),
    "a prompt beyond the context": (["run"], LONG.encode(), "a prompt of 600 tokens"),
    "a prompt beyond the pool": (["run", "--pool", "20KiB"], b"x" * 81, "needs 6 blocks, the whole pool has 5"),
    "a prompt in UTF-16": (["tokenize"], "hi".encode("utf-16"), "byte 0 is 0xff"),
    "a cut character": (["tokenize"], "é".encode()[:1], "byte 0 is 0xc3"),
    "nothing to score": (["score"], b"", "2 to 512 tokens, got 0"),
    "too little to score": (["score"], b"x", "2 to 512 tokens, got 1"),
    "too much to score": (["score"], LONG.encode(), "2 to 512 tokens, got 600"),
    "a score beyond the pool": (["score", "--pool", "20KiB"], b"x" * 81, "81 tokens need 6 blocks, 5 are available"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, case: str) -> None:
    (command, *options), content, words = TEXTS[case]
    path = tmp_path / "text"
    path.write_bytes(content)
    source = "--prompt-file" if command == "run" else "--text-file"
    assert_refused(run_here(capsys, command, model, *options, source, str(path)), words)


@pytest.mark.parametrize("option", ["--prompt", "--text"])
def test_an_argument_not_in_utf_8(capsys: pytest.CaptureFixture[str], model: str, option: str) -> None:
    """Python hands such bytes on as surrogates."""
    command = {"--prompt": "run", "--text": "tokenize"}[option]
    assert_refused(run_here(capsys, command, model, option, "caf\udce9"), "not valid Unicode", r"'\udce9'")


def test_a_text_at_the_limit_is_read_and_no_byte_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b" " * (1 << 20))
    assert_refused(run_here(capsys, "run", model, "--prompt-file", str(path)), "tokens and 1 to generate exceed")
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert_refused(run_here(capsys, "run", model, "--prompt-file", str(path)), "more than 1 MiB", "split it")


IDS = {
    "": "Expecting value",
    "1 2": "Extra data",
    "{}": "it holds a dict",
    '"1"': "it holds a str",
    "[1, -1]": "element 1 is -1",
    "[1, 2147483648]": "element 1 is 2147483648",
    "[1, 272]": "token id 272 is outside 0..271",
    "[1.0, 2]": "element 0 is 1.0",
    "[true, 2]": "element 0 is True",
    "[NaN]": "element 0 is nan",
    "[[1], 2]": "element 0 is [1]",
    "[7]": "2 to 512 tokens, got 1",
    "[" + "1," * 600 + "1]": "2 to 512 tokens, got 601",
    "[1, " + "1" * 5000 + "]": "Exceeds the limit",
    "[" * 100_000: "recursion",
    "[" * 100_000 + "]" * 100_000: "recursion",
    '["' + "x" * 100_000 + '"]': "element 0 is 'xxxxx",
}


@pytest.mark.parametrize("content", IDS, ids=lambda content: content[:20])
def test_a_list_of_ids(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, content: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    assert_refused(run_here(capsys, "score", model, "--ids-file", str(path)), IDS[content])


# Files

UNREADABLE = {
    "absent": "No such file or directory",
    "absent\n\x1b[31m": "No such file or directory",
    "folder": "",  # these two: below
    "nul\0byte": "embedded null",
    "/proc/self/mem": "",
    "text/beneath": "Not a directory",
    "x" * 300: "File name too long",
}


@pytest.mark.parametrize("use", ["model", "prompt", "text", "ids"])
@pytest.mark.parametrize("name", UNREADABLE, ids=lambda name: ascii(name[:20]))
def test_a_path_that_leads_to_no_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, name: str, use: str
) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    path = name if name.startswith("/") else f"{tmp_path}/{name}"
    arguments = {
        "model": ["run", path, *HELLO],
        "prompt": ["run", model, "--prompt-file", path],
        "text": ["tokenize", model, "--text-file", path],
        "ids": ["score", model, "--ids-file", path],
    }[use]
    words = {
        ("folder", True): "holds no config.json: give a .gguf file or a Hugging Face folder",
        ("folder", False): "Is a directory",
        ("/proc/self/mem", True): "the file is empty",  # it says so; its first page is not mapped
        ("/proc/self/mem", False): "Input/output error",
    }.get((name, use == "model"), UNREADABLE[name])
    shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(path.split()))
    assert_refused(run_here(capsys, *arguments), words, shown)


def test_a_model_that_cannot_be_mapped(capsys: pytest.CaptureFixture[str]) -> None:
    """Files of sysfs claim 4096 bytes and refuse to be mapped."""
    path = "/sys/kernel/uevent_seqnum"
    assert stat.S_ISREG(os.stat(path).st_mode)
    assert_refused(run_here(capsys, "run", path, *HELLO), f"cannot map model file {path}: No such device")


@pytest.mark.parametrize("use", ["model", "prompt", "ids"])
def test_a_file_whose_mode_forbids_it(tmp_path: Path, model: str, use: str) -> None:
    path = tmp_path / "secret"
    path.write_text("[1, 2]")
    path.chmod(0)
    arguments = {
        "model": ["run", str(path), *HELLO],
        "prompt": ["run", model, "--prompt-file", str(path)],
        "ids": ["score", model, "--ids-file", str(path)],
    }[use]
    # Mode bits bind root too once it may not override them.
    bound = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()
    assert_refused(run_apart(*arguments, prefix=bound), str(path), "Permission denied")


@pytest.mark.parametrize("use", ["model", "prompt", "text", "ids"])
@pytest.mark.parametrize("special", ["fifo", "/dev/zero"])
def test_a_file_without_end_or_beginning(tmp_path: Path, model: str, special: str, use: str) -> None:
    """A FIFO that nobody writes to, and zeros for ever."""
    path = special
    if special == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    arguments = {
        "model": ["run", path, *HELLO],
        "prompt": ["run", model, "--prompt-file", path],
        "text": ["score", model, "--text-file", path],
        "ids": ["score", model, "--ids-file", path],
    }[use]
    words = {
        ("fifo", "prompt"): "the prompt is empty",
        ("fifo", "text"): "got 0",
        ("fifo", "ids"): "Expecting value",
        ("/dev/zero", "prompt"): "more than 1 MiB",
        ("/dev/zero", "text"): "more than 1 MiB",
        ("/dev/zero", "ids"): "more than 1 MiB",
    }.get((special, use), "not a regular file")
    assert_refused(run_apart(*arguments, prefix=("prlimit", f"--as={2 << 30}")), words)


def test_a_pipe_whose_writer_takes_its_time_is_a_file_like_any_other(model: str) -> None:
    shell = ("bash", "-c", 'exec "$@" --prompt-file <(sleep 0.3; echo hello)', "bash")
    outcome = run_apart("run", model, "--max-tokens", "3", "--json", prefix=shell)
    assert (outcome.status, outcome.err) == (0, "")


# Surroundings


def redirected(redirection: str) -> tuple[str, ...]:
    return ("sh", "-c", f'exec "$@" {redirection}', "sh")


@pytest.mark.parametrize(
    ("redirection", "words"),
    [
        (">&-", "stdout is closed"),
        (">/dev/full", "No space left on device"),
        ("<&-", "cannot read stdin: it is closed"),
        ("0>/dev/null", "cannot read stdin"),
    ],
)
def test_a_stream_that_cannot_be_used(model: str, redirection: str, words: str) -> None:
    assert_refused(run_apart("tokenize", model, prefix=redirected(redirection), stdin=b"hello"), words)


def test_without_stderr_the_status_tells(model: str) -> None:
    for redirection in ("2>&-", "2>/dev/full", ">&- 2>&- <&-"):
        outcome = run_apart("run", model, "--max-tokens", "0", prefix=redirected(redirection))
        assert (outcome.status, outcome.out, outcome.err) == (2, "", "")


def test_an_encoding_that_lacks_a_character_loses_no_answer(model: str) -> None:
    arguments = ("run", model, "--prompt", "é", "--max-tokens", "8")
    answer = run_apart(*arguments, environment={"PYTHONIOENCODING": "utf-8"})
    assert not answer.out.isascii()  # else this shows nothing
    outcome = run_apart(*arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == answer.out.encode("ascii", "backslashreplace").decode()


def test_a_disk_that_takes_nothing(tmp_path: Path, model: str) -> None:
    """No file may grow beyond a page: neither the cache nor the temporary folder can hold the weights."""
    outcome = run_apart(
        *("run", model, *HELLO),
        prefix=("prlimit", "--fsize=4096"),
        environment={"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)},
    )
    assert_refused(outcome, "File too large", "set XDG_CACHE_HOME to a folder with room")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache/rockpage/weights").rglob("*") if path.is_file()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_done_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_here(capsys, "run", model, *HELLO)
    assert (outcome.status, outcome.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_user_without_a_home(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert_refused(run_here(capsys, "run", model, *HELLO), "no home folder", "set XDG_CACHE_HOME or HOME")


def test_a_run_leaves_nothing_behind_but_its_own_cache(tmp_path: Path, model: str) -> None:
    """Nor do the libraries below it: ONNX Runtime's telemetry would keep a database beside the cache."""
    (tmp_path / "tmp").mkdir()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    unset = ("env", "--unset=ORT_DISABLE_TELEMETRY")
    outcome = run_apart("run", model, *HELLO, prefix=unset, environment=environment)
    assert (outcome.status, outcome.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tmp"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["rockpage"]
    assert list((tmp_path / "tmp").iterdir()) == []
