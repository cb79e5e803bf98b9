"""The self-test's step for a whole model: are its tokens those of the CPU?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .engine import Engine
from .explain import explain_placement
from .logprobs import TokenLogprobs
from .sampler import SamplingParams
from .selftest_report import Step
from .staged import StagedAttention

__all__ = ["NEAR_TIE", "same_tokens"]

_PROMPT = "A bearing that runs hot is most often"

_TOKENS = 16

NEAR_TIE = 0.1
"""Of log-probabilities: rounding attention to fp16 moves them by some hundredths, so that a token less far ahead of the
next may lose its place."""

_POOL_BYTES = 32 << 20

_RUNNERS_UP = 20


def same_tokens(model: Path, runtime: str, graphs: Path | None, threads: int) -> Step:
    """Does a model say the same as on the CPU?

    Args:
        model: a GGUF file or a Hugging Face folder.
        runtime: name of the staged one.
        graphs: its graphs, if the runtime needs them.
        threads: of the CPU.
    """
    on_cpu = _greedy(model, "cpu", None, threads)
    on_device = _greedy(model, runtime, graphs, threads)
    return _compared(on_cpu, on_device, runtime)


@dataclass(frozen=True)
class _Answer:
    """A model's answer, and the launches that it took; `trouble` if not all of them were the device's."""

    tokens: Sequence[TokenLogprobs]
    launches: int
    trouble: str


def _greedy(model: Path, runtime: str, graphs: Path | None, threads: int) -> _Answer:
    with Engine.load(
        model,
        runtime=runtime,
        pool_bytes=_POOL_BYTES,
        threads=threads,
        activations="fp32",
        graphs=graphs,
        placement=None if runtime == "cpu" else "device",
        max_sequences=1,
    ) as engine:
        engine.add_request(_PROMPT, SamplingParams(max_tokens=_TOKENS, ignore_eos=True, logprobs=_RUNNERS_UP))
        tokens: list[TokenLogprobs] = []
        while not engine.idle:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                tokens += output.logprobs
        attention = engine.runtime
        if not isinstance(attention, StagedAttention):
            return _Answer(tokens, 0, "")
        cores = attention.cores
        trouble = "; ".join(explain_placement(attention)[1:]) if cores.failures or cores.on_host else ""
        return _Answer(tokens, cores.launches, trouble)


def _compared(on_cpu: _Answer, on_device: _Answer, runtime: str) -> Step:
    name = "tokens"
    if on_device.trouble or not on_device.launches:
        return Step(name, "failed", on_device.trouble or f"nothing was attended by {runtime}")
    pairs = list(zip(on_cpu.tokens, on_device.tokens, strict=True))
    part = next((index for index, (ours, its) in enumerate(pairs) if ours.token != its.token), len(pairs))
    moved = max((abs(ours.logprob - its.logprob) for ours, its in pairs[:part]), default=0.0)
    figures: dict[str, object] = {"tokens": len(pairs), "same": part, "logprobs_moved": moved}
    figures["launches"] = on_device.launches
    moved_words = f"log-probabilities moved by {moved:.1e} at most"
    if part == len(pairs):
        found = f"{part} tokens as on the cpu runtime, by {on_device.launches} launches; {moved_words}"
        return Step(name, "proved", found, figures)
    ours, its = pairs[part]
    gap = ours.logprob - dict(ours.top).get(its.token, ours.top[-1][1])
    figures["gap"] = gap
    found = (
        f"the same as on the cpu runtime up to token {part}, where the CPU has {runtime}'s choice {gap:.3f} or more "
        f"behind its own; {moved_words}"
    )
    return Step(name, "proved" if gap <= NEAR_TIE else "failed", found, figures)
