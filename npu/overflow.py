"""What becomes of an answer for which the model's context has no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hostcache.errors import RequestRefused, UsageError
from hostcache.window import AttentionWindow

__all__ = ["USUAL_SINKS", "ContextRules", "Grant", "OverflowPolicy"]

OverflowPolicy: TypeAlias = Literal["stop", "refuse", "slide"]
"""What happens where a prompt and `max_tokens` exceed the context.

- `"stop"`: the answer gets what the context leaves, and then ends with `FinishReason.CONTEXT`.
- `"refuse"`: the request is refused. The default of `max_tokens` counts like any other, so that no answer ever ends for
  want of context.
- `"slide"`: the answer goes on, and so does a prompt that is longer than the context. Each token sees a window and the
  first tokens; see docs/long-contexts.md.
"""

USUAL_SINKS = 4
"""First tokens that every token sees beside its window: with them models stay sane, more bring little (Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453)."""

_PART_KEPT_FREE = 8
"""By default an eighth of the context is neither sinks nor window. When it is full, keys are turned to earlier
positions: the smaller it is, the oftener that happens, and the oftener keys are rounded."""


@dataclass(frozen=True)
class Grant:
    """What a request gets.

    Attributes:
        max_tokens: of its answer, at least 1.
        window: what its tokens see; None: everything, or what the model's own windows show.
        overflow: what happens where its forks ask for more; `"slide"` only if it does slide.
    """

    max_tokens: int
    window: AttentionWindow | None
    overflow: OverflowPolicy


class ContextRules:
    """What requests get of a model's context.

    Args:
        context_length: most tokens of a sequence that does not slide.
        block_tokens: tokens per block.
        windows: the model's own, by layer: tokens, 0 for a layer that sees everything; empty: there are none.
    """

    def __init__(self, context_length: int, block_tokens: int, windows: Sequence[int] = ()) -> None:
        self._context = context_length
        self._block_tokens = block_tokens
        self._windows = tuple(windows)

    def grant(
        self, overflow: OverflowPolicy, prompt_tokens: int, max_tokens: int, window: AttentionWindow | None
    ) -> Grant:
        """What a new request gets.

        Args:
            overflow: what happens where the context has no room for the prompt and `max_tokens`.
            prompt_tokens: of the prompt.
            max_tokens: of the answer, as asked for.
            window: what its tokens are to see; None: everything, or, if it must slide, as much as the context allows.

        Raises:
            RequestRefused: it does not fit, and is to be refused then; or the context is too short to slide in.
            UsageError: there is no such policy, it is no window, or the model's own windows leave no choice.
        """
        if not isinstance(overflow, str) or overflow not in get_args(OverflowPolicy):
            policies = ", ".join(get_args(OverflowPolicy))
            raise UsageError(f"no overflow policy is called {overflow!r}: there are {policies}", overflow=overflow)
        if window is not None and not isinstance(window, AttentionWindow):
            raise UsageError(f"window is {window!r}; it must be an AttentionWindow, or None", window=window)
        if window is not None and any(self._windows):
            raise UsageError(
                f"the model's layers have windows of their own, of {max(self._windows)} tokens: leave window out",
                windows=self._windows,
            )
        slides = overflow == "slide" and (window is not None or prompt_tokens + max_tokens > self._context)
        if slides:
            return Grant(max_tokens, window or self._usual_window(), "slide")
        ends = "stop" if overflow == "slide" else overflow
        return Grant(self.tokens(ends, prompt_tokens, max_tokens), window, ends)

    def tokens(self, overflow: OverflowPolicy, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens an answer gets, under a request's `Grant.overflow`.

        Raises:
            RequestRefused: not one fits, or not all of them, and it is to be refused then.
        """
        room = self._context - prompt_tokens
        if max_tokens <= room or overflow == "slide":
            return max_tokens
        if overflow == "refuse":
            raise RequestRefused(
                f"a prompt of {prompt_tokens} tokens and {max_tokens} to generate exceed the context of "
                f"{self._context}: shorten the prompt, ask for fewer tokens, or choose another overflow policy",
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                context_length=self._context,
            )
        if room < 1:
            raise RequestRefused(
                f"a prompt of {prompt_tokens} tokens and 1 to generate exceed the context of {self._context}: "
                "shorten the prompt, or choose the overflow policy slide",
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                context_length=self._context,
            )
        return room

    def _usual_window(self) -> AttentionWindow | None:
        """The largest window, but for a part that is kept free; None: the model's own."""
        if any(self._windows):
            if not all(self._windows):
                raise UsageError(
                    "this model has layers with a window and layers that see everything: it cannot slide; "
                    "choose another overflow policy",
                    windows=self._windows,
                )
            return None
        front = -(-USUAL_SINKS // self._block_tokens) * self._block_tokens
        tokens = self._context - front - max(self._block_tokens, self._context // _PART_KEPT_FREE)
        if tokens < 1:
            raise RequestRefused(
                f"a context of {self._context} tokens is too short to slide in: give one of more than "
                f"{front + self._block_tokens}",
                context_length=self._context,
            )
        return AttentionWindow(tokens, USUAL_SINKS)
