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
    sources=["staging/_gather.c", "hostcache/_rows.c", "hostcache/_rows_avx2.c", "hostcache/_rows_neon.c"],
    depends=[
        "hostcache/_codec.h",
        "hostcache/_fp16.h",
        "hostcache/_isa.h",
        "hostcache/_rows.h",
        "hostcache/_rows_decode.h",
        "staging/_copy.h",
        "staging/_gather.h",
    ],
    # No contraction: what is staged of a quantised block is, bit for bit, what the cache reads of it.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden"],
)
