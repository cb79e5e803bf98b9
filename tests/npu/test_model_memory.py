"""A load that does not fit is refused before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.errors import RegionError, UsageError
from hostcache.memory_budget import MemoryBudget
from npu import model_memory
from npu.discovery import discover
from npu.engine import Engine
from npu.memory_plan import LIBRARIES_BYTES, runtime_bytes, step_bytes, tiled_runtime_bytes, tiled_step_bytes
from npu.model_memory import USUAL_POOL_BYTES, MemoryDemand, PoolChoice, choose_pool, plan_model, require_memory
from npu.source import open_model
from tests.footprint import Footprint
from tests.npu.beds import BEDS
from tests.npu.tiny import TinyLlama, write_tiny_llama

MIB = 1 << 20
POOL_BYTES = MIB
MODEL = TinyLlama(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, matrix_type="Q8_0")

WEIGHTS = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96) + MODEL.vocab * 64
WEIGHTS_BYTES = WEIGHTS + WEIGHTS // 32 * 2
"""8-bit codes, and a scale for 32 of them; the embedding counts as the head, which it is tied to."""

RUNTIME_BYTES = tiled_runtime_bytes(MODEL.vocab) + tiled_step_bytes(64, 64, 32, 96, rows=256)

BUFFER_BYTES = 2 * 2 * 4096 * 16 * 2 + 2 * 2 * (64 * 2 + 4) * 16 * 2 + 4096 * (64 * 2 + 4) * 2
"""K and V of 4096 tokens, q and result of 64 tokens of 2 query heads for each KV head and of 4 rows of which the last
proves the result fresh, and a mask."""

ARENA_BYTES = 6 * -(-BUFFER_BYTES // 4096) * 4096
"""Six buffers of whole pages."""

LOADED = 40 * MIB
"""Resident when a load begins: some of the libraries."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", MODEL)


def left(monkeypatch: pytest.MonkeyPatch, available: int, loaded: int = LOADED) -> None:
    """Let a cgroup have so much left, and the process be so large."""
    budget = MemoryBudget("/service", limit=1 << 40, available=available)
    monkeypatch.setattr(model_memory, "scarcest_budget", lambda: budget)
    monkeypatch.setattr(model_memory, "_resident_bytes", lambda: loaded)


def require(model: Path, runtime: str = "cpu") -> None:
    with open_model(model) as source:
        require_memory(source, MemoryDemand("int8", runtime, max_rows=256), POOL_BYTES)


def test_a_model_is_planned_from_its_header(model: Path) -> None:
    options = {"pool_asked": POOL_BYTES, "ram_bytes": 1 << 30, "reserve_bytes": 5}
    with open_model(model) as source:
        plan = plan_model(source, "int8", runtime="emulated", context=512, **options)
        assert plan_model(source, "int8", runtime="auto", **options).device_bytes == 0
        assert plan_model(source, "int8", runtime="cpu", **options).staging_bytes == 0
        with pytest.raises(UsageError, match="activations must be int8 or fp32, got 'int4'"):
            plan_model(source, "int4", runtime="cpu", **options)  # type: ignore[arg-type] # what is tested
    assert plan.weights_bytes == WEIGHTS_BYTES
    assert plan.runtime_bytes == RUNTIME_BYTES
    assert plan.staging_bytes == plan.device_bytes == ARENA_BYTES
    assert (plan.context, plan.context_limit, plan.reserve_bytes) == (512, 512, 5)
    assert plan.geometry.bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_float_activations_are_planned_as_onnx_runtime_takes_them(model: Path) -> None:
    with open_model(model) as source:
        plan = plan_model(source, "fp32", runtime="cpu", pool_asked=POOL_BYTES, ram_bytes=1 << 30, reserve_bytes=0)
    assert plan.weights_bytes == WEIGHTS + WEIGHTS // 32 * 12  # two halves of 4 bits with scales, and offsets
    assert plan.runtime_bytes == runtime_bytes(2, MODEL.vocab) + step_bytes(64, 96, rows=256)


