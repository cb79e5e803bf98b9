"""Seeded faults in windows on their way to a kernel or a device, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["WINDOW_LAUNCH_FAULTS"]

WINDOW_LAUNCH_FAULTS = [
    *group(
        "npu/attention.py",
        "npu/test_attention_windows.py npu/test_window_launches.py",
        ("a layer's wider window takes the sequence's place", "(own == 0) | (own > window)", "(own >= 0)"),
        ("a window one token short of the context hides nothing", "(narrower < self.context_lens)", "(narrower < self.context_lens - 1)"),
    ),
    *group(
        "npu/checks.py",
        "npu/test_attention_windows.py",
        ("a window of fewer than no tokens passes", "np.flatnonzero(counts < 0)", "np.flatnonzero(counts < -1)"),
        ("windows of some sequences alone pass", "if len(counts) != sequences:", "if len(counts) > sequences:"),
        ("windows of some layers alone pass", "if windows and len(windows) != layers:", "if False:"),
    ),
    *group(
        "npu/cpu.py",
        "npu/test_attention_windows.py",
        ("every layer has the first one's window", "self._views[self._layer_windows[layer]]", "self._views[self._layer_windows[0]]"),
    ),
    *group(
        "npu/parts.py",
        "npu/test_window_launches.py npu/test_emulated_attention.py",
        ("a tile stops a token short", "before + last - start - gone,", "before + last - start - gone - 1,"),
        ("a window is a token too wide", "first - start - window + 1 if window", "first - start - window if window"),
        ("the block of the window's first token is left out", "oldest // block_tokens - kept)", "-(-oldest // block_tokens) - kept)"),
        ("a block that holds some sinks is left out", "kept = -(-sinks // block_tokens)", "kept = sinks // block_tokens"),
        ("all that a window ever hid is staged", "left_out = max(0, oldest // block_tokens - kept)", "left_out = 0"),
        ("blocks are left out of the length alone", "table[behind:], table[self.kept : behind]", "table[self.kept : behind], table[behind:]"),
        ("what a block holds beside the window is shown", "if oldest > sinks else (0, 0)", "if False else (0, 0)"),
    ),
    *group(
        "npu/launch.py",
        "npu/test_window_launches.py",
        ("rows of a tile see behind their window", "mask[..., : len(early)][left_out] = MASKED", "pass"),
        ("rows of a tile do not see the sinks", "(early >= batch.sinks[:, np.newaxis, np.newaxis])", "(early >= 0)"),
        ("padding is staged of what is hidden", "first = 0 if hidden_from else hidden_to", "first = 0"),
        ("contexts count in full, whatever a window leaves out", "tokens[sequence] = max(", "tokens[sequence] = 0 * tokens[sequence] + batch.context_lens[sequence] or max("),
    ),
    *group(
        "npu/staged.py",
        "npu/test_window_launches.py",
        ("layers with windows share the plan of those without", "shown = 0 if view.windows is None else window", "shown = 0"),
    ),
    *group(
        "npu/host_share.py",
        "npu/test_emulated_attention.py npu/test_window_launches.py",
        ("a share is attended in another one's step", "if share is not self._share and share.batch.rows:", "if self._share is None and share.batch.rows:"),
        ("the host does not learn of windows", "self.end()\n            self._runtime.begin_step(share.batch)", "self.end()\n            self._runtime.begin_step(AttentionBatch(share.batch.query_starts, share.batch.context_lens, share.batch.tables))"),
    ),
    *group(
        "staging/plan.py",
        "npu/test_window_launches.py staging/test_plan.py",
        ("hidden tokens are not cleared", "if hidden.any():\n        start, end", "if False:\n        start, end"),
        ("sinks are cleared with what is hidden", "np.minimum(first + tokens, hidden[sequence, 0])", "0 * first"),
        ("what a window left behind stays staged", "behind = tails[:, 1] + tails[:, 2] == self.layout.tokens", "behind = tails[:, 1] >= 0"),
    ),
    *group(
        "staging/residency.py",
        "npu/test_window_launches.py",
        ("what was hidden counts as staged", "np.where(seen_again, np.minimum(kept, start), kept)", "kept"),
    ),
    *group(
        "npu/rerotation.py",
        "npu/test_rerotation.py",
        ("keys turn the wrong way", "turned(keys.astype(np.float32), by * self._frequencies", "turned(keys.astype(np.float32), -by * self._frequencies"),
        ("halves turn where neighbours should", "if interleaved else (np.s_", "if False else (np.s_"),
        ("a turn applies the factor of cos and sin again", "cos, sin = np.cos(angles)", "cos, sin = 1.1 * np.cos(angles)"),
        ("values are turned, too", ".reshape(shape)[:, 0, :, :tokens]", ".reshape(shape)[..., :tokens, :]"),
        ("a turned block counts as written in full", "content, tokens, codec)", "content, 16, codec)"),
    ),
    *group(
        "npu/model_windows.py",
        "npu/test_model_windows.py npu/test_model.py",
        ("all layers have a window that some have", "window if slides else 0 for", "window for"),
        ("a window that holds the context hides some", "if not 0 < window < context_length:", "if not 0 < window <= context_length:"),
        ("a window of unnamed layers is all layers'", "if not isinstance(keys.value(f\"{architecture}.{_PATTERN}\"), list):", "if False:"),
        ("a window is used that is switched off", "asked and window > 0 and layer >= full", "window > 0 and layer >= full"),
        ("the first layers have the window", "layer >= full for", "layer < full for"),
        ("a Llama's window is passed over", "if asked or _SLIDING in (types or ()):", "if False:"),
        ("null is a window of the usual size", "window = 0 if config", "window = _USUAL_WINDOW if config"),
        ("layers of other kinds see everything", "sorted({*types} - {_SLIDING, _FULL})", "()"),
    ),
    *group(
        "npu/model.py",
        "npu/test_model.py",
        ("numerics do not tell windows apart", " if any(self.windows) else rope", " if False else rope"),
    ),
]
