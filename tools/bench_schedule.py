"""`python -m tools.bench_schedule`: what happens between two runs of the model costs, in a step that decodes.

That is planning the step, the arrays that the model gets (tokens, positions, slots, lengths, block tables), and
committing what was sampled, with the full blocks published to the prefix cache.

With `--peer`, a checkout of nano-vllm (https://github.com/GeeeekExplorer/nano-vllm) does the same for as many sequences
of the same lengths, in the same process and in turn, so that the ratio holds on a busy machine, too: its
`Scheduler.schedule`, its `ModelRunner.prepare_decode` and its `Scheduler.postprocess`. Two of these alone are not the
same work: our plan is those arrays. PyTorch is not needed: where `prepare_decode` makes a tensor of a list it gets a
numpy array, and moving that to a device does nothing. Sampling parameters count on neither side. The block size
matters to both, as every sequence takes and publishes a block once in so many steps. The package xxhash is needed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Step", "main", "measure", "own_step", "peer_step"]

Step = Callable[[], float]
"""Does all that a step needs besides the model; returns the seconds that took."""

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
    scheduled, is_prefill = scheduler.schedule()
    scheduler.postprocess(scheduled, tokens, is_prefill)
    prepare_decode = _prepare_decode(checkout, block_tokens)

    def step() -> float:
        started = time.perf_counter()
        scheduled, is_prefill = scheduler.schedule()
        prepare_decode(scheduled)
        scheduler.postprocess(scheduled, tokens, is_prefill)
        return time.perf_counter() - started

    return step


def _prepare_decode(checkout: Path, block_tokens: int) -> Callable[[list[object]], object]:
    """nano-vllm's `ModelRunner.prepare_decode`, without the rest of its module, which imports the model."""
    import numpy as np

    class Tensor(np.ndarray):
        def cuda(self, non_blocking: bool) -> Tensor:  # noqa: ARG002 # there is no device
            return self

    def tensor(values: object, dtype: type[np.generic], pin_memory: bool) -> Tensor:  # noqa: ARG001 # nor its memory
        return np.array(values, dtype).view(Tensor)

    path = checkout / "nanovllm" / "engine" / "model_runner.py"
    module = ast.parse("from __future__ import annotations\n" + path.read_text(), str(path))
    runner = next(part for part in module.body if isinstance(part, ast.ClassDef) and part.name == "ModelRunner")
    wanted = {"prepare_decode", "prepare_block_tables"}
    runner.body = [part for part in runner.body if isinstance(part, ast.FunctionDef) and part.name in wanted]
    torch = types.SimpleNamespace(tensor=tensor, int32=np.int32, int64=np.int64)
    names: dict[str, Any] = {"torch": torch, "set_context": lambda *_, **__: None}
    exec(compile(ast.Module([module.body[0], runner], []), path, "exec"), names)  # noqa: S102 # the peer's code, asked for
    instance = names["ModelRunner"]()
    instance.block_size = block_tokens
    prepare: Callable[[list[object]], object] = instance.prepare_decode
    return prepare


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
