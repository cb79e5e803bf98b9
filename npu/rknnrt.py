"""librknnrt.so, the vendor's C library: it has calls for operands that stay where they lie, its Python wheel has none.

By ctypes, which type checkers know and which compiles nothing for a library that is on boards alone. Structs and
numbers are those of rknn_api.h in release 2.3.2. The ctypes classes of the wheel 2.5.0 are the same as far as they go,
which is without `TensorMemory`; that one is held against what the library writes into it. Older headers differ.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from hostcache.errors import DeviceError

from .niceness import kept_niceness
from .rknn_errors import call_error, code_name

__all__ = [
    "FLOAT16",
    "KNOWN_VERSIONS",
    "LIBRARY",
    "InOutNum",
    "InitFlag",
    "Library",
    "Query",
    "SdkVersion",
    "TensorAttr",
    "TensorFormat",
    "TensorMemory",
    "require_known",
]

LIBRARY = Path("/usr/lib/librknnrt.so")
"""Where the vendor's wheel looks, too: one library serves both."""

KNOWN_VERSIONS = ((2, 3, 2), (2, 5, 0))
"""The first and the last whose structs are known, from the header of the one and the wheel of the other."""

FLOAT16 = 1
"""`rknn_tensor_type`."""


class TensorFormat:
    """`rknn_tensor_format`."""

    NHWC = 1
    NC1HWC2 = 2


class Query:
    """`rknn_query_cmd`. What is current follows `rknn_set_input_shapes`, and is not known before it."""

    IN_OUT_NUM = 0
    INPUT_ATTR = 1
    SDK_VERSION = 5
    CURRENT_NATIVE_INPUT_ATTR = 16
    CURRENT_NATIVE_OUTPUT_ATTR = 17


class InitFlag:
    """Of `rknn_init`. Without the last two, each run would sync every operand by a call that an import refuses."""

    PRIOR_MEDIUM = 0x1
    DISABLE_PROC_HIGH_PRIORITY = 0x2000
    DISABLE_FLUSH_INPUT_MEM_CACHE = 0x4000
    DISABLE_FLUSH_OUTPUT_MEM_CACHE = 0x8000


