"""The C parts: cffi modules cannot be declared in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "hostcache/_kv_build.py:ffi",
        "staging/_gather_build.py:ffi",
        "npu/_attention_build.py:ffi",
    ]
)
