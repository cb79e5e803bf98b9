"""What a replay found, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping

from .replay_measure import Measurement, Outcomes
from .replay_stats import Histogram

__all__ = ["as_json", "as_text"]

PERCENTS = (50, 95, 99)

ENDS = ("finished", "aborted", "failed", "refused")

CONTIGUOUS, UNCHUNKED = "contiguous", "unchunked"


def as_json(measured: Measurement) -> dict[str, object]:
    """All figures of a run; times in seconds, shares from 0 to 1."""
    outcomes = measured.outcomes
    return {
        **_counts(outcomes),
        "reasons": dict(measured.reasons.most_common()),
        "leaked_blocks": measured.leaked_blocks,
        "utilisation": measured.utilisation,
        "trace_utilisation": measured.trace_utilisation,
        "waste_fraction": measured.waste,
        "used_fraction": measured.used_share,
        "cached_fraction": measured.cached_share,
        "hit_rate": measured.hit_rate,
        "preemptions": measured.stats.preemptions,
        "swapped_out": measured.stats.swapped_out,
        **_percentiles("ttft", outcomes.first_token),
        **_percentiles("itl", measured.gap),
        **_percentiles("queue", measured.queue),
        "steps": measured.steps,
        "computed_tokens": measured.stats.computed_tokens,
        "simulated_s": measured.seconds,
        "idle_s": measured.idle_seconds,
        "drain_s": measured.drain_seconds,
        "phases": [{**_counts(phase), **_percentiles("ttft", phase.first_token)} for phase in measured.phases],
    }


def as_text(runs: Mapping[str, Measurement]) -> str:
    """A table with a column for each run, and what is to be said of the first one alone.

    Args:
        runs: by name; the first one is the one that was asked for, the others are for comparison.
    """
    measured = next(iter(runs.values()))
    lines = [
        f"{measured.outcomes.requests} requests in {_time(measured.seconds)}, {measured.steps} steps",
        "",
        *_table(runs),
    ]
    if len(measured.phases) > 1:
        lines += ["", *_phases(measured)]
    if measured.reasons:
        lines += ["", *(f"{count} times: {reason}" for reason, count in measured.reasons.most_common(5))]
    return "\n".join(lines)


def _table(runs: Mapping[str, Measurement]) -> list[str]:
    rows: dict[str, list[str]] = {"": list(runs)} if len(runs) > 1 else {}
    for measured in runs.values():
        for name, cell in _cells(measured).items():
            rows.setdefault(name, []).append(cell)
    return [f"{name:<34}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows.items()]


def _cells(measured: Measurement) -> dict[str, str]:
    outcomes = measured.outcomes
    return {
        **{name: str(getattr(outcomes, name)) for name in ENDS},
        "tokens over room in their blocks": _share(measured.utilisation),
        "  of the trace in whole blocks": _share(measured.trace_utilisation),
        "held but empty": _share(measured.waste),
        "pool used, on average": _share(measured.used_share),
        "pool cached, on average": _share(measured.cached_share),
        "prompt tokens that were cached": _share(measured.hit_rate),
        "preemptions": str(measured.stats.preemptions),
        "  of them to the swap space": str(measured.stats.swapped_out),
        **_times("time to first token", outcomes.first_token),
        **_times("between tokens", measured.gap),
        **_times("in the queue", measured.queue),
        "idle": _share(measured.idle_seconds / measured.seconds if measured.seconds else 0.0),
        "from last arrival to end": _time(measured.drain_seconds),
        "blocks leaked": str(measured.leaked_blocks),
    }


def _phases(measured: Measurement) -> list[str]:
    head = f"{'phase':<8}" + "".join(f"{name:>10}" for name in ("requests", *ENDS, "ttft p50", "ttft p95"))
    return [head] + [
        f"{number:<8}"
        + f"{phase.requests:>10}"
        + "".join(f"{getattr(phase, name):>10}" for name in ENDS)
        + "".join(f"{_time(phase.first_token.percentile(percent)):>10}" for percent in (50, 95))
        for number, phase in enumerate(measured.phases, start=1)
    ]


def _counts(outcomes: Outcomes) -> dict[str, object]:
    return {name: getattr(outcomes, name) for name in ("requests", *ENDS)}


def _percentiles(name: str, histogram: Histogram) -> dict[str, object]:
    found = {f"{name}_p{percent}_s": histogram.percentile(percent) for percent in PERCENTS}
    return {**found, f"{name}_max_s": histogram.largest}


def _times(name: str, histogram: Histogram) -> dict[str, str]:
    return {f"{name}, p{percent}": _time(histogram.percentile(percent)) for percent in PERCENTS}


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time(seconds: float) -> str:
    """Three digits, in the unit that people would use."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
