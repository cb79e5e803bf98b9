"""A file is there when it is whole, and nothing is there before."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hostcache.errors import UsageError
from hostcache.whole_file import replace_file, whole_file


@pytest.fixture(params=["unnamed", "hidden"])
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a file system with unnamed files, and on one without."""
    if request.param == "hidden":
        real = os.open

        def refuse_unnamed(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse_unnamed)
    return tmp_path


def test_a_finished_file_has_its_name_its_content_and_its_mode(folder: Path) -> None:
    umask = os.umask(0o027)
    try:
        with whole_file(folder / "model") as fd:
            os.write(fd, b"content")
            assert not (folder / "model").exists()
    finally:
        os.umask(umask)
    assert os.listdir(folder) == ["model"]
    assert (folder / "model").read_bytes() == b"content"
    assert stat.S_IMODE((folder / "model").stat().st_mode) == 0o640


def test_an_error_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_file(folder / "model") as fd:
        assert os.write(fd, b"half of it") // 0
    assert os.listdir(folder) == []


def test_a_file_that_is_there_stays(folder: Path) -> None:
    (folder / "model").write_bytes(b"older")
    already = "model is there already; remove it or give another name"
    with pytest.raises(UsageError, match=already), whole_file(folder / "model"):
        pytest.fail("it was opened")
    with pytest.raises(UsageError, match="other has come meanwhile"), whole_file(folder / "other"):
        (folder / "other").write_bytes(b"faster")
    assert sorted(os.listdir(folder)) == ["model", "other"]
    assert (folder / "model").read_bytes() == b"older"
    assert (folder / "other").read_bytes() == b"faster"


def test_a_link_to_nowhere_counts_as_there(folder: Path) -> None:
    (folder / "model").symlink_to("nowhere")
    with pytest.raises(UsageError, match="is there already"), whole_file(folder / "model"):
        pytest.fail("it was opened")


def test_a_replacement_is_whole_and_takes_the_old_ones_place(folder: Path) -> None:
    (folder / "model").write_bytes(b"the older content")
    with whole_file(folder / "model", 0o600, replace=True) as fd:
        os.write(fd, b"new")
        assert (folder / "model").read_bytes() == b"the older content"
    assert os.listdir(folder) == ["model"]
    assert (folder / "model").read_bytes() == b"new"
    assert stat.S_IMODE((folder / "model").stat().st_mode) == 0o600
    with whole_file(folder / "first", replace=True) as fd:  # nothing was there
        os.write(fd, b"first")
    assert (folder / "first").read_bytes() == b"first"


def test_a_replacement_that_is_not_finished_changes_nothing(folder: Path) -> None:
    (folder / "model").write_bytes(b"the older content")
    with pytest.raises(ZeroDivisionError), whole_file(folder / "model", replace=True) as fd:
        assert os.write(fd, b"half of it") // 0
    assert os.listdir(folder) == ["model"]
    (folder / "folder").mkdir()
    with pytest.raises(IsADirectoryError), whole_file(folder / "folder", replace=True):
        pass
    assert sorted(os.listdir(folder)) == ["folder", "model"]
    assert (folder / "model").read_bytes() == b"the older content"


def test_a_missing_folder_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "model"):
        pytest.fail("it was opened")


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with whole_file(folder / "model"):
        pass
    with pytest.raises(UsageError), whole_file(folder / "model"):
        pytest.fail("it was opened")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_small_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"the longer content of before")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert reader.read() == b"the longer content of before"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["note"]


def test_a_small_file_for_others_is_as_open_as_the_umask_lets_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "note", b"new", mode=0o666)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note").stat().st_mode) == 0o640


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(path, b"new")
    assert os.listdir(tmp_path) == ["folder"]