@pytest.mark.parametrize(("runtime", "staging"), [("cpu", 0), ("rknnrt", ARENA_BYTES), ("emulated", 2 * ARENA_BYTES)])
def test_what_is_left_decides_to_the_byte(
    model: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, staging: int
) -> None:
    # What the process holds already is counted among the libraries.
    enough = WEIGHTS_BYTES + RUNTIME_BYTES + POOL_BYTES + staging - LOADED
    left(monkeypatch, enough)
    require(model, runtime)
    left(monkeypatch, enough - 1)
    with pytest.raises(RegionError) as caught:
        require(model, runtime)
    needed = enough + LOADED
    # A block is 4 KiB: 16 tokens of 256 bytes.
    assert caught.value.values == {"needed": needed, "available": needed - 1, "pool_limit": POOL_BYTES - 4096}
    assert str(caught.value) == (
        f"{model} does not fit into the memory of cgroup /service: {needed / MIB:.1f} MiB are needed and "
        f"{needed / MIB:.1f} MiB are there: a pool of 1.0 MiB would fit; "
        "use a smaller model or pool, or free memory first"
    )


def test_what_else_the_process_holds_is_no_part_of_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of a gigabyte that loads a model has its libraries loaded, and no more than that."""
    needed = WEIGHTS_BYTES + POOL_BYTES + RUNTIME_BYTES - LIBRARIES_BYTES
    left(monkeypatch, needed, loaded=1 << 30)
    require(model)
    left(monkeypatch, needed - 1, loaded=1 << 30)
    with pytest.raises(RegionError, match="does not fit"):
        require(model)


def test_the_engine_refuses_before_it_takes_anything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(monkeypatch, MIB)
    with pytest.raises(RegionError, match="no pool would fit; use a smaller model or pool, or free memory first"):
        Engine.load(model, pool_bytes=POOL_BYTES, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()  # no weight was repacked


def test_a_swap_file_takes_no_memory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(folder: Path | None) -> None:
        with Engine.load(model, pool_bytes=POOL_BYTES, swap_bytes=MIB, swap_folder=folder, cache_dir=tmp_path):
            pass

    left(monkeypatch, WEIGHTS_BYTES + RUNTIME_BYTES + POOL_BYTES - LOADED)
    load(tmp_path)
    with pytest.raises(RegionError, match="does not fit"):
        load(None)


def test_constants_of_int4_must_be_there_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 layers and 2 heads: 16 offsets and three matrices of 16 x 16. An extent is four blocks of int4, each 8 rows
    of 160 bytes, so that 204 of them are in a pool of 1 MiB."""
    enough = WEIGHTS_BYTES + RUNTIME_BYTES + 204 * 4 * 8 * 160 + 2 * 2 * (16 + 3 * 16 * 16) * 4 - LOADED
    left(monkeypatch, enough - 1)
    with pytest.raises(RegionError, match="does not fit"):
        Engine.load(model, kv="int4", pool_bytes=POOL_BYTES, cache_dir=tmp_path)
    left(monkeypatch, enough)
    Engine.load(model, kv="int4", pool_bytes=POOL_BYTES, cache_dir=tmp_path).close()


def test_what_is_to_stay_staged_must_be_there_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(runtime: str) -> None:
        Engine.load(model, runtime=runtime, pool_bytes=POOL_BYTES, resident_bytes=8 * MIB, cache_dir=tmp_path).close()

    # The emulated NPU has as much again of its own.
    enough = WEIGHTS_BYTES + RUNTIME_BYTES + POOL_BYTES + 2 * (ARENA_BYTES + 8 * MIB) - LOADED
    left(monkeypatch, enough - 1)
    with pytest.raises(RegionError, match="does not fit"):
        load("emulated")
    left(monkeypatch, enough)
    load("emulated")
    with pytest.raises(UsageError, match="the cpu runtime stages nothing"):
        load("cpu")


def test_what_auto_stages_on_a_board_is_counted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(graphs: Path | None) -> None:
        Engine.load(model, pool_bytes=POOL_BYTES, graphs=graphs, cache_dir=tmp_path).close()

    board = BEDS["vendor"].write(tmp_path / "machine")
    monkeypatch.setattr("npu.runtimes.discover", lambda: discover(board))
    enough = WEIGHTS_BYTES + RUNTIME_BYTES + POOL_BYTES - LOADED
    left(monkeypatch, enough + ARENA_BYTES - 1)
    load(None)  # by the CPU
    with pytest.raises(RegionError, match="does not fit"):
        load(tmp_path / "graphs")
    left(monkeypatch, enough + ARENA_BYTES)
    with pytest.raises(UsageError, match=r"manifest\.json is not there"):  # that is looked for next
        load(tmp_path / "graphs")


