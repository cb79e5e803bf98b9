"""One context of the vendor's C library: every call is checked, and nothing is taken that is not known."""

from __future__ import annotations

import logging
import os
import re
from ctypes import sizeof
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import DeviceError
from npu.rknnrt import InOutNum, Library, SdkVersion, TensorAttr, TensorMemory, require_known
from npu.rknnrt_context import Operand, RknnrtContext
from staging import StagingLayout
from tests.npu.rknnrt_bed import RknnrtBed, compile_stub
from tests.npu.stub_graphs import StubGraph

GRAPH = StubGraph(rows=4, key_channels=16, head_dim=8, masked=False, launches=((2, 64), (2, 128)))

pytestmark = pytest.mark.usefixtures("rknnrt_bed")


def layout(tokens: int = 64) -> StagingLayout:
    return StagingLayout(1, 2, tokens, 4, 8, 0, tiled=True)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "decode-0123.rknn"
    path.write_text(GRAPH.write())
    return path


@pytest.fixture
def library(stub_library: Path) -> Library:
    return Library(stub_library)


class Memory:
    """A dma-buf that holds all operands of a launch, keys zero, so that the result is the mean of V."""

    def __init__(self, bed: RknnrtBed, tokens: int = 64) -> None:
        self.layout = layout(tokens)
        self._fd = os.memfd_create("dma-buf")
        os.pwrite(self._fd, bytes(2 * self.layout.nbytes), 0)
        bed.stub.shadow(self._fd, self._fd)

    def operands(self, value: float, shift: int = 0) -> list[Operand]:
        place, laid = shift, self.layout
        os.pwrite(self._fd, np.full(laid.values_shape, value, np.float16).tobytes(), place + laid.values_offset)
        return [
            Operand(self._fd, 0, place + offset, int(np.prod(shape)) * 2)
            for offset, shape in (
                (laid.query_offset, laid.query_shape),
                (laid.keys_offset, laid.keys_shape),
                (laid.values_offset, laid.values_shape),
                (laid.out_offset, laid.out_shape),
            )
        ]

    def out(self, shift: int = 0) -> list[float]:
        size = int(np.prod(self.layout.out_shape)) * 2
        return sorted(set(np.frombuffer(os.pread(self._fd, size, shift + self.layout.out_offset), np.float16).tolist()))


def test_structs_are_of_the_sizes_that_the_headers_have_on_64_bits() -> None:
    assert [sizeof(struct) for struct in (TensorAttr, TensorMemory, InOutNum, SdkVersion)] == [376, 40, 8, 512]
    offsets = {name: getattr(TensorAttr, name).offset for name in ("n_elems", "scale", "size_with_stride", "h_stride")}
    assert offsets == {"n_elems": 328, "scale": 356, "size_with_stride": 364, "h_stride": 372}
    assert (TensorMemory.fd.offset, TensorMemory.offset.offset, TensorMemory.size.offset) == (16, 20, 24)


def test_a_context_runs_its_graph_over_memory_that_it_is_pointed_to(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path
) -> None:
    context = RknnrtContext(library, graph, 2)
    assert (context.version, context.driver) == ("2.5.0", "0.9.8")
    short, long = Memory(rknnrt_bed), Memory(rknnrt_bed, 128)
    for memory, value in ((short, 3.0), (long, 5.0), (short, 7.0), (short, 9.0)):
        context.run(memory.layout, memory.operands(value))
        assert memory.out() == [value]
    context.run(short.layout, short.operands(2.0, shift=short.layout.nbytes))
    assert (short.out(), short.out(short.layout.nbytes)) == ([9.0], [2.0])
    assert rknnrt_bed.stub.memories == 12  # four operands in each of three places, made once
    assert rknnrt_bed.stub.calls("rknn_set_input_shapes") == 3  # when they change
    context.release()
    context.release()
    assert (rknnrt_bed.stub.memories, rknnrt_bed.stub.contexts) == (0, 0)


