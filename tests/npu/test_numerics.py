"""The id that prefix keys carry: it names whatever changes a byte of KV, part by part, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from hostcache.cache import PagedKVCache
from hostcache.scheduler_config import SchedulerConfig
from npu.attention import AttentionRuntime
from npu.cpu import CpuAttention
from npu.decoder_choice import load_decoder
from npu.emulated import EmulatedAttention
from npu.engine import Engine
from npu.gguf import GGUFFile
from npu.loading import EngineParts
from npu.rope import Rope, RopeScaling
from npu.sampler import SamplingParams
from tests.npu.tiny import TINY, TinyLlama, write_tiny_llama
from tests.npu.toy_tokenizer import toy

PROMPT = list(range(10, 60))
Computed: TypeAlias = tuple[str, bytes]
"""The id that the KV of `PROMPT` is shared under, and that KV."""


def computed(
    engine: Engine, params: SamplingParams | None = None, salt: str = "", prompt_version: str = ""
) -> Computed:
    params = params or SamplingParams(ignore_eos=True)
    request_id = engine.add_request(PROMPT, params, salt=salt, prompt_version=prompt_version)
    (request,) = engine.scheduler.waiting
    while not request.output.size:
        engine.step()
    kv = np.stack([engine.cache.read(layer, request.table.blocks, len(PROMPT)) for layer in range(2)]).tobytes()
    engine.abort(request_id)
    return request.namespace.numerics, kv


def load(model: Path, **options: Any) -> Computed:
    with Engine.load(model, **{"pool_bytes": 1 << 20, "cache_dir": model.parent / "cache", **options}) as engine:
        return computed(engine)


@pytest.fixture(scope="module", params=["Q4_1", "Q5_0"])
def stored(request: pytest.FixtureRequest) -> TinyLlama:
    """A model that our own kernels multiply by, and one that ONNX Runtime does."""
    return replace(TINY, matrix_type=request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, stored: TinyLlama) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("numerics") / "tiny.gguf", stored)


@pytest.fixture(scope="module")
def usual(model: Path) -> Computed:
    return load(model)


# What changes KV


def with_another_weight(_: TinyLlama, model: Path, path: Path) -> Path:
    """The same file but for one bit of one weight."""
    content = bytearray(model.read_bytes())
    with GGUFFile.open(model) as gguf:
        matrix = gguf.data("blk.0.attn_k.weight").tobytes()
    assert content.count(matrix) == 1
    content[content.index(matrix) + len(matrix) // 2] ^= 1
    path.write_bytes(content)
    return path


FILES: dict[str, Callable[[TinyLlama, Path, Path], Path]] = {
    "a weight": with_another_weight,
    "an epsilon": lambda stored, _, path: write_tiny_llama(path, replace(stored, eps=1e-3)),
    "a base of the rotation": lambda stored, _, path: write_tiny_llama(path, replace(stored, rope_theta=20000.0)),
}
OPTIONS = {
    "activations": {"activations": "fp32"},
    "the runtime": {"runtime": "emulated"},
    "its rounding": {"runtime": "emulated", "rounding": "op"},
}


@pytest.mark.parametrize("what", FILES)
def test_another_model_has_another_id(
    stored: TinyLlama, model: Path, usual: Computed, tmp_path: Path, what: str
) -> None:
    other = load(FILES[what](stored, model, tmp_path / "other.gguf"))
    assert other[1] != usual[1]
    assert other[0] != usual[0]


def test_each_way_to_compute_it_has_an_id_of_its_own(model: Path, usual: Computed) -> None:
    results = [usual, *(load(model, **options) for options in OPTIONS.values())]
    assert len({kv for _, kv in results}) == len(results)
    assert len({numerics for numerics, _ in results}) == len(results)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0, RopeScaling.LINEAR, 2.0),
        Rope(10000.0, RopeScaling.YARN, 2.0, original_context=128),
        Rope(10000.0, attention=1.5),
        Rope(10000.0, factors=(1.0,) * 7 + (2.0,)),
    ],
    ids=["linear", "yarn", "attention", "factors"],
)
def test_the_rotation_is_named_apart_from_the_file(
    model: Path, usual: Computed, rope: Rope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that reads the same file otherwise must not take the old version's KV for its own."""
    monkeypatch.setattr("npu.model.read_rope", lambda *_: rope)
    monkeypatch.setattr("npu.model.ModelConfig._check_tensors", lambda *_: None)  # the factors are in no file
    other = load(model)
    assert other[1] != usual[1]
    assert other[0] != usual[0]


