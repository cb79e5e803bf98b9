"""nano-vllm's side of `rockpage bench cache`; each does the same as ours of that name."""

from __future__ import annotations

import time
from typing import Any

from .bench_cache_work import APPENDS, BLOCKS, DECODING, PREFIX, PROMPT, REPEATS, make_prompt, require_hit
from .bench_peer import NanoVllm
from .bench_rows import Work

__all__ = ["admission", "append", "lookup", "publish", "table_append"]


def lookup(peer: NanoVllm, block_tokens: int, _: int) -> Work:
    """As `own_lookup`."""
    manager, sequence = _peer_that_knows(peer, block_tokens)

    def work() -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            found = manager.can_allocate(sequence)
        seconds = time.perf_counter() - started
        require_hit(found * block_tokens)
        return seconds / REPEATS

    return work


def admission(peer: NanoVllm, block_tokens: int, _: int) -> Work:
    """As `own_admission`."""
    manager, sequence = _peer_that_knows(peer, block_tokens)

    def work() -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            found = manager.can_allocate(sequence)
            manager.allocate(sequence, found)
            manager.deallocate(sequence)
        seconds = time.perf_counter() - started
        require_hit(found * block_tokens)
        return seconds / REPEATS

    return work


def publish(peer: NanoVllm, block_tokens: int, _: int) -> Work:
    """As `own_publish`: the blocks of a prompt that has been computed; having been published before saves nothing."""
    manager = peer.new_block_manager(BLOCKS, block_tokens)
    sequence = peer.sequence(make_prompt().tolist())
    manager.allocate(sequence, manager.can_allocate(sequence))
    sequence.num_scheduled_tokens = PREFIX

    def work() -> float:
        started = time.perf_counter()
        manager.hash_blocks(sequence)
        return (time.perf_counter() - started) / (PREFIX // block_tokens)

    return work


def append(peer: NanoVllm, block_tokens: int, times: int) -> Work:
    """As `own_append`; every token counts as computed when the next one is appended."""
    length = PROMPT + block_tokens + times + 1
    manager = peer.new_block_manager(DECODING * -(-length // block_tokens), block_tokens)
    running = [_peer_sequence(peer, manager, number, PROMPT + number % block_tokens) for number in range(DECODING)]

    def work() -> float:
        started = time.perf_counter()
        for sequence in running:
            if manager.can_append(sequence):
                manager.may_append(sequence)
            sequence.num_scheduled_tokens = 1
            manager.hash_blocks(sequence)
            sequence.num_cached_tokens += 1
            sequence.append_token(7)
        return (time.perf_counter() - started) / DECODING

    return work


def table_append(peer: NanoVllm, block_tokens: int, times: int) -> Work:
    """As `own_table_append`."""
    manager = peer.new_block_manager(-(-(PROMPT + times * APPENDS) // block_tokens), block_tokens)
    sequence = _peer_sequence(peer, manager, 0, PROMPT)

    def work() -> float:
        started = time.perf_counter()
        for _ in range(APPENDS):
            if manager.can_append(sequence):
                manager.may_append(sequence)
            sequence.append_token(7)
        return (time.perf_counter() - started) / APPENDS

    return work


def _peer_that_knows(peer: NanoVllm, block_tokens: int) -> tuple[Any, Any]:
    """A block manager with a sequence that uses the prefix, and another sequence that asks for it."""
    manager = peer.new_block_manager(BLOCKS, block_tokens)
    first, second = (peer.sequence(make_prompt().tolist()) for _ in range(2))
    manager.allocate(first, manager.can_allocate(first))
    first.num_scheduled_tokens = len(make_prompt())
    manager.hash_blocks(first)
    return manager, second


def _peer_sequence(peer: NanoVllm, manager: Any, number: int, tokens: int) -> Any:  # noqa: ANN401 # the peer's own
    """A sequence of tokens that no other has, all but the newest computed."""
    sequence = peer.sequence(list(range(1000 * number, 1000 * number + tokens)))
    manager.allocate(sequence, 0)
    sequence.num_scheduled_tokens = tokens - 1
    manager.hash_blocks(sequence)
    sequence.num_cached_tokens = tokens - 1
    return sequence
