"""What a row says: which of two is compared, by what, and on which side of its target that is."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from tools.bench_chart import lines
from tools.bench_kind import Measured
from tools.bench_report import SUMMARY, report, summarise
from tools.bench_rows import Better, Figure, Point, Row, Timing, take_turns, timed
from tools.bench_text import as_text, format_seconds

OURS, THEIRS = Timing(1e-6, 2e-6), Timing(4e-6, 5e-6)


@pytest.mark.parametrize(
    ("better", "by", "ratio"),
    [("lower", "minimum", 0.25), ("lower", "median", 0.4), ("higher", "minimum", 4.0), ("higher", "median", 2.5)],
)
def test_a_ratio_is_a_cost_or_a_speed(better: Any, by: Any, ratio: float) -> None:
    assert Row("work", "peer", OURS, THEIRS, better=better, by=by).ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("better", "target", "missed"),
    [
        ("lower", 0.49, True),
        ("lower", 0.5, False),
        ("lower", None, False),
        ("higher", 2.1, True),
        ("higher", 2.0, False),
        ("higher", None, False),
    ],
)
def test_a_target_is_missed_on_its_wrong_side(better: Better, target: float | None, *, missed: bool) -> None:
    """Ours takes half of the peer's time: half its cost, twice its speed."""
    row = Row("work", "peer", Timing(1.0, 9.0), Timing(2.0, 2.0), target, better=better)
    assert row.misses_target == missed
    assert Figure("work", "peer", row.ratio or 0, "x", target, better=better).misses_target == missed


def test_without_a_peer_nothing_is_missed() -> None:
    row = Row("work", "peer", OURS, None, 0.1)
    assert (row.ratio, row.misses_target) == (None, False)


def test_a_row_is_an_object() -> None:
    assert Row("a step", "peer", OURS, THEIRS, 0.2, 0.1).as_json() == {
        "case": "a step",
        "peer": "peer",
        "ours_s": 1e-6,
        "peer_s": 4e-6,
        "ours_median_s": 2e-6,
        "peer_median_s": 5e-6,
        "ratio": 0.25,
        "target": 0.2,
        "stretch": 0.1,
        "better": "lower",
        "by": "minimum",
        "unit": "s",
        "verdict": "missed",
    }
    figure = Figure("KL, int8", "fp16", 0.001, "nats", 0.002).as_json()
    assert (figure["ours_s"], figure["peer_s"], figure["ratio"], figure["unit"]) == (None, None, 0.001, "nats")


def test_a_row_is_a_line() -> None:
    heading, *table = as_text(
        [
            Row("a step", "peer", OURS, THEIRS, 0.2),
            Row("other", "peer", OURS, None, 0.2),
            Row(
                "memory", "peer", Timing(1 << 20, 1 << 21), Timing(1 << 22, 1 << 22), 0.2, better="higher", unit="bytes"
            ),
            Figure("KL, int8", "fp16", 0.001, "nats", 0.002),
        ]
    )
    assert heading.split() == ["case", "ours", "(median)", "peer", "its", "(median)", "ratio", "target"]
    assert [" ".join(line.split()) for line in table] == [
        "a step 1 us (2 us) peer 4 us (5 us) 0.25 <= 0.2 missed",
        "other 1 us (2 us) peer missing <= 0.2",
        "memory 1.0 MiB (2.0 MiB) peer 4.0 MiB (4.0 MiB) 4 >= 0.2",
        "KL, int8 0.001 nats fp16 0.001 <= 0.002",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3e-9, "3 ns"), (9.996e-7, "1 us"), (1.234e-5, "12.3 us"), (0.25, "250 ms"), (0.9996, "1 s"), (75.0, "75 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_all_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []

    def work(name: str, seconds: Any) -> Any:
        def once() -> float:
            order.append(name)
            return float(next(seconds))

        return once

    first, second = take_turns([work("a", cycle([7, 1, 2])), work("b", iter([9.0, 5.0, 6.0, 7.0]))], times=3, warm_up=1)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert (first, second) == (Timing(1, 2), Timing(5, 6))  # of 1, 2, 7 and 5, 6, 7: what is warmed up by is left out


def test_a_call_is_work_and_takes_time() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1))() > 0
    assert calls == [1]


