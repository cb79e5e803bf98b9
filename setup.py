"""What pyproject.toml cannot say: where it runs, the C parts, and that one wheel serves every Python."""

from __future__ import annotations

import platform
import sys
import sysconfig

from setuptools import setup


def unsupported() -> str | None:
    """Why what is built here could not run on this Python; None where it can."""
    if sys.platform != "linux":
        return f"rockpage runs on Linux, this is {sys.platform}: use a Linux machine, a container, or WSL 2 on Windows"
    if sys.maxsize < 1 << 32:
        return f"rockpage needs a 64-bit Python on x86-64 or aarch64, this one is 32-bit ({platform.machine()})"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "rockpage needs the stable ABI, which a free-threaded Python lacks: use python3.14, not python3.14t"
    return None


reason = unsupported()
if reason:
    sys.exit(reason)

setup(
    cffi_modules=[
        "hostcache/_batch_build.py:ffi",
        "hostcache/_kv_build.py:ffi",
        "staging/_gather_build.py:ffi",
        "staging/_limits_build.py:ffi",
        "npu/_attention_build.py:ffi",
        "npu/_dense_build.py:ffi",
    ],
    # cffi compiles against the stable ABI by itself; the wheel's tag has to be told.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
