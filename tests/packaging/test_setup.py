"""What setup.py says where rockpage cannot run: pip prints it when no wheel fits and it has to build."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Keyword arguments of every call to setuptools; nothing is built."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("setuptools.setup", lambda **keywords: calls.append(keywords))
    return calls


def test_this_machine_is_one_it_runs_on(set_up: list[dict[str, object]]) -> None:
    runpy.run_path(str(SETUP))
    (keywords,) = set_up
    assert keywords["options"] == {"bdist_wheel": {"py_limited_api": "cp310"}}


@pytest.mark.parametrize("system", ["darwin", "win32", "android"])
def test_another_system_is_named_and_nothing_is_built(
    set_up: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(SystemExit, match=rf"^rockpage runs on Linux, this is {system}: use "):
        runpy.run_path(str(SETUP))
    assert not set_up


def test_a_32_bit_python_is_named_and_nothing_is_built(
    set_up: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "maxsize", (1 << 31) - 1)
    monkeypatch.setattr("platform.machine", lambda: "armv7l")
    with pytest.raises(SystemExit, match=r"needs a 64-bit Python on x86-64 or aarch64, this one is 32-bit \(armv7l\)$"):
        runpy.run_path(str(SETUP))
    assert not set_up


def test_a_free_threaded_python_is_named_and_nothing_is_built(
    set_up: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(SystemExit, match=r"which a free-threaded Python lacks: use python3\.14, not python3\.14t$"):
        runpy.run_path(str(SETUP))
    assert not set_up
