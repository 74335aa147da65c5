"""Tables for the link benchmark and the demo. Times are virtual ones (see ``link_model``) unless a column says wall."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table

from inductor_passes.operators import GROUP_KINDS

#: Largest relative difference of losses that still counts as equal.
LOSS_TOLERANCE = 1e-5
#: The same for messages that are rounded: losses of a small model, whose weights are an int8 off by 0.6% each.
NARROW_TOLERANCE = 2e-2
#: Share of bytes that padding may add.
PADDING = 0.01


def limit_ns(results: dict[str, Any]) -> float:
    """max(compute alone, communication alone), for sharded data parallelism plus the head and tail that no order
    hides.
    """
    lanes = max(results["compute_alone_ns"], results["communication_alone_ns"])
    return float(lanes + results["head_ns"] + results["tail_ns"])


def bound_ns(results: dict[str, Any]) -> float:
    """A lower bound that counts head and tail once: they are part of communication alone."""
    compute = results["compute_alone_ns"] + results["head_ns"] + results["tail_ns"]
    return float(max(compute, results["communication_alone_ns"]))


def row(results: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A contender's row, or None."""
    return next((r for r in results["rows"] if r["name"] == name), None)


def row_of(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A contender's row.

    Raises:
        KeyError: it did not run.
    """
    found = row(results, name)
    if found is None:
        raise KeyError(f"{name} is not among {', '.join(r['name'] for r in results['rows'])}")
    return found


def best_in_tree(results: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest in-tree setting, or None."""
    rows = [r for r in results["rows"] if r["family"] == "in-tree"]
    return min(rows, key=lambda r: median(r["virtual_ns"]), default=None)


def ratios(results: dict[str, Any], name: str) -> dict[str, float]:
    """A contender's median step over default Inductor's, the best in-tree setting's, the limit and the lower bound."""
    mine = row_of(results, name)
    step = median(mine["virtual_ns"])
    result = {"limit": step / limit_ns(results), "bound": step / bound_ns(results)}
    default, in_tree = row(results, "inductor"), best_in_tree(results)
    if default is not None:
        result["default"] = step / median(default["virtual_ns"])
        result["default wall"] = median(mine["wall_ns"]) / median(default["wall_ns"])
    if in_tree is not None:
        result["in-tree"] = step / median(in_tree["virtual_ns"])
    return result


def errors(results: dict[str, Any]) -> list[str]:
    """What makes a contender's row invalid: other collectives than the model needs, or other losses."""
    found = []
    reference = row_of(results, "inductor")
    for r in results["rows"]:
        if not r["steady"]:
            found.append(f"{r['title']}: the number of collectives changed between steps")
        found.extend(f"{r['title']}: {text}" for text in _bytes_errors(results, r, reference))
        if r["worst_loss_difference"] > (NARROW_TOLERANCE if r.get("narrowed") else LOSS_TOLERANCE):
            found.append(f"{r['title']}: losses differ by up to {r['worst_loss_difference']:.1e} (relative)")
    return found


def _bytes_errors(results: dict[str, Any], r: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    sent, expected = sum(r["wire_bytes"].values()), sum(reference["wire_bytes"].values())
    # Buckets pad; nothing else of ours may send more than the graph that came in.
    if r["family"] == "ours" and sent > expected * (1 + PADDING):
        return [f"sent {sent} bytes per step; default Inductor sends {expected}"]
    if not results["sharded"]:
        return []
    found = list(r["traffic"]["wrong"])
    known = r["traffic"]["known_bytes"]
    if known is not None and sent > known * (1 + PADDING):
        found.append(f"sent {sent} bytes per step, of which {known} belong to parameters and their gradients")
    return found


def notes(results: dict[str, Any]) -> list[str]:
    """Who is missing and why, and what makes the wall clock doubtful; the other columns are not concerned."""
    late = [
        f"{r['title']}: {r['violations']} real transfers came after their emulated end (a busy machine); mind its "
        "step, not its wall clock"
        for r in results["rows"]
        if r["violations"]
    ]
    late += [f"{r['title']}: its first steps, {'; '.join(r['tuned'])}" for r in results["rows"] if "tuned" in r]
    return late + [f"{name} did not run: {why}" for name, why in results["failed"].items()]


def facts(results: dict[str, Any]) -> str:
    """What the table is relative to, in one paragraph."""
    sizes = results["sizes"]
    ends = f", head {_ms(results['head_ns'])} ms, tail {_ms(results['tail_ns'])} ms" if results["sharded"] else ""
    return (
        f"{results['ranks']} ranks, {sizes['layers']} layers of width {sizes['dim']}, "
        f"{sizes['batch']} x {sizes['seq']} tokens per rank; link {results['bytes_per_s'] / 1e6:.1f} MB/s, "
        f"{results['latency_ns'] / 1e3:.0f} us per collective. Compute alone "
        f"{_ms(results['compute_alone_ns'])} ms, communication alone {_ms(results['communication_alone_ns'])} ms"
        f"{ends}: limit {_ms(limit_ns(results))} ms (lower bound {_ms(bound_ns(results))} ms)."
    )


COLUMNS = (
    "step ms",
    "spread",
    "predicted ms",
    "disturbed ms",
    "exposed ms",
    "/ default",
    "/ in-tree",
    "/ limit",
    "peak MB",
    "/ default",
    "collectives",
    "losses",
    "wall ms",
    "wall / default",
)


def lines(results: dict[str, Any]) -> list[list[str]]:
    """One line of cells per contender: its title, then ``COLUMNS``."""
    out = []
    default = row(results, "inductor")
    for r in results["rows"]:
        ratio = ratios(results, r["name"])
        out.append(
            [
                r["title"],
                _ms(median(r["virtual_ns"])),
                f"{_ms(min(r['virtual_ns']))}-{_ms(max(r['virtual_ns']))}",
                # Pages of before have neither.
                *(_ms(r[name]) if r.get(name) else "-" for name in ("predicted_ns", "disturbed_ns")),
                _ms(median(r["exposed_ns"])),
                _ratio(ratio.get("default")),
                _ratio(ratio.get("in-tree")),
                _ratio(ratio["limit"]),
                f"{r['peak_bytes'] / 1e6:.1f}",
                _ratio(r["peak_bytes"] / default["peak_bytes"] if default else None),
                " ".join(f"{_SHORT.get(kind, kind)}{count}" for kind, count in r["counts"].items()),
                "equal" if r["worst_loss_difference"] == 0 else f"{r['worst_loss_difference']:.0e}",
                _ms(median(r["wall_ns"])),
                _ratio(ratio.get("default wall")),
            ]
        )
    return out


def table(results: dict[str, Any]) -> Table:
    """One line per contender."""
    out = Table(title=f"{results['title']}, {results['rate']} link: communication / compute = {results['ratio']:g}")
    out.add_column("contender", no_wrap=True)
    for heading in COLUMNS:
        out.add_column(heading, justify="right", no_wrap=True)
    for cells in lines(results):
        out.add_row(*cells)
    for name in results["failed"]:
        out.add_row(name, "failed")
    return out


def summary(results: dict[str, Any]) -> Table:
    """The demo's table: few columns, best understood by someone who sees it for the first time."""
    limit = "limit: no order of the same collectives can be faster; fewer, larger ones can"
    out = Table(title="One training step, two ranks, emulated link", caption=limit)
    for heading in ("", "step", "waiting for the link", "peak memory", "above the limit", "step, wall clock"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for r in results["rows"]:
        out.add_row(
            r["title"],
            f"{_ms(median(r['virtual_ns']))} ms",
            f"{_ms(median(r['exposed_ns']))} ms",
            f"{r['peak_bytes'] / 1e6:.1f} MB",
            f"{100 * (ratios(results, r['name'])['limit'] - 1):.0f} %",
            f"{_ms(median(r['wall_ns']))} ms",
        )
    out.add_row("limit", f"{_ms(limit_ns(results))} ms", "", "", "", "")
    return out


#: Other operations of a group (``barrier``) are called by their names.
_SHORT = {kind.value: kind.label for kind in GROUP_KINDS}


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
