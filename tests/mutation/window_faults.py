"""Seeded faults in windows, gaps and turns, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["WINDOW_FAULTS"]

SHADOW = "hostcache/test_scheduler_windows.py hostcache/test_shadow_windows.py"

WINDOW_FAULTS = [
    *group(
        "hostcache/window.py",
        "hostcache/test_window.py",
        ("a block goes while a token still sees its last one", "(computed - self.window.tokens + 1) //", "(computed - self.window.tokens + 2) //"),
        ("the block of the sinks goes, too", "* self.block_tokens - self.front)", "* self.block_tokens)"),
        ("the gap grows a token late", "self.block_tokens + self.window.tokens - 1", "self.block_tokens + self.window.tokens"),
        ("a window's own block is not counted", "self.largest_chunk) // self.block_tokens) + 1", "self.largest_chunk) // self.block_tokens)"),
        ("a window that leaves no room to turn passes", "self.front + self.window.tokens + self.block_tokens <= self.context_length", "self.front + self.window.tokens <= self.context_length"),
    ),
    *group(
        "hostcache/table.py",
        "hostcache/test_table_gap.py hostcache/test_table_stateful.py",
        ("blocks that were let go of are never given back", "        self._pool.release_all(dropped)\n        return True\n", "        return True\n"),
        ("a block that was let go of stays among the ids", "        self._noted = min(self._noted, first)\n", ""),
        ("a growing gap forgets by how much keys were turned", "self.gap = TableGap(front, tokens, gap.turned)", "self.gap = TableGap(front, tokens)"),
        ("a fork forgets the gap", "child.adopt(self.blocks, self.length, self.gap)", "child.adopt(self.blocks, self.held)"),
        ("keys are turned by all of the gap each time", "by = self.gap.turned - self.gap.tokens", "by = -self.gap.tokens"),
        ("keys are turned on instead of back", "by = self.gap.turned - self.gap.tokens", "by = self.gap.tokens - self.gap.turned"),
        ("the sinks are turned, too", "for index in range(self._first_to_turn, len(self.blocks)):", "for index in range(len(self.blocks)):"),
        ("shared blocks are turned where they are", "            self._repoint(index, fresh)\n            self.gap = replace", "            turn(self.blocks[index], self.blocks[index], by)\n            self._pool.release(fresh)\n            self.gap = replace"),
        ("a turn that failed is begun anew", "ahead=self.gap.ahead + 1", "ahead=0"),
        ("a turn that failed keeps its block", "                self._pool.release(fresh)\n                raise\n", "                raise\n"),
        ("a block that cannot be freed is not counted before a turn", "return staying + (staying < len(moved))", "return 1"),
        ("a table that is emptied keeps its gap", "        if length == 0:\n            self.gap = NO_GAP\n", ""),
        ("slots behind the gap are those in front of it", "positions = np.arange(start - shift, stop - shift, dtype=np.int64)", "positions = np.arange(start, stop, dtype=np.int64)"),
    ),
    *group(
        "hostcache/request.py",
        SHADOW,
        ("what sees too little is published", "        return self.layout.shareable\n", "        return self.limit\n"),
        ("what lies behind a gap is published", "        if self._table.gap.tokens:\n            return self.published * self.layout.block_tokens\n", ""),
    ),
    *group(
        "hostcache/decode_batch.py",
        SHADOW,
        ("a decoding sequence's rows forget that it was turned", "            positions -= self._windowing[picked, TURNED].astype(np.int32)\n", ""),
        ("a decoding sequence's context counts the gap", "return positions - self._windowing[picked, GAP].astype(np.int32) if self._windowed else positions", "return positions"),
        ("a decoding sequence never lets go", "return self._due(GAP_GROWS_AT)", "return []"),
        ("a decoding sequence is never turned", "return self._due(TURN_AT)", "return []"),
        ("who decodes with a window does not tell", "        self._windowed += request.layout is not None\n", ""),
    ),
    *group(
        "hostcache/step.py",
        SHADOW,
        ("a prompt's rows forget that it was turned", "turned = request.table.gap.turned\n", "turned = 0\n"),
        ("a step's prompts have no windows beside decoding ones", "parts = (decodes.windowing, count), (windowing, len(prefills))", "parts = (decodes.windowing, count), (None, len(prefills))"),
    ),
    *group(
        "hostcache/step_filler.py",
        SHADOW,
        ("a prompt is computed across a turn", "        count = min(count, request.next_turn - start)\n", ""),
        ("the last one that waits to be turned fails", "        if request.computed == request.next_turn:\n            return any(map(request.pool.is_fenced, request.table.blocks))\n", ""),
        ("guesses go across a turn", "most = min(request.limit - 1, request.next_turn) - request.length", "most = request.limit - 1 - request.length"),
    ),
    *group(
        "hostcache/admission.py",
        SHADOW,
        ("who comes back from the swap space forgets its gap", "swapped.tokens, swapped.gap)", "swapped.tokens)"),
        ("a window's tokens beyond it are taken from others' prefix", "request.tokens[: request.shareable + 1]", "request.tokens"),
        ("a long session needs blocks for all its tokens", "            blocks = min(blocks, most)\n", "            pass\n"),
    ),
    *group(
        "hostcache/preemption.py",
        SHADOW,
        ("shared blocks behind a gap are left out of the swap space", "            first = min(first, gap.front // pool.block_tokens)\n", "            pass\n"),
    ),
    *group(
        "hostcache/running_set.py",
        SHADOW,
        ("a window is promised blocks for all its tokens", "            needed = max(0, min(needed, self._most_blocks(request, request.layout) - len(table.blocks)))\n", "            pass\n"),
        ("who must not be preempted is not promised anew what others hold", "        return layout.most_blocks + lent\n", "        return layout.most_blocks\n"),
    ),
    *group(
        "hostcache/dedup.py",
        SHADOW,
        ("a block is announced that will not be published", "request.tokens[: request.shareable], request.published", "request.tokens, request.published"),
    ),
    *group(
        "hostcache/intake.py",
        SHADOW,
        ("a fork sees all", "parent.namespace, parent.layout, codec=parent.codec", "parent.namespace, None, codec=parent.codec"),
        ("a session's tokens end where the pool does", "        if layout is None:\n            limit = min(", "        if True:\n            limit = min("),
    ),
]
