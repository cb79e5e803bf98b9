"""Schemas, expressions and grammars that answers are to follow: sound, hostile, and neither."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from npu.structured import Structure, StructureCompiler
from tests.fuzz.guard import refusals
from tests.fuzz.values import FLOATS, INTEGERS, JSON_TEXTS, TEXTS

__all__ = ["follow", "structures"]

_STEPS = 6


def follow(compiler: StructureCompiler, structure: Structure) -> None:
    """Compile a structure and follow it for a few tokens; each step may be refused."""
    with refusals():
        constraint = compiler.constraint(structure)
        answer: list[int] = []
        for step in range(_STEPS):
            tokens = np.array(answer, np.int32)
            allowed = constraint.allowed(tokens)
            token = int(allowed[step * 7919 % len(allowed)])
            if constraint.completed_by(tokens, token):
                break
            answer.append(token)


_COUNTS = st.sampled_from([0, 1, 2, 3, 60, 1000, 100_000, 2**31, 2**63, -1])
_CHOICE = st.integers(0, 99)
_WORDS = st.sampled_from(
    ["a", "b", "ab", "é", "\\d", ".", "\\s", "[a-z]", "[^a]", "\\p{L}", "\\w", "$", "^", "\\b", "\\1"]
)
_GROUPS = st.sampled_from(["({})", "(?:{})", "(?i:{})", "(?={})", "(?!{})", "(?<n>{})", "[{}]", "({}", "~({})"])
_TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "nosuch"])
_FORMATS = st.sampled_from(["date-time", "email", "uuid", "ipv6", "uri", "hostname", "nosuch"])
_POINTERS = st.sampled_from(["#", "#/$defs/a", "#/properties/a", "#/nosuch", "http://x/y", "file:///etc/passwd", "a"])


def _pattern(draw: st.DrawFn, depth: int) -> str:
    choice = draw(_CHOICE)
    if depth == 0 or choice < 25:
        return draw(_WORDS)
    inner = _pattern(draw, depth - 1)
    if choice < 45:
        return inner + _pattern(draw, depth - 1)
    if choice < 55:
        return f"{inner}|{_pattern(draw, depth - 1)}"
    if choice < 75:
        return draw(_GROUPS).replace("{}", inner)
    if choice < 85:
        return f"(?:{inner}){'*+?'[choice % 3]}"
    low, high = draw(_COUNTS), draw(_COUNTS)
    return f"(?:{inner}){{{low},{high}}}" if choice % 2 else f"(?:{inner}){{{low}}}"


def _schema(draw: st.DrawFn, depth: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(1 + draw(_CHOICE) // 40):
        key = draw(_KEYWORDS)
        schema[key] = _keyword(draw, key, depth)
    return schema


_NESTED = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "patternProperties", "dependentSchemas")
_NUMBERED = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "multipleOf")
_KEYWORDS = st.sampled_from(
    [
        *(*_NESTED, *_LISTED, *_NAMED, *_NUMBERED, *_BOUNDS),
        *("type", "type", "type", "enum", "const", "pattern", "format", "$ref", "required", "x-guidance"),
    ]
)


def _keyword(draw: st.DrawFn, key: str, depth: int) -> Any:  # noqa: PLR0911 - one for each kind
    if depth > 0 and key in _NESTED:
        return _schema(draw, depth - 1)
    if depth > 0 and key in _LISTED:
        return [_schema(draw, depth - 1) for _ in range(1 + draw(_CHOICE) % 3)]
    if depth > 0 and key in _NAMED:
        return {draw(_WORDS): _schema(draw, depth - 1)}
    if key in _NUMBERED:
        return draw(_COUNTS)
    if key in _BOUNDS:
        return draw(INTEGERS.filter(lambda number: abs(number) < 10**300) | FLOATS)
    if key == "pattern":
        return _pattern(draw, 3)
    simple = {
        "type": _TYPES,
        "format": _FORMATS,
        "$ref": _POINTERS,
        "const": TEXTS,
        "enum": st.lists(TEXTS, max_size=3),
    }
    return draw(simple.get(key, st.just({"whitespace_flexible": True})))


def _grammar(draw: st.DrawFn) -> str:
    rules = ["start", "a", "b", "A", "B"]
    return "\n".join(f"{rule}: {_production(draw, 3)}" for rule in rules[: 1 + draw(_CHOICE) % 5])


_ATOMS = st.sampled_from(
    [
        *("a", "b", "A", "B", "start", '"x"', '"ab"i', '""', "/a+/", "/(a|b){3}/", "@x", "nosuch"),
        *("<|user|>", "<[3]>", "<[99999999]>"),
        *('%json {"type": "string"}', '%regex {"substring_chars": "abc"}', '%lark { start: "x" }'),
    ]
)


def _production(draw: st.DrawFn, depth: int) -> str:
    choice = draw(_CHOICE)
    if depth == 0 or choice < 30:
        return draw(_ATOMS)
    inner = _production(draw, depth - 1)
    if choice < 50:
        return f"{inner} {_production(draw, depth - 1)}"
    if choice < 65:
        return f"({inner} | {_production(draw, depth - 1)})"
    if choice < 80:
        return f"({inner}){'*+?'[choice % 3]}"
    if choice < 95:
        return f"({inner}){{{draw(_COUNTS)},{draw(_COUNTS)}}}"
    return f"/{_pattern(draw, 2)}/"


_KINDS = st.sampled_from(["schema", "schema", "json", "regex", "regex", "grammar", "grammar", "text"])


@st.composite
def structures(draw: st.DrawFn) -> Structure:
    """A structure of any syntax."""
    kind = draw(_KINDS)
    if kind == "schema":
        written = json.dumps(_schema(draw, 3))
        return Structure("JSON schema", written)
    if kind == "json":
        return Structure("JSON schema", draw(JSON_TEXTS))
    if kind == "regex":
        return Structure("regular expression", _pattern(draw, 4))
    if kind == "grammar":
        return Structure("grammar", _grammar(draw))
    return Structure(draw(st.sampled_from(["JSON schema", "regular expression", "grammar"])), draw(TEXTS))
