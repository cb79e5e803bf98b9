"""Seeded faults in what happens at the end of the context, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["OVERFLOW_FAULTS"]

OVERFLOW_FAULTS = [
    *group(
        "npu/overflow.py",
        "npu/test_overflow.py",
        ("an answer that just fits slides", "prompt_tokens + max_tokens > self._context)", "prompt_tokens + max_tokens >= self._context)"),
        ("an answer that just fits is refused", "if max_tokens <= room or overflow", "if max_tokens < room or overflow"),
        ("the largest window takes the sinks' block", "front = -(-USUAL_SINKS // self._block_tokens) * self._block_tokens", "front = USUAL_SINKS"),
        ("the largest window leaves nothing free to turn into", "- max(self._block_tokens, self._context // _PART_KEPT_FREE)", "- self._context // _PART_KEPT_FREE"),
        ("a window is laid over a model's own", "if window is not None and any(self._windows):", "if False:"),
        ("a model slides with layers that see everything", "            if not all(self._windows):\n", "            if False:\n"),
        ("forks of what fitted are granted what does not", 'ends = "stop" if overflow == "slide" else overflow', "ends = overflow"),
    ),
    *group(
        "npu/stream.py",
        "npu/test_overflow.py",
        ("an answer that the context cut says nothing of it", "            return FinishReason.CONTEXT\n", "            return FinishReason.LENGTH\n"),
        ("an answer of just what was left is called cut", "request.limit - request.prompt_length < self.params.max_tokens", "request.limit - request.prompt_length <= self.params.max_tokens"),
        ("forks forget what happens at the end of the context", "sampler, constraint, overflow=self.overflow)", "sampler, constraint)"),
    ),
    *group(
        "npu/stream_intake.py",
        "npu/test_overflow.py npu/test_engine_windows.py",
        ("a window never reaches the scheduler", "            window=grant.window,\n", ""),
        ("branches end at the context, whatever their leader does", "constraint=constraint, overflow=leader.overflow)", "constraint=constraint, overflow='stop')"),
    ),
    *group(
        "npu/loading.py",
        "npu/test_engine_windows.py npu/test_windowed_models.py",
        ("nobody lets go of what no layer sees", "model_window=max(windows) if all(windows) else 0,", "model_window=0,"),
        ("layers that see everything lose what others do not see", "model_window=max(windows) if all(windows) else 0,", "model_window=max(windows),"),
        ("keys of the wrong pairs are turned", "interleaved = model_config.family.interleaved", "interleaved = not model_config.family.interleaved"),
    ),
]
