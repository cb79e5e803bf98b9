"""Builds `staging._gather`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_gather.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "staging._gather",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=["staging/_gather.c"],
    depends=["hostcache/_isa.h", "staging/_copy.h", "staging/_gather.h"],
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)
