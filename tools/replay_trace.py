"""Traffic as a file: one request a line, as `docs/replay.md` says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import BinaryIO, NoReturn, TextIO

from hostcache.errors import UsageError

__all__ = ["TraceRequest", "read_trace", "write_trace"]

LONGEST_LINE = 1 << 16
"""Bytes of a line; one that says all there is to say takes some 200."""

MOST_TOKENS = 1 << 24
"""Tokens of a prompt or an answer: more than any model's context."""

HIGHEST_PRIORITY = 1_000_000
LATEST = 1e12
"""Seconds, some 30,000 years: a float still tells microseconds apart, nearly."""


@dataclass(frozen=True)
class TraceRequest:
    """What one request of a trace asks for, and when.

    Attributes:
        arrival: seconds from the trace's start.
        prompt_tokens: tokens of the prompt, those of the shared prefix included.
        output_tokens: tokens after which its answer ends by itself.
        prefix: names the text that its prompt begins with; requests with the same name begin alike.
        prefix_tokens: how much of that text.
        client: whose it is, for fairness.
        priority: higher goes first.
        abort: seconds from the trace's start at which the client gives up; infinite: never.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    client: str = ""
    priority: int = 0
    abort: float = math.inf


KINDS = {"arrival": "a time", "abort": "a time", "prefix": "text", "client": "text"}
"""What fields other than counts hold."""

RANGES: Mapping[str, tuple[float, float]] = {
    "arrival": (0, LATEST),
    "abort": (0, LATEST),
    "prompt_tokens": (1, MOST_TOKENS),
    "output_tokens": (1, MOST_TOKENS),
    "prefix_tokens": (0, MOST_TOKENS),
    "priority": (-HIGHEST_PRIORITY, HIGHEST_PRIORITY),
}
REQUIRED = ("arrival", "prompt_tokens", "output_tokens")


def read_trace(stream: BinaryIO, name: str) -> Iterator[TraceRequest]:
    """Requests of a JSONL trace, as they are asked for: a trace may be larger than memory.

    Args:
        stream: the lines, UTF-8; empty ones are passed over.
        name: of the file, for messages.

    Raises:
        UsageError: a line is no request, or arrives before the one in front of it; or there is none. The message names
            the file, the line and the field.
    """
    number, last = 0, 0.0
    empty = True
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if not line.strip():
            continue
        try:
            request = _parse(line)
            if request.arrival < last:
                raise ValueError(f"arrival {request.arrival:g} is earlier than the {last:g} before it: sort the trace")
        except ValueError as error:
            raise UsageError(f"{name}, line {number}: {error}", name=name, line=number) from error
        last, empty = request.arrival, False
        yield request
    if empty:
        raise UsageError(f"{name} holds no request: write one a line, as docs/replay.md says", name=name)


def write_trace(stream: TextIO, requests: Iterable[TraceRequest]) -> None:
    """Write requests as `read_trace` reads them; what is at its default is left out."""
    defaults = {field.name: field.default for field in fields(TraceRequest)}
    for request in requests:
        said = {name: value for name, value in asdict(request).items() if value != defaults[name]}
        stream.write(json.dumps(said) + "\n")


def _parse(line: bytes) -> TraceRequest:
    """One line.

    Raises:
        ValueError: it is no request; the text is for the user.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it is longer than {LONGEST_LINE} bytes")
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_each_once, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be a request") from error
    if not isinstance(value, dict):
        raise ValueError("it must be an object, such as " + '{"arrival": 0.5, "prompt_tokens": 20, "output_tokens": 8}')
    known = [field.name for field in fields(TraceRequest)]
    for name, said in value.items():
        if name not in known:
            raise ValueError(f"there is no field {name!r:.40}: there are {', '.join(known)}")
        _check_field(name, said)
    if missing := [name for name in REQUIRED if name not in value]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    request = TraceRequest(**value)
    if request.prefix_tokens > request.prompt_tokens:
        raise ValueError(f"prefix_tokens {request.prefix_tokens} exceeds prompt_tokens {request.prompt_tokens}")
    if bool(request.prefix) != bool(request.prefix_tokens):
        raise ValueError("prefix and prefix_tokens go together: give both, or none")
    if request.abort <= request.arrival:
        raise ValueError(f"abort {request.abort:g} is not later than arrival {request.arrival:g}")
    return request


def _check_field(name: str, value: object) -> None:
    """Raise ValueError unless the field may hold the value."""
    kind = KINDS.get(name, "a count")
    if kind == "text":
        if not (isinstance(value, str) and len(value) <= 1000 and not re.search("[\ud800-\udfff]", value)):
            raise ValueError(f"{name} is {value!r:.40}; it must be text of at most 1000 letters, without surrogates")
        return
    low, high = RANGES[name]
    types = (int, float) if kind == "a time" else (int,)
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:  # NaN is in no range
        number = "number" if kind == "a time" else "whole number"
        raise ValueError(f"{name} is {value!r:.40}; it must be a {number} within {low:g}..{high:g}")


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields_of_line = dict(pairs)
    if len(fields_of_line) < len(pairs):
        raise ValueError("it gives a field twice")
    return fields_of_line


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
