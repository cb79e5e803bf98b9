"""`rockpage demo`: several sessions of a real model share one pool and one system prompt."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Subparsers, add_command
from .engine_options import add_engine_options, open_engine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from npu.engine import Engine
    from npu.sampler import SamplingParams

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage demo
rockpage demo --runtime emulated --max-tokens 16
rockpage demo --json"""

PREALLOCATED_TOKENS = 2048
"""What a cache without paging sets aside per session."""

PAIRS = 5
"""Alternating cold and cached runs behind each time to first token; medians are shown."""

SYSTEM = """\
You are the assistant on the operator panel of CNC machine CNC-04 in our hall 2. You help operators to work \
safely and to find faults.
First: safety comes before production. Nobody opens the guard door while the spindle turns. Before any work \
inside the machine the main switch is off and locked, and the air pressure is released.
Second: answer in plain words and in at most three sentences. Name the part, the button or the page of the panel \
which the operator needs.
Third: if you do not know the answer, say so and send the operator to the shift leader. Never guess a torque, a \
speed or a pressure.
Fourth: alarms. Alarm 100 means that the emergency stop is pressed. Alarm 210 means that the coolant level is \
low. Alarm 315 means that the tool magazine is not in position. Alarm 420 means that the spindle is too hot; let \
it run without load for five minutes before it is switched off.
Fifth: at the end of a shift the operator cleans the table, empties the chip tray, writes the hours into the log \
book and tells the next shift about every single alarm."""
"""With the template around it 256 tokens of SmolLM2's vocabulary: 16 full blocks."""

QUESTIONS = (
    "What does alarm 210 mean?",
    "May I open the guard door now?",
    "The spindle is too hot. What do I do?",
    "What do I do at the end of my shift?",
    "Which torque do I need for the chuck?",
    "The tool magazine reports alarm 315.",
)

