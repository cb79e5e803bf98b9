"""How long sessions and documents waited, against what they may: as numbers, text and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import bench_rows
from .bench_rows import Timing
from .latency_run import Setting, Waits

__all__ = ["LONGEST_GAP", "LONGEST_WAIT", "MORE_THAN_TILE", "Row", "as_text", "draw"]

LONGEST_GAP = 0.35
"""Of the longest gap without chunks, what the longest one may take."""

LONGEST_WAIT = 2.0
"""Times a document's wait for its first token without chunks, what it may wait."""

MORE_THAN_TILE = 1.2
"""Times a step with the smallest tile, what 95 % of the gaps may take if the budget is less."""


@dataclass(frozen=True)
class Row:
    """What was measured under one setting.

    Attributes:
        setting: that it was measured under.
        waits: what was measured.
        unchunked: the same without chunks; None: this is it.
    """

    setting: Setting
    waits: Waits
    unchunked: Waits | None = None

    @property
    def tile_seconds(self) -> float:
        """Median of a step in which all sessions decode and a document has the smallest tile."""
        return float(np.median(self.waits.tile))

    @property
    def most_gap(self) -> float:
        """Seconds that 95 % of the gaps may take."""
        return max(self.setting.step_seconds or 0.0, MORE_THAN_TILE * self.tile_seconds)

    @property
    def gap_ratio(self) -> float:
        """The longest gap over that without chunks."""
        return max(self.waits.gaps) / max((self.unchunked or self.waits).gaps)

    @property
    def wait_ratio(self) -> float:
        """A document's wait for its first token over that without chunks: medians."""
        return float(np.median(self.waits.first_token) / np.median((self.unchunked or self.waits).first_token))

    @property
    def core_share(self) -> float:
        """Share of the time in which the process had a core; above 1 if several threads had."""
        return self.waits.computed / self.waits.elapsed

    @property
    def limits(self) -> list[bench_rows.Row]:
        """What is asked of a budget, as all benchmarks show it: its longest gap, its document's wait, most of its gaps.

        Nothing is asked where there is none.
        """
        if self.setting.step_seconds is None or self.unchunked is None:
            return []
        kept = float(np.quantile(self.waits.gaps, 0.95))
        return [
            _limit(f"longest gap, {self.setting.name}", max(self.waits.gaps), max(self.unchunked.gaps), LONGEST_GAP),
            _limit(
                f"document's first token, {self.setting.name}",
                float(np.median(self.waits.first_token)),
                float(np.median(self.unchunked.first_token)),
                LONGEST_WAIT,
            ),
            _limit(f"95 % of the gaps, {self.setting.name}", kept, self.most_gap, 1.0, "budget"),
        ]

    @property
    def holds(self) -> bool:
        """Whether all that is asked is kept."""
        return not any(limit.misses_target for limit in self.limits)

    def as_json(self) -> dict[str, object]:
        """All figures of the setting; times in seconds."""
        p50, p95, longest = (float(np.quantile(self.waits.gaps, share)) for share in (0.5, 0.95, 1))
        return {
            "setting": self.setting.name,
            "budget_s": self.setting.step_seconds,
            "chunk": self.setting.chunk,
            "decode_s": float(np.median(self.waits.decode)),
            "tile_s": self.tile_seconds,
            "gap_p50_s": p50,
            "gap_p95_s": p95,
            "gap_p95_limit_s": self.most_gap,
            "gap_max_s": longest,
            "gap_max_ratio": self.gap_ratio,
            "ttft_s": float(np.median(self.waits.first_token)),
            "ttft_ratio": self.wait_ratio,
            "core_fraction": self.core_share,
            "holds": self.holds,
        }


def _limit(case: str, ours: float, theirs: float, most: float, peer: str = "unchunked") -> bench_rows.Row:
    goal = case.partition(",")[0]
    return bench_rows.Row(case, peer, Timing(ours, ours), Timing(theirs, theirs), most, goal=goal)


HEADINGS = ("setting", "decode", "+ tile", "gap p50", "p95", "limit", "longest", "ratio", "document", "ratio", "core")


def as_text(rows: Sequence[Row]) -> str:
    """A table; times in milliseconds, the document's in seconds."""
    lines = [f"{HEADINGS[0]:<14}" + "".join(f"{heading:>10}" for heading in HEADINGS[1:])]
    for row in rows:
        times = (
            np.median(row.waits.decode),
            row.tile_seconds,
            *np.quantile(row.waits.gaps, (0.5, 0.95)),
            row.most_gap,
            max(row.waits.gaps),
        )
        cells = [f"{1000 * seconds:.1f} ms" for seconds in times]
        cells.append(f"{row.gap_ratio:.3f}")
        cells.append(f"{np.median(row.waits.first_token):.2f} s")
        cells.append(f"{row.wait_ratio:.2f}")
        cells.append(f"{100 * row.core_share:.0f} %")
        missed = "" if row.holds else "  missed"
        lines.append(f"{row.setting.name:<14}" + "".join(f"{cell:>10}" for cell in cells) + missed)
    return "\n".join(lines)


def draw(path: str, rows: Sequence[Row]) -> None:
    """Write a PNG: the gaps, and a document's wait, over the budget.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws into memory: needs no display
    from matplotlib.figure import Figure

    swept = sorted((row for row in rows if row.setting.step_seconds), key=lambda row: row.setting.step_seconds or 0)
    budgets = [1000 * (row.setting.step_seconds or 0) for row in swept]
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True)
    for label, share in (("longest", 1.0), ("p95", 0.95), ("p50", 0.5)):
        above.plot(budgets, [1000 * np.quantile(row.waits.gaps, share) for row in swept], "o-", label=label)
    above.plot(budgets, [1000 * row.most_gap for row in swept], "k--", label="limit of p95")
    above.set_ylabel("gap between tokens, ms")
    above.legend()
    below.plot(budgets, [row.wait_ratio for row in swept], "o-")
    below.axhline(LONGEST_WAIT, color="k", linestyle="--")
    below.set_ylabel("document's first token, times unchunked")
    below.set_xlabel("budget of a step, ms")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)
