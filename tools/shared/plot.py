"""Charts for benchmark pages: plain, readable without colour, the same bytes for the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "inductor_passes",
    "svg.fonttype": "none",
}
_COLOURS = ("#9a9a9a", "#d08a3a", "#2f6db3", "#1f3f66", "#6aa84f", "#b04a5a", "#7a5fa8", "#444444")
_MARKERS = "osD^vPX*"


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def bars(
    path: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    ylabel: str,
    *,
    line: float | None = None,
) -> None:
    """Grouped bars: ``series[name][i]`` belongs to ``groups[i]``; NaN leaves a gap. ``line`` is a reference height."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(max(6.0, 0.32 * len(groups) * (len(series) + 1)), 3.6))
        width = 0.8 / max(1, len(series))
        for k, (name, values) in enumerate(series.items()):
            places = [i + (k - (len(series) - 1) / 2) * width for i in range(len(groups))]
            axes.bar(places, values, width * 0.92, label=name, color=_COLOURS[k % len(_COLOURS)])
        if line is not None:
            axes.axhline(line, color="black", linewidth=0.8, linestyle=":")
        turned: dict[str, object] = {"rotation": 30, "ha": "right"} if len(groups) > 4 else {}
        axes.set_xticks(range(len(groups)), groups, **turned)
        axes.set_ylabel(ylabel)
        axes.grid(axis="y", linewidth=0.4)
        axes.legend(frameon=False, ncols=min(4, len(series)), loc="lower left", bbox_to_anchor=(0, 1))
        _save(figure, path)


def curves(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = True,
    log_y: bool = False,
) -> None:
    """Lines through points, ``panels[title][series]`` a list of (x, y), panels side by side with one legend."""
    with plt.rc_context(_STYLE):
        columns = min(4, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure, grid = plt.subplots(rows, columns, figsize=(3.1 * columns, 2.7 * rows), squeeze=False)
        for axes, (title, series) in zip(grid.flat, panels.items()):
            for k, (name, points) in enumerate(series.items()):
                xs, ys = [x for x, _ in points], [y for _, y in points]
                axes.plot(xs, ys, label=name, color=_COLOURS[k % len(_COLOURS)], marker=_MARKERS[k % 8], markersize=3.5)
            axes.set_title(title, fontsize=9)
            if log_x:
                axes.set_xscale("log", base=2)
            if log_y:
                axes.set_yscale("log")
            axes.grid(linewidth=0.4)
            axes.set_xlabel(xlabel)
        for axes in grid.flat[len(panels) :]:
            axes.axis("off")
        grid[0][0].set_ylabel(ylabel)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0.05, 1.0))
        figure.tight_layout()
        _save(figure, path)
