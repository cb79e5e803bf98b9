"""Seeded faults in benchmarks, and in the choice of a codec, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["BENCH_FAULTS"]

BENCH_FAULTS = [
    *group(
        "tools/bench_rows.py",
        "tools/test_bench_rows.py",
        ("what cannot be asked for is missed", "return self.excuse is None and _misses", "return _misses"),
        ("what is excused is told as met", '(excuse or "missed") if _misses', '"missed" if not excuse and _misses'),
    ),
    *group(
        "tools/bench_report.py",
        "tools/test_bench_rows.py",
        ("an excuse hides what was missed", '"missed" if "missed" in verdicts else next', "next"),
        ("rows that were met hide an excuse", '(one for one in verdicts if one != "met"), "met")', '(one for one in verdicts), "met")'),
    ),
    *group(
        "tools/bench_attention_threads.py",
        "tools/test_bench_attention_threads.py",
        ("no machine is asked what it can do", "excuse=None if free else", "excuse=None if True else"),
        ("what the machine can do is judged by medians", "alone_read.minimum / both_read.minimum", "alone_read.median / both_read.median"),
        ("two threads read twice as much", "again = max(1, nbytes // OWN // readers)", "again = max(1, nbytes // OWN)"),
    ),
    *group(
        "tools/bench_onnx.py",
        "tools/test_bench_onnx.py",
        ("the peer does not see the newest token", "np.full(sequences, context - 1, np.int32)", "np.full(sequences, context - 2, np.int32)"),
        ("the peer writes to a copy", 'for name, array in {"out": self.out, **past}.items():', 'for name, array in {"out": self.out, "key": self.keys[layer - 1], "value": self.values[layer - 1]}.items():'),
    ),
    *group(
        "tools/bench_memory.py",
        "tools/test_bench_e2e.py",
        ("a peer that fails is missing", "if done.returncode == MISSING:", "if done.returncode:"),
    ),
    *group(
        "tools/latency_report.py",
        "tools/test_bench_latency.py",
        ("gaps are held to the budget alone", "kept, self.most_gap, 1.0", "kept, self.setting.step_seconds, 1.0"),
    ),
    *group(
        "npu/kv_choice.py",
        "npu/test_kv_choice.py",
        ("one session is planned, whatever is asked", "blocks >= sessions * geometry.blocks_for(context)", "blocks >= geometry.blocks_for(context)"),
        ("what does not fit stays fp16", "return KvChoice(INT8, reason, reduced=True)", "return KvChoice(FP16, reason, reduced=True)"),
        ("fp16 is given up without a word", "return KvChoice(INT8, reason, reduced=True)", "return KvChoice(INT8, reason)"),
    ),
]
