"""Builds `staging._limits`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_limits.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "staging._limits",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=["staging/_limits.c"],
    depends=["hostcache/_isa.h", "staging/_limits.h"],
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)
