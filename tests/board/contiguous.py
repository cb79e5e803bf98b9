"""Loads a model and sets its KV cache aside as one without paging must: 2048 tokens for each session, at start.

Writes a line for every session that has its memory, until all have it or the kernel ends the process. Run it in one of
its own: `python -m tests.board.contiguous MODEL CACHE_DIR SESSIONS`.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np

from npu.decoder import Decoder
from npu.memory_plan import PREALLOCATED_TOKENS
from npu.source import open_model
from npu.text import tokenizer_of
from tests.board.mixed_sessions import THREADS


def main(model: str, cache_dir: str, sessions: str) -> None:
    with open_model(model) as source:
        tokenizer = tokenizer_of(source)
        decoder = Decoder.load(source, threads=THREADS, cache_dir=cache_dir)
    rows = np.arange(decoder.max_rows)
    decoder.forward(rows.astype(np.int32), rows.astype(np.int32), rows[-1:], no_attention)
    nbytes = PREALLOCATED_TOKENS * decoder.geometry.bytes_per_token
    present_at_once = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # as memory of a device is
    cache = []
    for session in range(1, int(sessions) + 1):
        cache.append(mmap.mmap(-1, nbytes, flags=present_at_once))
        sys.stdout.write(f"{session} of {sessions}\n")
        sys.stdout.flush()
    sys.exit(f"all {len(cache)} fit beside {tokenizer.vocab_size} tokens")


def no_attention(*arrays: Any) -> None:
    """Attend to nothing: what a step takes beside its KV does not depend on it."""


if __name__ == "__main__":
    main(*sys.argv[1:])
