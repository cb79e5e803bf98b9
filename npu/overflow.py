"""What becomes of an answer for which the model's context has no room."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from hostcache.errors import RequestRefused, UsageError

__all__ = ["OverflowPolicy", "tokens_granted"]

OverflowPolicy: TypeAlias = Literal["stop", "refuse"]
"""What happens where a prompt and `max_tokens` exceed the context.

- `"stop"`: the answer gets what the context leaves, and then ends with `FinishReason.CONTEXT`.
- `"refuse"`: the request is refused. The default of `max_tokens` counts like any other, so that no answer ever ends for
  want of context.
"""


def tokens_granted(policy: OverflowPolicy, prompt_tokens: int, max_tokens: int, context_length: int) -> int:
    """How many tokens an answer may have.

    Args:
        policy: what happens where the context has no room for `max_tokens`.
        prompt_tokens: of the prompt.
        max_tokens: asked for.
        context_length: most tokens of a sequence.

    Returns:
        At least 1: whether there is room for that, whoever queues the request says.

    Raises:
        RequestRefused: the policy is to refuse, and they do not fit.
        UsageError: there is no such policy.
    """
    if policy not in get_args(OverflowPolicy):
        raise UsageError(
            f"no overflow policy is called {policy!r}: there are {', '.join(get_args(OverflowPolicy))}", overflow=policy
        )
    room = context_length - prompt_tokens
    if policy == "refuse" and max_tokens > room:
        raise RequestRefused(
            f"a prompt of {prompt_tokens} tokens and {max_tokens} to generate exceed the context of {context_length}: "
            "shorten the prompt, ask for fewer tokens, or choose another overflow policy",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            context_length=context_length,
        )
    return min(max_tokens, max(1, room))
