"""What the renderings of one conversation may use: steps, processor time, and memory.

A template is code from a model file. All that repeats in it, loops, calls, filters, takes a step, and all that it makes
is weighed, so that no single operation works on more than `VALUE_LIMIT` and none makes much more of it. A single
operation is never interrupted: what is slow on such a value, a search from the end of a text say, is refused before it
begins.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

__all__ = [
    "CPU_SECONDS",
    "STEP_LIMIT",
    "VALUE_LIMIT",
    "Budget",
    "check_format",
    "check_growth",
    "check_search",
    "weigh",
]

STEP_LIMIT = 500_000
"""Turns of loops, calls, filters, tests, operators. The three renderings that a conversation of 1,000 messages is
encoded with take some 60,000."""

CPU_SECONDS = 1.0
"""Of the rendering thread, which 1,000 messages keep busy for 0.05 s (a core of an EPYC server)."""

VALUE_LIMIT = 2 << 20
"""Weight of one value: `weigh`. In characters, four times the longest context of Llama-type models, 131,072 tokens."""

_MEMORY_LIMIT = 64 << 20  # weight of all that is made; a character takes 1 to 4 bytes
_GROWTH_LIMIT = 32 << 20  # characters that one call may make at most, before its result is weighed
_SEARCH_LIMIT = 1 << 30  # comparisons of one call; the slowest take 0.15 s for as many
_HEAVY = 1 << 16  # weight of a value whose making is worth a look at the clock
_NUMBER_BITS = 4096  # of integers; dividing large ones takes the square of their length
_TIME_EVERY = 16  # steps; asking for a thread's time is a system call
_ELEMENT = 16  # weight of a place in a container: a pointer, and the element's own header

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)

_active: ContextVar[Budget | None] = ContextVar("budget", default=None)


class Budget:
    """The budget of one conversation's renderings, which must stay on the thread that made it."""

    def __init__(self) -> None:
        self._steps = STEP_LIMIT
        self._memory = _MEMORY_LIMIT
        self._end = time.thread_time() + CPU_SECONDS

    @classmethod
    @contextmanager
    def spend(cls) -> Iterator[None]:
        """Let `step` and `made` count on a new budget; within another such block, on that one's."""
        if _active.get() is not None:
            yield
            return
        token = _active.set(cls())
        try:
            yield
        finally:
            _active.reset(token)

    @classmethod
    @contextmanager
    def spend_apart(cls) -> Iterator[None]:
        """Let them count on a new budget in any case; an outer one's clock stands still."""
        outer, started = _active.get(), time.thread_time()
        token = _active.set(cls())
        try:
            yield
        finally:
            _active.reset(token)
            if outer is not None:
                outer._end += time.thread_time() - started

    @staticmethod
    def step() -> None:
        """Take a step.

        Raises:
            TemplateError: that was one too many, or time is up.
        """
        budget = _active.get()
        if budget is None:
            return
        budget._steps -= 1
        if budget._steps < 0:
            raise TemplateError(f"it takes more than {STEP_LIMIT} steps")
        if budget._steps % _TIME_EVERY == 0:
            budget._look_at_clock()

    @staticmethod
    def made(value: Any) -> Any:  # noqa: ANN401 - a template's values are of any type
        """Weigh a value that the template has made, and return it.

        Raises:
            TemplateError: it is too large, or one too many, or time is up.
        """
        budget = _active.get()
        if budget is not None:
            weight = weigh(value)
            budget._memory -= weight
            if budget._memory < 0:
                raise TemplateError(f"it makes more than {_MEMORY_LIMIT} characters")
            if weight > _HEAVY:
                budget._look_at_clock()
        return value

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._end:
            raise TemplateError(f"it takes more than {CPU_SECONDS:g} seconds")


def weigh(value: object) -> int:
    """Weight of a value with all that is in it: characters of texts, and 16 for each place in a container.

    What is contained twice counts twice: printing or comparing a value walks it as a tree.

    Raises:
        TemplateError: it is more than `VALUE_LIMIT`, or a number of more than 4096 bits.
    """
    weight = 0
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str | bytes):
            weight += len(item)
        elif isinstance(item, int) and item.bit_length() > _NUMBER_BITS:
            raise TemplateError(f"it makes a number of {item.bit_length()} bits")
        elif isinstance(item, Mapping):
            weight += _ELEMENT * len(item)
            pending += (*item.keys(), *item.values())
        elif isinstance(item, range):
            weight += _ELEMENT * len(item)
        elif isinstance(item, _CONTAINERS):
            weight += _ELEMENT * len(item)
            pending += item
        if weight > VALUE_LIMIT:
            raise TemplateError(f"it makes a value of more than {VALUE_LIMIT} characters")
    return weight


def check_growth(value: object, arguments: Iterable[object]) -> None:
    """Refuse an operation that puts arguments (a width, a separator, a replacement) all over a value.

    Raises:
        TemplateError: its result could have more than 32 Mi characters.
    """
    times = sum(abs(item) if isinstance(item, int) else weigh(item) for item in arguments)
    if (_ELEMENT + weigh(value)) * times > _GROWTH_LIMIT:
        raise TemplateError("it makes a value of unbounded size")


def check_search(text: str, arguments: Iterable[object]) -> None:
    """Refuse a search that compares each character of a text with each of an argument, where both are long.

    Raises:
        TemplateError: it could take more than 2**30 comparisons.
    """
    longest = max((len(item) for item in arguments if isinstance(item, str)), default=0)
    if len(text) * longest > _SEARCH_LIMIT:
        raise TemplateError(f"it searches for a size of {longest} in one of {len(text)} characters")


def check_format(layout: str, arguments: Iterable[object]) -> None:
    """Refuse a format, by `%` or by braces, that asks for enormous widths or prints its arguments too often.

    Raises:
        TemplateError: its result could have more than 32 Mi characters.
    """
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", layout)]
    takes_widths = "*" in layout or re.search(r"\{[^{}]*\{", layout) is not None
    check_growth(layout, [*widths, *(item for item in arguments if takes_widths or not isinstance(item, int))])
