"""`rockpage cache`, on caches that the test has written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu.cache_room import open_in_use
from tests.tools.command_line import assert_refused, run_here

NEW, OLD = f"{'1' * 32}-int8-1", f"{'0' * 32}-fp32-1"


@pytest.fixture
def utc() -> Iterator[None]:
    """Times are shown as the machine's clock on the wall does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def weights(utc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two entries: 3 MiB used at noon on the second day, 1 MiB used at noon on the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", "8MiB")
    folder = tmp_path / "rockpage" / "weights"
    for name, nbytes, used in ((NEW, 3 << 20, 1_767_355_200), (OLD, 1 << 20, 1_767_268_800)):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights.bin").write_bytes(bytes(nbytes))
        os.utime(folder / name / "weights.bin", (used, used))
    return folder


def test_it_says_where_and_how_much(capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    with open_in_use(weights / NEW / "weights.bin"):
        outcome = run_here(capsys, "cache")
    assert outcome.out.splitlines() == [
        f"{weights}: 4.0 MiB of 8.0 MiB (ROCKPAGE_CACHE_SIZE)",
        f"  {OLD}        1.0 MiB  used 2026-01-01 12:00",
        f"  {NEW}        3.0 MiB  in use",
        f"{weights.with_name('rknn')}: 0.0 MiB of 8.0 MiB (ROCKPAGE_CACHE_SIZE)",
        f"{weights.with_name('keys')}: 0.0 MiB of 8.0 MiB (ROCKPAGE_CACHE_SIZE)",
    ]
    outcome = run_here(capsys, "cache", "--json")
    assert json.loads(outcome.out) == {
        "folder": str(weights),
        "bytes": 4 << 20,
        "limit_bytes": 8 << 20,
        "entries": [
            {"name": OLD, "bytes": 1 << 20, "used": 1_767_268_800, "in_use": False},
            {"name": NEW, "bytes": 3 << 20, "used": 1_767_355_200, "in_use": False},
        ],
        "graphs": {"folder": str(weights.with_name("rknn")), "bytes": 0, "limit_bytes": 8 << 20, "entries": []},
        "keys": {"folder": str(weights.with_name("keys")), "bytes": 0, "limit_bytes": 8 << 20, "entries": []},
    }


@pytest.mark.parametrize(
    ("what", "path"),
    [("graphs", f"rknn/{'2' * 32}-rk3588-1/graph.rknn"), ("keys", f"keys/{'2' * 32}-int4-1/keys.bin")],
    ids=["graphs", "keys"],
)
def test_what_else_was_made_is_shown_and_cleared_likewise(
    capsys: pytest.CaptureFixture[str], weights: Path, what: str, path: str
) -> None:
    file = weights.parent / path
    entry = file.parent
    entry.mkdir(parents=True)
    file.write_bytes(bytes(2 << 20))
    os.utime(file, (1_767_355_200, 1_767_355_200))
    lines = run_here(capsys, "cache").out.splitlines()
    at = lines.index(f"{entry.parent}: 2.0 MiB of 8.0 MiB (ROCKPAGE_CACHE_SIZE)")
    assert lines[at + 1] == f"  {entry.name:<42}     2.0 MiB  used 2026-01-02 12:00"
    outcome = run_here(capsys, "cache", "--clear", "--json")
    assert json.loads(outcome.out)[what]["entries"] == []
    assert os.listdir(entry.parent) == ["lock"]


def test_clear_removes_what_nobody_uses(capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    with open_in_use(weights / NEW / "weights.bin"):
        outcome = run_here(capsys, "cache", "--clear", "--json")
    assert [entry["name"] for entry in json.loads(outcome.out)["entries"]] == [NEW]
    assert sorted(os.listdir(weights)) == [NEW, "lock"]
    assert json.loads(run_here(capsys, "cache", "--clear", "--json").out)["bytes"] == 0


def test_a_cache_that_is_not_there_is_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("ROCKPAGE_CACHE_SIZE", raising=False)
    for arguments in ([], ["--clear"]):
        outcome = run_here(capsys, "cache", *arguments)
        assert outcome.out.splitlines() == [
            f"{tmp_path}/none/rockpage/{name}: 0.0 MiB of 4.00 GiB (ROCKPAGE_CACHE_SIZE)"
            for name in ("weights", "rknn", "keys")
        ]
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_a_cache_is_one_line(
    capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", "4G")
    assert_refused(run_here(capsys, "cache"), "ROCKPAGE_CACHE_SIZE: '4G' is not a size")
    monkeypatch.delenv("ROCKPAGE_CACHE_SIZE")
    (tmp_path / "rockpage" / "weights").rename(tmp_path / "moved")
    (tmp_path / "rockpage" / "weights").write_text("a file where the folder should be")
    for arguments in ([], ["--clear"]):
        assert_refused(run_here(capsys, "cache", *arguments), "Not a directory")
