"""One graph on one NPU core, whose operands stay where they lie: in dma-bufs, in the NPU's own order."""

from __future__ import annotations

import ctypes
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hostcache.errors import DeviceError
from staging import TILE_CHANNELS, StagingLayout

from .rknn_errors import require_content
from .rknnrt import FLOAT16, InOutNum, Library, Query, SdkVersion, TensorAttr, TensorFormat, require_known

__all__ = ["MOST_MEMORIES", "Operand", "RknnrtContext"]

MOST_MEMORIES = 1024
"""Imports that a context keeps; those that were used longest ago go. With room for K and V of every layer of some
staged copies."""

_log = logging.getLogger(__name__)


class Operand(NamedTuple):
    """Where an operand lies.

    Attributes:
        descriptor: of a dma-buf.
        address: at which this process sees the dma-buf's first byte.
        offset: in the dma-buf.
        nbytes: of the operand.
    """

    descriptor: int
    address: int
    offset: int
    nbytes: int


class RknnrtContext:
    """A graph, loaded for one core. Used by one thread at a time.

    Args:
        library: the vendor's.
        graph: the .rknn file.
        core: number of the core, from 0.

    Attributes:
        version: of librknnrt.so.
        driver: version of the kernel's driver.

    Raises:
        DeviceError: a call failed, or the library's structs are not known; nothing of the context is left.
    """

    def __init__(self, library: Library, graph: Path, core: int) -> None:
        self._where = f"{graph.name} on core {core}"
        self._library = library
        self._prepared: dict[StagingLayout, list[TensorAttr]] = {}  # of inputs and the output; one for each launch
        self._current: StagingLayout | None = None  # that the context's shapes are set to
        self._memories: OrderedDict[Operand, Any] = OrderedDict()  # used longest ago first
        require_content(graph)
        self._context: int | None = library.init(self._where, graph.read_bytes())
        try:
            self.version, self.driver = self._versions()
            require_known(self.version)
            self._call("rknn_set_core_mask", 1 << core)
            counts = InOutNum()
            self._query(Query.IN_OUT_NUM, counts)
            self._inputs = [self._attribute(Query.INPUT_ATTR, index) for index in range(counts.n_input)]
        except BaseException:
            self.release()
            raise

    def prepare(self, layout: StagingLayout) -> list[TensorAttr]:
        """Set the shapes of a launch, and see to it that the NPU wants its operands as they are staged.

        Returns:
            Of each input and the output, how it lies.

        Raises:
            DeviceError: the graph has no such launch, or the library would lay an operand out in another way.
        """
        self._current = None  # whatever fails, they are set anew
        shapes = _input_shapes(layout)
        if len(shapes) != len(self._inputs):
            raise DeviceError(f"{self._where}: the graph has {len(self._inputs)} inputs, not {len(shapes)}")
        attributes = (TensorAttr * len(shapes))(*self._inputs)
        for attribute, shape in zip(attributes, shapes, strict=True):
            attribute.fmt, attribute.n_dims = TensorFormat.NHWC, len(shape)
            attribute.dims[: len(shape)] = shape
        self._call("rknn_set_input_shapes", len(shapes), attributes)
        if layout not in self._prepared:
            self._prepared[layout] = self._native(shapes, (layout.heads, 1, layout.rows, layout.head_dim))
        self._current = layout
        return self._prepared[layout]

    def run(self, layout: StagingLayout, operands: Sequence[Operand]) -> None:
        """Run a launch and wait for its end.

        Args:
            layout: of the launch.
            operands: inputs in the graph's order, then the output. The device has their bytes already; the caller syncs
                the output's.

        Raises:
            DeviceError: a call failed. That none failed does not prove the result fresh.
        """
        attributes = self._prepared[layout] if layout == self._current else self.prepare(layout)
        for operand, attribute in zip(operands, attributes, strict=True):
            self._call("rknn_set_io_mem", self._memory(operand), ctypes.byref(attribute))
        self._call("rknn_run", None)
        while len(self._memories) > MOST_MEMORIES:  # the newest are this run's
            self._destroy(self._memories.popitem(last=False)[1])

    def release(self) -> None:
        """Give back what the NPU holds. Safe to call twice; what the library says to it is logged, no more."""
        while self._memories:
            self._destroy(self._memories.popitem()[1])
        if self._context is not None:
            self._attempt("rknn_destroy")
            self._context = None

    def _versions(self) -> tuple[str, str]:
        """Of the library and of the driver."""
        said = SdkVersion()
        self._query(Query.SDK_VERSION, said)
        library, driver = (text.decode(errors="replace") for text in (said.api_version, said.drv_version))
        return (re.match(r"\d[\w.]*", library) or [library])[0], driver

    def _native(self, inputs: Sequence[tuple[int, ...]], output: tuple[int, ...]) -> list[TensorAttr]:
        attributes = [
            self._attribute(Query.CURRENT_NATIVE_INPUT_ATTR, index, shape) for index, shape in enumerate(inputs)
        ]
        for attribute in attributes:
            attribute.pass_through = 1
        return [*attributes, self._attribute(Query.CURRENT_NATIVE_OUTPUT_ATTR, 0, output)]

    def _attribute(self, query: int, index: int, shape: tuple[int, ...] | None = None) -> TensorAttr:
        """How a tensor lies, and that it does so in tiles, if its shape as `[N, H, W, C]` is given."""
        attribute = TensorAttr(index=index)
        self._query(query, attribute)
        if shape is not None:
            batch, height, width, channels = shape
            tiles = (batch, channels // TILE_CHANNELS, height, width, TILE_CHANNELS)
            nbytes = 2 * batch * height * width * channels
            expected = (TensorFormat.NC1HWC2, FLOAT16, tiles, nbytes)
            found = (attribute.fmt, attribute.type, attribute.shape, attribute.size_with_stride)
            if found != expected:
                name = attribute.name.decode(errors="replace")
                raise DeviceError(
                    f"{self._where}: the NPU wants {name} in format, type, shape and bytes {found}, it is staged in "
                    f"{expected}: use the rknnlite runtime, which lays it out anew",
                    found=found,
                    staged=expected,
                )
        return attribute

    def _query(self, query: int, answer: ctypes.Structure) -> None:
        self._call("rknn_query", query, ctypes.byref(answer), ctypes.sizeof(answer))

    def _memory(self, operand: Operand) -> Any:  # noqa: ANN401 - a pointer of ctypes
        memory = self._memories.pop(operand, None) or self._library.create_memory(
            self._where, self._context or 0, operand
        )
        self._memories[operand] = memory
        return memory

    def _destroy(self, memory: Any) -> None:  # noqa: ANN401 - likewise
        self._attempt("rknn_destroy_mem", memory)

    def _attempt(self, name: str, *arguments: object) -> None:
        try:
            self._call(name, *arguments)
        except DeviceError as error:
            _log.warning("%s", error)

    def _call(self, name: str, *arguments: object) -> None:
        self._library.call(self._where, name, self._context, *arguments)


def _input_shapes(layout: StagingLayout) -> list[tuple[int, ...]]:
    """Of q, K, V and, if there is one, the mask: `[N, H, W, C]`."""
    shapes: list[tuple[int, ...]] = [
        (layout.heads, 1, layout.rows, layout.key_channels),
        (layout.heads, 1, layout.tokens, layout.key_channels),
        (layout.heads, 1, layout.tokens, layout.head_dim),
    ]
    return [*shapes, (layout.batch, 1, layout.rows, layout.tokens)] if layout.mask_rows else shapes
