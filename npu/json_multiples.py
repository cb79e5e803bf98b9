"""How much a JSON schema's `multipleOf` costs, before anything is made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal

__all__ = ["MULTIPLE_LIMIT", "excessive_multiple"]

MULTIPLE_LIMIT = 10_000
"""Largest least common multiple of a schema's steps, in units of their last decimal place and without zeros at its end.

llguidance makes an automaton of so many states of it: 104857 takes 0.6 s, 1048575 takes 5 s and 300 MB, 9999991 takes
150 s and 6 GB (1.9.1).
"""

_MOST_DIGITS = 30  # of a step: whatever has more is beyond the limit, or has a unit too fine for it


def excessive_multiple(schema: str) -> str | None:
    """The first `multipleOf` that brings a schema beyond `MULTIPLE_LIMIT`, as written; None if none does.

    Steps count together wherever they stand: those that a number must obey at once multiply. What is no JSON, or no
    number, is left to others to refuse.
    """
    try:
        steps = [step for step in _steps(json.loads(schema, parse_float=Decimal, parse_int=Decimal)) if step]
    except (ValueError, ArithmeticError, RecursionError):
        return None
    for step in steps:
        if abs(step.adjusted()) > _MOST_DIGITS or len(step.as_tuple().digits) > _MOST_DIGITS:
            return str(step)
    places = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    common = 1
    for step in steps:
        common = math.lcm(common, int(abs(step).scaleb(max(0, places))))
        states = common
        while states % 10 == 0:
            states //= 10
        if states > MULTIPLE_LIMIT:
            return str(step)
    return None


def _steps(schema: object) -> Iterator[Decimal]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            step = part.get("multipleOf")
            if isinstance(step, Decimal):
                yield step
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
