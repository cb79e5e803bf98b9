"""One request's way from token ids to text."""

from __future__ import annotations

from dataclasses import dataclass

from hostcache.errors import RockpageError
from hostcache.request import FinishReason, Request

from .detokenizer import Detokenizer, StopChecker
from .sampler import Sampler, SamplingParams
from .tokenizer import Tokenizer

__all__ = ["RequestOutput", "Stream"]


@dataclass(frozen=True)
class RequestOutput:
    """What one step brought for one request.

    Attributes:
        request_id: as `add_request` returned it.
        token_ids: tokens sampled in this step: one, or none if the request only ended.
        text: the text they complete; may be empty while a character or a stop string is undecided.
        finish_reason: why the request has ended; None while it goes on.
        error: what went wrong, if the reason is `FAILED`.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: RockpageError | None = None


class Stream:
    """What the engine keeps for a request besides its tokens: how it samples, and what text is undecided.

    Args:
        request: the request.
        params: how it samples and when it ends.
        tokenizer: gives each token's bytes.
        sampler: None makes one from `params`; a fork that shares its parent's seed shares its sampler.

    Attributes:
        request: as given.
        params: as given.
        sampler: chooses its tokens.
        stopped: whether a stop string has ended it.
    """

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Tokenizer, sampler: Sampler | None = None
    ) -> None:
        self.request = request
        self.params = params
        self.sampler = sampler or Sampler(params)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(params.stop)
        self._decided = 0  # characters that came out, or would have
        self._given = 0  # of those, characters that a fork's parent has given out already
        self._early = ""  # what a fork decides of its parent's tokens and its parent does not

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._stops.stopped is not None

    def fork(self, request: Request, tokenizer: Tokenizer, params: SamplingParams | None) -> Stream:
        """The stream of a fork: its text goes on exactly where this one's stands, whatever its own stop strings.

        Args:
            request: the fork.
            tokenizer: gives each token's bytes.
            params: how it samples; None: as this one, whose sampler it shares.
        """
        child = Stream(request, params or self.params, tokenizer, None if params else self.sampler)
        child._given = self._decided
        child._early = "".join(child.push(int(token)) for token in request.output)
        return child

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is decided by it."""
        return self._take(self._stops.push(self._detokenizer.push(token)))

    def last(self, tokens: tuple[int, ...] = (), text: str = "") -> RequestOutput:
        """The request has ended: nothing is held back any more, unless behind a stop string.

        Args:
            tokens: tokens of the last step.
            text: the text they brought.
        """
        text += self._take(self._stops.push(self._detokenizer.flush()) + self._stops.flush())
        reason = FinishReason.STOP if self.stopped else self.request.finish_reason
        return RequestOutput(self.request.id, tokens, text, reason, self.request.error)

    def _take(self, decided: str) -> str:
        """Of newly decided text, what was not given out before."""
        start = max(0, self._given - self._decided)
        self._decided += len(decided)
        early, self._early = self._early, ""
        return early + decided[start:]
