"""Caches of repacked weights that were sound: their files are damaged, or have become something else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.onnx_graph import WEIGHTS_FILE
from npu.weights import plan_weights
from npu.weights_cache import model_digest, weights_folder
from tests.fuzz.guard import Broken, refusals
from tests.fuzz.raw_bytes import Change, change_bytes, changes_of_bytes
from tests.fuzz.values import JSON_TEXTS
from tests.npu.tiny import TinyLlama, write_tiny_llama

__all__ = ["CacheCase", "WeightsCache", "cache_cases"]

_TINY = TinyLlama(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32)


@dataclass(frozen=True)
class CacheCase:
    """What is done to the files of a cache, by their number in alphabetical order."""

    changes: list[tuple[int, Change]]


class WeightsCache:
    """A model and the cache that its first load has left, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._model = write_tiny_llama(folder / "model.gguf", _TINY)
        self._sound, self._damaged = folder / "sound", folder / "damaged"
        self._weights = self._load(self._sound)

    def damage(self, case: CacheCase) -> Path:
        """A copy of the cache with the changes made."""
        shutil.rmtree(self._damaged, ignore_errors=True)
        shutil.copytree(self._sound, self._damaged)
        files = sorted(path for path in self._damaged.rglob("*") if path.is_file())
        for number, change in case.changes:
            _damage(files[number % len(files)], change)
        return self._damaged

    def use(self, cache_dir: Path) -> None:
        """Load the weights through a cache.

        Raises:
            Broken: they are others than those that a new cache has.
        """
        with refusals():
            if self._load(cache_dir) != self._weights:
                raise Broken("the weights are others than those of a new cache")

    def _load(self, cache_dir: Path) -> bytes:
        with GGUFFile.open(self._model) as source:
            plan = plan_weights(source, ModelConfig.from_gguf(source), "int8")
            with weights_folder(source, plan, model_digest(source, cache_dir), "int8", cache_dir) as folder:
                return (folder / WEIGHTS_FILE).read_bytes()


def _damage(path: Path, change: Change) -> None:
    make: dict[str, Callable[[Path], Any]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path.name),
        "gone": lambda path: None,
    }
    match change:
        case ("folder" | "pipe" | "loop" | "gone" as kind,):
            if path.is_file():
                path.unlink()
                make[kind](path)
        case ("set", key, text):
            if path.suffix == ".json" and path.is_file():
                with contextlib.suppress(ValueError):  # damaged before
                    path.write_text(json.dumps({**json.loads(path.read_text()), key: "@"}).replace('"@"', text))
        case _ if path.is_file():
            path.write_bytes(change_bytes(path.read_bytes(), change))


_NOTED = st.one_of(JSON_TEXTS, st.sampled_from([f'"{"0" * 64}"', '"../../../x"', '"\\u0000"']))
_CHANGES = st.one_of(
    changes_of_bytes(),
    st.tuples(st.sampled_from(["folder", "pipe", "loop", "gone"])),
    st.tuples(st.just("set"), st.sampled_from(["path", "identity", "sha256"]), _NOTED),
)


def cache_cases() -> st.SearchStrategy[CacheCase]:
    """One to three changes."""
    return st.builds(CacheCase, st.lists(st.tuples(st.integers(0, 5), _CHANGES), min_size=1, max_size=3))
