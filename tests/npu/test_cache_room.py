"""The bound on the weights cache: the oldest go, what is in use stays, and nothing that fails spoils it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hostcache.errors import UsageError
from npu.cache_room import DEFAULT_LIMIT, CacheRoom, cache_limit, open_in_use
from npu.decoder import Decoder
from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.onnx_graph import WEIGHTS_FILE
from npu.weights import WeightsPlan, plan_weights
from npu.weights_cache import weights_folder, weights_room
from tests.npu.tiny import write_tiny_llama


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as opened:
        yield opened


class Cache:
    """A cache that models are loaded into by their digest's first letter, oldest use first."""

    def __init__(self, tiny: GGUFFile, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: WeightsPlan = plan_weights(tiny, ModelConfig.from_gguf(tiny), "int8")
        self.entry_bytes = self.plan.nbytes + 32  # the weights and their SHA-256
        self.root = root
        self.room: CacheRoom = weights_room(root)
        self.weights = self.room.folder
        self._tiny = tiny
        self._monkeypatch = monkeypatch
        self._clock = 1_000_000

    def bound(self, nbytes: int) -> None:
        self._monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", str(nbytes))

    def load(self, letter: str) -> None:
        """Load a model, a minute behind the one before."""
        with weights_folder(self._tiny, self.plan, letter * 64, "int8", self.root) as folder:
            assert (folder / WEIGHTS_FILE).stat().st_size == self.entry_bytes
        self._clock += 60
        os.utime(folder / WEIGHTS_FILE, (self._clock, self._clock))

    def path(self, letter: str) -> Path:
        return self.weights / f"{letter * 32}-int8-1" / WEIGHTS_FILE

    @property
    def letters(self) -> str:
        """What is there, the least recently used first."""
        return "".join(entry.folder.name[0] for entry in self.room.entries())


@pytest.fixture
def cache(tiny: GGUFFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tiny, tmp_path / "cache", monkeypatch)
    cache.bound(3 * cache.entry_bytes)
    for letter in "abc":
        cache.load(letter)
    assert cache.letters == "abc"
    return cache


def test_what_was_used_longest_ago_goes(cache: Cache) -> None:
    os.utime(cache.path("b"), (1, 1))
    cache.load("a")
    cache.load("d")
    assert cache.letters == "cad"
    cache.load("e")
    assert cache.letters == "ade"


def test_nothing_goes_while_there_is_room_to_the_last_byte(cache: Cache) -> None:
    cache.bound(4 * cache.entry_bytes)
    cache.load("d")
    assert cache.letters == "abcd"
    cache.bound(5 * cache.entry_bytes - 1)
    cache.load("e")
    assert cache.letters == "bcde"


def test_a_limit_below_one_entry_leaves_the_one_that_was_written(cache: Cache) -> None:
    cache.bound(1)
    cache.load("b")  # it is there: nothing is written, so nothing goes
    assert cache.letters == "acb"
    cache.load("d")
    assert cache.letters == "d"


def test_a_load_uses_its_entry(cache: Cache) -> None:
    """The stamp is the file's own, so that every process and every mount option agrees on it."""
    with weights_folder(cache._tiny, cache.plan, "a" * 64, "int8", cache.root):
        assert cache.letters == "bca"


def test_what_a_loader_uses_stays(cache: Cache) -> None:
    with weights_folder(cache._tiny, cache.plan, "a" * 64, "int8", cache.root):
        os.utime(cache.path("a"), (1, 1))
        assert [entry.in_use for entry in cache.room.entries()] == [True, False, False]
        cache.load("d")
        assert cache.letters == "acd"
        cache.bound(1)
        cache.room.clear()
        assert cache.letters == "a"


def test_what_a_loaded_model_uses_stays_until_it_is_gone(tiny: GGUFFile, tmp_path: Path) -> None:
    room = weights_room(tmp_path / "own")
    decoder = Decoder.load(tiny, cache_dir=tmp_path / "own")
    (entry,) = room.entries()
    assert entry.in_use
    room.clear()
    assert entry.folder.exists()
    del decoder
    gc.collect()
    assert not room.entries()[0].in_use
    room.clear()
    assert room.entries() == []


def test_another_process_keeps_what_it_uses_until_it_is_killed(cache: Cache) -> None:
    script = "import sys, time; from npu.cache_room import open_in_use; from pathlib import Path\n"
    script += "file = open_in_use(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(cache.path("a"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            cache.load("d")
            assert cache.letters == "acd"
        finally:
            holder.kill()
    cache.load("e")
    assert cache.letters == "cde"


def test_a_disk_with_little_room_takes_what_its_limit_allows_and_no_more(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds three entries and a byte less than a fourth; the limit would allow ten."""
    cache.bound(10 * cache.entry_bytes)

    def disk_usage(path: Path) -> SimpleNamespace:
        used = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        return SimpleNamespace(free=4 * cache.entry_bytes - 1 - used)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    cache.load("d")
    assert cache.letters == "bcd"


@pytest.mark.parametrize(("lacking", "left"), [(0, "bcd"), (1, "abcd")])
def test_nothing_goes_if_the_disk_would_be_too_full_all_the_same(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, lacking: int, left: str
) -> None:
    """Of the entries only one half as large as the others can go, and the disk has as much left besides, or less."""
    half = cache.entry_bytes // 2
    os.truncate(cache.path("a"), half)
    os.utime(cache.path("a"), (1, 1))
    free = cache.entry_bytes - half - lacking
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    cache.bound(10 * cache.entry_bytes)
    with open_in_use(cache.path("b")), open_in_use(cache.path("c")):
        cache.load("d")
    assert cache.letters == left


def test_what_killed_processes_left_counts_and_goes(cache: Cache) -> None:
    """One was killed while it wrote, one while it removed."""
    half, empty = cache.path("8").parent, cache.path("9").parent
    half.mkdir()
    (half / "weights.tmp").write_bytes(bytes(cache.entry_bytes))
    empty.mkdir()
    for folder, age in ((half, 1), (empty, 2)):
        os.utime(folder, (age, age))
    cache.load("d")
    assert cache.letters == "bcd"
    assert not half.exists()
    assert not empty.exists()
    empty.mkdir()
    cache.room.clear()
    assert os.listdir(cache.weights) == ["lock"]


def test_who_comes_while_an_entry_is_removed_writes_it_anew(cache: Cache) -> None:
    """As a process sees it that opened the file just before its name went."""
    content = cache.path("a").read_bytes()
    loader = threading.Thread(target=cache.load, args="a")
    with cache.path("a").open("rb") as remover:
        fcntl.flock(remover, fcntl.LOCK_EX)
        loader.start()
        loader.join(0.1)
        assert loader.is_alive()  # it waits for the remover
        cache.path("a").unlink()
    loader.join()
    assert cache.path("a").read_bytes() == content


def test_a_file_that_was_removed_is_not_opened(cache: Cache) -> None:
    with pytest.raises(FileNotFoundError):
        open_in_use(cache.path("d"))
    with open_in_use(cache.path("a")) as file:
        assert len(file.read()) == cache.entry_bytes


def test_what_cannot_be_removed_is_no_obstacle(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, ignore_errors: bool) -> None:
        assert ignore_errors  # of a file system gone read-only, say

    monkeypatch.setattr(shutil, "rmtree", refuse)
    cache.load("d")
    assert cache.letters == "abcd"


def test_what_is_no_entry_is_left_alone(cache: Cache, tmp_path: Path) -> None:
    """Somebody's models, say, where the cache is a link to a large disk."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / WEIGHTS_FILE).write_bytes(b"not ours")
    link = cache.path("9").parent
    link.symlink_to(tmp_path / "elsewhere")
    (cache.weights / "model-int8-1").mkdir()
    (cache.weights / "model-int8-1" / WEIGHTS_FILE).write_bytes(b"somebody's")
    (cache.weights / "note").write_text("somebody's")
    cache.bound(1)
    cache.load("d")
    cache.room.clear()
    assert sorted(os.listdir(cache.weights)) == [link.name, "lock", "model-int8-1", "note"]
    assert os.listdir(cache.weights / "model-int8-1") == os.listdir(link) == [WEIGHTS_FILE]


def test_where_nothing_was_cached_there_is_nothing_to_clear(tmp_path: Path) -> None:
    room = weights_room(tmp_path)
    room.clear()
    assert room.entries() == []
    assert not (tmp_path / "weights").exists()


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, limit in (("2GiB", 2 << 30), ("1.5GB", 1_500_000_000), ("", DEFAULT_LIMIT)):
        monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", text)
        assert cache_limit() == limit
    monkeypatch.delenv("ROCKPAGE_CACHE_SIZE")
    assert cache_limit() == DEFAULT_LIMIT == 4 << 30


@pytest.mark.parametrize("text", ["4G", "0", "-1", "much"])
def test_a_limit_that_is_no_size_is_refused_by_name(cache: Cache, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", text)
    with pytest.raises(UsageError, match=f"^ROCKPAGE_CACHE_SIZE: '{text}'"):
        cache.load("a")
    assert cache.letters == "abc"


def test_an_entry_of_another_user_counts_as_used(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it is refused, as for anybody but root; who uses it cannot be known."""
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    cache.room.clear()
    assert cache.letters == "abc"
