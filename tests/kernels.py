"""The tests of what is written in C: they also run on emulated arm64, and with sanitizers built in."""

from __future__ import annotations

__all__ = ["KERNEL_TESTS", "MODEL_TESTS"]

KERNEL_TESTS = (
    "tests/hostcache/test_decode_batch.py",
    "tests/hostcache/test_kv_kernel.py",
    "tests/hostcache/test_kv_codecs.py",
    "tests/staging/test_gather_kernel.py",
    "tests/staging/test_limits.py",
    "tests/staging/test_staged_codecs.py",
    "tests/npu/test_cpu_attention.py",
    "tests/npu/test_cpu_attention_codecs.py",
    "tests/npu/test_attention_windows.py",
    "tests/npu/test_tiled_decoder.py",
)
"""From the root of the checkout."""

MODEL_TESTS = ("tests/npu/test_key_balance.py",)
"""Likewise, but they run a model, with libraries that are not on emulated arm64: with sanitizers alone."""
