"""Builds `hostcache._kv`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_kv.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "hostcache._kv",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=["hostcache/_kv.c", "hostcache/_rows.c", "hostcache/_rows_avx2.c", "hostcache/_rows_neon.c"],
    depends=[
        "hostcache/_codec.h",
        "hostcache/_fp16.h",
        "hostcache/_isa.h",
        "hostcache/_kv.h",
        "hostcache/_rows.h",
        "hostcache/_rows_decode.h",
    ],
    # Quantised bytes must not depend on the instruction set, so no product and sum become one.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden"],
)