@pytest.mark.parametrize(
    ("activations", "name", "value"),
    [
        ("fp32", "onnxruntime.__version__", "0.0"),
        ("fp32", "numpy.__version__", "0.0"),
        ("fp32", "npu.decoder.machine_identity", lambda: "another machine"),
        ("fp32", "npu.decoder.FORM_VERSION", 0),
        ("int8", "numpy.__version__", "0.0"),
        ("int8", "npu.tiled_decoder.machine_identity", lambda: "another machine"),
        ("int8", "npu.tiled_decoder.TILE_VERSION", 0),
    ],
)
@pytest.mark.parametrize("stored", ["Q4_1"], indirect=True)  # with fp32, ONNX Runtime multiplies by it, too
def test_libraries_machine_and_forms_are_named(
    model: Path, activations: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them can be had in two versions here; KV stays the same, and its id must not."""
    before = load(model, activations=activations)
    monkeypatch.setattr(name, value)
    other = load(model, activations=activations)
    assert other[1] == before[1]
    assert other[0] != before[0]


def attended_by(model: Path, open_attention: Callable[[PagedKVCache, int], AttentionRuntime]) -> Computed:
    """As `load`, with an attention runtime that `Engine.load` has no options for."""
    with GGUFFile.open(model) as gguf:
        decoder = load_decoder(gguf, cache_dir=model.parent / "cache")
    cache = PagedKVCache.create(decoder.geometry, 1 << 20)
    attention = open_attention(cache, decoder.config.heads)
    with Engine(EngineParts(decoder, toy(), cache, attention, SchedulerConfig(context_length=512))) as engine:
        return computed(engine)


def test_the_instruction_set_of_attention_is_named(model: Path, usual: Computed) -> None:
    plain = attended_by(model, lambda cache, heads: CpuAttention(cache, heads, isa="plain"))
    best = attended_by(model, CpuAttention)
    assert best == usual
    # The best of this machine may be the plain one: then, and only then, they are the same.
    assert (plain[0] == best[0]) == (plain[1] == best[1])


def test_buckets_and_the_host_are_named(model: Path) -> None:
    def emulated(isa: str, *buckets: int) -> Callable[[PagedKVCache, int], AttentionRuntime]:
        return lambda cache, heads: EmulatedAttention(
            cache, heads, buckets=buckets, host=CpuAttention(cache, heads, isa=isa)
        )

    ids = [attended_by(model, emulated(*arguments))[0] for arguments in (("plain", 64), ("plain", 64, 128))]
    assert len(set(ids)) == 2
    # The prompt has 50 tokens: what no bucket holds is attended by the host.
    (plain, best) = (attended_by(model, emulated(isa, 32)) for isa in ("plain", "auto"))
    assert (plain[0] == best[0]) == (plain[1] == best[1])


# What does not


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"pool_bytes": 2 << 20},
        {"max_rows": 20, "max_sequences": 2},
        {"prefill_chunk": 7},
        {"context_length": 100},
    ],
    ids=str,
)
def test_how_much_is_computed_at_once_is_not_in_the_id(model: Path, usual: Computed, options: dict[str, int]) -> None:
    assert load(model, **options) == usual


def test_where_files_lie_is_not_in_the_id(model: Path, usual: Computed, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.gguf"
    shutil.copy(model, renamed)
    assert load(renamed, cache_dir=tmp_path) == usual


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.9, seed=3, ignore_eos=True),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(logit_bias={5: 50.0}, logprobs=3, max_tokens=9, stop=("x",), ignore_eos=True),
    ],
    ids=["filters", "penalties", "bias"],
)
def test_how_tokens_are_chosen_is_not_in_the_id(model: Path, usual: Computed, params: SamplingParams) -> None:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent / "cache") as engine:
        assert computed(engine, params) == usual


def test_tenants_and_versions_are_kept_apart_by_fields_of_their_own(model: Path, usual: Computed) -> None:
    with Engine.load(model, pool_bytes=1 << 20, cache_dir=model.parent / "cache") as engine:
        assert computed(engine, salt="a") == computed(engine, prompt_version="2") == usual
