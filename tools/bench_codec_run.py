"""The work of `rockpage bench codec`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache import KVGeometry, PagedKVCache
from hostcache.codec import CODECS, FP16, INT4, Codec
from hostcache.errors import UsageError
from hostcache.namespace import Namespace
from npu.loading import EngineParts, load_parts
from npu.model_runner import ModelRunner
from npu.score import forced_logits
from npu.weights import Activations

from .bench_rows import Figure, Row, take_turns, timed
from .inputs import read_text
from .terminal import tell

__all__ = ["Drift", "quality_figures", "scatter_rows", "texts_of"]

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
"""In a checkout; an installed rockpage has none."""

MOST_CHANGE = {"int8": 0.2, "int4": 2.0}
"""Of perplexity, in percent."""

MOST_KL = {"int8": 0.002, "int4": 0.03}
"""Mean KL divergence, in nats."""

POOL_BYTES = 256 << 20
"""Of three sequences at once, which take 1.75 tokens' worth of fp16 for each token."""

SMOLLM2 = KVGeometry(layers=30, kv_heads=3, head_dim=64)

Text = str | NDArray[np.int32]
"""Text, or ids of the demo model's vocabulary."""


def texts_of(path: str | None) -> dict[str, list[Text]]:
    """What is read, by the name under which it is summed up.

    Raises:
        UsageError: there is no text, and none was named.
        OSError: the file cannot be read.
    """
    if path is not None:
        return {Path(path).name: [read_text(None, path)]}
    try:
        golden = json.loads((GOLDENS / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))
        book = (GOLDENS / "alice.txt").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError("the texts of the tests are in a checkout only: name one by --text FILE") from error
    return {
        "the two scored texts": [np.array(scored["ids"], np.int32) for scored in golden["scored"]],
        "Alice, I and II": [book],
    }


@dataclass
class Drift:
    """How far a model's predictions are from those with fp16, position by position.

    Attributes:
        divergences: KL(fp16 || codec), in nats.
        changes: of the logarithm of the next token's probability.
    """

    divergences: list[NDArray[np.float64]] = field(default_factory=list)
    changes: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, exact: NDArray[np.float32], found: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        """Compare logits `[n, vocabulary]` of as many positions."""
        before, after = _log_softmax(exact), _log_softmax(found)
        self.divergences.append((np.exp(before) * (before - after)).sum(axis=1))
        rows = np.arange(len(targets))
        self.changes.append(after[rows, targets] - before[rows, targets])

    @property
    def perplexity_change(self) -> float:
        """Relative, in percent."""
        return 100 * float(np.expm1(-np.concatenate(self.changes).mean()))

    @property
    def mean_divergence(self) -> float:
        """Over all positions."""
        return float(np.concatenate(self.divergences).mean())

    @property
    def worst_change(self) -> float:
        """Of a single token, in nats, either way."""
        return float(np.abs(np.concatenate(self.changes)).max())

    @classmethod
    def of_all(cls, drifts: Sequence[Drift]) -> Drift:
        """As if all had been one text."""
        return cls([part for drift in drifts for part in drift.divergences], [c for d in drifts for c in d.changes])


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def quality_figures(
    model: Path, texts: dict[str, list[Text]], *, piece: int, activations: Activations, threads: int
) -> list[Figure]:
    """Read the texts with every codec, side by side.

    Args:
        model: a GGUF file or a Hugging Face folder.
        texts: by the name under which they are summed up.
        piece: tokens that are read at a time.
        activations: as in `load_parts`.
        threads: that compute.

    Returns:
        For each codec the change of perplexity, the mean KL and the worst token: of all texts, which the targets are
        for, and of each name.
    """
    parts = load_parts(
        model, kv=INT4.name, activations=activations, threads=threads, pool_bytes=POOL_BYTES, watch_memory=False
    )
    scaled = [codec for codec in CODECS.values() if codec.scaled]
    drifts: dict[str, dict[str, Drift]] = {codec.name: {} for codec in scaled}
    with closing(parts):
        runner = ModelRunner(parts.decoder, parts.cache, parts.runtime, parts.balance)
        for name, group in texts.items():
            for drift in drifts.values():
                drift[name] = Drift()
            for ids in _pieces(parts, group, piece):
                tell(f"{len(ids)} tokens of {name}, in {', '.join(CODECS)}")
                done = 1
                sides = zip(*(_logits(parts, runner, ids, codec) for codec in (FP16, *scaled)), strict=True)
                for exact, *found in sides:
                    targets = ids[done : done + len(exact)]
                    done += len(targets)
                    for codec, logits in zip(scaled, found, strict=True):
                        drifts[codec.name][name].add(exact, logits, targets)
    return [figure for codec, by_text in drifts.items() for figure in _figures(codec, by_text)]


def _pieces(parts: EngineParts, group: Sequence[Text], piece: int) -> Iterator[NDArray[np.int32]]:
    for text in group:
        ids = parts.tokenizer.encode(text) if isinstance(text, str) else text
        for start in range(0, len(ids) - 1, piece):
            yield ids[start : start + piece]


def _logits(
    parts: EngineParts, runner: ModelRunner, ids: NDArray[np.int32], codec: Codec
) -> Iterator[NDArray[np.float32]]:
    own = Namespace(runner.numerics(codec))
    return forced_logits(ids, own, parts.cache, parts.config, runner.compute, codec=codec)


def _figures(codec: str, by_text: dict[str, Drift]) -> Iterator[Figure]:
    everything = Drift.of_all(list(by_text.values()))
    yield Figure(f"{codec}, perplexity", "fp16", everything.perplexity_change, "%", MOST_CHANGE[codec])
    yield Figure(f"{codec}, mean KL", "fp16", everything.mean_divergence, "nats", MOST_KL[codec])
    yield Figure(f"{codec}, worst token", "fp16", everything.worst_change, "nats")
    if len(by_text) > 1:
        for name, drift in by_text.items():
            yield Figure(f"{codec}, perplexity of {name}", "fp16", drift.perplexity_change, "%")
            yield Figure(f"{codec}, mean KL of {name}", "fp16", drift.mean_divergence, "nats")


def scatter_rows(times: int) -> list[Row]:
    """Time the scatter of a decoding batch and of a chunk of a prompt, SmolLM2's heads."""
    cache = PagedKVCache.create(SMOLLM2, 64 << 20, INT4)
    rows = []
    with closing(cache):
        for count in (8, 64):  # a decoding batch, a chunk of a prompt
            keys, values = np.random.default_rng(1).standard_normal((2, count, 3, 64)).astype(np.float32)
            works = [timed(_scatter(cache, codec, keys, values)) for codec in CODECS.values()]
            exact, *others = take_turns(works, times)
            scaled = [name for name in CODECS if name != FP16.name]
            for name, timing in zip(scaled, others, strict=True):
                rows.append(Row(f"scatter {count} rows, 3 heads x 64, {name}", "fp16", timing, exact))
    return rows


def _scatter(
    cache: PagedKVCache, codec: Codec, keys: NDArray[np.float32], values: NDArray[np.float32]
) -> Callable[[], None]:
    """Writes rows of one layer to a table of their own, over and over."""
    table = cache.table(codec)
    table.append(len(keys))
    slots, codes = table.slots(0, len(keys)), np.full(len(keys), codec.code, np.uint8)
    return partial(cache.write, 0, slots, keys, values, codes)
