"""Seeded faults in the scheduler's rules, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["SCHEDULER_FAULTS"]

STEP_TESTS = "hostcache/test_scheduler.py hostcache/test_scheduler_fork.py hostcache/test_shadow_oracle.py"

SCHEDULER_FAULTS = [
    *group(
        "hostcache/step.py",
        "hostcache/test_scheduler.py",
        ("a sequence does not see its own rows", "[chunk.start + chunk.count for chunk in chunks]", "[chunk.start for chunk in chunks]"),
        ("the token before the last is sampled", "[q - 1 for q, c in zip", "[q - 2 for q, c in zip"),
        ("positions count from 1", "np.arange(start, start + count)", "np.arange(start + 1, start + count + 1)"),
        ("a prompt samples from a decoding sequence's row", "count + logit_rows", "logit_rows"),
    ),
    *group(
        "hostcache/decode_batch.py",
        STEP_TESTS,
        ("the arrays miss a sequence's new block", "self._refresh(self._place(request))", "pass"),
        ("those behind one that ends keep its tokens", "            array[index : count - 1] = array[index + 1 : count].copy()\n", "            pass\n"),
        ("those behind a new one get its tokens", "            array[index + 1 : count + 1] = array[index:count].copy()\n", "            pass\n"),
        ("a sequence's token stays where the last one was", "self._positions[: len(tokens)] += 1", "pass"),
        ("when not all decode, the first ones' rows are taken", "else [self._place(request) for request in requests]", "else slice(count)"),
        ("when not all decoded, nothing moves on", "            self._positions[places] += 1\n", ""),
    ),
    *group(
        "hostcache/lifecycle.py",
        STEP_TESTS,
        ("a block is published before it is full", "range(request.published, request.computed // size)", "range(request.published, -(-request.computed // size))"),
        ("an abort frees what the step in flight writes", "        if request.in_flight:\n", "        if False:\n"),
        ("a rolled back step keeps its slots", "            request.table.truncate(request.computed)\n", ""),
    ),
    *group(
        "hostcache/running_set.py",
        STEP_TESTS,
        ("prompts are promised nothing", "0 if decodes else request.table.blocks_needed(request.remaining)", "0"),
        ("a fork does not hold its node", "        self._prefix.hold_node(parent.node)\n", ""),
        ("an ended request holds on to its node", "            self._prefix.release_node(request.node)\n", ""),
        ("an ended request keeps its blocks", "        request.table.release()\n", ""),
    ),
    *group(
        "hostcache/admission.py",
        STEP_TESTS,
        ("admission ignores what was promised to the running", "self._running.promised + self._watermark if", "self._watermark if"),
        ("admission leaves nothing free", "self._running.promised + self._watermark if", "self._running.promised if"),
        ("the private copy of a partial hit is not counted", "blocks -= len(hit.blocks) ", "blocks -= len(hit.blocks) + (hit.partial >= 0) "),
        ("a request that is not admitted leaks its hit", "            self._give_back(hit)\n            return obstacle\n", "            self._prefix.release_node(hit.node)\n            return obstacle\n"),
        ("a request that is not admitted leaks its node", "            self._give_back(hit)\n            return obstacle\n", "            self._pool.release_all(hit.blocks)\n            return obstacle\n"),
        ("who gave way goes on where it was", "request.computed = request.hit_tokens = request.table.length", "request.hit_tokens = request.table.length"),
    ),
    *group(
        "hostcache/preemption.py",
        STEP_TESTS,
        ("one gives way whose end frees nothing", " and any(map(self._pool.would_free, reversed(candidate.table.blocks)))", ""),
    ),
    *group(
        "hostcache/step_filler.py",
        STEP_TESTS,
        ("the last one that cannot grow waits for ever", "        else:\n            self._fail(request)\n", ""),
    ),
    *group(
        "hostcache/scheduler.py",
        STEP_TESTS,
        ("a step that cannot be planned keeps its slots", "            self._lifecycle.take_back(self._filler.taken)\n", ""),
        ("a fork runs beyond the limit", "if len(running) >= self.config.max_sequences or", "if"),
    ),
]