LINE_WIDTH = 76


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage demo`."""
    parser = add_command(
        subparsers,
        "demo",
        run,
        summary="watch six sessions share one pool and one system prompt",
        usage="[OPTIONS] [MODEL]",
        example=EXAMPLE,
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add_engine_options(parser)


@dataclass
class Peak:
    """The pool at its fullest moment.

    Attributes:
        used: blocks that at least one session refers to.
        shared: of those, blocks that several sessions refer to.
        slots: token slots in the used blocks.
        live: of those, slots that hold a token.
    """

    used: int = 0
    shared: int = 0
    slots: int = 0
    live: int = 0

    def observe(self, engine: Engine) -> None:
        """Look at the pool between two steps."""
        filled: Counter[int] = Counter()
        size = engine.cache.geometry.block_tokens
        for request in engine.scheduler.running:
            for index, block in enumerate(request.table.blocks):
                filled[block] = max(filled[block], min(size, request.table.held - index * size))
        if len(filled) >= self.used:
            refs = engine.cache.pool.refs
            self.used, self.slots, self.live = len(filled), len(filled) * size, sum(filled.values())
            self.shared = sum(refs[block] > 1 for block in filled)


@dataclass
class Lines:
    """Prints the sessions' answers as they come, each line marked with its session.

    A line goes out when it is full or its answer has ended, so that the answers stay readable beside each other.
    """

    shown: bool
    pending: dict[int, str] = field(default_factory=dict)

    def push(self, session: int, text: str, *, ended: bool) -> None:
        """Take the next piece of a session's answer."""
        text = self.pending.get(session, "") + text
        while "\n" in text or len(text) > LINE_WIDTH:
            cut = text.find("\n")
            if not 0 <= cut <= LINE_WIDTH:
                cut = text.rfind(" ", 1, LINE_WIDTH) if " " in text[1:LINE_WIDTH] else LINE_WIDTH
            self._print(session, text[:cut])
            text = text[cut:].lstrip(" \n")
        if ended and text:
            self._print(session, text)
            text = ""
        self.pending[session] = text

    def _print(self, session: int, line: str) -> None:
        if self.shown and line.strip():
            print(f"  {session} | {line}", flush=True)


def run(args: argparse.Namespace) -> int:
    """Stream the answers and close with a table of this run, or print that as one JSON object.

    Raises:
        RockpageError: the model could not be fetched or run.
        OSError: a file cannot be read.
    """
    from hostcache.prefix_node import common_beginning
    from npu.sampler import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, repetition_penalty=1.15)
    with open_engine(args) as engine:
        prompts = [
            engine.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
            for question in QUESTIONS
        ]
        if not args.json:
            shared = min(common_beginning(prompts[0], other) for other in prompts[1:])
            print(f"{len(prompts)} sessions, {shared} tokens of their prompts in common, one pool of ", end="")
            print(f"{engine.cache.blocks} blocks ({format_size(engine.cache.buffer.nbytes)})\n", flush=True)
        figures = {**_first_token_times(engine, *prompts[:2]), **_serve(engine, prompts, params, args.json)}
        figures["peak_rss_bytes"] = _peak_rss()
        print(json.dumps(figures) if args.json else _table(figures, len(prompts)))
    return 0


def _first_token_times(engine: Engine, prompt: NDArray[np.int32], other: NDArray[np.int32]) -> dict[str, float]:
    """Median seconds to the first token on the idle engine: cold, the same prompt again, another with its beginning."""
    _time_to_first_token(engine, prompt)  # first use of every size touches fresh memory: not counted
    times: dict[str, list[float]] = {"ttft_cold_s": [], "ttft_hit_s": [], "ttft_shared_s": []}
    for _ in range(PAIRS):
        engine.prefix.invalidate()
        for name, asked in zip(times, (prompt, prompt, other), strict=True):
            times[name].append(_time_to_first_token(engine, asked))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _time_to_first_token(engine: Engine, prompt: NDArray[np.int32]) -> float:
    from npu.sampler import SamplingParams

    started = time.perf_counter()
    engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while not engine.idle:
        engine.step()
    return time.perf_counter() - started


def _serve(engine: Engine, prompts: list[NDArray[np.int32]], params: SamplingParams, quiet: bool) -> dict[str, float]:
    """All sessions at once; what the pool held at its fullest, and how fast tokens came."""
    lines, peak, tokens = Lines(not quiet), Peak(), 0
    started = time.perf_counter()
    sessions = {engine.add_request(prompt, params): number for number, prompt in enumerate(prompts, start=1)}
    for number, question in enumerate(QUESTIONS, start=1):
        lines.push(number, f"> {question}\n", ended=False)
    while not engine.idle:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens += len(output.token_ids)
            lines.push(sessions[output.request_id], output.text, ended=output.finish_reason is not None)
        peak.observe(engine)
    seconds = time.perf_counter() - started
    geometry = engine.cache.geometry
    return {
        "blocks_used": peak.used,
        "blocks_shared": peak.shared,
        "waste_fraction": 1 - peak.live / max(peak.slots, 1),
        "bytes_paged": peak.used * geometry.block_bytes,
        "bytes_contiguous": len(prompts) * PREALLOCATED_TOKENS * geometry.bytes_per_token,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
    }


def _table(figures: dict[str, float], sessions: int) -> str:
    cold, hit, shared = (figures[name] for name in ("ttft_cold_s", "ttft_hit_s", "ttft_shared_s"))
    ratio = figures["bytes_contiguous"] / max(figures["bytes_paged"], 1)
    rows = [
        ("blocks used at the fullest", f"{figures['blocks_used']}, {figures['blocks_shared']} of them shared"),
        ("slots reserved but empty", f"{100 * figures['waste_fraction']:.1f} %"),
        ("KV memory, paged", format_size(int(figures["bytes_paged"]))),
        (
            f"KV memory, {PREALLOCATED_TOKENS} tokens x {sessions}",
            f"{format_size(int(figures['bytes_contiguous']))} ({ratio:.1f} times as much)",
        ),
        ("time to first token, cold", f"{1000 * cold:.0f} ms"),
        ("  the same prompt again", f"{1000 * hit:.0f} ms ({100 * (1 - hit / cold):.0f} % less)"),
        ("  another question behind it", f"{1000 * shared:.0f} ms ({100 * (1 - shared / cold):.0f} % less)"),
        ("tokens per second, together", f"{figures['tokens_per_s']:.0f}"),
        ("peak resident memory", format_size(int(figures["peak_rss_bytes"]))),
    ]
    return "\n" + "\n".join(f"{name:<32}{value}" for name, value in rows)


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    sys.exit("the kernel does not report VmHWM")
