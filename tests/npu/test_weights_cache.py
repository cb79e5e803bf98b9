"""The weights cache: written once, believed only when whole, and never in the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from hostcache.errors import BadModelFile, UsageError
from npu import weights_cache
from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.onnx_graph import WEIGHTS_FILE
from npu.weights import WeightsPlan, plan_weights
from npu.weights_cache import default_cache_dir, model_digest, weights_folder, weights_room
from tests.npu.tiny import write_tiny_llama


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as opened:
        yield opened


@pytest.fixture
def plan(tiny: GGUFFile) -> WeightsPlan:
    return plan_weights(tiny, ModelConfig.from_gguf(tiny), "int8")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one name for each weights file written."""
    written: list[str] = []
    write = WeightsPlan.write

    def counted(self: WeightsPlan, gguf: GGUFFile, file: BinaryIO) -> None:
        written.append(str(file.name))
        write(self, gguf, file)

    monkeypatch.setattr(WeightsPlan, "write", counted)
    return written


def fetch(tiny: GGUFFile, plan: WeightsPlan, cache: Path) -> tuple[Path, bytes]:
    """Folder and content as a loader sees them."""
    with weights_folder(tiny, plan, "d" * 64, "int8", cache) as folder:
        return folder, (folder / WEIGHTS_FILE).read_bytes()


