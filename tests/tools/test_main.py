"""The command's frame: statuses, one-line errors, interruption, and the terminal it leaves behind."""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hostcache.errors import BadModelFile, UsageError
from tools import main as main_module
from tools.command import Subparsers, add_command
from tools.main import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from tools.main import main; sys.exit(main())"]


@pytest.fixture
def with_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Registers a subcommand `try` that does what a test wants."""

    def register(run: Callable[[argparse.Namespace], int]) -> None:
        def add_parser(subparsers: Subparsers) -> None:
            add_command(subparsers, "try", run, summary="try something", example="rockpage try")

        monkeypatch.setattr(main_module, "COMMANDS", (SimpleNamespace(add_parser=add_parser),))

    return register


Register = Callable[[Callable[[argparse.Namespace], int]], None]


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_is_the_subcommands(with_command: Register, status: int) -> None:
    with_command(lambda _: status)
    assert main(["try"]) == status


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("a prompt is empty: give one", prompt=""), "a prompt is empty: give one"),
        (BadModelFile("key 'a\nb\x1b[31m'\tis twice there"), "key 'a b?[31m' is twice there"),
        (FileNotFoundError(2, "No such file or directory", "/no/such.txt"), "/no/such.txt: No such file or directory"),
        (PermissionError(13, "Permission denied", "/etc/x"), "/etc/x: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_failure_is_one_line_and_status_2(
    with_command: Register, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    with_command(failing(error))
    assert main(["try"]) == 2
    assert capsys.readouterr() == ("", f"rockpage: error: {line}\n")


def test_debugging_lets_the_traceback_through(with_command: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(failing(UsageError("wrong")))
    monkeypatch.setenv("ROCKPAGE_DEBUG", "1")
    with pytest.raises(UsageError, match="wrong"):
        main(["try"])


def test_a_bug_is_not_dressed_up_as_bad_input(with_command: Register) -> None:
    with_command(failing(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_ctrl_c_is_status_130(with_command: Register, capsys: pytest.CaptureFixture[str]) -> None:
    with_command(failing(KeyboardInterrupt()))
    assert main(["try"]) == 130
    assert capsys.readouterr() == ("", "\n")


@pytest.mark.parametrize("becomes", [None, ImportError("initialization failed")], ids=["lost", "another error"])
def test_a_signal_decides_the_status_even_if_its_exception_does_not_arrive(
    with_command: Register, becomes: Exception | None
) -> None:
    """A C library in the middle of its initialisation, or a destructor, makes something else of it."""

    def run(_: argparse.Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            if becomes is not None:
                raise becomes from None
        return 0

    with_command(run)
    assert main(["try"]) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["no-such-command"], "no-such-command"),
        (["plan", "--no-such-option"], "--no-such-option"),
        (["plan", "--ram", "4G"], "'4G' is not a size"),
        (["plan", "--context", "-1"], "--context"),
        (["plan", "--geo", "layers=1,kv_heads=1,head_dim=1"], "--geo"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rockpage: error: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [module.__name__.rpartition(".")[2] for module in main_module.COMMANDS])
def test_every_subcommand_has_an_example_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  rockpage {command}" in out
    assert "--json" in out


def test_help_waits_for_nothing_heavy() -> None:
    script = (
        "import sys; from tools.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'numpy', 'cffi', 'onnxruntime', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[0].startswith("usage: rockpage")
    assert run.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "plan", "--geometry", "layers=1,kv_heads=1,head_dim=8", "--weights", "1", "--ram", "4GiB"]
    with os.fdopen(writer, "w") as stdout:
        run = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert run.stderr == b""
    assert run.returncode == 141


def test_ctrl_c_on_a_real_terminal_leaves_it_as_it_was() -> None:
    """The command switches echo off, as a prompt may, and is interrupted from the keyboard."""
    script = (
        "import argparse, sys, termios, time\n"
        "from tools import main as module\n"
        "from tools.command import add_command\n"
        "def run(_):\n"
        "    modes = termios.tcgetattr(0)\n"
        "    modes[3] &= ~termios.ECHO\n"
        "    termios.tcsetattr(0, termios.TCSANOW, modes)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "class Try:\n"
        "    def add_parser(self, subparsers): add_command(subparsers, 'try', run, summary='s', example='e')\n"
        "module.COMMANDS = (Try(),)\n"
        "sys.exit(module.main(['try']))\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:  # the child: its controlling terminal is the other end of `terminal`
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", script])
    before = termios.tcgetattr(terminal)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1024)
    assert termios.tcgetattr(terminal) != before
    started = time.monotonic()
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert time.monotonic() - started < 30
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