class TensorAttr(ctypes.Structure):
    """`rknn_tensor_attr`."""

    _fields_ = (
        ("index", ctypes.c_uint32),
        ("n_dims", ctypes.c_uint32),
        ("dims", ctypes.c_uint32 * 16),
        ("name", ctypes.c_char * 256),
        ("n_elems", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("fmt", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("qnt_type", ctypes.c_int32),
        ("fl", ctypes.c_int8),
        ("zp", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("w_stride", ctypes.c_uint32),
        ("size_with_stride", ctypes.c_uint32),
        ("pass_through", ctypes.c_uint8),
        ("h_stride", ctypes.c_uint32),
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions that are used."""
        return tuple(self.dims[: self.n_dims])


class TensorMemory(ctypes.Structure):
    """`rknn_tensor_mem`, which the library makes and frees."""

    _fields_ = (
        ("virt_addr", ctypes.c_void_p),
        ("phys_addr", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("priv_data", ctypes.c_void_p),
    )


class InOutNum(ctypes.Structure):
    """`rknn_input_output_num`."""

    _fields_ = (("n_input", ctypes.c_uint32), ("n_output", ctypes.c_uint32))


class SdkVersion(ctypes.Structure):
    """`rknn_sdk_version`."""

    _fields_ = (("api_version", ctypes.c_char * 256), ("drv_version", ctypes.c_char * 256))


_CONTEXT = ctypes.c_uint64
_POINTER = ctypes.c_void_p  # to whatever the call says

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rknn_init": (_POINTER, _POINTER, ctypes.c_uint32, ctypes.c_uint32, _POINTER),
    "rknn_destroy": (_CONTEXT,),
    "rknn_query": (_CONTEXT, ctypes.c_int, _POINTER, ctypes.c_uint32),
    "rknn_set_core_mask": (_CONTEXT, ctypes.c_int),
    "rknn_set_input_shapes": (_CONTEXT, ctypes.c_uint32, _POINTER),
    "rknn_destroy_mem": (_CONTEXT, _POINTER),
    "rknn_set_io_mem": (_CONTEXT, _POINTER, _POINTER),
    "rknn_run": (_CONTEXT, _POINTER),
}
"""Of the calls that return a code."""

_CREATE = "rknn_create_mem_from_fd"


class Library:
    """The loaded library.

    Args:
        path: of its file.

    Raises:
        DeviceError: it cannot be loaded, or lacks a call.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        try:
            with kept_niceness():
                loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(
                f"{path} cannot be loaded ({error}): put the vendor's librknnrt.so there", path=str(path)
            ) from error
        try:
            self._calls = {name: getattr(loaded, name) for name in (*_ARGUMENTS, _CREATE)}
        except AttributeError as error:
            raise DeviceError(
                f"{path} is no librknnrt.so that can be handed memory ({error}): rockpage knows {_known()}",
                path=str(path),
            ) from error
        for name, arguments in _ARGUMENTS.items():
            self._calls[name].argtypes = arguments
        create = self._calls[_CREATE]
        create.argtypes = (_CONTEXT, ctypes.c_int32, _POINTER, ctypes.c_uint32, ctypes.c_int32)
        create.restype = ctypes.POINTER(TensorMemory)

    def call(self, where: str, name: str, *arguments: object) -> None:
        """Make a call that returns a code.

        Args:
            where: the graph and the core, for the error.
            name: of the call.
            arguments: its own.

        Raises:
            DeviceError: it returned another code than 0.
        """
        code = self._calls[name](*arguments)
        if code:
            raise call_error(where, name, f"returned {code}", code_name(code))

    def init(self, where: str, graph: bytes) -> int:
        """`rknn_init`: the context of a graph. Raises as `call`."""
        context = _CONTEXT()
        flags = (
            InitFlag.PRIOR_MEDIUM
            | InitFlag.DISABLE_PROC_HIGH_PRIORITY
            | InitFlag.DISABLE_FLUSH_INPUT_MEM_CACHE
            | InitFlag.DISABLE_FLUSH_OUTPUT_MEM_CACHE
        )
        with kept_niceness():
            self.call(where, "rknn_init", ctypes.byref(context), graph, len(graph), flags, None)
        return context.value

    def create_memory(self, where: str, context: int, place: tuple[int, int, int, int]) -> Any:  # noqa: ANN401 - ctypes' pointers have no type
        """`rknn_create_mem_from_fd`: import a part of a dma-buf.

        Args:
            where: as in `call`.
            context: as `init` returned it.
            place: descriptor of the dma-buf, address at which this process sees its first byte, offset and bytes.

        Returns:
            A pointer to a `TensorMemory`.

        Raises:
            DeviceError: the library returned none, or one that says something else.
        """
        descriptor, address, offset, nbytes = place
        memory = self._calls[_CREATE](context, descriptor, address, nbytes, offset)
        if not memory:
            raise call_error(
                where,
                _CREATE,
                "returned nothing",
                f"the driver did not take {nbytes} bytes of a dma-buf: the NPU's 4 GB of addresses are used up, the "
                "limit of open files is reached (ulimit -n), or it has no IOMMU and the memory is not contiguous",
            )
        found = (memory.contents.fd, memory.contents.offset, memory.contents.size)
        if found != (descriptor, offset, nbytes):
            self.call(where, "rknn_destroy_mem", context, memory)
            raise DeviceError(
                f"{where}: {_CREATE} answers {found} to a descriptor, an offset and a size of "
                f"{(descriptor, offset, nbytes)}: its struct is not the one rockpage knows, use the rknnlite runtime",
                found=found,
            )
        return memory


def require_known(version: str) -> None:
    """Do nothing if the structs of a version of the library are known.

    Raises:
        DeviceError: they are not.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not numbers or not KNOWN_VERSIONS[0] <= tuple(map(int, numbers.groups())) <= KNOWN_VERSIONS[1]:
        raise DeviceError(
            f"librknnrt.so says it is version {version!r}, rockpage knows the structs of {_known()}: use one of those, "
            "or the rknnlite runtime",
            version=version,
        )


def _known() -> str:
    first, last = (".".join(map(str, version)) for version in KNOWN_VERSIONS)
    return f"{first} to {last}"
