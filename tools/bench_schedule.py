"""`rockpage bench schedule`: what happens between two runs of the model, in a step in which all sequences decode.

Ours is planning the step, the arrays that the model gets (tokens, positions, slots, lengths, block tables), and
committing what was sampled, with the full blocks published to the prefix cache.

nano-vllm does the same for as many sequences of the same lengths: its `Scheduler.schedule`, its
`ModelRunner.prepare_decode` and its `Scheduler.postprocess`. Two of these alone are not the same work: our plan is
those arrays. Sampling parameters count on neither side. The block size matters to both, as every sequence takes and
publishes a block once in so many steps.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from hostcache import KVGeometry, Namespace, PrefixCache, Scheduler, SchedulerConfig, UnbackedCache

from .bench_peer import NanoVllm
from .bench_rows import Case, Work

__all__ = ["cases"]

SEQUENCES = {1: None, 8: None, 32: None, 128: 0.3}
"""How many decode, and what a step of theirs may take of the peer's time."""


def cases(peer: NanoVllm | None, block_tokens: int, context: int) -> list[Case]:
    """One for each number of sequences.

    Args:
        peer: None: there is none.
        block_tokens: of both.
        context: tokens each sequence begins with. The lengths differ by one, up to a block, as those of real traffic
            do: not all need a block at once.
    """
    return [
        Case(
            f"a step of {sequences}, {context} tokens each",
            partial(own_step, sequences, block_tokens, context),
            None if peer is None else partial(peer_step, peer, sequences, block_tokens, context),
            target,
        )
        for sequences, target in SEQUENCES.items()
    ]


def own_step(sequences: int, block_tokens: int, context: int, steps: int) -> Work:
    """A scheduler with so many sequences that decode, in a pool with room for `steps` tokens each; none ends."""
    geometry = KVGeometry(layers=1, kv_heads=1, head_dim=64, block_tokens=block_tokens)
    length = context + block_tokens + steps + 2
    cache = UnbackedCache(geometry, sequences * geometry.blocks_for(length) + 1)
    config = SchedulerConfig(length + 1, max_rows=sequences * length, max_sequences=sequences, prefill_chunk=length)
    scheduler = Scheduler(cache, PrefixCache(cache.pool), config)
    for number in range(sequences):
        prompt = np.arange(context + number % block_tokens) + 1000 * number
        scheduler.submit(prompt, Namespace("model"), steps + 2)
    tokens, stops = [7] * sequences, [False] * sequences
    scheduler.commit(scheduler.schedule(), tokens, stops)

    def step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.commit(plan, tokens, stops, seconds=0.01)
        return time.perf_counter() - started

    return step


def peer_step(peer: NanoVllm, sequences: int, block_tokens: int, context: int, steps: int) -> Work:
    """The same with nano-vllm's scheduler."""
    length = context + block_tokens + steps + 2
    scheduler = peer.new_scheduler(sequences, length, block_tokens)
    params = peer.sampling_params(max_tokens=steps + 2, ignore_eos=True)
    for number in range(sequences):
        prompt = list(range(1000 * number, 1000 * number + context + number % block_tokens))
        scheduler.add(peer.sequence(prompt, params))
    tokens = [7] * sequences
    scheduled, is_prefill = scheduler.schedule()
    scheduler.postprocess(scheduled, tokens, is_prefill)
    prepare_decode = peer.prepare_decode(block_tokens)

    def step() -> float:
        started = time.perf_counter()
        scheduled, is_prefill = scheduler.schedule()
        prepare_decode(scheduled)
        scheduler.postprocess(scheduled, tokens, is_prefill)
        return time.perf_counter() - started

    return step
