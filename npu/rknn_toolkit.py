"""The vendor's compiler and simulator, rknn-toolkit2, from outside: a worker process in an environment of its own."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, MissingExtra

from .rknn_log import last_words
from .rknn_worker import read_message, write_message

__all__ = ["PYTHON_VARIABLE", "REQUIREMENTS", "TARGET", "CompileJob", "RknnToolkit", "Shapes", "find_python"]

PYTHON_VARIABLE = "ROCKPAGE_RKNN_PYTHON"
"""Environment variable that names the Python interpreter which has rknn-toolkit2."""

REQUIREMENTS = Path(__file__).with_name("rknn_requirements.txt")
"""Versions that were tried together, all that the toolkit needs: `pip install --no-deps -r`."""

_WAY_OUT = (
    "with Python 3.10 to 3.12, python3 -m venv .venv-rknn && .venv-rknn/bin/pip install --no-deps -r "
    f"{REQUIREMENTS}, and set {PYTHON_VARIABLE} to .venv-rknn/bin/python"
)

TARGET = "rk3588"
"""What graphs are compiled for: RK3588, RK3588S and RK3583. The compilers of other chips do not fuse attention."""

START_SECONDS = 60
"""Importing the toolkit takes 0.4 s on an EPYC server, 3 s with torch beside it."""

COMPILE_SECONDS = 1800
"""The largest graph tried, the head of a model with 151,936 tokens, takes under a minute."""

RUN_SECONDS = 300
"""The largest run tried, 452 rows over 4096 tokens of 2 heads, takes 0.1 s."""

Shapes = tuple[tuple[int, ...], ...]
"""One shape per input of a graph, in its order."""


@dataclass(frozen=True)
class CompileJob:
    """A graph and how to compile it.

    Attributes:
        name: for messages.
        onnx: the serialised model.
        shapes: the sets of input shapes that the compiled file takes; none if the graph's own are fixed.
        dataset: samples to calibrate int8 by, of the largest shapes: for each, one float32 array per input. Empty
            compiles in fp16.
        kept_fp16: values that stay in fp16 when the others become int8. The toolkit then takes one set of shapes only.
    """

    name: str
    onnx: bytes
    shapes: tuple[Shapes, ...] = ()
    dataset: tuple[tuple[NDArray[np.float32], ...], ...] = ()
    kept_fp16: tuple[str, ...] = ()


def find_python(python: Path | str | None = None) -> Path:
    """The interpreter that has the toolkit: the one named, else that of `PYTHON_VARIABLE`, else this one.

    Raises:
        MissingExtra: none is named, and this one has no toolkit.
    """
    named = python or os.environ.get(PYTHON_VARIABLE)
    if named:  # as typed, not resolved: that would lead out of a virtual environment
        return Path(shutil.which(named) or named).absolute()
    if find_spec("rknn") is not None:
        return Path(sys.executable)
    raise MissingExtra(f"compiling for the NPU needs rknn-toolkit2: {_WAY_OUT}")


class RknnToolkit:
    """A running worker. One call at a time; once it has ended, by a crash or an interrupted call, every call fails.

    Args:
        python: see `find_python`.

    Attributes:
        version: of rknn-toolkit2, such as `2.5.0`.

    Raises:
        MissingExtra: there is no interpreter with the toolkit.
        DeviceError: the worker did not start.
    """

    def __init__(self, python: Path | str | None = None) -> None:
        interpreter = find_python(python)
        self._scratch = tempfile.TemporaryDirectory(prefix="rockpage-rknn-")
        self._log = Path(self._scratch.name) / "log"
        worker = Path(__file__).with_name("rknn_worker.py")
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the interpreter the user named
                    # -I: this folder's modules must not stand in for the toolkit's, nor the user's environment.
                    [str(interpreter), "-I", str(worker)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._scratch.name,
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
        except OSError as error:
            self._scratch.cleanup()
            raise MissingExtra(
                f"{interpreter} cannot be started ({error.strerror}): {_WAY_OUT}",
                python=str(interpreter),
            ) from error
        try:
            greeting, _ = self._receive("starting", START_SECONDS)
            if "missing" in greeting:
                raise MissingExtra(f"{interpreter} has no rknn-toolkit2: {_WAY_OUT}", python=str(interpreter))
        except BaseException:
            self.close()
            raise
        self.version: str = greeting["version"]

    @property
    def ended(self) -> bool:
        """Whether the worker has ended: then it takes a new one to go on."""
        return self._process.poll() is not None

    def __enter__(self) -> RknnToolkit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and remove what it left behind. Safe to call twice."""
        self._end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that nobody read
                    pipe.close()
        self._scratch.cleanup()

    def compile(self, job: CompileJob, out: Path | None = None) -> str:
        """Compile a graph into a file.

        Args:
            job: what to compile.
            out: the .rknn file to write, absolute; None compiles and keeps nothing.

        Returns:
            What the compiler printed.

        Raises:
            DeviceError: it refused, took too long, or ended its process.
        """
        return self._compile(job, out, simulate=False)[0]

    def build(self, job: CompileJob) -> int:
        """Compile a graph for `run`, and return the number it has there.

        Raises:
            DeviceError: as for `compile`.
        """
        return int(self._compile(job, None, simulate=True)[1]["handle"])

    def run(self, handle: int, inputs: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Simulate a built graph.

        Args:
            handle: from `build`.
            inputs: float32, of one of the job's sets of shapes.

        Returns:
            The graph's outputs, float32; values are those of fp16 where the compiler rounds.

        Raises:
            DeviceError: the simulator refused, took too long, or ended its process.
        """
        return self._call("simulation", {"call": "run", "handle": handle}, RUN_SECONDS, inputs)[1]

    def _compile(self, job: CompileJob, out: Path | None, *, simulate: bool) -> tuple[str, dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=self._scratch.name, prefix="job-") as name:
            folder = Path(name)
            (folder / "graph.onnx").write_bytes(job.onnx)
            before = self._log.stat().st_size
            request = {
                "call": "compile",
                "onnx": str(folder / "graph.onnx"),
                "target": TARGET,
                "shapes": job.shapes,
                "dataset": _write_dataset(folder, job) if job.dataset else None,
                "kept_fp16": job.kept_fp16,
                "out": None if out is None else str(out),
                "simulate": simulate,
            }
            answer, _ = self._call(f"compiling {job.name}", request, COMPILE_SECONDS)
        return self._printed(before), answer

    def _call(
        self, what: str, request: dict[str, Any], seconds: float, arrays: Sequence[NDArray[Any]] = ()
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        assert self._process.stdin is not None, "a pipe, see Popen"
        try:
            write_message(self._process.stdin, request, arrays)
            return self._receive(what, seconds)
        except BrokenPipeError:
            raise self._death(what) from None
        except DeviceError:
            raise
        except BaseException:  # Ctrl-C: its answer would be taken for that of the next call
            self._end()
            raise

    def _receive(self, what: str, seconds: float) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        answers = self._process.stdout
        assert answers is not None, "a pipe, see Popen"
        ready, _, _ = select.select([answers], [], [], seconds)
        if not ready:
            self._end()
            raise DeviceError(f"{what}: rknn-toolkit2 did not answer within {seconds} s and was ended", seconds=seconds)
        try:
            answer, arrays = read_message(answers)
        except EOFError:
            raise self._death(what) from None
        if error := answer.get("error"):
            raise DeviceError(f"{what}: rknn-toolkit2 refused: {error}", error=error)
        return answer, arrays

    def _end(self) -> None:
        """End the worker at once. It has nothing to finish: files are ours only when a call has returned."""
        self._process.kill()
        self._process.wait()

    def _death(self, what: str) -> DeviceError:
        """What to say of a worker that has ended."""
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        said = last_words(self._printed())
        return DeviceError(f"{what}: rknn-toolkit2 ended its process with {how}; it said: {said}", how=how, said=said)

    def _printed(self, start: int = 0) -> str:
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")


def _write_dataset(folder: Path, job: CompileJob) -> str:
    """The list that the toolkit reads: one line per sample, one .npy file per input on it."""
    lines = []
    for number, sample in enumerate(job.dataset):
        paths = [folder / f"sample-{number}-{position}.npy" for position in range(len(sample))]
        for path, array in zip(paths, sample, strict=True):
            np.save(path, array)
        lines.append(" ".join(map(str, paths)))
    listed = folder / "dataset.txt"
    listed.write_text("\n".join(lines) + "\n")
    return str(listed)
