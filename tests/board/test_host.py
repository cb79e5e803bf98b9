"""What is missing for an emulating job is named, and a command that fails is heard."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.board.host import JobError, require_packages, run


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    here, away = str(tmp_path), str(tmp_path / "away")
    require_packages({here: "coreutils"})
    with pytest.raises(JobError, match=r"sudo apt-get install --no-install-recommends flex bison$"):
        require_packages({away: "flex", here: "coreutils", f"{away}2": "bison"})
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(JobError, match="aarch64 cannot run this"):
        require_packages({here: "coreutils"})


def test_a_command_that_fails_is_an_error_with_the_end_of_its_output() -> None:
    with pytest.raises(JobError, match=r"ended with status 2:\nthe compiler's words$"):
        run(["sh", "-c", 'echo "the compiler\'s words" >&2; exit 2'])
    with pytest.raises(JobError, match=r"no-such-make: .*No such file"):
        run(["no-such-make"])
    assert run(["sh", "-c", "echo $MAKEFLAGS$LC_ALL"]) == "C\n"
