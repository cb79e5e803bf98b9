"""A folder of prefixes: they come back after a restart, keep within bounds, and never stand in anybody's way."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hostcache import Namespace, PrefixStore
from hostcache.errors import UsageError
from hostcache.state_file import StateReader, state_bytes
from hostcache.state_format import StateHeader

from .saved import HOME, SMALL, Home, prompt

SYSTEM = prompt(18)  # four full blocks and two tokens
FILE_BYTES = state_bytes(StateHeader.of("prefix", SMALL, HOME, SYSTEM[:16], computed=16))


class Process:
    """A pool with a store, as after each start; time is what it is set to."""

    def __init__(
        self, folder: Path, *, max_bytes: int = 1 << 20, max_age: float = 1000, now: float = 0, blocks: int = 12
    ) -> None:
        self.now = now
        self.home = Home(blocks, max_pinned=blocks - 2)
        self.store = PrefixStore(
            folder, self.home.cache, self.home.prefix, max_bytes=max_bytes, max_age=max_age, clock=lambda: self.now
        )

    def keep(self, tokens: np.ndarray, namespace: Namespace = HOME) -> int:
        self.home.compute(tokens, namespace)
        return self.store.save(namespace, tokens)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_pinned_prefix_survives_a_restart(tmp_path: Path) -> None:
    """It comes back from disk, byte for byte, for any prompt that begins with it, and is computed by nobody."""
    first = Process(tmp_path)
    first.home.compute(SYSTEM)
    assert first.home.prefix.pin(HOME, SYSTEM, "console", 60) == 16
    assert first.store.save(HOME, SYSTEM) == 16
    again = Process(tmp_path)
    asked = np.concatenate([SYSTEM, prompt(5, seed=7)])
    assert again.home.prefix.known_tokens(HOME, asked) == 0
    assert again.store.restore(HOME, asked) == 16
    assert again.home.known(asked) == 16
    assert again.home.prefix.pin(HOME, SYSTEM, "console", 60) == 16
    assert again.store.restore(HOME, asked) == 0  # it is there
    again.home.prefix.unpin("console")
    again.home.check_idle()


def test_the_folder_and_its_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    Process(folder).keep(SYSTEM)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (name,) = files(folder)
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert name.startswith(HOME.digest[:32])
    with StateReader(folder / name) as reader:
        assert (reader.header.kind, reader.header.computed, reader.note) == ("prefix", 16, b"")
        assert np.array_equal(reader.tokens, SYSTEM[:16])


def test_a_hit_in_the_folder_needs_equal_tokens_and_the_same_namespace(tmp_path: Path) -> None:
    Process(tmp_path).keep(SYSTEM)
    again = Process(tmp_path)
    other = SYSTEM.copy()
    other[0] += 1
    assert again.store.restore(HOME, other) == 0
    for namespace in (Namespace("another model", salt="a secret"), replace(HOME, salt="b"), replace(HOME, adapter="c")):
        assert again.store.restore(namespace, SYSTEM) == 0
    assert again.home.prefix.resident == 0
    half = SYSTEM.copy()
    half[9:] += 1
    assert again.store.restore(HOME, half) == 8  # the blocks that are equal
    assert again.home.known(half) == 8
    assert again.store.restore(HOME, SYSTEM) == 8  # and then the rest
    assert again.home.known(SYSTEM) == 16


def test_the_longest_of_several_is_taken(tmp_path: Path) -> None:
    process = Process(tmp_path, blocks=20)
    for length in (4, 12, 8):
        assert process.keep(SYSTEM[:length]) == length
    assert process.store.save(HOME, SYSTEM[:12]) == 12  # the same file once more
    assert len(files(tmp_path)) == 3
    again = Process(tmp_path)
    assert again.store.restore(HOME, SYSTEM) == 12


def test_a_prefix_that_is_not_known_is_not_kept(tmp_path: Path) -> None:
    process = Process(tmp_path)
    assert process.store.save(HOME, SYSTEM) == 0
    assert process.keep(SYSTEM[:3]) == 0  # not a block
    assert files(tmp_path) == []
    assert process.home.prefix.nodes == 2  # root and tail: asking left nothing
    with pytest.raises(UsageError, match="must be int32"):
        process.store.restore(HOME, np.zeros(8, np.int64))


def test_bytes_are_bounded_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    process = Process(tmp_path, max_bytes=3 * FILE_BYTES, blocks=20)
    prompts = [prompt(16, seed=seed) for seed in range(4)]
    for process.now, tokens in enumerate(prompts[:3], 1):
        assert process.keep(tokens) == 16
    again = Process(tmp_path, max_bytes=3 * FILE_BYTES, now=10)
    assert again.store.restore(HOME, prompts[0]) == 16  # used now
    assert again.keep(prompts[3]) == 16
    assert len(files(tmp_path)) == 3
    final = Process(tmp_path, max_bytes=3 * FILE_BYTES, now=10)
    assert [final.store.restore(HOME, tokens) for tokens in prompts] == [16, 0, 16, 16]
    assert len(files(tmp_path)) == 3
    smaller = Process(tmp_path, max_bytes=FILE_BYTES + 1, now=10)
    assert len(files(tmp_path)) == 1
    assert smaller.keep(prompts[0]) == 16
    assert len(files(tmp_path)) == 1


def test_a_prefix_larger_than_the_folder_may_be_evicts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(tmp_path, max_bytes=FILE_BYTES)
    process.keep(SYSTEM)
    assert process.keep(prompt(20, seed=1)) == 0
    assert f"is not kept: {tmp_path} may hold {FILE_BYTES}" in caplog.text
    assert Process(tmp_path, max_bytes=FILE_BYTES).store.restore(HOME, SYSTEM) == 16


def test_what_is_not_used_goes_with_age(tmp_path: Path) -> None:
    """Files of another model too: nobody asks for them any more."""
    process = Process(tmp_path, now=100)
    process.keep(SYSTEM, Namespace("the model of last year"))
    process.keep(SYSTEM)
    assert len(files(tmp_path)) == 2
    again = Process(tmp_path, now=1000)
    assert again.store.restore(HOME, SYSTEM) == 16
    Process(tmp_path, now=1101)
    assert len(files(tmp_path)) == 1
    assert Process(tmp_path, now=2000).store.restore(HOME, SYSTEM) == 16
    Process(tmp_path, now=3001)
    assert files(tmp_path) == []


def test_a_board_that_wakes_up_in_1970_keeps_its_files(tmp_path: Path) -> None:
    Process(tmp_path, now=1_700_000_000).keep(SYSTEM)
    assert Process(tmp_path, now=12).store.restore(HOME, SYSTEM) == 16


def damage(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0, 30, -40], ids=["magic", "header", "block"])
def test_a_damaged_file_is_set_aside_reported_and_its_prefix_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: int
) -> None:
    Process(tmp_path).keep(SYSTEM)
    (name,) = files(tmp_path)
    damage(tmp_path / name, where)
    again = Process(tmp_path)
    assert again.store.restore(HOME, SYSTEM) == 0
    assert name in caplog.text
    assert "cannot be used" in caplog.text or "is computed again" in caplog.text
    assert files(tmp_path) == [name + ".bad"]
    caplog.clear()
    assert again.store.restore(HOME, SYSTEM) == 0
    assert caplog.text == ""  # it is said once
    assert again.keep(SYSTEM) == 16
    assert Process(tmp_path).store.restore(HOME, SYSTEM) == 16
    assert files(tmp_path) == [name, name + ".bad"]
    assert len(files(Process(tmp_path, now=9e9).store.folder)) == 0  # set-aside files go with age, too


def test_set_aside_files_count_and_so_does_what_a_killed_writer_left(tmp_path: Path) -> None:
    for name, used in (("x.kv.bad", 1), (".y.kv.0123456789abcdef.tmp", 2)):
        (tmp_path / name).write_bytes(bytes(FILE_BYTES))
        os.utime(tmp_path / name, (used, used))
    (tmp_path / "notes.txt").write_text("not ours")
    process = Process(tmp_path, max_bytes=2 * FILE_BYTES, now=5)
    assert process.keep(SYSTEM) == 16
    assert "x.kv.bad" not in files(tmp_path)
    assert len(files(tmp_path)) == 3
    assert (tmp_path / "notes.txt").exists()


def test_a_file_that_is_gone_or_another_costs_its_computation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Process(tmp_path).keep(SYSTEM)
    (name,) = files(tmp_path)
    again, third = Process(tmp_path), Process(tmp_path)
    other = Process(tmp_path / "other")
    other.keep(prompt(16, seed=9))
    (tmp_path / "other" / files(tmp_path / "other")[0]).replace(tmp_path / name)
    assert again.store.restore(HOME, SYSTEM) == 0
    assert "is another file by now" in caplog.text
    (tmp_path / name).unlink()
    assert third.store.restore(HOME, SYSTEM) == 0
    assert "No such file" in caplog.text
    third.home.check_idle()


def test_a_full_disk_is_reported_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert process.keep(SYSTEM) == 0
    assert f"a prefix cannot be kept in {tmp_path}: No space left on device" in caplog.text
    assert files(tmp_path) == []
    process.home.check_idle()


def test_limits_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for limits in ({"max_bytes": 0}, {"max_age": 0.0}, {"max_age": float("nan")}):
        with pytest.raises(UsageError, match="positive limits"):
            Process(tmp_path, **limits)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be kept in .*file: .*; give a folder of your own"):
        Process(tmp_path / "file")


def test_invalidation_reaches_every_tier(tmp_path: Path) -> None:
    """After `invalidate`, neither the pool nor the folder has the old version, whoever wrote it; the new one stays."""
    old, new = replace(HOME, prompt_version="1"), replace(HOME, prompt_version="2")
    process = Process(tmp_path, blocks=24)
    process.keep(SYSTEM, old)
    process.keep(SYSTEM, new)
    Process(tmp_path).keep(SYSTEM[:12], old)  # another process
    assert len(files(tmp_path)) == 3
    assert process.home.prefix.invalidate(prompt_version="1") == 5
    assert (process.home.known(SYSTEM, old), process.store.restore(old, SYSTEM)) == (0, 0)
    assert Process(tmp_path).store.restore(old, SYSTEM) == 0
    assert Process(tmp_path).store.restore(new, SYSTEM) == 16
    process.home.prefix.invalidate(namespace=new)
    assert Process(tmp_path).store.restore(new, SYSTEM) == 0
    process.keep(SYSTEM)
    process.home.prefix.invalidate()
    assert files(tmp_path) == []


def test_a_restore_under_a_full_pool_keeps_its_sources(tmp_path: Path) -> None:
    """Pool full of cached prefixes, folder at its limit: reading back evicts neither the file nor what it stands on."""
    process = Process(tmp_path, max_bytes=FILE_BYTES, blocks=5)
    process.keep(SYSTEM)
    process.home.compute(prompt(8, seed=3))  # evicts the tail of the prefix
    known = process.home.prefix.known_tokens(HOME, SYSTEM)
    assert known < 16
    assert process.store.restore(HOME, SYSTEM) == 16 - known
    assert process.home.known(SYSTEM) == 16
    assert len(files(tmp_path)) == 1


def test_a_pool_in_use_restores_what_fits(tmp_path: Path) -> None:
    Process(tmp_path).keep(SYSTEM)
    again = Process(tmp_path, blocks=5)
    table = again.home.cache.table()
    table.append(16)
    assert again.store.restore(HOME, SYSTEM) == 4
    table.append(4)
    assert again.store.restore(HOME, SYSTEM) == 0
    table.release()
    again.home.check_idle()


def test_what_is_kept_already_is_not_written_again(tmp_path: Path) -> None:
    """But it counts as used, and a file that somebody has removed is written again."""
    process = Process(tmp_path, now=100)
    assert process.keep(SYSTEM) == 16
    (path,) = tmp_path.iterdir()
    inode = path.stat().st_ino
    process.now = 200
    assert process.store.save(HOME, SYSTEM) == 16
    assert (path.stat().st_ino, path.stat().st_mtime) == (inode, 200)
    again = Process(tmp_path, now=300)
    assert again.store.restore(HOME, SYSTEM) == 16
    assert again.store.save(HOME, SYSTEM) == 16
    assert (path.stat().st_ino, path.stat().st_mtime) == (inode, 300)
    path.unlink()
    assert again.store.save(HOME, SYSTEM) == 16
    assert path.exists()
