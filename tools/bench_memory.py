"""What a process takes that runs 8 sequences with 4096 tokens of context, ours or llama.cpp's.

Run as a module it is one of the two: `SIDE MODEL THREADS`, and prints a `Footprint`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hostcache.errors import DeviceError, MissingExtra

from .bench_rows import Row, Timing
from .llama_peer import PEER

__all__ = ["CONTEXT", "SEQUENCES", "Footprint", "memory_rows"]

SEQUENCES = 8
CONTEXT = 4096
"""Tokens of all sequences together: the pool's size, and the context's."""

ANSWER = 8
PROMPT = CONTEXT // SEQUENCES - 2 * ANSWER  # blocks of 16 tokens are left over for what is answered

MISSING = 3
"""Status of a peer's process where the peer is not installed."""

Footprint = dict[str, int]
"""Bytes of a process: `resident`, and `private`, which belong to no file."""


def memory_rows(model: Path, threads: int) -> list[Row]:
    """Both processes, one after the other; the peer's is missing where llama-cpp-python is.

    Raises:
        DeviceError: a process failed otherwise.
    """
    ours, theirs = (_probe(side, model, threads) for side in ("ours", "theirs"))
    assert ours is not None  # only the peer can be missing
    name = f"{{}} memory, {SEQUENCES} sequences, context of {CONTEXT}"
    return [
        Row(
            name.format(kind),
            PEER,
            Timing(ours[kind], ours[kind]),
            None if theirs is None else Timing(theirs[kind], theirs[kind]),
            target=1.15,
            stretch=1.0,
            unit="bytes",
        )
        for kind in ("resident", "private")
    ]


def _probe(side: str, model: Path, threads: int) -> Footprint | None:
    """The footprint of one side; None if the peer is not installed.

    Raises:
        DeviceError: its process failed, with the last line that it wrote to stderr.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, side, str(model), str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    if done.returncode == MISSING:
        return None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise DeviceError(
            f"the process that was to be measured with {model} ended with {done.returncode}, {side}: {said[-1]}",
            side=side,
            status=done.returncode,
        )
    footprint: Footprint = json.loads(done.stdout)
    return footprint


def _run_ours(model: Path, threads: int) -> None:
    from npu.engine import Engine
    from npu.model import ModelConfig
    from npu.sampler import SamplingParams
    from npu.source import open_model

    with open_model(model) as source:
        nbytes = ModelConfig.from_gguf(source).geometry.bytes_per_token * CONTEXT
    engine = Engine.load(model, runtime="cpu", pool_bytes=nbytes, threads=threads)
    for number in range(SEQUENCES):
        prompt = [16 + (number * 31 + place * 7) % 240 for place in range(PROMPT)]
        engine.add_request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    while not engine.idle:
        engine.step()
    print(json.dumps(footprint()))


def _run_theirs(model: Path, threads: int) -> None:
    from .llama_peer import LlamaCpp

    peer = LlamaCpp(model, sequences=SEQUENCES, context=CONTEXT, threads=threads)
    tokens = {}
    for number in range(SEQUENCES):
        prompt = [16 + (number * 31 + place * 7) % 240 for place in range(PROMPT)]
        (tokens[number],) = peer.compute([(number, prompt)])
    for _ in range(ANSWER - 1):
        tokens = dict(enumerate(peer.compute([(number, [token]) for number, token in tokens.items()])))
    print(json.dumps(footprint()))


def footprint() -> Footprint:
    """This process's, as the kernel counts it page by page."""
    kib = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
        name, amount, *_ = line.split()
        kib[name] = int(amount)
    return {"resident": kib["Rss:"] * 1024, "private": kib["Anonymous:"] * 1024}


if __name__ == "__main__":
    try:
        {"ours": _run_ours, "theirs": _run_theirs}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    except MissingExtra:
        sys.exit(MISSING)
