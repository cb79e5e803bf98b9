"""What librknnrt.so returns and says, and what is likely behind it: the same by whatever way it is called."""

from __future__ import annotations

from pathlib import Path

from hostcache.errors import DeviceError

__all__ = ["call_error", "code_name", "require_content", "require_version"]

_CODES = {
    -1: "RKNN_ERR_FAIL",
    -2: "RKNN_ERR_TIMEOUT",
    -3: "RKNN_ERR_DEVICE_UNAVAILABLE",
    -4: "RKNN_ERR_MALLOC_FAIL",
    -5: "RKNN_ERR_PARAM_INVALID",
    -6: "RKNN_ERR_MODEL_INVALID",
    -7: "RKNN_ERR_CTX_INVALID",
    -8: "RKNN_ERR_INPUT_INVALID",
    -9: "RKNN_ERR_OUTPUT_INVALID",
    -10: "RKNN_ERR_DEVICE_UNMATCH",
    -13: "RKNN_ERR_TARGET_PLATFORM_UNMATCH",
}
"""rknn_api.h of release 2.3.2, without two codes that only older compilers' files bring."""

_CANNOT_OPEN = "the NPU cannot be opened: it takes the vendor's driver and the groups video and render"

_NO_CORE = "the chip has no such core (an RK3588 has three, an RK3583 two), or the context is broken"

_CAUSES = (
    ("Can not find dynamic library", "the vendor's library is missing: put librknnrt.so into /usr/lib"),
    ("specify the target", "the chip is not known: a container must be shown /proc/device-tree"),
    ("missing in the container", "the container must be shown /proc/device-tree and /dev/dri"),
    ("npu core mode", _NO_CORE),
    ("MODEL_INVALID", "librknnrt.so is older than the compiler, or the file is no graph: use one version of both"),
    ("UNMATCH", "the graph, or librknnrt.so, is for another chip: export the graphs for this one"),
    ("MALLOC_FAIL", "no memory for the NPU: export smaller buckets, or end what else uses the NPU"),
    ("TIMEOUT", "the NPU did not answer: the kernel's log has the driver's words"),
    ("DEVICE_UNAVAILABLE", _CANNOT_OPEN),
    ("init failed", _CANNOT_OPEN),
    ("rknn_set_core_mask", _NO_CORE),
)
"""Words of the vendor, or a call that failed, and the likely cause. The first that matches counts."""


def code_name(code: int) -> str:
    """The vendor's name of a code; empty if it has none."""
    return _CODES.get(code, "")


def call_error(where: str, call: str, outcome: str, said: str) -> DeviceError:
    """The error for a call that failed.

    Args:
        where: the graph and the core.
        call: of the vendor's.
        outcome: what came of it.
        said: the vendor's words, if any.
    """
    words = f"{call} failed: {said}"
    cause = next((cause for hint, cause in _CAUSES if hint in words), "")
    reasons = "; ".join(filter(None, (said, cause))) or "nothing was said about it"
    return DeviceError(f"{where}: {call} {outcome}: {reasons}", call=call, outcome=outcome)


def require_content(graph: Path) -> None:
    """Do nothing if a file holds anything.

    Raises:
        DeviceError: it is empty: a size of 0 says to librknnrt.so that it is given a path and no content.
    """
    if not graph.stat().st_size:
        raise DeviceError(f"{graph} is empty, and librknnrt.so would take its bytes for a path: export it again")


def require_version(version: str, toolkit: str, compiled: str) -> None:
    """Do nothing if librknnrt.so is of the compiler's version.

    Args:
        version: of librknnrt.so.
        toolkit: version of rknn-toolkit2.
        compiled: what that compiled, in a word.

    Raises:
        DeviceError: the library is of another version.
    """
    if version != toolkit:
        raise DeviceError(
            f"librknnrt.so is {version}, the {compiled} were compiled by rknn-toolkit2 {toolkit}: put "
            f"librknnrt.so {toolkit} into /usr/lib, or export them by rknn-toolkit2 {version}",
            runtime=version,
            toolkit=toolkit,
        )
