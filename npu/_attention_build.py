"""Builds `npu._attention`; setup.py runs it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]  # cffi ships no type information

DECLARATIONS = (Path(__file__).parent / "_attention.h").read_text(encoding="ascii")

ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "npu._attention",
    "#include <stdint.h>\n" + DECLARATIONS,
    sources=[
        "npu/_attention.c",
        "npu/_attention_plain.c",
        "npu/_attention_avx2.c",
        "npu/_attention_avx512.c",
        "npu/_attention_neon.c",
    ],
    depends=[
        "hostcache/_fp16.h",
        "hostcache/_isa.h",
        "npu/_attention.h",
        "hostcache/_codec.h",
        "npu/_attention_ahead.h",
        "npu/_attention_body.h",
        "npu/_attention_dots.h",
        "npu/_attention_fp16.h",
        "npu/_attention_levels.h",
        "npu/_attention_tile.h",
        "npu/_attention_walk.h",
        "npu/_attention_x86.h",
        "npu/_threads.h",
    ],
    # No contraction: the kernel writes its fused multiply-adds out, so that a row's bits never depend on inlining.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
)
