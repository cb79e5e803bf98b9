"""Measures what int4 must know of a model's keys, and keeps it beside the repacked weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache

from .attention import AttentionBatch
from .cpu import CpuAttention
from .decoder import DenseModel, Floats
from .key_balance import KeyBalance
from .key_cache import KeyCache
from .key_moments import FIRST_TOKEN_WEIGHT, SHRINKAGE, KeyMoments
from .model import ModelConfig
from .rerotation import turned
from .tokenizer import Tokenizer
from .weights_cache import default_cache_dir

__all__ = ["load_key_balance"]

TEXT = """\
The harbour master kept two notebooks. In the first one he wrote down every ship that came in, how deep she lay \
in the water, what she carried and how long she meant to stay. The second was for the weather, and nobody but \
his daughter was allowed to read it. "You will see," he told her, "that the sea repeats itself, only never on \
the same day."

Before you replace the filter, close both valves and wait until the gauge shows zero. Loosen the four screws, \
lift the cover off, and take out the old cartridge. Wipe the seat clean. If the ring is torn or hard, use a new \
one: it costs 0.40 euros, and a leak costs a floor. Then open the lower valve slowly, let the air out, and write \
the date (for example 2024-03-17) on the label.

Q: How many days has a leap year, and why is 1900 not one?
A: It has 366. Years that 100 divides are common years unless 400 divides them, so 2000 was a leap year and 1900 \
was not.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else None

1. Wash the lentils and soak them for an hour.
2. Fry one onion, two cloves of garlic and a spoonful of cumin in oil; add salt, pepper, and 750 ml of water.
3. Cook everything for 25 minutes. Serve with bread, yoghurt and the juice of half a lemon.

Light takes about eight minutes from the Sun to the Earth, but four years from the nearest star. What we see at \
night is therefore old news: some of it left when our grandparents were children, some before there were people \
to look up. The telescope does not show us the universe as it is; it shows a great many pasts at once, arranged \
by distance.

Dear Ms. Okafor, thank you for your letter of 12 May. We have looked into the matter and found that your order \
was sent to the wrong address. A new parcel has left our warehouse today, and you should have it by Friday. We \
are sorry for the trouble. If there is anything else that we can do, please call us. Yours sincerely, Tomas Lind
"""
"""Prose, instructions, questions, code, lists and a letter. Source: written for this."""

TEXT_TOKENS = 512
"""Tokens of it that are used at most."""

SPAN = 2048
"""Positions that keys are balanced for: what keys have in common changes with their distance."""

_CHUNK = 64


def load_key_balance(
    decoder: DenseModel,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    max_rows: int,
    cache_dir: str | os.PathLike[str] | None = None,
    windows: Sequence[int] = (),
) -> KeyBalance | None:
    """A model's constants for int4, measured by a run over `TEXT` if they are not kept yet.

    Args:
        decoder: the model; it has run nothing else yet, or nothing that matters.
        config: its dimensions.
        tokenizer: of the model.
        max_rows: most tokens of one step.
        cache_dir: root of the weights cache; None: the user's.
        windows: of each layer, as for the attention runtime.

    Returns:
        None if the context, or what the tokenizer makes of the text, has but one token: nothing can be told from that.
    """
    key = f"{decoder.fingerprint}|{decoder.numerics}|{FIRST_TOKEN_WEIGHT}|{SHRINKAGE}|{SPAN}|{TEXT_TOKENS}|{TEXT}"
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    cache = KeyCache(root)
    kept = cache.find(key, (config.layers, config.kv_heads, config.head_dim))
    if kept is not None:
        return kept
    tokens = tokenizer.encode(TEXT)[: min(TEXT_TOKENS, config.context_length)]
    if len(tokens) < 2:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a model of broken numbers says so when it answers
        balance = _measure(decoder, config, tokens, windows, min(_CHUNK, max_rows)).balance()
    cache.keep(key, balance)
    return balance


def _measure(
    decoder: DenseModel, config: ModelConfig, tokens: NDArray[np.int32], windows: Sequence[int], chunk: int
) -> KeyMoments:
    """Moments of a text as if it stood at the start of each quarter of the span, `chunk` tokens a step."""
    geometry, count = config.geometry, len(tokens)
    moments = KeyMoments(geometry.layers, geometry.kv_heads, geometry.head_dim)
    quarter = min(SPAN, config.context_length) // 4
    frequencies = config.rope.frequencies(config.head_dim)
    cache = PagedKVCache.create(geometry, geometry.blocks_for(count) * geometry.block_bytes)
    runtime = CpuAttention(cache, config.heads, windows=windows)
    table = cache.table()

    def spread(rows: Floats) -> Floats:
        interleaved = config.family.interleaved
        return np.concatenate([turned(rows, n * quarter * frequencies, interleaved=interleaved) for n in range(4)])

    def compute(rows: slice) -> None:
        slots, behind_first = table.slots(rows.start, rows.stop), 0 if rows.start else 1

        def attend(layer: int, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
            if behind_first:
                moments.add_first(layer, k[0])
            moments.add(layer, spread(k[behind_first:]), spread(q[behind_first:]))
            cache.write(layer, slots, k, v)
            runtime.attend(layer, q, out)

        starts, lengths = np.array([0, len(slots)], np.int32), np.array([rows.stop], np.int32)
        runtime.begin_step(AttentionBatch(starts, lengths, np.array([table.blocks], np.int32)))
        positions = np.arange(rows.start, rows.stop, dtype=np.int32)
        decoder.forward(tokens[rows], positions, np.empty(0, np.int64), attend)
        runtime.end_step()

    try:
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            table.append(stop - start)
            compute(slice(start, stop))
    finally:
        runtime.close()
        cache.close()
    return moments
