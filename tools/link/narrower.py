"""What narrower messages do, in one table: steps, bytes and errors against default Inductor and ours as it is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tools.link.report import row
from tools.link.summary import REFERENCE
from tools.shared.record import markdown_table

HEADER = (
    *("model", "link", "contender", "step ms", "/ default", "/ ours", "/ predicted"),
    *("MB sent", "/ default", "losses", "error, at most", "measured"),
)
ABOUT = (
    "`MB sent` is what a rank sends per step; `losses` the largest relative difference from default Inductor's over "
    "the first steps. `error, at most` is the bound on one rounding, relative to the largest element of its block; "
    "`measured` the largest that `compress_measure` found on any rank, in two steps of a model of its own that is not "
    "timed."
)


def section(everything: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown; none where no contender narrows."""
    lines = [_cells(results, r) for results in everything for r in results["rows"] if r.get("narrowed")]
    if not lines:
        return []
    return ["## Narrower messages", "", ABOUT, "", *markdown_table(HEADER, lines), ""]


def _cells(results: dict[str, Any], r: dict[str, Any]) -> list[str]:
    step, sent = median(r["virtual_ns"]), sum(r["wire_bytes"].values())
    default, ours = row(results, REFERENCE), row(results, "ours")
    bound, measured = r.get("error_bound"), r.get("measured_error")
    return [
        results["title"],
        results["rate"],
        r["title"],
        f"{step / 1e6:.1f}",
        _over(step, median(default["virtual_ns"]) if default else None),
        _over(step, median(ours["virtual_ns"]) if ours else None),
        _over(step, r["predicted_ns"]),
        f"{sent / 1e6:.2f}",
        _over(sent, sum(default["wire_bytes"].values()) if default else None),
        f"{r['worst_loss_difference']:.0e}",
        "-" if not bound else f"{bound:g}",
        "-" if measured is None else f"{measured:.2g}",
    ]


def _over(value: float, other: float | None) -> str:
    return f"{value / other:.3f}" if other else "-"