def test_where_the_kernel_does_not_say_what_is_left_a_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_memory, "scarcest_budget", lambda: None)
    Engine.load(model, pool_bytes=POOL_BYTES, cache_dir=tmp_path).close()


OTHERS = WEIGHTS_BYTES + RUNTIME_BYTES
"""What the process takes beside the pool."""

RESERVE = 256 * MIB
"""Of a machine of 2^40 bytes: twice 128 MiB, below which memory counts as short."""


def choose(
    model: Path,
    asked: int | None = None,
    *,
    runtime: str = "cpu",
    weights_bytes: int | None = None,
    resident_bytes: int = 0,
    swap_bytes: int = 0,
) -> PoolChoice:
    demand = MemoryDemand("int8", runtime, 256, weights_bytes, resident_bytes, swap_bytes)
    with open_model(model) as source:
        return choose_pool(source, demand, asked)


def test_an_unasked_pool_is_as_usual_where_there_is_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enough = OTHERS + RESERVE + USUAL_POOL_BYTES
    left(monkeypatch, enough - LOADED)
    choice = choose(model)
    assert choice.nbytes == USUAL_POOL_BYTES == 192 * MIB
    assert choice.reason == (
        f"as usual: cgroup /service has {enough / MIB:.1f} MiB for the process, whose other parts take "
        f"{OTHERS / MIB:.1f} MiB"
    )


def test_an_unasked_pool_leaves_free_what_must_stay_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, OTHERS + RESERVE + 10 * MIB - LOADED)
    choice = choose(model)
    assert choice.nbytes == 10 * MIB
    assert choice.reason.startswith("not 192.0 MiB: cgroup /service has ")
    assert choice.reason.endswith(f"whose other parts take {OTHERS / MIB:.1f} MiB, and 256.0 MiB stay free")
    left(monkeypatch, OTHERS + RESERVE + 10 * MIB - LOADED - 1)
    assert choose(model).nbytes == 10 * MIB - 4096  # whole blocks
    assert choose(model).reduced
    left(monkeypatch, OTHERS + RESERVE + 10 * MIB - LOADED)
    smaller = choose(model, swap_bytes=4 * MIB)
    assert smaller.nbytes == 6 * MIB
    assert f"other parts take {(OTHERS + 4 * MIB) / MIB:.1f} MiB, and 256.0 MiB" in smaller.reason


def test_an_unasked_pool_leaves_room_for_the_npus_weights_and_what_stays_staged(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_npu = RUNTIME_BYTES + 3 * MIB + ARENA_BYTES + 8 * MIB  # the CPU holds no weights
    left(monkeypatch, on_npu + RESERVE + 10 * MIB - LOADED)
    choice = choose(model, runtime="rknnrt", weights_bytes=3 * MIB, resident_bytes=8 * MIB)
    assert choice.nbytes == 10 * MIB
    assert f"whose other parts take {on_npu / MIB:.1f} MiB" in choice.reason


def test_a_pool_that_serves_nobody_is_not_chosen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = 256 * 256  # tokens, and bytes of each
    left(monkeypatch, OTHERS + RESERVE + least - LOADED)
    assert choose(model).nbytes == least
    left(monkeypatch, OTHERS + RESERVE + least - LOADED - 1)
    with pytest.raises(RegionError, match=r"does not fit into the memory of cgroup /service: .* use a smaller model"):
        choose(model)


def test_an_asked_pool_is_as_asked_or_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, OTHERS + POOL_BYTES - LOADED)
    assert choose(model, POOL_BYTES) == PoolChoice(POOL_BYTES, "as asked for")  # what stays free is the asker's affair
    for asked, swap_bytes, smaller in ((POOL_BYTES + 4096, 0, "model or pool"), (POOL_BYTES, 4096, "or swap space")):
        with pytest.raises(RegionError, match=rf"1\.0 MiB would fit; use a smaller .*{smaller}, or") as caught:
            choose(model, asked, swap_bytes=swap_bytes)
        assert caught.value.values["pool_limit"] == POOL_BYTES - swap_bytes


def test_an_unasked_pool_where_the_kernel_does_not_say(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_memory, "scarcest_budget", lambda: None)
    assert choose(model) == PoolChoice(USUAL_POOL_BYTES, "as usual: the kernel does not say what memory is left")


def test_a_process_knows_its_size() -> None:
    assert model_memory._resident_bytes() == pytest.approx(Footprint.of_this_process().resident, abs=2 * MIB)
