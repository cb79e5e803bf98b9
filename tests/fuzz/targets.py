"""Every way in, as a target."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from npu.engine import Engine
from npu.structured import StructureCompiler
from tests.fuzz.gguf_files import GGUFCase, gguf_cases
from tests.fuzz.guard import MIB
from tests.fuzz.hf_folders import FolderCase, folder_cases
from tests.fuzz.jinja_sources import jinja_sources
from tests.fuzz.rendering import render
from tests.fuzz.requests import request_cases, serve
from tests.fuzz.structures import follow, structures
from tests.fuzz.target import Target
from tests.fuzz.use_model import use_model
from tests.fuzz.vocabularies import tokenizer_cases, use_tokenizer
from tests.fuzz.weights_caches import WeightsCache, cache_cases
from tests.npu.tiny import write_tiny_llama
from tests.npu.toy_tokenizer import toy

__all__ = ["TARGETS"]


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files)


def _gguf(folder: Path) -> Target:
    path = folder / "model.gguf"

    def prepare(case: GGUFCase) -> Path:
        path.write_bytes(case.to_bytes())
        return path

    return Target(gguf_cases(), use_model, prepare, size=_size)


def _folders(folder: Path) -> Target:
    model = folder / "model"

    def prepare(case: FolderCase) -> Path:
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir()
        case.write(model)
        return model

    return Target(folder_cases(), use_model, prepare, size=_size)


def _templates(folder: Path) -> Target:
    return Target(jinja_sources(), render, seconds=3.0, nbytes=512 * MIB)


def _tokenizers(folder: Path) -> Target:
    return Target(tokenizer_cases(), use_tokenizer)


def _structures(folder: Path) -> Target:
    compiler = StructureCompiler(toy())
    return Target(structures(), lambda structure: follow(compiler, structure), nbytes=128 * MIB)


def _requests(folder: Path) -> Target:
    model = write_tiny_llama(folder / "tiny.gguf")
    engine = Engine.load(model, pool_bytes=4 * MIB, kv="int4", cache_dir=folder / "cache")
    return Target(request_cases(), lambda case: serve(engine, case))


def _weights_caches(folder: Path) -> Target:
    cache = WeightsCache(folder)
    return Target(cache_cases(), cache.use, cache.damage)


TARGETS: Mapping[str, Callable[[Path], Target]] = {
    "gguf": _gguf,
    "folders": _folders,
    "templates": _templates,
    "tokenizers": _tokenizers,
    "structures": _structures,
    "requests": _requests,
    "caches": _weights_caches,
}
"""By name: what makes a target, which may keep files in a folder of its own."""
