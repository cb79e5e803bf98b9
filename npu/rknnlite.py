"""One graph on one NPU core, through the vendor's Python runtime: rknn-toolkit-lite2 over librknnrt.so.

The wheel turns every failure into -1 or None, ignores the code that a run returns, and goes on with a context that
could not be set up. Its `inference` is three calls on an object behind it, which do raise, and of which the second
returns that code; so they are called here one by one. They are the same in its versions 2.3.0, 2.3.2 and 2.5.0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, MissingExtra

from .niceness import kept_niceness
from .rknn_errors import call_error, code_name, require_content

__all__ = ["LiteContext"]

_Value = TypeVar("_Value")

_log = logging.getLogger(__name__)


class LiteContext:
    """A graph, loaded for one core. Used by one thread at a time.

    Args:
        graph: the .rknn file.
        core: number of the core, from 0.

    Attributes:
        version: of librknnrt.so.
        driver: version of the kernel's driver.

    Raises:
        MissingExtra: rknn-toolkit-lite2 is not installed.
        DeviceError: a call of the vendor's failed; nothing of the context is left.
    """

    def __init__(self, graph: Path, core: int) -> None:
        self._where = f"{graph.name} on core {core}"
        require_content(graph)
        self._words = _Words()
        self._lite = self._call("RKNNLite", _lite_class())
        self._lite.rknn_log = self._words
        try:
            self._expect_0("load_rknn", self._lite.load_rknn, str(graph))
            with kept_niceness():
                self._expect_0("init_runtime", lambda: self._lite.init_runtime(core_mask=1 << core))
            self._lite.rknn_data = None  # the file's bytes, which the library has copied: they would stay for good
            self.version, self.driver = self._versions()
            self._steps = self._find_steps()
        except BaseException:
            self.release()
            raise

    def run(self, inputs: Sequence[NDArray[np.float16]], shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Run a graph of one output; see `run_all`."""
        (result,) = self.run_all(inputs, (shape,))
        return result

    def run_all(
        self, inputs: Sequence[NDArray[np.float16]], shapes: Sequence[tuple[int, ...]]
    ) -> list[NDArray[np.float32]]:
        """Run the graph and wait for its results.

        Args:
            inputs: in the graph's order, four axes each, channels last. Not checked by the wheel: a wrong number of
                elements would be read behind its end.
            shapes: of the outputs in the graph's order, channels second.

        Returns:
            float32 arrays of these shapes, the caller's own.

        Raises:
            DeviceError: a call failed, or brought something else. That none failed does not prove the result fresh.
        """
        set_inputs, run, get_outputs = self._steps
        # The wheel writes into the list of formats.
        self._call("set_inputs", set_inputs, list(inputs), None, ["nhwc"] * len(inputs))
        if returned := self._call("run", run):
            raise self._error("run", f"returned {returned}", code_name(returned))
        outputs = self._call("get_outputs", get_outputs)
        found = [(getattr(o, "dtype", type(o)), getattr(o, "shape", None)) for o in outputs or ()]
        if found != [(np.float32, shape) for shape in shapes]:
            wanted = ", ".join(map(str, shapes))
            raise self._error("get_outputs", f"returned {found}", f"float32 {wanted} was asked for")
        return list(outputs)

    def release(self) -> None:
        """Give back what the NPU holds. Safe to call twice; what the vendor says to it is logged, no more."""
        lite, self._lite = self._lite, None
        self._steps = ()
        try:
            if lite is not None:
                lite.release()
        except Exception as error:  # the wheel raises whatever it likes
            _log.warning("%s: release: %s", self._where, error)

    def _versions(self) -> tuple[str, str]:
        """Of the library and of the driver."""
        said = self._call("get_sdk_version", self._lite.get_sdk_version)
        numbers = [re.search(rf"{name}:\s*(\d\S*)", str(said)) for name in ("API", "DRV")]
        version, driver = (number.group(1) if number else "" for number in numbers)
        if not version:
            raise self._error("get_sdk_version", f"returned {said!r}", "librknnrt.so does not say its version")
        return version, driver

    def _find_steps(self) -> tuple[Callable[..., Any], ...]:
        """The three calls of a run."""
        runtime = getattr(self._lite, "rknn_runtime", None)
        try:
            return runtime.set_inputs, runtime.run, runtime.get_outputs  # type: ignore[union-attr] # checked this way
        except AttributeError as error:
            raise DeviceError(
                f"this version of rknn-toolkit-lite2 is made in another way than 2.5.0 ({error}): "
                "pip install rknn-toolkit-lite2==2.5.0"
            ) from None

    def _expect_0(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        returned = self._call(name, function, *arguments)
        if returned != 0:
            raise self._error(name, f"returned {returned!r}", self._words.last())

    def _call(self, name: str, function: Callable[..., _Value], *arguments: object) -> _Value:
        try:
            return function(*arguments)
        except Exception as error:  # the wheel raises whatever it likes
            said = f"{type(error).__name__}: {error}"
        # Outside of the handler: the wheel's error would keep its frames alive, and with them views of the operands.
        raise self._error(name, "failed", said)

    def _error(self, call: str, outcome: str, said: str) -> DeviceError:
        return call_error(self._where, call, outcome, said)


class _Words:
    """Stands where the wheel's logger stood, so that its last words can be part of an error."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        """`e`, `w`, `d` and so on: a call with a text, and whether to raise it."""

        def hear(text: object, *_: object) -> None:
            _log.debug("%s %s", level, text)
            if level == "e":
                self._errors.append(str(text).strip().rpartition("\n")[2])  # of a traceback, the last line

        return hear

    def last(self) -> str:
        """The last error that was heard; forget them all."""
        errors, self._errors = self._errors, []
        return errors[-1] if errors else ""


def _lite_class() -> Callable[[], Any]:
    """The vendor's class.

    Raises:
        MissingExtra: it cannot be imported.
    """
    try:
        from rknnlite.api import RKNNLite  # type: ignore[import-not-found] # noqa: PLC0415 - boards only
    except ImportError as error:
        raise MissingExtra(
            f"the rknnlite runtime and dense segments need the vendor's rknn-toolkit-lite2 ({error}): on the board, "
            "with Python 3.10 to 3.12, pip install 'rockpage[board]'"
        ) from error
    made: Callable[[], Any] = RKNNLite
    return made
