"""Runs the command, in this process or in one of its own, and says what a refusal looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.main import main

__all__ = ["COMMAND", "ROOT", "Outcome", "assert_refused", "run_apart", "run_here"]

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "import sys; from tools.main import main; sys.exit(main())")
PATIENCE = 30
"""Seconds until a process of its own counts as hanging; the slowest takes one on an idle core."""

LONGEST_COMPLAINT = 1100
"""Characters of a line that a person still reads."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run the command in this process: milliseconds instead of a third of a second."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1  # as the interpreter does
    return Outcome(status, *capsys.readouterr())


def run_apart(
    *arguments: str,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Outcome:
    """Run the command in a process of its own; a hang fails the test.

    Args:
        arguments: of the command.
        prefix: what starts it, such as a shell that redirects or `prlimit`.
        environment: variables to add.
        stdin: what it reads.
    """
    process = subprocess.run(
        [*prefix, *COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        input=stdin,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Outcome(process.returncode, process.stdout.decode(), process.stderr.decode())


def assert_refused(outcome: Outcome, *words: str, out: str = "") -> None:
    """Status 2, nothing but `out` on stdout, and one readable line on stderr that holds `words`."""
    assert outcome.status == 2, outcome
    assert outcome.out == out
    assert outcome.err.startswith("rockpage: error: "), outcome.err
    assert outcome.err.endswith("\n")
    assert outcome.err[:-1].isprintable(), outcome.err
    assert len(outcome.err) < LONGEST_COMPLAINT
    for word in words:
        assert word in outcome.err
