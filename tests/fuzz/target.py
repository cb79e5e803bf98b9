"""What a fuzzing target is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from tests.fuzz.guard import MIB

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A part of rockpage that takes what comes from outside.

    Attributes:
        cases: what it is given, drawn.
        run: gives a prepared case to the part; raises whatever is no refusal of ours.
        prepare: makes of a case what `run` takes: a file, a folder. Not measured.
        seconds: processor time a case may take.
        nbytes: by how much it may let the process grow, whatever its size.
        times: and how many bytes more for each byte of its input.
        size: bytes of the input.
    """

    cases: SearchStrategy[Any]
    run: Callable[[Any], None]
    prepare: Callable[[Any], Any] = lambda case: case
    seconds: float = 1.0
    nbytes: int = 32 * MIB
    times: int = 32
    size: Callable[[Any], int] = lambda prepared: 0
