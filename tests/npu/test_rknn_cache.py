"""The bound on the cache of compiled graphs; that it serves what was compiled is tested by the exports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostcache.errors import DeviceError, UsageError
from npu.rknn_cache import CompileCache
from npu.rknn_toolkit import CompileJob
from tests.npu.rknn_stand_in import StandInCompiler

GRAPH_BYTES = len("compiled a")


@pytest.fixture
def compiler() -> StandInCompiler:
    return StandInCompiler()


def job(letter: str) -> CompileJob:
    return CompileJob(letter, letter.encode(), (((1, 2, 3, 4),),))


def entry_bytes(folder: Path, compiler: StandInCompiler) -> int:
    """Of a graph and its note; all here are of one size."""
    cache = CompileCache(folder)
    cache.compile(compiler, job("s"))
    (entry,) = cache.room.entries()
    assert entry.nbytes > GRAPH_BYTES
    return entry.nbytes


def compile_and_let_go(folder: Path, compiler: StandInCompiler, letters: str) -> None:
    """As one process after the other would; each a minute behind the one before."""
    for letter in letters:
        path = CompileCache(folder).compile(compiler, job(letter)).path
        now = 60 * len(compiler.jobs)
        os.utime(path, (now, now))


def test_what_was_used_longest_ago_goes(
    compiler: StandInCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = entry_bytes(tmp_path / "one", compiler)
    # While the graph is written its note is not there yet.
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", str(2 * nbytes + GRAPH_BYTES))
    folder = tmp_path / "cache"
    compile_and_let_go(folder, compiler, "abc")
    CompileCache(folder).compile(compiler, job("a"))  # found: it is used again
    compile_and_let_go(folder, compiler, "d")
    compiler.jobs.clear()
    compile_and_let_go(folder, compiler, "acd")
    assert compiler.jobs == []
    compile_and_let_go(folder, compiler, "b")
    assert compiler.jobs == ["b"]


def test_what_an_export_has_compiled_stays_until_it_has_placed_it(
    compiler: StandInCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", "1")
    cache = CompileCache(tmp_path)
    paths = [cache.compile(compiler, job(letter)).path for letter in "abc"]
    CompileCache(tmp_path).compile(compiler, job("d"))  # another's
    assert [path.read_text() for path in paths] == ["compiled a", "compiled b", "compiled c"]
    assert sum(entry.in_use for entry in cache.room.entries()) == 3
    del cache
    compile_and_let_go(tmp_path, compiler, "e")
    (left,) = CompileCache(tmp_path).room.entries()
    assert (left.folder / "graph.rknn").read_text() == "compiled e"


def test_a_failed_compilation_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(StandInCompiler):
        def compile(self, job: CompileJob, out: Path) -> str:
            super().compile(job, out)
            raise DeviceError("it ended its process")

    with pytest.raises(DeviceError):
        CompileCache(tmp_path).compile(Broken(), job("a"))
    assert os.listdir(tmp_path) == ["lock"]


def test_a_limit_that_is_no_size_is_refused_before_the_work(
    compiler: StandInCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_CACHE_SIZE", "much")
    with pytest.raises(UsageError, match="ROCKPAGE_CACHE_SIZE"):
        CompileCache(tmp_path).compile(compiler, job("a"))
    assert compiler.jobs == []
