"""Builds `npu._dense`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_dense.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "npu._dense",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=[
        "npu/_dense.c",
        "npu/_dense_plain.c",
        "npu/_dense_avx2.c",
        "npu/_dense_avx512.c",
        "npu/_dense_neon.c",
    ],
    depends=[
        "hostcache/_fp16.h",
        "hostcache/_isa.h",
        "npu/_dense.h",
        "npu/_dense_body.h",
        "npu/_dense_kernel.h",
        "npu/_threads.h",
    ],
    # No contraction: a row has the same bits with every instruction set.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
)
