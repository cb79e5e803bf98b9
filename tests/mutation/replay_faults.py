"""Seeded faults in what replays traffic and measures it, as data."""

# ruff: noqa: E501 - a fault is one line
# fmt: off
from __future__ import annotations

from .fault import group

__all__ = ["REPLAY_FAULTS"]

REPLAY_FAULTS = [
    *group(
        "hostcache/block_cache.py",
        "hostcache/test_block_cache.py",
        ("copies are counted in blocks", "self.copied_tokens += tokens", "self.copied_tokens += 1"),
    ),
    *group(
        "tools/replay_run.py",
        "tools/test_replay_run.py",
        ("idle time is not passed over", "self._pass(upcoming.arrival)", "self.now += 1e-3"),
        ("who gives up runs on", "            if session is not None:\n                self.scheduler.end", "            if session is None:\n                self.scheduler.end"),
        ("who waits cannot give up", "self._waiting.get(number) or self._started.get(number)", "self._started.get(number)"),
        ("each later part of a prompt counts as its start", "session = self._waiting.pop(request.id, None)", "session = self._waiting.get(request.id) or self._started.get(request.id)"),
        ("an answer is a token too long", "stops.append(session.left <= 0)", "stops.append(session.left < 0)"),
        ("the first token counts as a gap", "                session.first = False\n", "                pass\n"),
        ("gaps are measured from the arrival", "            session.last = now\n", "            pass\n"),
        ("references that nobody holds pass", "if blocks != sum(pool.refs) or", "if"),
        ("lost blocks pass", " or held + pool.free + pool.cached + pool.fenced + pool.withheld != pool.total:", ":"),
        ("shared blocks count for each table", "held = pool.total - pool.refs.count(0)", "held = sum(pool.refs)"),
        ("the books are never looked through", "if self._measure.steps % FULL_CHECK_STEPS == 0:", "if False:"),
        ("contiguous sessions share their prefix", "if asked.prefix and self._setup.reserved_blocks is None:", "if asked.prefix:"),
        ("contiguous sessions hold what they need", "blocks = held = len(running) * reserved", "pass"),
        ("all prefixes are the same text", "hashlib.blake2b(name.encode())", "hashlib.blake2b(b'')"),
        ("all requests are the same text", "token = next(self._serials) % OWN_TOKENS", "token = 0"),
        ("all sessions store fp16", "                codec=self._setup.codec,\n", ""),
        ("ended requests are forgotten", "self._measure.ended(session.asked, session.request)", "pass"),
    ),
    *group(
        "tools/replay_measure.py",
        "tools/test_replay_run.py",
        ("the trace ends at its last arrival", "self.seconds, self.drain_seconds = now, now - self._last_arrival", "self.seconds, self.drain_seconds = self._last_arrival, 0.0"),
        ("means are over steps, not over time", "        seconds = end - start\n        self._tokens", "        seconds = 1.0\n        self._tokens"),
        ("waste counts shared blocks for each table", "return _ratio(empty, self._held_blocks * self._block_tokens)", "return _ratio(empty, self._table_blocks * self._block_tokens)"),
        ("the last block of a request is left out", "self._asked_blocks += -(-length // self._block_tokens)", "self._asked_blocks += length // self._block_tokens"),
        ("a request belongs to the phase before", "bisect.bisect_right(self._bounds, asked.arrival)", "bisect.bisect_left(self._bounds, asked.arrival)"),
        ("a failure counts as an end", "elif request.finish_reason is FinishReason.FAILED:", "elif False:"),
        ("waiting begins with the first step", "self.queue.add(now - asked.arrival)", "self.queue.add(0.0)"),
    ),
    *group(
        "tools/replay_cost.py",
        "tools/test_replay_run.py",
        ("KV is read for nothing", " + self.token * int(plan.context_lens.sum())", ""),
        ("a row costs as much as ten", "self.row * plan.rows", "self.row * 10 * plan.rows"),
    ),
    *group(
        "tools/replay_setup.py",
        "tools/test_replay_run.py",
        ("contiguous sessions are as many as asked for", "min(setup.config.max_sequences, setup.blocks // reserved)", "setup.config.max_sequences"),
        ("unchunked prompts are cut by the rows of a step", "max_rows=context + config.max_sequences, ", ""),
    ),
    *group(
        "tools/replay_swap.py",
        "tools/test_replay_run.py",
        ("swapped blocks take up no more than their bytes", "self.free = nbytes // unit_bytes", "self.free = nbytes // block_bytes"),
        ("a swap space is never full", "if len(blocks) > self.free:", "if False:"),
        ("what was taken takes room", "self.free += ticket.blocks", "pass"),
        ("a ticket is good twice", "self._held.pop(ticket.id, None)", "self._held.get(ticket.id)"),
        ("swapping takes no time", "seconds, self._seconds = self._seconds, 0.0", "seconds, self._seconds = 0.0, 0.0"),
    ),
    *group(
        "tools/replay_stats.py",
        "tools/test_replay_stats.py",
        ("a percentile is the bucket behind its own", "if seen >= wanted:", "if seen > wanted:"),
        ("a percentile is its bucket's lower bound", "GROWTH ** (bucket + 0.5)", "GROWTH ** (bucket - 0.5)"),
        ("slots that become one are not added up", "[left + right for left, right in", "[left for left, right in"),
        ("what ends in a later slot counts in the first", "edge = min((first + 1) * self.slot_seconds, end)", "edge = end"),
        ("a value that comes many times counts once", "self._buckets[bucket] += count", "self._buckets[bucket] += 1"),
    ),
    *group(
        "tools/replay_trace.py",
        "tools/test_replay_trace.py",
        ("traces may go back in time", "if request.arrival < last:", "if False:"),
        ("empty lines are not counted", "        number += 1\n        if not line.strip():\n            continue\n", "        if not line.strip():\n            continue\n        number += 1\n"),
        ("the last of two equal fields counts", "if len(fields_of_line) < len(pairs):", "if False:"),
        ("true is a number of tokens", "isinstance(value, bool) or not isinstance(value, types)", "not isinstance(value, types)"),
        ("a prefix may exceed its prompt", "if request.prefix_tokens > request.prompt_tokens:", "if False:"),
    ),
    *group(
        "tools/replay_workload.py",
        "tools/test_replay_workload.py",
        ("arrivals are as regular as a clock", "draw.gammavariate(shape, 1 / shape)", "1.0"),
        ("days are all alike", "1 + workload.daily_swing * math.sin(2 * math.pi * now / DAY)", "1.0"),
        ("there is one load", "min(int(now / seconds * len(rates)), len(rates) - 1)", "0"),
        ("answers may be as long as they like", "(high - low)), self.most)", "(high - low)), 10**9)"),
        ("a machine's capacity forgets its pool", "running = min(config.max_sequences, max(1.0, room / (own / steps)))", "running = config.max_sequences"),
        ("capacity forgets that prefixes are read", "(tokens + kind.prefixed * workload.prefix_tokens)", "tokens"),
        ("capacity forgets chunks", "max(1.0, prompt / config.prefill_chunk)", "1.0"),
    ),
]
