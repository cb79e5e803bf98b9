"""The README quotes the first table of `rockpage bench --all --report` as it was written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.bench import KINDS
from tools.bench_gather_run import APPEND_MUST, APPEND_STRETCH, MUST
from tools.bench_report import SUMMARY

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
BOUND = re.compile(rf"([<>]=) ({NUMBER})")


def quoted() -> list[list[str]]:
    """The cells of each row."""
    _, found, behind = README.partition("\n".join(SUMMARY) + "\n")
    assert found
    table = behind.partition("\n\n")[0].splitlines()
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table]


@pytest.mark.parametrize("row", quoted(), ids=lambda row: f"{row[0]}: {row[1]}")
def test_a_row_is_one_that_the_report_writes_and_its_verdict_follows(row: list[str]) -> None:
    kind, what, peer, ratios, target, stretch, verdict = row
    assert kind in {kind.name for kind in KINDS}
    assert what
    assert peer
    limit = BOUND.fullmatch(target)
    assert limit is not None
    assert stretch == "" or BOUND.fullmatch(stretch)
    assert re.fullmatch(rf"(?:{NUMBER}(?: to {NUMBER})?)?", ratios)
    worst = ratios.split(" to ")[0]
    if not worst:
        assert verdict == "not measured"
        return
    if float(worst) == float(limit[2]):  # as rounded: either is right
        assert verdict in ("met", "missed")
        return
    kept = (float(worst) < float(limit[2])) == (limit[1] == "<=")
    if not kept and what.startswith("2 threads"):
        assert verdict == "missed" or verdict.startswith("no free core")
        return
    assert verdict == ("met" if kept else "missed")


def test_what_staging_must_reach_is_quoted() -> None:
    found = {row[1]: tuple(row[4:6]) for row in quoted() if row[0] == "gather"}
    expected = {f"gather, random blocks, head_dim {head_dim}": limits for head_dim, limits in MUST.items()}
    assert found == {
        **{goal: (f">= {must:g}", f">= {stretch:g}") for goal, (must, stretch) in expected.items()},
        **{
            f"append to a staged copy, {sequences}": (f"<= {APPEND_MUST:g}", f"<= {APPEND_STRETCH:g}")
            for sequences in ("1 sequence", "8 sequences")
        },
    }
