"""What the vendor's wheel does, as far as `npu.rknnlite` counts on it. On emulated arm64: `make test-arm64`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import DeviceError
from npu.rknnlite import LiteContext
from tests.board.arm64_root import LITE_VERSION
from tests.board.stub import Stub
from tests.npu.stub_graphs import StubGraph

pytestmark = pytest.mark.arm64

GRAPH = StubGraph(rows=4, key_channels=16, head_dim=8, masked=False, launches=((2, 64), (2, 128)))
MASKED = StubGraph(rows=4, key_channels=8, head_dim=8, masked=True, launches=((2, 64),))
OUT = (2, 8, 1, 4)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "decode.rknn"
    path.write_text(GRAPH.write())
    return path


@pytest.fixture
def stub() -> Iterator[Stub]:
    """The library, without faults; every context must have been given back."""
    stub = Stub()
    stub.fail("")
    yield stub
    stub.fail("")
    assert stub.contexts == 0


def opened(graph: Path) -> Any:
    from rknnlite.api import RKNNLite  # type: ignore[import-not-found] # noqa: PLC0415 - it is on arm64 only

    lite = RKNNLite()
    assert lite.load_rknn(str(graph)) == 0
    return lite


def operands(graph: StubGraph, value: float = 3) -> list[NDArray[np.float16]]:
    """Keys are zero, so that the result is the mean of V: `value` in every element."""
    arrays = [np.zeros(shape, np.float16) for shape in graph.shapes(0)]
    arrays[2][...] = value
    return arrays


def test_this_is_the_vendors_wheel_on_arm64() -> None:
    assert platform.machine() == "aarch64"
    assert version("rknn-toolkit-lite2") == LITE_VERSION
    assert str(import_module("rknnlite.api.rknn_runtime").__file__).endswith("aarch64-linux-gnu.so")


def test_inference_takes_a_failed_run_for_a_good_one(graph: Path, stub: Stub) -> None:
    """So the steps of it are called one by one, and the canary proves the rest."""
    lite = opened(graph)
    assert lite.init_runtime(core_mask=1) == 0
    formats = ["nhwc"] * 3
    (first,) = lite.inference(operands(GRAPH), data_format=formats)
    assert formats != ["nhwc"] * 3
    np.testing.assert_array_equal(first, np.full(OUT, 3, np.float32))
    assert first.flags.owndata
    stub.fail("rknn_run@1=-1")
    (second,) = lite.inference(operands(GRAPH, 5), data_format=["nhwc"] * 3)
    np.testing.assert_array_equal(second, first)
    lite.release()


def test_a_context_that_could_not_be_set_up_goes_on(graph: Path, stub: Stub) -> None:
    stub.fail("rknn_set_core_mask@1=-1")
    lite = opened(graph)
    assert lite.init_runtime(core_mask=1) == -1
    assert lite.inference(operands(GRAPH), data_format=["nhwc"] * 3) is not None
    lite.release()


def test_operands_of_a_wrong_size_are_not_refused_by_the_wheel(graph: Path, stub: Stub) -> None:
    """It is the stub that does; the library behind it may read on."""
    context = LiteContext(graph, 0)
    wrong = operands(GRAPH)
    wrong[1] = wrong[1][:, :, :60]
    with pytest.raises(DeviceError, match=r"set_inputs failed: Exception: Set input shape failed"):
        context.run(wrong, OUT)
    context.release()


def test_a_context_runs_both_its_launches_and_knows_its_versions(graph: Path, stub: Stub) -> None:
    context = LiteContext(graph, 2)
    assert (context.version, context.driver) == ("2.5.0", "0.9.8")
    for launch in (0, 1, 0):
        q, k, v = (np.zeros(shape, np.float16) for shape in GRAPH.shapes(launch))
        v[...] = launch + 1
        np.testing.assert_array_equal(context.run([q, k, v], OUT), np.full(OUT, launch + 1, np.float32))
    context.release()


def test_a_mask_is_taken_channels_last(tmp_path: Path, stub: Stub) -> None:
    """Row r sees token r and no other, and token t has the value t."""
    path = tmp_path / "prefill16.rknn"
    path.write_text(MASKED.write())
    context = LiteContext(path, 1)
    q, k, v, mask = (np.zeros(shape, np.float16) for shape in MASKED.shapes(0))
    v[...] = np.arange(64)[:, np.newaxis]
    mask[...] = -1e4
    mask[0, 0, range(4), range(4)] = 0
    out = context.run([q, k, v, mask], OUT)
    np.testing.assert_array_equal(out, np.broadcast_to(np.arange(4, dtype=np.float32), OUT))
    context.release()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("rknn_init@1=-3", "init_runtime returned -1: .*RKNN_ERR_DEVICE_UNAVAILABLE; the NPU cannot be opened"),
        ("rknn_init@1=-6", "RKNN_ERR_MODEL_INVALID; librknnrt.so is older"),
        ("rknn_init@1=stale", "npu core mode.*; the chip has no such core"),
        ("rknn_init@1=garbage", "npu core mode"),
        ("rknn_init@1=timeout:10", "init_runtime returned -1: .*RKNN_ERR_TIMEOUT; the NPU did not answer"),
        ("rknn_set_core_mask@1=-1", "npu core mode"),
        ("rknn_query@1=-1", r"init_runtime returned -1: .*Query RKNN SDK version Failed"),
        ("rknn_query@1=stale", "init_runtime returned -1: ValueError"),
    ],
)
def test_a_library_that_fails_at_the_start_is_an_error_and_nothing_of_it_is_left(
    graph: Path, stub: Stub, fault: str, error: str
) -> None:
    stub.fail(fault)
    with pytest.raises(DeviceError, match=error):
        LiteContext(graph, 0)


def test_a_file_that_is_no_graph_is_an_error(tmp_path: Path, stub: Stub) -> None:
    path = tmp_path / "junk.rknn"
    path.write_bytes(b"junk")
    with pytest.raises(DeviceError, match="RKNN_ERR_MODEL_INVALID"):
        LiteContext(path, 0)


def test_the_chip_is_needed_and_the_error_says_how_to_show_it(graph: Path, stub: Stub) -> None:
    chip = Path("/proc/device-tree/compatible")
    text = chip.read_text()
    chip.write_text("allwinner,a64")
    try:
        with pytest.raises(DeviceError, match=r"init_runtime returned -1: .*shown /proc/device-tree"):
            LiteContext(graph, 0)
    finally:
        chip.write_text(text)


def test_the_process_is_as_nice_as_before(graph: Path, stub: Stub) -> None:
    """The stub makes it -19 if it may, as the vendor's library does."""
    os.setpriority(os.PRIO_PROCESS, 0, 3)
    context = LiteContext(graph, 0)
    context.run(operands(GRAPH), OUT)
    assert os.getpriority(os.PRIO_PROCESS, 0) == 3
    context.release()
