"""The worker process and what becomes of its failures, with a stand-in for the vendor's package."""

from __future__ import annotations

import io
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import DeviceError, MissingExtra
from npu import rknn_toolkit
from npu.rknn_toolkit import PYTHON_VARIABLE, REQUIREMENTS, CompileJob, RknnToolkit, find_python
from npu.rknn_worker import read_message, write_message
from tests.npu.rknn_stand_in import VERSION, make_interpreter


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_interpreter(tmp_path_factory.mktemp("interpreter"))


@pytest.fixture(scope="module")
def toolkit(interpreter: Path) -> Iterator[RknnToolkit]:
    """One for all tests that do not end it: starting it takes a quarter of a second."""
    with RknnToolkit(interpreter) as toolkit:
        yield toolkit


@pytest.fixture
def doomed(interpreter: Path) -> Iterator[RknnToolkit]:
    with RknnToolkit(interpreter) as toolkit:
        yield toolkit


def job(deed: str) -> CompileJob:
    return CompileJob(deed, deed.encode(), (((1, 2), (3, 4)),))


def test_a_message_with_arrays_arrives_as_it_was_sent() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(6, dtype=np.float16).reshape(3, 2).T,
        np.zeros((0, 4), np.float32),
        np.array([7], np.int64),
    ]
    stream = io.BytesIO()
    write_message(stream, {"call": "run"}, arrays)
    stream.seek(0)
    header, got = read_message(stream)
    assert header == {"call": "run"}
    for sent, array in zip(arrays, got, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)
    with pytest.raises(EOFError):
        read_message(stream)


@pytest.mark.parametrize("kept", [2, 20, 60])
def test_a_message_that_breaks_off(kept: int) -> None:
    stream = io.BytesIO()
    write_message(stream, {}, [np.zeros(8)])
    with pytest.raises(EOFError):
        read_message(io.BytesIO(stream.getvalue()[:kept]))


def test_version_and_a_file(toolkit: RknnToolkit, tmp_path: Path) -> None:
    assert toolkit.version == VERSION
    said = toolkit.compile(job("fine"), tmp_path / "out.rknn")
    assert (tmp_path / "out.rknn").read_text() == "fine"
    assert "I rknn building ..." in said
    assert "for [[[1, 2], [3, 4]]]" in said
    assert toolkit.compile(job("another")).count("I rknn building ...") == 1  # each call its own words


