"""Loads a model and sets its KV cache aside as one without paging must: 2048 tokens for each session, at start.

Writes a line for every session that has its memory, until all have it or the kernel ends the process. Run it in one of
its own: `python -m tests.board.contiguous MODEL CACHE_DIR SESSIONS`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from npu.decoder_choice import load_decoder
from npu.memory_plan import PREALLOCATED_TOKENS
from npu.source import open_model
from npu.text import tokenizer_of
from tests.board.mixed_sessions import THREADS


def main(model: str, cache_dir: str, sessions: str) -> None:
    with open_model(model) as source:
        tokenizer = tokenizer_of(source)
        decoder = load_decoder(source, threads=THREADS, cache_dir=cache_dir)
    rows = np.arange(decoder.max_rows)
    decoder.forward(rows.astype(np.int32), rows.astype(np.int32), rows[-1:], no_attention)
    keep_in_memory(cache_dir)
    nbytes = PREALLOCATED_TOKENS * decoder.geometry.bytes_per_token
    present_at_once = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # as memory of a device is
    cache = []
    for session in range(1, int(sessions) + 1):
        cache.append(mmap.mmap(-1, nbytes, flags=present_at_once))
        sys.stdout.write(f"{session} of {sessions}\n")
        sys.stdout.flush()
    sys.exit(f"all {len(cache)} fit beside {tokenizer.vocab_size} tokens")


def keep_in_memory(folder: str) -> None:
    """Lock the weights mapped from there: else the kernel drops them for the cache, and reads them for each token."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if folder in line:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            if libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(stop - start)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def no_attention(*arrays: Any) -> None:
    """Attend to nothing: what a step takes beside its KV does not depend on it."""


if __name__ == "__main__":
    main(*sys.argv[1:])
