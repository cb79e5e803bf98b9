"""Builds `hostcache._batch`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_batch.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "hostcache._batch",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=["hostcache/_batch.c"],
    depends=["hostcache/_batch.h"],
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)