def test_imports_are_bounded_and_those_used_longest_ago_go(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu.rknnrt_context.MOST_MEMORIES", 8)
    context = RknnrtContext(library, graph, 0)
    memories = [Memory(rknnrt_bed) for _ in range(3)]
    for step in range(30):
        memory = memories[step % 3]
        context.run(memory.layout, memory.operands(float(step)))
        assert memory.out() == [float(step)]
        assert rknnrt_bed.stub.memories == min(4 * (step + 1), 8)
    context.run(memory.layout, memory.operands(0))
    assert rknnrt_bed.stub.calls("rknn_create_mem_from_fd") == 4 * 30  # but not once more what was used just now
    context.release()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rknn_init@1=-1", "rknn_init returned -1: RKNN_ERR_FAIL; .* the groups video and render$"),
        ("rknn_init@1=-6", "rknn_init returned -6: RKNN_ERR_MODEL_INVALID; .* use one version of both$"),
        ("rknn_init@1=-99", "rknn_init returned -99: .* video and render$"),
        ("rknn_init@1=stale", "rknn_query returned -7: RKNN_ERR_CTX_INVALID$"),
        ("rknn_query@1=-5", "rknn_query returned -5: RKNN_ERR_PARAM_INVALID$"),
        ("rknn_query@1=stale", "says it is version ''"),
        ("rknn_query@1=garbage", "says it is version '3.5.1', rockpage knows the structs of 2.3.2 to 2.5.0"),
        ("rknn_query@2=-1", "rknn_query returned -1: RKNN_ERR_FAIL$"),
        ("rknn_query@3=-1", "rknn_query returned -1: RKNN_ERR_FAIL$"),
        ("rknn_set_core_mask@1=-1", "rknn_set_core_mask returned -1: RKNN_ERR_FAIL; the chip has no such core .*"),
    ],
)
def test_a_call_that_fails_at_the_start_is_an_error_with_its_name_and_the_way_out(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path, fault: str, said: str
) -> None:
    rknnrt_bed.stub.fail(fault)
    with pytest.raises(DeviceError, match=said):
        RknnrtContext(library, graph, 1)
    assert rknnrt_bed.stub.contexts == 0


@pytest.mark.parametrize("fault", ["rknn_query@2=stale", "rknn_query@2=garbage"])  # how many inputs it has
def test_a_graph_of_other_inputs_is_refused(rknnrt_bed: RknnrtBed, library: Library, graph: Path, fault: str) -> None:
    rknnrt_bed.stub.fail(fault)
    context = RknnrtContext(library, graph, 1)
    with pytest.raises(DeviceError, match=r"the graph has [02] inputs, not 3"):
        context.prepare(layout())
    context.release()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rknn_set_input_shapes@1=-5", "rknn_set_input_shapes returned -5: RKNN_ERR_PARAM_INVALID$"),
        ("rknn_query@1=-5", "rknn_query returned -5"),
        ("rknn_query@4=garbage", "the NPU wants .* in format, type, shape and bytes .*: use the rknnlite runtime"),
        (
            "rknn_create_mem_from_fd@2=-1",
            "rknn_create_mem_from_fd returned nothing: the driver did not take 4096 bytes",
        ),
        ("rknn_create_mem_from_fd@3=garbage", "its struct is not the one rockpage knows"),
        ("rknn_set_io_mem@4=-1", "rknn_set_io_mem returned -1"),
        ("rknn_run@1=-2", "rknn_run returned -2: RKNN_ERR_TIMEOUT; the NPU did not answer: the kernel's log"),
    ],
)
def test_a_call_of_a_run_that_fails_is_an_error_and_the_next_run_is_right(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path, fault: str, said: str
) -> None:
    context = RknnrtContext(library, graph, 1)
    memory = Memory(rknnrt_bed)
    rknnrt_bed.stub.fail(fault)
    with pytest.raises(DeviceError, match=f"^decode-0123.rknn on core 1: .*{said}") as refused:
        context.run(memory.layout, memory.operands(3.0))
    assert re.search(said, str(refused.value))
    rknnrt_bed.stub.fail("")
    context.run(memory.layout, memory.operands(4.0))
    assert memory.out() == [4.0]
    context.release()