def test_nothing_is_left_where_the_user_works(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with RknnToolkit(interpreter) as toolkit:
        said = toolkit.compile(job("fine"))
        assert f"working in {tmp_path}/rockpage-rknn-" in said
    assert list(tmp_path.iterdir()) == []


def test_int8_but_for_some_values(toolkit: RknnToolkit, tmp_path: Path) -> None:
    """Samples reach the compiler; values to keep are named to it, but for those that the graph does not have."""
    dataset = tuple((np.full((1, 2), n, np.float32), np.ones((3, 4), np.float32)) for n in (1, 2))
    kept = ("swiglu", "elsewhere", "down", "dtype")
    said = toolkit.compile(CompileJob("int8", b"fine", (), dataset, kept), tmp_path / "out.rknn")
    assert "sums [[2.0, 12.0], [4.0, 12.0]]" in said
    assert "step 2: graph.model graph.data graph.quantization.cfg" in said
    assert "custom_quantize_layers:\n    swiglu: float16\n    down: float16\nquantize_parameters:\n" in said
    assert (tmp_path / "out.rknn").read_text() == "hybrid"


def test_int8_altogether(toolkit: RknnToolkit) -> None:
    said = toolkit.compile(CompileJob("int8", b"fine", (), ((np.zeros((1, 2), np.float32),),)))
    assert "custom_quantize_layers: {}\nquantize_parameters:\n" in said


def test_a_proposal_that_says_it_otherwise(toolkit: RknnToolkit) -> None:
    with pytest.raises(DeviceError, match=r"graph\.quantization\.cfg does not say 'custom_quantize_layers: \{\}'"):
        toolkit.compile(CompileJob("int8", b"another format", (), ((np.zeros((1, 2), np.float32),),), ("down",)))


def test_a_built_graph_runs(toolkit: RknnToolkit) -> None:
    handles = [toolkit.build(job("fine")), toolkit.build(job("fine too"))]
    (out,) = toolkit.run(handles[1], [np.array([[1.5]], np.float32)])
    assert out.tolist() == [[3.0]]


def test_the_toolkit_cannot_read_what_is_meant_for_the_worker(toolkit: RknnToolkit) -> None:
    toolkit.compile(job("read stdin"))


@pytest.mark.parametrize(
    ("deed", "reason"),
    [("load -1", "load_onnx returned -1"), ("raise", "refused: ValueError: it cannot be$")],
)
def test_a_refusal_is_an_error_and_the_worker_goes_on(toolkit: RknnToolkit, deed: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=f"compiling {deed}: .*{reason}"):
        toolkit.compile(job(deed))
    toolkit.compile(job("fine"))


def test_a_simulator_that_does_not_start_or_answer(toolkit: RknnToolkit) -> None:
    with pytest.raises(DeviceError, match="init_runtime returned -1"):
        toolkit.build(job("no runtime"))
    handle = toolkit.build(job("None"))
    with pytest.raises(DeviceError, match=r"simulation: .*inference returned None"):
        toolkit.run(handle, [np.zeros((1, 1), np.float32)])


@pytest.mark.parametrize(
    ("deed", "reason"), [("abort", "SIGABRT; it said: buffer overflow!!!"), ("exit", "status 3; it said: ")]
)
def test_an_end_names_how_and_the_last_words(doomed: RknnToolkit, deed: str, reason: str) -> None:
    for _ in range(2):  # the second call finds it dead, and says the same
        with pytest.raises(DeviceError, match=f"compiling {deed}: rknn-toolkit2 ended its process with {reason}"):
            doomed.compile(job(deed))
    assert doomed.ended


def test_a_run_that_aborts(doomed: RknnToolkit) -> None:
    handle = doomed.build(job("abort in run"))
    with pytest.raises(DeviceError, match="simulation: rknn-toolkit2 ended its process with SIGABRT"):
        doomed.run(handle, [np.zeros((1, 1), np.float32)])


def test_a_call_has_a_time_limit(doomed: RknnToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rknn_toolkit, "COMPILE_SECONDS", 0.2)
    with pytest.raises(DeviceError, match=r"compiling hang: rknn-toolkit2 did not answer within 0.2 s"):
        doomed.compile(job("hang"))
    assert doomed.ended


def test_an_interrupt_ends_the_worker_so_that_no_late_answer_is_believed(
    doomed: RknnToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt  # as a signal would while an answer is awaited

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            doomed.compile(job("hang"))
    with pytest.raises(DeviceError, match="SIGKILL"):
        doomed.compile(job("fine"))


def test_close_ends_the_process(interpreter: Path) -> None:
    toolkit = RknnToolkit(interpreter)
    toolkit.close()
    assert toolkit.ended
    toolkit.close()


def test_which_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/from/the/environment")
    assert find_python("/named") == Path("/named")
    assert find_python("bin/python") == Path.cwd() / "bin/python"
    assert find_python("sh").is_absolute()  # from PATH
    assert find_python() == Path("/from/the/environment")
    monkeypatch.delenv(PYTHON_VARIABLE)
    with pytest.raises(MissingExtra, match=rf"--no-deps -r {REQUIREMENTS}, and set {PYTHON_VARIABLE}"):
        find_python()


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(MissingExtra, match="/no/python cannot be started"):
        RknnToolkit("/no/python")


def test_an_interpreter_without_the_toolkit() -> None:
    with pytest.raises(MissingExtra, match=f"{sys.executable} has no rknn-toolkit2"):
        RknnToolkit(sys.executable)


def test_an_interpreter_that_is_none() -> None:
    with pytest.raises(DeviceError, match="starting: rknn-toolkit2 ended its process with status 1"):
        RknnToolkit("/bin/false")


def test_the_requirements_are_pinned() -> None:
    lines = REQUIREMENTS.read_text().splitlines()
    assert "rknn-toolkit2==2.5.0" in lines
    assert all("==" in line for line in lines if not line.startswith("#"))
