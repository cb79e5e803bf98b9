"""Values that have broken readers of files and doors of servers before."""

from __future__ import annotations

import json
import math
import sys

from hypothesis import strategies as st

__all__ = ["FLOATS", "INTEGERS", "JSON_TEXTS", "TEXTS"]

_ENDS = [(1 << bits) + near for bits in (0, 1, 7, 8, 15, 16, 20, 31, 32, 53, 63, 64) for near in (-1, 0, 1)]

INTEGERS = st.integers(-300, 300) | st.sampled_from([*_ENDS, *(-end for end in _ENDS), 10**400])
"""Small ones, the ends of machine integers and their neighbours, and one that no float holds."""

FLOATS = st.floats(-4, 4) | st.sampled_from(
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, sys.float_info.max, -sys.float_info.max, 3.5e38, 1e-46, 65520.0]
)
"""Ordinary ones, what is no number, and what float64, float32 and float16 just hold or do not."""

TEXTS = st.text(max_size=6) | st.sampled_from(
    [
        *("", " ", "\x00", "a\x00b", "\x1b[2J", "\r\n", "../x", "/", ".", "..", "a" * 5000),
        *("\ud800", "\udcff", "\U0010ffff", "\u2581", "<0x0A>", "<0xZZ>", "\u0345" * 40, "\ufdfa" * 40),
    ]
)
"""Texts of any characters; some that end strings, escape, lead elsewhere, are no Unicode, or are long."""

_PLAIN_JSON = ("null", "true", "0", "-1", "0.5", '""', '"a"', "[]", "[1]", '["a"]', "[null]", "{}", '{"a": {}}', "[{}]")
_HOSTILE_JSON = (
    *("NaN", "-Infinity", "1e999", "1e308", "1e-400", "2147483648", "18446744073709551616", "9" * 400, "9" * 5000),
    *('"\\ud800"', '["\\udc00"]', '{"\\ud83d": 1}', '"\\u0000"', '{"a": 1, "a": 2}', "1,", "[1,]", "'a'", ""),
    *("[" * 60 + "]" * 60, "[" * 970 + "]" * 970, "[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000),
)

JSON_TEXTS = st.one_of(
    st.sampled_from(_PLAIN_JSON),
    st.sampled_from(_HOSTILE_JSON),
    st.one_of(INTEGERS.map(str), FLOATS.map(json.dumps), TEXTS.map(json.dumps)),
)
"""What stands where JSON wants a value: of every type, of enormous size or depth, or no JSON at all."""