def test_after_shapes_that_could_not_be_set_they_are_set_anew(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path
) -> None:
    """The library may have done half of it: those of the launch before do not count any more."""
    context = RknnrtContext(library, graph, 0)
    short, long = Memory(rknnrt_bed), Memory(rknnrt_bed, 128)
    context.run(short.layout, short.operands(1.0))
    rknnrt_bed.stub.fail("rknn_set_input_shapes@1=-1")
    with pytest.raises(DeviceError, match="rknn_set_input_shapes"):
        context.run(long.layout, long.operands(1.0))
    context.run(short.layout, short.operands(2.0))
    assert rknnrt_bed.stub.calls("rknn_set_input_shapes") == 2
    context.release()


@pytest.mark.parametrize("native", ["nhwc", "stride"])
def test_operands_that_the_npu_wants_otherwise_are_refused(
    library: Library, graph: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPAGE_STUB_NATIVE", native)
    context = RknnrtContext(library, graph, 0)
    # q of [2, 1, 4, 16] has two tiles of eight channels, 256 bytes.
    with pytest.raises(DeviceError, match=r"the NPU wants q in .*, it is staged in \(2, 1, \(2, 2, 1, 4, 8\), 256\)"):
        context.prepare(layout())
    context.release()


def test_a_launch_that_was_not_exported_is_refused(library: Library, graph: Path) -> None:
    context = RknnrtContext(library, graph, 0)
    with pytest.raises(DeviceError, match="rknn_set_input_shapes returned -5"):
        context.prepare(layout(256))
    context.release()


@pytest.mark.parametrize("version", ["1.6.0", "2.3.0", "2.3", "2.6.0", "3.0.0", "", "unknown"])
def test_versions_whose_structs_are_not_known_are_refused(version: str) -> None:
    with pytest.raises(DeviceError, match=rf"version '{version}', rockpage knows the structs of 2\.3\.2 to 2\.5\.0"):
        require_known(version)


@pytest.mark.parametrize("version", ["2.3.2", "2.4.2a15", "2.5.0"])
def test_versions_between_the_known_ones_pass(version: str) -> None:
    require_known(version)


def test_a_library_that_is_not_there_or_lacks_a_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"nowhere\.so cannot be loaded \(.*\): put the vendor's librknnrt\.so there"):
        Library(tmp_path / "nowhere.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(DeviceError, match=r"text\.so cannot be loaded"):
        Library(tmp_path / "text.so")
    old = compile_stub(tmp_path / "old.so", "-Drknn_set_io_mem=rknn_set_io_mem_of_old")
    with pytest.raises(DeviceError, match=r"old\.so is no librknnrt\.so that .*rknn_set_io_mem.*2\.3\.2 to 2\.5\.0"):
        Library(old)


def test_an_empty_file_is_not_handed_over(rknnrt_bed: RknnrtBed, library: Library, tmp_path: Path) -> None:
    (tmp_path / "empty.rknn").touch()
    with pytest.raises(DeviceError, match=r"empty\.rknn is empty, and librknnrt.so would take its bytes for a path"):
        RknnrtContext(library, tmp_path / "empty.rknn", 0)
    assert rknnrt_bed.stub.calls("rknn_init") == 0


def test_what_cannot_be_given_back_is_logged_and_the_rest_is(
    rknnrt_bed: RknnrtBed, library: Library, graph: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = RknnrtContext(library, graph, 0)
    memory = Memory(rknnrt_bed)
    context.run(memory.layout, memory.operands(3.0))
    rknnrt_bed.stub.fail("rknn_destroy_mem@2=late:1 rknn_destroy@1=late:1")
    with caplog.at_level(logging.WARNING):
        context.release()
    assert caplog.messages == []
    context = RknnrtContext(library, graph, 0)
    held = context._context
    rknnrt_bed.stub.fail("rknn_destroy@1=-7")
    with caplog.at_level(logging.WARNING):
        context.release()
    assert caplog.messages == ["decode-0123.rknn on core 0: rknn_destroy returned -7: RKNN_ERR_CTX_INVALID"]
    library.call("a test", "rknn_destroy", held)