def test_a_second_load_writes_nothing(tiny: GGUFFile, plan: WeightsPlan, writes: list[str], tmp_path: Path) -> None:
    first, second = (fetch(tiny, plan, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert len(writes) == 1
    folder, content = first
    assert content[plan.nbytes :] == hashlib.sha256(content[: plan.nbytes]).digest()
    assert os.listdir(folder) == [WEIGHTS_FILE]
    assert sorted(os.listdir(folder.parent)) == sorted(["lock", folder.name])


def test_modes_and_models_have_files_of_their_own(tiny: GGUFFile, plan: WeightsPlan, tmp_path: Path) -> None:
    folders = set()
    for digest, activations in (("a" * 64, "int8"), ("a" * 64, "fp32"), ("b" * 64, "int8")):
        with weights_folder(tiny, plan, digest, activations, tmp_path) as folder:
            folders.add(folder)
    assert len(folders) == 3


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped in the weights", "flipped in the hash", "empty", "gone"])
def test_a_damaged_file_is_rebuilt(
    tiny: GGUFFile, plan: WeightsPlan, writes: list[str], tmp_path: Path, damage: str
) -> None:
    folder, content = fetch(tiny, plan, tmp_path)
    path = folder / WEIGHTS_FILE
    flipped = bytearray(content)
    flipped[plan.nbytes // 2 if "weights" in damage else -1] ^= 1
    damaged = {"cut": content[:-1], "longer": content + b"\0", "empty": b""}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(damaged.get(damage, bytes(flipped)))
    assert fetch(tiny, plan, tmp_path) == (folder, content)
    assert len(writes) == 2


def test_what_a_killed_writer_left_is_written_over(tiny: GGUFFile, plan: WeightsPlan, tmp_path: Path) -> None:
    folder, content = fetch(tiny, plan, tmp_path)
    (folder / WEIGHTS_FILE).rename(folder / "weights.tmp")
    with (folder / "weights.tmp").open("ab") as file:
        file.write(b"more than will be written again")
    assert fetch(tiny, plan, tmp_path) == (folder, content)
    assert os.listdir(folder) == [WEIGHTS_FILE]


def test_two_loaders_write_once(tiny: GGUFFile, plan: WeightsPlan, writes: list[str], tmp_path: Path) -> None:
    folder, content = fetch(tiny, plan, tmp_path)
    (folder / WEIGHTS_FILE).unlink()
    seen: list[tuple[Path, bytes]] = []
    loaders = [threading.Thread(target=lambda: seen.append(fetch(tiny, plan, tmp_path))) for _ in range(3)]
    with weights_room(tmp_path).writing():  # all find nothing and wait for the lock
        for loader in loaders:
            loader.start()
        loaders[0].join(0.1)
        assert not seen
    for loader in loaders:
        loader.join()
    assert seen == [(folder, content)] * 3
    assert len(writes) == 2


@pytest.mark.parametrize("chosen", [True, False], ids=["TMPDIR", "default"])
def test_a_cache_that_cannot_be_written_is_done_without(
    tiny: GGUFFile, plan: WeightsPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    place = tmp_path if chosen else Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path) if chosen else "")
    obstacle = tmp_path / "cache"
    obstacle.write_text("a file where the folder should be")  # permissions would not stop root
    with weights_folder(tiny, plan, "d" * 64, "int8", obstacle) as folder:
        temporary = folder
        assert folder.is_relative_to(place)
        content = (folder / WEIGHTS_FILE).read_bytes()
    assert content == fetch(tiny, plan, tmp_path / "writable")[1]
    assert not temporary.exists()


@pytest.mark.parametrize("when", ["asked for room", "writing"])
def test_a_full_disk_is_one_clear_error(
    tiny: GGUFFile, plan: WeightsPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "writing":  # a file system that promises more than it has
        monkeypatch.setattr(WeightsPlan, "write", full)
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=rf"^{plan.nbytes} bytes .* No space left .* set XDG_CACHE_HOME") as caught:
        fetch(tiny, plan, tmp_path / "cache")
    assert caught.value.values["needed"] == plan.nbytes
    assert os.listdir(tmp_path / "cache" / "weights") == ["lock"]


# --- digests ------------------------------------------------------------------------------------------------------


def test_a_digest_is_computed_once(tiny: GGUFFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hashlib.sha256(tiny.path.read_bytes()).hexdigest()
    assert model_digest(tiny, tmp_path / "cache") == expected
    monkeypatch.delattr(weights_cache, "_hash")  # hashing again would fail
    assert model_digest(tiny, tmp_path / "cache") == expected


def test_another_file_at_the_same_path_has_another_digest(tiny: GGUFFile, tmp_path: Path) -> None:
    model_digest(tiny, tmp_path / "cache")
    raw = bytearray(tiny.path.read_bytes())
    raw[-1] ^= 1
    (tmp_path / "new").write_bytes(raw)
    (tmp_path / "new").replace(tiny.path)
    with GGUFFile.open(tiny.path) as opened:
        assert model_digest(opened, tmp_path / "cache") == hashlib.sha256(raw).hexdigest()
    with pytest.raises(BadModelFile, match="replaced while it was read"):
        model_digest(tiny, tmp_path / "cache")  # still the old file
    tiny.path.unlink()
    with pytest.raises(BadModelFile, match="gone while it was read"):
        model_digest(tiny, tmp_path / "cache")


@pytest.mark.parametrize(
    "note", ["", "{", "[]", "{}", '{"path": 1, "identity": [], "sha256": "0"}', "\udcff", "[" * 100_000]
)
def test_a_damaged_note_is_not_believed(tiny: GGUFFile, tmp_path: Path, note: str) -> None:
    expected = model_digest(tiny, tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "digests").iterdir()
    path.write_bytes(note.encode(errors="surrogateescape"))
    assert model_digest(tiny, tmp_path / "cache") == expected
    assert json.loads(path.read_bytes())["sha256"] == expected


@pytest.mark.parametrize(
    "digest", [None, 7, "", "0" * 63, "0" * 63 + "/", "0" * 63 + "\n", "\0" * 64, "../" * 21 + "x"]
)
def test_a_note_without_a_digest_is_not_believed(tiny: GGUFFile, tmp_path: Path, digest: object) -> None:
    """It becomes the name of a folder, which must not be another's."""
    expected = model_digest(tiny, tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "digests").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "sha256": digest}))
    assert model_digest(tiny, tmp_path / "cache") == expected


@pytest.mark.parametrize("name", ["digests/*.json", "weights/lock", "weights/*/weights.bin"])
def test_a_pipe_in_the_cache_is_not_waited_for(tiny: GGUFFile, plan: WeightsPlan, tmp_path: Path, name: str) -> None:
    def load() -> tuple[str, bytes]:
        digest = model_digest(tiny, tmp_path / "cache")
        with weights_folder(tiny, plan, digest, "int8", tmp_path / "cache") as folder:
            return digest, (folder / WEIGHTS_FILE).read_bytes()

    expected = load()
    (path,) = (tmp_path / "cache").glob(name)
    path.unlink()
    os.mkfifo(path)
    assert load() == expected


def test_an_unwritable_cache_only_costs_time(tiny: GGUFFile, tmp_path: Path) -> None:
    obstacle = tmp_path / "cache"
    obstacle.write_text("a file where the folder should be")
    assert model_digest(tiny, obstacle) == hashlib.sha256(tiny.path.read_bytes()).hexdigest()


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/rockpage")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("", "relative", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == Path("/home/someone/.cache/rockpage")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("/home/someone/.cache/rockpage")
