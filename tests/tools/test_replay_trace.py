"""A trace is read as it was written, and a line that is no request is named."""

from __future__ import annotations

import io
import math

import pytest

from hostcache.errors import UsageError
from tools.replay_trace import TraceRequest, read_trace, write_trace

GOOD = b'{"arrival": 1, "prompt_tokens": 20, "output_tokens": 8}\n'


def read(text: bytes) -> list[TraceRequest]:
    return list(read_trace(io.BytesIO(text), "t.jsonl"))


def test_what_was_written_is_read() -> None:
    requests = [
        TraceRequest(0.0, 1, 1),
        TraceRequest(0.25, 300, 8, "sys\u00e9", 256, "console 3", -2, 7.5),
        TraceRequest(0.25, 300, 8, priority=1),
    ]
    text = io.StringIO()
    write_trace(text, requests)
    assert text.getvalue().splitlines()[0] == '{"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 1}'
    assert read(text.getvalue().encode()) == requests


def test_what_is_not_said_has_its_default() -> None:
    assert read(b"\n" + GOOD + b"  \n") == [TraceRequest(1, 20, 8, "", 0, "", 0, math.inf)]


def with_fields(fields: str) -> bytes:
    return GOOD[:-2] + b", " + fields.encode() + b"}\n"


BAD: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'arrival': 1}\n", "it is not JSON: Expecting property name"),
    "cut short": (GOOD[:-9], "it is not JSON"),
    "no object": (b"[1, 2]\n", 'it must be an object, such as {"arrival": 0.5'),
    "no UTF-8": (b'{"client": "\xff"}\n', "it is not UTF-8 at byte 12"),
    "deep": (b"[" * 60_000 + b"\n", "nested too deeply|not JSON"),
    "long": (with_fields('"client": "' + "x" * 70_000 + '"'), "longer than 65536 bytes"),
    "unknown": (with_fields('"tokens": 3'), "there is no field 'tokens': there are arrival, prompt_tokens"),
    "twice": (with_fields('"arrival": 3'), "it gives a field twice"),
    "missing": (b'{"arrival": 1}\n', "it lacks prompt_tokens, output_tokens"),
    "NaN": (GOOD.replace(b"1,", b"NaN,"), "NaN is not a number of JSON"),
    "infinite": (with_fields('"abort": 1e999'), "abort is inf; it must be a number within 0..1e\\+12"),
    "huge": (with_fields('"priority": ' + "9" * 4000), "priority is 9+; it must be a whole number"),
    "negative": (GOOD.replace(b"1,", b"-1,"), "arrival is -1; it must be a number within 0"),
    "no tokens": (GOOD.replace(b"20", b"0"), "prompt_tokens is 0; it must be a whole number within 1"),
    "a fraction": (GOOD.replace(b"20", b"20.5"), "prompt_tokens is 20.5; it must be a whole number"),
    "a truth": (GOOD.replace(b"20", b"true"), "prompt_tokens is True"),
    "a number for a name": (with_fields('"client": 3'), "client is 3; it must be text"),
    "half a letter": (with_fields(r'"prefix": "\ud800", "prefix_tokens": 4'), r"prefix is '\\ud800'; it must be text"),
    "a prefix without length": (with_fields('"prefix": "a"'), "prefix and prefix_tokens go together"),
    "a length without prefix": (with_fields('"prefix_tokens": 4'), "prefix and prefix_tokens go together"),
    "a prefix beyond the prompt": (with_fields('"prefix": "a", "prefix_tokens": 21'), "21 exceeds prompt_tokens 20"),
    "an abort at arrival": (with_fields('"abort": 1'), "abort 1 is not later than arrival 1"),
    "out of order": (GOOD.replace(b"1,", b"0.5,"), "arrival 0.5 is earlier than the 1 before it: sort the trace"),
}


@pytest.mark.parametrize(("line", "complaint"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named(line: bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=rf"^t\.jsonl, line 3: .*({complaint})") as caught:
        read(GOOD + b"\n" + line)
    assert caught.value.values["line"] == 3
    assert len(str(caught.value)) < 250


def test_lines_in_front_of_a_bad_one_are_handed_out() -> None:
    requests = read_trace(io.BytesIO(GOOD + b"nonsense\n"), "t.jsonl")
    assert next(requests).prompt_tokens == 20
    with pytest.raises(UsageError, match="line 2"):
        next(requests)


@pytest.mark.parametrize("text", [b"", b"\n\n"])
def test_a_trace_holds_a_request(text: bytes) -> None:
    with pytest.raises(UsageError, match=r"t\.jsonl holds no request"):
        read(text)
