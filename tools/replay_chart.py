"""A replay as a picture: the pool, the queue and the time to the first token, over the time of the trace."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hostcache.errors import MissingExtra, UsageError

from .replay_measure import Measurement
from .replay_stats import Trend

__all__ = ["draw_chart", "require_charts"]

PANELS: tuple[tuple[str, str, Callable[[Measurement], Trend]], ...] = (
    ("share of the pool in use", "linear", lambda measured: measured.used),
    ("requests that wait", "linear", lambda measured: measured.waiting),
    ("time to first token, s", "log", lambda measured: measured.first_token),
)


def require_charts(path: str) -> None:
    """Refuse what cannot be drawn: better before minutes of measuring than behind them.

    Args:
        path: of the file to be.

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: the file has no folder, or is one.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtra("a chart needs matplotlib: pip install 'rockpage[chart]'", extra="chart") from error
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise UsageError(f"no chart can be written to {path}: name a file in a folder that is there", path=path)


def draw_chart(path: str, runs: Mapping[str, Measurement], title: str) -> None:
    """Write a PNG with a panel for each quantity and a line for each run.

    Args:
        path: of the file.
        runs: by name.
        title: above the panels.

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: the file has no folder, or is one.
        OSError: the file cannot be written.
    """
    require_charts(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws into memory: needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    longest = max(measured.seconds for measured in runs.values())
    unit, size = ("days", 86400.0) if longest > 2 * 86400 else ("hours", 3600.0)
    for axes, (label, scale, trend_of) in zip(figure.subplots(len(PANELS), sharex=True), PANELS, strict=True):
        for depth, (name, measured) in enumerate(runs.items()):
            means = trend_of(measured).means()
            times, values = [start / size for start, _ in means], [mean for _, mean in means]
            axes.plot(times, values, label=name, linewidth=1, zorder=-depth)  # the first one on top
        axes.set_ylabel(label)
        axes.set_yscale(scale)
        axes.grid(alpha=0.3)
    axes.set_xlabel(f"{unit} since the trace began")
    if len(runs) > 1:
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
