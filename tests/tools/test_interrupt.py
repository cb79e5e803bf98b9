"""Ctrl-C and its relatives, at any moment: blocks, files and the terminal are given back, and the engine goes on."""

from __future__ import annotations

import errno
import functools
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import pytest

from npu.engine import Engine
from npu.sampler import Sampler, SamplingParams
from npu.tiles import TilePlan
from npu.weights import WeightsPlan
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tests.tools.command_line import COMMAND, ROOT
from tools.main import main
from tools.signals import unwinding_signals

PROMPT = "the rain in the plain and one other thing"
PROMPTLY = 10
"""Seconds within which a signal must have had its effect; a tenth of one on an idle core."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers need not end for a long time."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", TinyLlama(context_length=1 << 20))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the process under test may write to: its cache and its temporary folder."""
    for name, folder in (("XDG_CACHE_HOME", "cache"), ("TMPDIR", "tmp")):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def left_behind(cache: Path) -> list[str]:
    """Files that a finished run would not have there."""
    finished = {"weights.bin", "lock"}
    return [str(path) for path in cache.rglob("*") if path.is_file() and path.name not in finished | digests(cache)]


def digests(cache: Path) -> set[str]:
    return {path.name for path in (cache / "cache/rockpage/digests").glob("[!.]*.json")}


def endless(model: Path) -> list[str]:
    """Command line of an answer that goes on until it is interrupted."""
    return [*COMMAND, "run", str(model), "--prompt", PROMPT, "--max-tokens", "1000000", "--ignore-eos"]


