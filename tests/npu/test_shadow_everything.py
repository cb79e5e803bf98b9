"""All that shares, moves or outlives blocks, in one machine: what a part keeps right alone must hold beside the others.

The shadow of `tests/hostcache` has forks, branches, speculation, swap, fences and aborts. Here it has windows, too, is
squeezed, ends and begins again over the same folder, and searches by beams between its steps, all at once. Blocks hold
fp16: there is no other codec yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostcache.errors import RequestFailed, RequestRefused
from hostcache.step import StepPlan
from npu.beam import BeamParams, BeamSearch
from tests.hostcache.slot_identity import HEAD_DIM, Fault, View, digest_rows, values_of
from tests.hostcache.test_shadow_pressure import SqueezedShadow
from tests.hostcache.test_shadow_restart import RestartingShadow
from tests.hostcache.windowed_shadow import WindowedShadow

STEPS = 200
END = 2
"""The token that ends a beam's answer; prompts and other answers hold 0 and 1."""


@dataclass
class WholeShadow(RestartingShadow, SqueezedShadow, WindowedShadow):
    """One process, of many over the same folder, in a pool that is lent out meanwhile.

    Every third one runs a model with a window of its own, which is another model: it has a folder of its own.
    """

    model_window: int = field(default=0, kw_only=True)

    def further_limits(self) -> dict[str, Any]:
        return super().further_limits() | {"model_window": self.model_window}

    def random_event(self) -> None:
        super().random_event()
        if self.random.random() < 0.05 and not self.model_window:  # beams keep all that they have seen
            self.search()

    def search(self) -> None:
        """A beam search over what the others leave of the pool; it gives all of it back."""
        namespace, tokens = self.some_prompt()
        params = BeamParams(self.random.randint(1, 3), max_tokens=self.random.randint(1, 12))
        used = self.cache.pool.used
        try:
            answers = BeamSearch(params, {END}, self.cache, self.scheduler.config, self.attend).run(tokens, namespace)
            self.seen["searched"] += 1
            if not 1 <= len(answers) <= params.width:
                raise Fault(f"{len(answers)} answers of {params.width} beams")
        except RequestRefused:
            self.seen["search refused"] += 1
        except RequestFailed:
            self.seen["search without room"] += 1
        if self.cache.pool.used != used:
            raise Fault(f"a search left {self.cache.pool.used - used} blocks in use")

    def attend(self, plan: StepPlan) -> NDArray[np.float32]:
        """Check what the beams would read, write what they compute, and make logits of what they have read."""
        view, logits, written = View(None, 0, 0, slides=False, block_tokens=self.block_tokens), [], []
        for index, chunk in enumerate(plan.chunks):
            stop = chunk.start + chunk.count
            digests = digest_rows(chunk.request.namespace, chunk.request.buffer[:stop], [])
            view.check_slots(self.memory, plan.tables[index], chunk.start, digests)
            written.append(values_of(digests[chunk.start :], np.arange(chunk.start, stop)))
            self.seen["beams beside each other"] += index > 0
            if chunk.samples:
                logits.append(written[-1][-1, : END + 1] / 512)
        blocks = set((plan.slots // self.block_tokens).tolist())
        if len(set(plan.slots.tolist())) != plan.rows or not all(map(self.cache.pool.writable, blocks)):
            raise Fault("beams write into one slot, or into a block that is shared or kept")
        values = np.concatenate(written)[:, None]
        k, v = (np.ascontiguousarray(half) for half in np.split(values, [HEAD_DIM], axis=2))
        self.cache.write(0, plan.slots, k, v)
        return np.array(logits, np.float32)


def processes(folder: Path, rounds: int) -> Iterator[WholeShadow]:
    """One after the other; blocks have as many tokens in all of them, pools differ."""
    for seed in range(rounds):
        window = (0, 0, 9)[seed // 3 % 3]
        models = folder / f"window {window}"
        models.mkdir(exist_ok=True)
        yield WholeShadow(seed, 4, (6, 16, 40)[seed % 3], folder=models, model_window=window)


@pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=pytest.mark.long)])
def test_nobody_reads_foreign_kv_whatever_happens_at_once(tmp_path: Path, rounds: int) -> None:
    """200 steps each; 100,000 in the longer run."""
    seen: Counter[str] = Counter()
    for process in processes(tmp_path, rounds):
        try:
            process.run(STEPS)
        finally:
            process.close()
        seen += process.seen
        stats = process.scheduler.stats
        for name in ("preemptions", "swapped_out", "swapped_in_tokens", "drafted_tokens", "accepted_tokens"):
            seen[name] += getattr(stats, name)
    for event in (
        "forked, running", "hit", "rolled back", "preemptions", "swapped_out", "swapped_in_tokens", "drafted_tokens",
        "accepted_tokens", "shed", "given back", "taken again", "evicted", "held out", "kept", "restored", "pinned",
        "session restored", "session refused", "file damaged", "swap damaged", "swap failures", "invalidated",
        "let go", "let go behind sinks", "turned", "slid twice",
        "searched", "search without room", "beams beside each other", "aborted swapped between steps",
        "aborted running in flight", "finished length", "finished failed", "finished stop",
    ):  # fmt: skip
        assert seen[event] >= rounds // 20, (event, seen)
