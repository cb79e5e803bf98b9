"""Between pool and file: into whatever blocks are free, all of it or nothing, and never over what somebody uses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import BadStateFile
from hostcache.state_file import StateReader

from .saved import HOME, SMALL, Home, prompt, saved_file

SECTION = SMALL.block_bytes + 32


def test_restore_into_a_fragmented_pool(tmp_path: Path) -> None:
    """Three sequences interleaved, the middle one ends: its holes are what there is."""
    tokens = saved_file(tmp_path / "state", length=12)
    home = Home(blocks=9)
    tables = [home.cache.table() for _ in range(3)]
    for _ in range(3):
        for table in tables:
            table.append(4)
    held = tables[0].blocks + tables[2].blocks
    before = [home.cache.view(block).copy() for block in held]
    tables[1].release()
    assert home.restore(tmp_path / "state") == 12
    hit = home.prefix.match(HOME, tokens, whole=True)
    assert sorted(hit.blocks) == [1, 4, 7]
    home.pool.release_all(hit.blocks)
    home.prefix.release_node(hit.node)
    assert home.known(tokens) == 12
    assert all(np.array_equal(home.cache.view(block), content) for block, content in zip(held, before, strict=True))


def test_a_damaged_block_brings_nothing_back_and_takes_nothing(tmp_path: Path) -> None:
    """The last of three is damaged: the first two were read into the pool, and must not be known."""
    path = tmp_path / "state"
    tokens = saved_file(path, length=12)
    data = bytearray(path.read_bytes())
    data[-SECTION + 3] ^= 4
    path.write_bytes(data)
    home = Home(blocks=4)
    with pytest.raises(BadStateFile, match=r"block 2 is damaged; it was set aside as state.bad"):
        home.restore(path)
    assert (home.known(tokens), home.pool.free) == (0, 4)
    home.check_idle()
    home.compute(tokens)  # whoever gets the blocks now computes into them
    assert home.known(tokens) == 12


def test_an_error_does_not_hold_on_to_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps it, as loggers do, does not keep the pool's memory with it."""
    path = tmp_path / "state"
    tokens = saved_file(path, length=12)
    data = bytearray(path.read_bytes())
    data[-SECTION + 3] ^= 4
    path.write_bytes(data)
    home, other = Home(), Home()
    with pytest.raises(BadStateFile) as damaged:
        home.restore(path)
    home.cache.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    other.compute(tokens)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as refused:
        other.save(path, tokens)
    other.cache.close()
    assert damaged.value.__traceback__ is not None
    assert refused.value.__traceback__ is not None


def test_making_room_does_not_evict_what_the_rest_stands_on(tmp_path: Path) -> None:
    """The pool is full, the head of the prefix is its oldest content, and the rest of it is to come from the file."""
    tokens = saved_file(tmp_path / "state", length=12)
    home = Home(blocks=4)
    home.compute(tokens[:4])
    others = prompt(12, seed=1)
    home.compute(others)
    assert home.pool.free == 0
    assert home.restore(tmp_path / "state") == 8
    assert home.known(tokens) == 12
    assert home.known(others) == 4
    home.check_idle()


def test_what_is_in_use_is_never_taken(tmp_path: Path) -> None:
    """Two of five blocks are free: two of the three are read, and those are known."""
    tokens = saved_file(tmp_path / "state", length=12)
    home = Home(blocks=5)
    table = home.cache.table()
    table.append(12)
    before = [home.cache.view(block).copy() for block in table.blocks]
    assert home.restore(tmp_path / "state") == 8
    assert home.known(tokens) == 8
    assert all(
        np.array_equal(home.cache.view(block), content) for block, content in zip(table.blocks, before, strict=True)
    )
    table.append(8)  # what came back gives way like anything cached
    assert home.known(tokens) == 0
    assert home.restore(tmp_path / "state") == 0  # no room at all
    table.release()
    home.check_idle()


def test_what_is_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = saved_file(tmp_path / "state", length=10)
    home = Home()
    home.compute(tokens[:8])
    read: list[int] = []
    real = StateReader.read_block

    def counted(self: StateReader, block: int) -> NDArray[np.uint8]:
        read.append(block)
        return real(self, block)

    monkeypatch.setattr(StateReader, "read_block", counted)
    assert home.restore(tmp_path / "state") == 2
    assert home.restore(tmp_path / "state") == 0
    assert read == [2]
    assert home.known(tokens) == 10
    assert home.prefix.resident == 3
    home.check_idle()


def test_no_more_is_read_than_is_of_use(tmp_path: Path) -> None:
    tokens = saved_file(tmp_path / "state", length=12)
    for most, expected in ((3, 0), (4, 4), (7, 4), (11, 8), (12, 12), (99, 12)):
        home = Home()
        assert home.restore(tmp_path / "state", most=most) == expected
        assert home.known(tokens) == expected
        home.check_idle()


def test_what_was_restored_is_not_written_over_by_who_continues_it(tmp_path: Path) -> None:
    """The half-full last block is the tree's: a sequence that goes on gets a private copy."""
    tokens = saved_file(tmp_path / "state", length=10)
    home = Home()
    home.restore(tmp_path / "state")
    hit = home.prefix.match(HOME, np.append(tokens, 7).astype(np.int32))
    table = home.cache.table()
    table.adopt([*hit.blocks, hit.partial], 10)
    table.append(1)
    assert table.blocks[-1] != hit.partial
    assert home.known(tokens) == 10


def test_a_session_that_grows_is_saved_over_and_over(tmp_path: Path) -> None:
    path, tokens = tmp_path / "state", prompt(40)
    for length in range(4, 40, 5):
        home = Home()
        if path.exists():
            assert home.restore(path) == length - 5
        home.compute(tokens[:length])
        assert home.save(path, tokens[:length]) == length
        home.check_idle()
    assert os.listdir(tmp_path) == ["state"]