# A process of its own


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_in_the_middle_of_an_answer(model: Path, cache: Path, number: int, status: int) -> None:
    with subprocess.Popen(endless(model), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(number)
        try:
            _, complaint = process.communicate(timeout=PROMPTLY)
        finally:
            process.kill()
    assert process.returncode == status
    assert complaint.strip() == b""
    assert left_behind(cache) == []


def test_ctrl_c_at_the_terminal(model: Path) -> None:
    with at_terminal(endless(model)) as (process, terminal):
        before = termios.tcgetattr(terminal)
        os.read(terminal, 1)
        started = time.monotonic()
        os.write(terminal, b"\x03")
        tail = drain(terminal)
        assert process.wait() == 130
        assert time.monotonic() - started < PROMPTLY
        assert termios.tcgetattr(terminal) == before
    assert b"\r\n" in tail[tail.index(b"^C") :]  # the terminal's echo, and a new line for the shell's prompt
    assert b"Traceback" not in tail


@contextmanager
def at_terminal(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a process whose controlling terminal is the other end of the descriptor."""
    terminal, other_end = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *command], cwd=ROOT, stdin=other_end, stdout=other_end, stderr=other_end
    ) as process:
        os.close(other_end)
        try:
            yield process, terminal
        finally:
            os.close(terminal)  # hangs up on whatever still runs


def drain(terminal: int) -> bytes:
    """Whatever is still written until the other end is closed."""
    seen = b""
    while True:
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # how Linux says that the other end is closed
                raise
            return seen


def test_a_job_in_the_background_is_not_stopped_by_its_terminal(model: Path) -> None:
    """Setting a terminal's modes from the background stops the job (SIGTTOU), at the very end of its work."""
    job = [*COMMAND, "tokenize", str(model), "--text", "hello"]
    script = (
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setpgid(0, 0)\n"
        f"    os.execv({COMMAND[0]!r}, {job!r})\n"
        "_, status = os.waitpid(pid, os.WUNTRACED)\n"
        "print('stopped' if os.WIFSTOPPED(status) else f'status {os.waitstatus_to_exitcode(status)}')\n"
    )
    with at_terminal([sys.executable, "-c", script]) as (_, terminal):
        assert drain(terminal).endswith(b"status 0\r\n")


def test_whoever_presses_ctrl_c_twice_does_not_wait() -> None:
    script = (
        "import signal\n"
        "from tools.signals import unwinding_signals\n"
        "with unwinding_signals():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        raise SystemExit('survived')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (-signal.SIGINT, b"")


# In this process


def test_signals_that_are_ignored_or_handled_stay_so() -> None:
    def own(_: int, __: FrameType | None) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, own)
    try:
        with unwinding_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("cache_works", [True, False])
def test_terminated_while_weights_are_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, model: Path, cache_works: bool, activations: str
) -> None:
    """In the cache, or in the temporary folder that stands in for it."""

    def write_half(plan: TilePlan | WeightsPlan, _: object, file: Any) -> NoReturn:
        file.write(bytes(plan.nbytes // 2))
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not come")

    if not cache_works:
        monkeypatch.setenv("XDG_CACHE_HOME", str(model))  # a file
    monkeypatch.setattr(TilePlan if activations == "int8" else WeightsPlan, "write", write_half)
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(model), "--prompt", PROMPT, "--activations", activations])
    assert stopped.value.code == 143
    assert left_behind(cache) == []
    assert list((cache / "tmp").iterdir()) == []


PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(params=["cpu", "emulated"])
def engine(request: pytest.FixtureRequest, model: Path, cache: Path) -> Iterator[Engine]:
    """Eight prompt tokens a step, so that an answer takes several steps of both kinds.

    Memory is looked at when the clock says so: without that, every answer runs through the same lines.
    """
    with Engine.load(
        model,
        runtime=request.param,
        pool_bytes=1 << 18,
        prefill_chunk=8,
        cache_dir=cache / "cache",
        watch_memory=False,
    ) as engine:
        yield engine


def interrupted(engine: Engine, consume: Callable[[Iterator[str]], object] = "".join) -> bool:
    """Take an answer until Ctrl-C comes, and say whether it came; the pool must be whole again."""
    stream = engine.generate(PROMPT, PARAMS)
    try:
        consume(stream)
        came = False
    except KeyboardInterrupt:
        came = True
    del stream  # closes it
    assert engine.cache.pool.used == 0
    engine.cache.pool.check()
    assert engine.idle
    return came


@pytest.fixture
def answer(engine: Engine) -> str:
    """The undisturbed answer, after which nothing is cached."""
    text = "".join(engine.generate(PROMPT, PARAMS))
    engine.prefix.invalidate()
    return text


def raising_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, interrupted in front of its n-th call."""
    calls = iter(range(1, call + 1))

    def wrapped(*operands: Any, **options: Any) -> Any:
        if next(calls, None) == call:
            raise KeyboardInterrupt
        return function(*operands, **options)

    return wrapped


@pytest.mark.parametrize("call", random.Random(8).sample(range(1, 15), 6))
def test_ctrl_c_within_attention(engine: Engine, answer: str, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """29 prompt tokens in chunks of 8 and 3 more one by one are 7 steps of 2 layers: calls 1 to 14."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "attend", raising_at(call, engine.runtime.attend))
        assert interrupted(engine)
    assert "".join(engine.generate(PROMPT, PARAMS)) == answer


def test_ctrl_c_does_not_wait_for_the_end_of_a_step(
    engine: Engine, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a large model takes seconds: the signal that comes in the first layer is acted upon in the second."""
    layers: list[int] = []
    attend = engine.runtime.attend

    def pressed_meanwhile(layer: int, *operands: Any) -> None:
        layers.append(layer)
        signal.raise_signal(signal.SIGINT)
        attend(layer, *operands)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "attend", pressed_meanwhile)
        assert interrupted(engine)
    assert layers == [0]
    assert "".join(engine.generate(PROMPT, PARAMS)) == answer


@pytest.mark.parametrize("call", [1, 2, 4])
def test_ctrl_c_while_sampling(engine: Engine, answer: str, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", raising_at(call, Sampler.sample))
        assert interrupted(engine)
    assert "".join(engine.generate(PROMPT, PARAMS)) == answer


def test_ctrl_c_while_scoring(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    expected = engine.score(ids).logprobs
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "attend", raising_at(5, engine.runtime.attend))
        with pytest.raises(KeyboardInterrupt):
            engine.score(ids)
    assert engine.cache.pool.used == 0
    engine.cache.pool.check()
    np.testing.assert_array_equal(engine.score(ids).logprobs, expected)


def test_ctrl_c_between_any_two_lines(engine: Engine, answer: str) -> None:
    """The real signal, raised in front of sixty of the thousands of lines that our code executes for an answer."""
    total = trace(engine.generate(PROMPT, PARAMS), at=0)
    assert total > 1500
    engine.prefix.invalidate()
    for point in random.Random(total).sample(range(1, total + 1), 60):
        assert interrupted(engine, functools.partial(trace, at=point)), point
        assert "".join(engine.generate(PROMPT, PARAMS)) == answer, point
        engine.prefix.invalidate()


def trace(stream: Iterator[str], at: int) -> int:
    """Take an answer, with SIGINT in front of line `at` of those of ours that run for it; returns how many do."""
    lines = 0

    def on_event(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if Path(frame.f_code.co_filename).parent.name not in ("hostcache", "staging", "npu"):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        "".join(stream)
    finally:
        sys.settrace(before)
    return lines
