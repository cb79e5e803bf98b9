"""What pyproject.toml cannot say: the C parts, and that one wheel serves every Python."""

from setuptools import setup

setup(
    cffi_modules=[
        "hostcache/_kv_build.py:ffi",
        "staging/_gather_build.py:ffi",
        "npu/_attention_build.py:ffi",
    ],
    # cffi compiles against the stable ABI by itself; the wheel's tag has to be told.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
