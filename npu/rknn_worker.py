"""Runs the vendor's compiler and simulator in an interpreter of its own; `npu.rknn_toolkit` starts it as a script.

rknn-toolkit2 wants older packages than rockpage, prints on the process's file descriptors, leaves files in the working
folder, and ends the process by SIGABRT where a graph is too large (2.5.0, `buffer overflow!!!`). A process of its own
takes all of that. It imports the standard library, numpy and rknn, and nothing of rockpage.

A message, in either direction, is its header's length (4 bytes, little-endian), the header (JSON), and the bytes of the
arrays that the header lists under `arrays` as `[dtype, shape]`, C-contiguous, one after the other. Requests come on
stdin, answers go to stdout; whatever the toolkit prints goes to the file that the process got as stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import types
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_message", "write_message"]

_LENGTH = struct.Struct("<I")
_LINE_BUFFERED = 1  # _IOLBF


def write_message(stream: IO[bytes], header: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> None:
    """Send one message.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    listed = [[array.dtype.str, array.shape] for array in arrays]
    text = json.dumps({**header, "arrays": listed}).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for array in arrays:
        stream.write(array.reshape(-1).view(np.uint8).data)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Wait for one message: its header and its arrays, which are the caller's own.

    Raises:
        EOFError: the other side has ended, perhaps in the middle of a message.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    header = json.loads(_read(stream, length))
    arrays = []
    for dtype, shape in header.pop("arrays"):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(_read(stream, array.nbytes), np.uint8)
        arrays.append(array)
    return header, arrays


def _read(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise EOFError(f"the stream ended {count - len(content)} bytes early")
    return content


class _Graphs:
    """Graphs that were built in this process and can be simulated: a file that was exported cannot."""

    def __init__(self) -> None:
        self._built: dict[int, Any] = {}

    def compile(self, header: dict[str, Any]) -> dict[str, Any]:
        """Build a graph; write it to `out`, keep it for `run`, or both."""
        from rknn.api import RKNN  # type: ignore[import-not-found] # noqa: PLC0415 - in the toolkit's environment only

        rknn = RKNN(verbose=True)  # tables of layers are printed only so
        config = {"dynamic_input": header["shapes"]} if header["shapes"] else {}
        _must("config", rknn.config(target_platform=header["target"], **config))
        _must("load_onnx", rknn.load_onnx(model=header["onnx"]))
        if header["dataset"] is None:
            _must("build", rknn.build(do_quantization=False))
        else:
            rknn = _quantise(rknn, header)
        if header["out"] is not None:
            _must("export_rknn", rknn.export_rknn(header["out"]))
        if not header["simulate"]:
            rknn.release()
            return {}
        _must("init_runtime", rknn.init_runtime(target=None))  # None is the simulator
        handle = len(self._built)
        self._built[handle] = rknn
        return {"handle": handle}

    def run(self, header: dict[str, Any], arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Simulate a built graph on float32 inputs as the graph declares them.

        They pass by the toolkit's own preparation, which holds the channels of every shape against those of the
        largest. It takes 4-D arrays for channels-last unless told otherwise.
        """
        outputs = self._built[header["handle"]].inference(
            inputs=arrays, data_format=["nchw"] * len(arrays), inputs_pass_through=[1] * len(arrays)
        )
        if outputs is None:
            raise RuntimeError("inference returned None")
        return [np.asarray(output) for output in outputs]


def _quantise(rknn: Any, header: dict[str, Any]) -> Any:  # noqa: ANN401 - RKNN, which has no types
    """Build a loaded graph in int8, but for the values that are to stay in fp16.

    The toolkit proposes scales in a file; naming a value there keeps it in fp16.
    """
    _must("hybrid_quantization_step1", rknn.hybrid_quantization_step1(dataset=header["dataset"]))
    stem = Path(header["onnx"]).stem  # its three files lie in the working folder
    proposal = Path(f"{stem}.quantization.cfg")
    nothing_kept = "custom_quantize_layers: {}\n"
    before, found, behind = proposal.read_text().partition(nothing_kept)
    if not found:
        raise RuntimeError(f"{proposal.name} does not say {nothing_kept.strip()!r}")
    kept = [name for name in header["kept_fp16"] if f"\n    {name}:\n" in behind]
    listed = "".join(f"\n    {name}: float16" for name in kept) or " {}"
    proposal.write_text(f"{before}custom_quantize_layers:{listed}\n{behind}")
    built = type(rknn)(verbose=True)
    files = (f"{stem}.model", f"{stem}.data", str(proposal))
    _must("hybrid_quantization_step2", built.hybrid_quantization_step2(*files))
    rknn.release()
    return built


def _must(call: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{call} returned {status}")


def _provide_torch() -> None:
    """Let the toolkit find a `torch` to import where there is none.

    It needs one to read PyTorch's models and for one method of quantisation, neither of which is used here; on import
    it takes a base class and a decorator from it (2.5.0). The real one is a gigabyte.
    """
    if find_spec("torch") is not None:
        return
    torch = types.ModuleType("torch")
    names = ("nn", "nn.functional", "optim", "utils", "utils.data")
    for name, module in [("torch", torch), *((f"torch.{name}", types.ModuleType(f"torch.{name}")) for name in names)]:
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["torch.nn"].Module = type("Module", (), {})  # type: ignore[attr-defined] # a stand-in
    torch.no_grad = lambda: lambda function: function  # type: ignore[attr-defined] # likewise


def _take_channel() -> tuple[IO[bytes], IO[bytes]]:
    """Keep stdin and stdout for messages, and send what libraries print on them to where stderr goes."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    libc = ctypes.CDLL(None)  # a file is block-buffered: the last words before an abort would be lost
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))
    return requests, answers


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    try:
        write_message(answers, {"version": version("rknn-toolkit2")})
    except PackageNotFoundError:
        write_message(answers, {"missing": "rknn-toolkit2"})
        return
    graphs = _Graphs()
    while True:
        try:
            header, arrays = read_message(requests)
        except EOFError:
            return
        try:
            if header["call"] == "compile":
                write_message(answers, graphs.compile(header))
            else:
                write_message(answers, {}, graphs.run(header, arrays))
        except Exception as error:  # the toolkit raises whatever it likes; the caller is told
            # The toolkit wraps a traceback in the message; the last line is the reason.
            write_message(answers, {"error": str(error).strip().rpartition("\n")[2] or type(error).__name__})
        sys.stdout.flush()


if __name__ == "__main__":
    _provide_torch()
    _serve(*_take_channel())
