"""What comes of one prompt: an answer, several side by side, or the likeliest ones; shown as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from hostcache.request import FinishReason
    from npu.engine import Engine
    from npu.logprobs import TokenLogprobs
    from npu.queue_options import QueueOptions
    from npu.sampling_params import SamplingParams

__all__ = ["Answer", "Answered", "InOrder", "answer", "require_choice", "search"]


@dataclass
class Answer:
    """One answer.

    Attributes:
        text: what it says.
        tokens: its ids.
        logprobs: of each token, if asked for.
        finish_reason: why it ended; None while it goes on.
        unseen_tokens: tokens of prompt and answer that a window hid from its last one.
        logprob: natural logarithm of its probability, if it was searched for.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    unseen_tokens: int = 0
    logprob: float | None = None


@dataclass(frozen=True)
class Answered:
    """The answers to a prompt, and how fast they came.

    Attributes:
        answers: at least one; the likeliest first, if they were searched for.
        cached_tokens: leading tokens of the prompt whose KV was there already, in full blocks.
        ttft_seconds: from the prompt to the first token.
        decoding_seconds: from then to the end.
    """

    answers: list[Answer]
    cached_tokens: int
    ttft_seconds: float
    decoding_seconds: float

    @property
    def output_tokens(self) -> int:
        """Of all answers."""
        return sum(len(one.tokens) for one in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Behind the first token; 0 if there was no other."""
        return (self.output_tokens - 1) / self.decoding_seconds if self.decoding_seconds > 0 else 0.0


def require_choice(count: int, beams: int | None, params: SamplingParams) -> None:
    """Refuse what would give the same answer several times, or has no effect on a search.

    Raises:
        UsageError: a number is below 1, both ways of getting several answers are asked for, or as said above.
    """
    from hostcache.errors import UsageError
    from npu.sampling_params import SamplingParams

    if count < 1:
        raise UsageError(f"--answers is {count}; it must be at least 1", answers=count)
    if beams is None:
        if count > 1 and params.temperature == 0:
            raise UsageError(
                f"{count} answers would all be the same: give a --temperature above 0, or --beams {count}",
                answers=count,
            )
        return
    if count > 1:
        raise UsageError("--answers draws answers and --beams searches for them: leave one out", beams=beams)
    usual = SamplingParams()
    for name in (one.name for one in fields(params) if one.name != "max_tokens"):
        if getattr(params, name) != getattr(usual, name):
            option = "json-schema" if name == "structure" else name.replace("_", "-")
            raise UsageError(f"--{option} has no effect on --beams, which looks for the likeliest: leave one out")


def answer(
    engine: Engine,
    prompt: NDArray[np.int32],
    params: SamplingParams,
    *,
    count: int = 1,
    show: TextIO | None = None,
    **options: Unpack[QueueOptions],
) -> Answered:
    """Run a prompt's requests to their end.

    Args:
        engine: has no other requests.
        prompt: int32 ids.
        params: how to sample.
        count: answers, at least 1.
        show: where the text goes as it comes; of several answers, one behind the other, each with its number.
        options: how they are queued.

    Raises:
        RockpageError: a request was refused, or failed.
        OSError: `show` cannot be written.
    """
    times = [time.perf_counter()]
    ids = engine.add_branches(prompt, count, params, **options)
    answers = {request: Answer() for request in ids}
    cached_tokens = engine.prefix.of(engine.codec()).known_tokens(engine.namespace(), prompt)
    shown = None if show is None else InOrder(show, list(answers.values()))
    try:
        while not engine.idle:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                times.append(time.perf_counter())
                one = answers[output.request_id]
                one.text += output.text
                one.tokens += output.token_ids
                one.logprobs += output.logprobs
                one.finish_reason = output.finish_reason
                one.unseen_tokens = output.unseen_tokens
            if shown is not None:
                shown.update()
    finally:
        for request in ids:
            engine.abort(request)
    return Answered(list(answers.values()), cached_tokens, times[1] - times[0], times[-1] - times[1])


def search(engine: Engine, prompt: NDArray[np.int32], width: int, max_tokens: int) -> Answered:
    """Search for the likeliest answers, `width` wide.

    Raises:
        RockpageError: as `npu.engine.Engine.beam_search`.
    """
    from hostcache.request import FinishReason
    from npu.beam import BeamParams

    room = max(1, engine.scheduler.config.context_length - len(prompt))
    started = time.perf_counter()
    found = engine.beam_search(prompt, BeamParams(width, max_tokens=min(max_tokens, room)))
    seconds = time.perf_counter() - started
    answers = []
    for one in found:
        ended = one.tokens[-1] in engine.tokenizer.eos_ids
        text = engine.tokenizer.decode(one.tokens[:-1] if ended else one.tokens)
        full = FinishReason.LENGTH if max_tokens <= room else FinishReason.CONTEXT
        reason = FinishReason.STOP if ended else full
        answers.append(Answer(text, list(one.tokens), finish_reason=reason, logprob=one.logprob))
    return Answered(answers, 0, seconds, 0.0)  # nothing is known before all is


class InOrder:
    """Shows answers that grow side by side one behind the other; the first that has not ended, as it comes.

    Args:
        file: where they are shown.
        answers: at least one; each has its number if there are several.
    """

    def __init__(self, file: TextIO, answers: list[Answer]) -> None:
        self._file = file
        self._answers = answers
        self._at = 0
        self._shown = 0  # characters of the answer at `_at`
        self._number()

    def update(self) -> None:
        """Write what has come.

        Raises:
            OSError: the file cannot be written.
        """
        while True:
            one = self._answers[self._at]
            self._file.write(one.text[self._shown :])
            self._shown = len(one.text)
            if one.finish_reason is None or self._at == len(self._answers) - 1:
                break
            self._at, self._shown = self._at + 1, 0
            self._file.write("\n\n")
            self._number()
        self._file.flush()

    def _number(self) -> None:
        if len(self._answers) > 1:
            self._file.write(f"[{self._at + 1}] ")
