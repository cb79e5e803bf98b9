"""How times grow, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from .bench_rows import Figure, Point, Row

__all__ = ["draw", "lines"]


def lines(rows: Sequence[Row | Figure]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Least seconds over what grows, in ascending order: by axis, and by line; a peer's lines bear its name."""
    axes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if not isinstance(row, Row) or row.point is None:
            continue
        _add(axes, row.point, row.point.line, row.ours.minimum)
        if row.theirs is not None:
            _add(axes, row.point, f"{row.peer}, {row.point.line}", row.theirs.minimum)
    return {axis: {line: sorted(set(points)) for line, points in drawn.items()} for axis, drawn in axes.items()}


def draw(path: str, rows: Sequence[Row | Figure], title: str) -> None:
    """Write a PNG with a panel for each axis and a line for each side; both scales are logarithmic.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws into memory: needs no display
    from matplotlib.figure import Figure as Picture

    axes = lines(rows)
    picture = Picture(figsize=(8, 1 + 4 * len(axes)), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(title)
    for panel, (axis, drawn) in zip(picture.subplots(len(axes), squeeze=False).flat, axes.items(), strict=True):
        for line, points in drawn.items():
            panel.plot(*zip(*points, strict=True), "o-", label=line)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(axis)
        panel.set_ylabel("seconds")
        panel.grid(alpha=0.3)
        panel.legend()
    picture.savefig(path, format="png", dpi=120)


def _add(axes: dict[str, dict[str, list[tuple[float, float]]]], point: Point, line: str, seconds: float) -> None:
    axes.setdefault(point.axis, {}).setdefault(line, []).append((point.at, seconds))
