"""Chat templates that nobody means well with.

They are drawn from a grammar of Jinja with the words that attacks are made of, or they are known attacks and templates
of real models with a few words exchanged.
"""

from __future__ import annotations

import re

from hypothesis import strategies as st

from tests.fuzz import jinja_words as words
from tests.npu.chat_families import FAMILIES
from tests.npu.hostile_templates import ESCAPES, GROWS, LOOPS, SLOW

__all__ = ["jinja_sources"]

_KNOWN = st.sampled_from(
    [re.findall(r"\w+|\s+|.", text) for text in (*ESCAPES, *LOOPS, *GROWS, *SLOW, *(f.template for f in FAMILIES))]
)
_NAME, _LITERAL, _ATTRIBUTE = map(st.sampled_from, (words.NAMES, words.LITERALS, words.ATTRIBUTES))
_FILTER, _TEST, _OPERATOR = map(st.sampled_from, (words.FILTERS, words.TESTS, words.OPERATORS))
_GROWN, _STATEMENT = map(st.sampled_from, (words.GROWTH, words.STATEMENTS))
_MARK = st.sampled_from(["(", ")", "|", ".", "{{", "%}", "'", ""])
_WORD = st.one_of(_NAME, _LITERAL, _ATTRIBUTE, _FILTER, _OPERATOR, _MARK)
_PERCENT, _FEW, _PLACE, _DEPTH = st.integers(0, 99), st.integers(0, 2), st.integers(0, 9999), st.integers(1, 3000)


@st.composite
def jinja_sources(draw: st.DrawFn) -> str:
    """A template's text: a known one with up to two words exchanged, or up to three statements."""
    percent = draw(_PERCENT)
    if percent < 40:
        known = list(draw(_KNOWN))
        for _ in range(draw(_FEW)):
            known[draw(_PLACE) % len(known)] = draw(_WORD)
        return "".join(known)
    source = "".join(_statement(draw, 2) for _ in range(1 + draw(_FEW)))
    if percent == 98:
        depth = draw(_DEPTH)
        return "{% if 1 %}" * depth + source + "{% endif %}" * depth
    if percent == 99:
        depth = draw(_DEPTH)
        return source * (depth % 50) + "{{ " + "(" * depth + "x" + ")" * depth + " }}"
    return source


def _statement(draw: st.DrawFn, depth: int) -> str:
    if depth == 0 or draw(_PERCENT) < 40:
        return "{{ " + _expression(draw, 3) + " }}"
    value, body, grown = _expression(draw, 2), _statement(draw, depth - 1), draw(_GROWN).format("ns.x")
    return draw(_STATEMENT).replace("VALUE", value).replace("BODY", body).replace("GROWN", grown)


def _expression(draw: st.DrawFn, depth: int) -> str:  # noqa: PLR0911 - one for each production
    percent = draw(_PERCENT)
    if depth == 0 or percent < 30:
        return draw(_NAME) if percent % 2 else draw(_LITERAL)
    value = _expression(draw, depth - 1)
    if percent < 70:
        call = f"({_arguments(draw, depth - 1)})" if percent % 2 else ""
        return f"({value}).{draw(_ATTRIBUTE)}{call}" if percent < 50 else f"({value})|{draw(_FILTER)}{call}"
    if percent < 75:
        return f"({value})[{_expression(draw, depth - 1)}]"
    if percent < 78:
        return f"({value})[{draw(_LITERAL)}:{draw(_LITERAL)}:{draw(_LITERAL)}]"
    if percent < 82:
        return f"({value})({_arguments(draw, depth - 1)})"
    if percent < 85:
        return f"({value}) is {draw(_TEST)}"
    if percent < 87:
        return f"({value}) if {_expression(draw, depth - 1)} else {draw(_NAME)}"
    if percent < 90:
        return f"[{value}, {_expression(draw, depth - 1)}]"
    return f"({value}) {draw(_OPERATOR)} ({_expression(draw, depth - 1)})"


def _arguments(draw: st.DrawFn, depth: int) -> str:
    return ", ".join(
        f"{draw(_ATTRIBUTE)}={_expression(draw, depth)}" if draw(_PERCENT) < 5 else _expression(draw, depth)
        for _ in range(draw(_FEW))
    )
