"""One request's way from token ids to text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RockpageError
from hostcache.request import FinishReason, Request

from .detokenizer import Detokenizer, StopChecker
from .logprobs import TokenLogprobs, token_logprobs
from .overflow import OverflowPolicy
from .sampler import Sampler, SamplingParams
from .structured import Constraint
from .tokenizer import Tokenizer

__all__ = ["RequestOutput", "Stream"]


@dataclass(frozen=True)
class RequestOutput:
    """What one step brought for one request.

    Attributes:
        request_id: as `add_request` returned it.
        token_ids: tokens that this step brought: one; several where proposed ones proved right; or none if the request
            only ended.
        text: the text they complete; may be empty while a character or a stop string is undecided.
        finish_reason: why the request has ended; None while it goes on.
        error: what went wrong, if the reason is `FAILED`.
        logprobs: one entry for each of `token_ids`, if the request asked for them.
        unseen_tokens: computed tokens of prompt and answer that a window, the request's or the model's, hides from the
            next one.

    Example:
        >>> from npu.engine import Engine
        >>> from npu.sampler import SamplingParams
        >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
        ...     request = engine.add_request("Monday, Tuesday,", SamplingParams(max_tokens=2))
        ...     while not engine.idle:
        ...         for output in engine.step():
        ...             print(output.text, output.finish_reason)
         Wednesday None
        , FinishReason.LENGTH
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: RockpageError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    unseen_tokens: int = 0


class Stream:
    """What the engine keeps for a request besides its tokens: how it samples, and what text is undecided.

    Args:
        request: the request.
        params: how it samples and when it ends.
        tokenizer: gives each token's bytes, and says which tokens end an answer.
        sampler: None makes one from `params`; a fork that shares its parent's seed shares its sampler.
        constraint: of the structure that `params` asks for; each request has its own.
        overflow: what happens where the context has no room for `params.max_tokens`.

    Attributes:
        request: as given.
        params: as given.
        overflow: as given.
        sampler: chooses its tokens.
        stopped: whether a stop string has ended it.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer,
        sampler: Sampler | None = None,
        constraint: Constraint | None = None,
        *,
        overflow: OverflowPolicy = "stop",
    ) -> None:
        self.request = request
        self.params = params
        self.overflow = overflow
        self.sampler = sampler or Sampler(params)
        self._constraint = constraint
        self._end_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
        self._logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens sampled in the last step
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(params.stop)
        self._decided = 0  # characters that came out, or would have
        self._given = 0  # of those, characters that a fork's parent has given out already
        self._early = ""  # what a fork decides of its parent's tokens and its parent does not

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._stops.stopped is not None

    def sample(self, logits: NDArray[np.float32], ahead: int = 0) -> tuple[int, bool]:
        """Choose the token that follows the request's, which are left as they are.

        Args:
            logits: float32 `[vocab]`, only read.
            ahead: how many tokens behind the request's newest one, which are in its buffer, have been chosen already.

        Returns:
            The token, and whether it ends the answer.

        Raises:
            RequestFailed: the model's numbers are broken, or the structure cannot be followed.
        """
        request, constraint = self.request, self._constraint
        history = request.buffer[: request.length + ahead]
        answer = history[request.prompt_length :]
        allowed = constraint.allowed(answer) if constraint else None
        token = self.sampler.sample(logits, history, request.prompt_length, allowed)
        if self.params.logprobs is not None:
            known = self._logprobs if ahead else ()
            self._logprobs = (*known, token_logprobs(logits, token, self.params.logprobs))
        ends = token in self._end_ids or (constraint is not None and constraint.completed_by(answer, token))
        return token, ends

    def fork(
        self, request: Request, tokenizer: Tokenizer, params: SamplingParams | None, constraint: Constraint | None
    ) -> Stream:
        """The stream of a fork: its text goes on exactly where this one's stands, whatever its own stop strings.

        Args:
            request: the fork.
            tokenizer: gives each token's bytes.
            params: how it samples; None: as this one, whose sampler it shares.
            constraint: what its structure allows; None allows everything.
        """
        sampler = None if params else self.sampler
        child = Stream(request, params or self.params, tokenizer, sampler, constraint, overflow=self.overflow)
        child._given = self._decided
        child._early = "".join(child.push(int(token)) for token in request.output)
        return child

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is decided by it. An end token, of whatever kind, has none."""
        if token in self._end_ids:
            return ""
        return self._take(self._stops.push(self._detokenizer.push(token)))

    def output(self, tokens: tuple[int, ...], text: str) -> RequestOutput:
        """The tokens that `sample` chose have been committed, and the request goes on."""
        return RequestOutput(self.request.id, tokens, text, logprobs=self._logprobs, unseen_tokens=self._unseen())

    def last(self, tokens: tuple[int, ...] = (), text: str = "") -> RequestOutput:
        """The request has ended: nothing is held back any more, unless behind a stop string.

        Args:
            tokens: tokens of the last step.
            text: the text they brought.
        """
        text += self._take(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        logprobs = self._logprobs[: len(tokens)]
        request = self.request
        return RequestOutput(
            request.id, tokens, text, self._finish_reason(), request.error, logprobs, unseen_tokens=self._unseen()
        )

    def _unseen(self) -> int:
        layout = self.request.layout
        return 0 if layout is None else layout.unseen_at(self.request.computed)

    def _finish_reason(self) -> FinishReason | None:
        """Why the request has ended, as its caller sees it."""
        request, reason = self.request, self.request.finish_reason
        if self.stopped:
            return FinishReason.STOP
        if reason is FinishReason.LENGTH and request.limit - request.prompt_length < self.params.max_tokens:
            return FinishReason.CONTEXT
        return reason

    def _take(self, decided: str) -> str:
        """Of newly decided text, what was not given out before."""
        start = max(0, self._given - self._decided)
        self._decided += len(decided)
        early, self._early = self._early, ""
        return early + decided[start:]