def test_a_line_of_a_chart_rises_with_what_grows_and_a_peer_has_its_own() -> None:
    rows = [
        Row("long", "torch", Timing(8, 9), Timing(80, 90), point=Point("context", 512, "fp16")),
        Row("short", "torch", Timing(1, 2), None, point=Point("context", 128, "fp16")),
        Row("many", "torch", Timing(3, 4), None, point=Point("sequences", 8, "fp16")),
        Row("elsewhere", "torch", Timing(5, 6), None),
    ]
    assert lines(rows) == {
        "context": {"fp16": [(128, 1), (512, 8)], "torch, fp16": [(512, 80)]},
        "sequences": {"fp16": [(8, 3)]},
    }


def test_a_goal_is_summed_up_from_the_worst_row_to_the_best() -> None:
    rows = [
        Row("8 tokens", "memcpy", Timing(2, 2), Timing(1, 1), 0.4, 0.9, "higher", goal="gather"),
        Row("9 tokens", "memcpy", Timing(5, 5), Timing(4, 4), 0.4, 0.9, "higher", goal="gather"),
        Row("7 tokens", "memcpy", Timing(5, 5), Timing(4, 4), None, goal="gather"),
        Row("append", "memcpy", Timing(3, 3), Timing(1, 1), 2.5),
        Row("decode", "torch", Timing(3, 3), None, 3.0, better="higher"),
    ]
    expected = [
        "| gather | gather | memcpy | 0.5 to 0.8 | >= 0.4 | >= 0.9 | met |",
        "| gather | append | memcpy | 3 | <= 2.5 |  | missed |",
        "| gather | decode | torch |  | >= 3 |  | not measured |",
    ]
    assert summarise({"gather": Measured(rows)}) == expected
    text = report({"gather": Measured(rows), "e2e": Measured([], ["llama-cpp-python is missing"])}, "a machine")
    assert "\n".join([*SUMMARY, *expected]) in text
    assert "| 7 tokens | 5 s | 5 s | memcpy | 4 s | 4 s | 1.25 |  |" in text
    assert text.endswith("## e2e\n\n- llama-cpp-python is missing\n")


def test_of_costs_the_lowest_is_the_best() -> None:
    rows = [Figure("a", "fp16", 0.1, "%", 0.2, goal="KL"), Figure("b", "fp16", 0.3, "%", 0.2, goal="KL")]
    assert summarise({"codec": Measured(rows)}) == ["| codec | KL | fp16 | 0.3 to 0.1 | <= 0.2 |  | missed |"]


def test_what_cannot_be_asked_is_told_and_not_missed() -> None:
    excused = Row("work", "peer", THEIRS, OURS, 1.5, better="higher", excuse="no free core: 0.97x")
    assert excused.verdict == excused.as_json()["verdict"] == "no free core: 0.97x"
    assert not excused.misses_target
    assert as_text([excused])[1].endswith(">= 1.5 no free core: 0.97x")
    assert summarise({"kind": Measured([excused])})[0].endswith("| >= 1.5 |  | no free core: 0.97x |")
    slow, fast = (Row("work", "peer", ours, OURS, 1.5, better="higher") for ours in (THEIRS, Timing(1e-7, 1e-7)))
    assert summarise({"kind": Measured([fast, excused])})[0].endswith("| no free core: 0.97x |")
    assert summarise({"kind": Measured([excused, slow])})[0].endswith("| missed |")
    assert fast.verdict == "met"
    low, high = (
        Row("work", "peer", ours, OURS, 0.5, excuse=why) for ours, why in ((Timing(1e-7, 1e-7), None), (OURS, "no"))
    )
    assert summarise({"kind": Measured([low, high])})[0].endswith("| 1 to 0.1 | <= 0.5 |  | no |")
    assert Row("work", "peer", OURS, THEIRS).verdict is None
