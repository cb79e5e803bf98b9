"""`python -m tools.bench_schedule`: what planning and committing a decode step costs.

With `--peer`, a checkout of nano-vllm (https://github.com/GeeeekExplorer/nano-vllm) plans the same steps in the
same process, in turn, so that the ratio holds on a busy machine, too. Its scheduler needs the package xxhash; nothing
else of it is imported.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Step", "main", "measure", "own_step", "peer_step"]

Step = Callable[[], float]
"""Plans a step and commits it; returns the seconds that took."""

PROMPT = 64
"""Tokens each sequence begins with. They differ by one, as those of real traffic do: not all need a block at once."""


def own_step(sequences: int, steps: int, block_tokens: int) -> Step:
    """A scheduler with so many sequences that decode, in a pool with room for `steps` tokens each."""
    import numpy as np

    from hostcache import KVGeometry, Namespace, PrefixCache, Scheduler, SchedulerConfig, UnbackedCache

    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=64, block_tokens=block_tokens)
    length = PROMPT + block_tokens + steps + 1
    cache = UnbackedCache(geometry, sequences * geometry.blocks_for(length) + 1)
    config = SchedulerConfig(length + 1, max_rows=1 << 14, max_sequences=sequences, prefill_chunk=length)
    scheduler = Scheduler(cache, PrefixCache(cache.pool), config)
    for number in range(sequences):
        prompt = np.arange(PROMPT + number % block_tokens) + 1000 * number
        scheduler.submit(prompt, Namespace("model"), steps + 1)
    tokens, stops = [7] * sequences, [False] * sequences
    scheduler.commit(scheduler.schedule(), tokens, stops)

    def step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.commit(plan, tokens, stops, seconds=0.01)
        return time.perf_counter() - started

    return step


def peer_step(checkout: Path, sequences: int, steps: int, block_tokens: int) -> Step:
    """The same with nano-vllm's scheduler.

    Raises:
        ImportError: there is none, or xxhash is missing.
    """
    package = types.ModuleType("nanovllm")  # its own imports all of PyTorch
    package.__path__ = [str(checkout / "nanovllm")]
    configuration = types.ModuleType("nanovllm.config")
    configuration.Config = types.SimpleNamespace  # type: ignore[attr-defined] # only named in annotations
    sys.modules |= {"nanovllm": package, "nanovllm.config": configuration}
    sequence_module = importlib.import_module("nanovllm.engine.sequence")
    sampling = importlib.import_module("nanovllm.sampling_params").SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    scheduler = importlib.import_module("nanovllm.engine.scheduler").Scheduler(
        types.SimpleNamespace(
            max_num_seqs=sequences,
            max_num_batched_tokens=1 << 14,
            eos=-1,
            kvcache_block_size=block_tokens,
            num_kvcache_blocks=sequences * (-(-(PROMPT + block_tokens + steps + 1) // block_tokens)) + 1,
        )
    )
    sequence_module.Sequence.block_size = block_tokens
    for number in range(sequences):
        prompt = list(range(1000 * number, 1000 * number + PROMPT + number % block_tokens))
        scheduler.add(sequence_module.Sequence(prompt, sampling))
    tokens = [7] * sequences
    scheduler.postprocess(*_planned(scheduler.schedule(), tokens))

    def step() -> float:
        started = time.perf_counter()
        scheduler.postprocess(*_planned(scheduler.schedule(), tokens))
        return time.perf_counter() - started

    return step


def _planned(plan: tuple[list[object], bool], tokens: list[int]) -> tuple[list[object], list[int], bool]:
    return plan[0], tokens, plan[1]


def measure(steps: Sequence[Step], rounds: int) -> list[float]:
    """The median seconds of each, taken in turn."""
    seconds = [[step() for step in steps] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of sequences."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_schedule", description=__doc__)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a checkout of nano-vllm to compare with")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each (default: %(default)s)")
    parser.add_argument("--block-tokens", type=int, default=16, metavar="N", help="default: %(default)s")
    args = parser.parse_args(arguments)
    print("sequences      step" + ("      peer   ratio" if args.peer else ""))
    for sequences in (1, 8, 32, 128):
        sizes = sequences, args.steps, args.block_tokens
        steps = [own_step(*sizes)] + ([peer_step(args.peer, *sizes)] if args.peer else [])
        own, *peer = measure(steps, args.steps)
        line = f"{sequences:9}  {own * 1e6:5.0f} us"
        print(line + "".join(f"  {other * 1e6:5.0f} us  {own / other:6.2f}" for other in peer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
