"""docs/invariants.md: each invariant names tests that exist, or says why it cannot be broken."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- \*\*(.*?)\*\*(.*?)(?=^- |^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
"""Each invariant, and what is said about it."""

NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_each_invariant_has_a_source_and_a_test_or_a_reason() -> None:
    assert len(ENTRIES) > 30
    for invariant, rest in ENTRIES:
        assert re.match(r"\s+\([^)]*#\d+[^)]*\)", rest), f"no public report is named for: {invariant}"
        assert "::test_" in rest or "Cannot occur:" in rest, f"neither a test nor a reason is given for: {invariant}"


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_each_test_that_is_named_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for other, name in NAMED if other == file} <= functions


def test_whatever_looks_like_a_test_was_read_as_one() -> None:
    assert TEXT.count("::") == len(NAMED)
