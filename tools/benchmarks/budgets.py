"""Step over peak memory: ours with one budget each against every combination of today's settings, interleaved.

Real ranks on the emulated link, as ``tools/bench link``. Links, cost profiles and what our plans say are kept in a
folder: a second run with the same folder finds its code in Inductor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from tools.benchmarks.link import Out, Timeout, run_job
from tools.link.lab import RATES
from tools.link.report import errors, facts
from tools.link.sweep import BUDGETS, EVERY, SWEEP
from tools.link.worker import REFERENCE
from tools.shared.record import RESULTS, geometric_mean, markdown_table, write
from tools.shared.record import chosen as known_ones

#: Model -> fields of ``LlamaConfig``: most of what it needs is activations, or parameters and their gradients.
MODELS: dict[str, dict[str, int]] = {
    "activations": {"layers": 3, "batch": 8},
    "parameters": {"layers": 3, "batch": 1, "dim": 512, "hidden": 1408, "heads": 8, "kv_heads": 8},
    # Seconds, to see that everything works.
    "tiny": {"layers": 2, "batch": 2, "dim": 64, "hidden": 128, "seq": 64},
}
LINKS = ("compute-bound", "balanced", "bandwidth-bound")
#: Caps as shares of default Inductor's peak.
CAPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Heads of the tables that :func:`at_each_peak` and :func:`at_caps` fill.
AT_PEAKS = (
    *("ours", "peak MB", "fastest of ours there", "ms"),
    *("fastest of the sweep there", "ms", "sweep / ours", "fastest without ours", "ms", "without / ours"),
)
AT_CAPS = ("cap / default's peak", "fastest of ours", "ms", "fastest of the sweep", "ms", "sweep / ours")


@dataclass(frozen=True)
class Measured:
    """One contender's median step in ns and its peak in bytes, beside what its plan said (0: nothing)."""

    name: str
    title: str
    ours: bool
    today: bool
    step_ns: float
    peak_bytes: int
    predicted_ns: int
    predicted_peak_bytes: int
    equal: bool


def measured(results: dict[str, Any]) -> list[Measured]:
    """All contenders of one model on one link, by peak."""
    found = [
        Measured(
            name=r["name"],
            title=EVERY[r["name"]].title,
            ours=r["name"] in BUDGETS,
            today=r["family"] != "ours",
            step_ns=median(r["virtual_ns"]),
            peak_bytes=r["peak_bytes"],
            predicted_ns=r["predicted_ns"],
            predicted_peak_bytes=r.get("predicted_peak_bytes", 0),
            equal=r["worst_loss_difference"] == 0,
        )
        for r in results["rows"]
    ]
    return sorted(found, key=lambda m: (m.peak_bytes, m.step_ns))


def fastest(ones: Sequence[Measured], cap_bytes: float) -> Measured | None:
    """The fastest of those whose peak is at most ``cap_bytes``; None where there is none."""
    return min((m for m in ones if m.peak_bytes <= cap_bytes), key=lambda m: m.step_ns, default=None)


def points(everyone: Sequence[Measured]) -> list[list[str]]:
    """A line per contender."""
    default = next(m for m in everyone if m.name == REFERENCE)
    lines = []
    for m in everyone:
        off, peak = "-", "-"
        if m.predicted_peak_bytes:
            peak = _mb(m.predicted_peak_bytes)
            off = f"{(m.predicted_peak_bytes / m.peak_bytes - 1) * 100:+.1f}%"
        lines.append(
            [
                m.title,
                m.name,
                _ms(m.step_ns),
                _ms(m.predicted_ns) if m.predicted_ns else "-",
                _mb(m.peak_bytes),
                f"{m.peak_bytes / default.peak_bytes:.2f}",
                peak,
                off,
                "equal" if m.equal else "differ",
            ]
        )
    return lines


def at_each_peak(everyone: Sequence[Measured]) -> tuple[list[list[str]], list[float], list[float]]:
    """For each peak of ours: ours and the fastest of the sweep, of today's alone, at or below it.

    Returns:
        Lines, and the ratios (theirs over ours) against the whole sweep and against what does not use ours.
    """
    ours, sweep = [m for m in everyone if m.ours], [m for m in everyone if not m.ours]
    lines: list[list[str]] = []
    whole: list[float] = []
    today: list[float] = []
    for m in ours:
        # At a peak, what needs less is allowed to ours, too.
        mine = fastest(ours, m.peak_bytes)
        assert mine is not None
        cells = [m.title, _mb(m.peak_bytes), mine.title, _ms(mine.step_ns)]
        for ones, ratios in ((sweep, whole), ([s for s in sweep if s.today], today)):
            best = fastest(ones, m.peak_bytes)
            if best is None:
                cells += ["nobody", "-", "-"]
            else:
                ratios.append(best.step_ns / mine.step_ns)
                cells += [best.title, _ms(best.step_ns), f"{ratios[-1]:.3f}"]
        lines.append(cells)
    return lines, whole, today


def at_caps(everyone: Sequence[Measured]) -> list[list[str]]:
    """The fastest of ours and of the sweep at shares of default Inductor's peak."""
    default = next(m for m in everyone if m.name == REFERENCE)
    lines = []
    for cap in CAPS:
        mine = fastest([m for m in everyone if m.ours], cap * default.peak_bytes)
        best = fastest([m for m in everyone if not m.ours], cap * default.peak_bytes)
        ratio = f"{best.step_ns / mine.step_ns:.3f}" if mine and best else "-"
        cells = [text for m in (mine, best) for text in ((m.title, _ms(m.step_ns)) if m else ("nobody", "-"))]
        lines.append([f"{cap:g}", *cells, ratio])
    return lines


def section(results: dict[str, Any]) -> list[str]:
    """Lines of Markdown about one model on one link."""
    everyone = measured(results)
    pairs, whole, today = at_each_peak(everyone)
    reach = {who: [m for m in everyone if m.ours is who] for who in (True, False)}
    text = ["", f"## {results['model']}, {results['rate']}", "", facts(results), "", *_verdict(everyone, whole, today)]
    if pairs:
        text += ["", *markdown_table(AT_PEAKS, pairs)]
    if all(reach.values()):
        text += ["", *markdown_table(AT_CAPS, at_caps(everyone))]
    columns = ["contender", "name", "step ms", "predicted ms", "peak MB", "/ default", "predicted MB", "off", "losses"]
    text += ["", *markdown_table(columns, points(everyone))]
    remarks = [*errors(results), *_doubts(results)]
    return text + [""] * bool(remarks) + [f"- {remark}" for remark in remarks]


def _doubts(results: dict[str, Any]) -> list[str]:
    """Who is missing and why, how far steps are apart, and in one line whose real transfers were late: there are dozens
    of contenders."""
    late = [r["violations"] for r in results["rows"] if r["violations"]]
    lines = [f"{name} did not run: {why}" for name, why in results["failed"].items()]
    apart = [(max(steps) - min(steps)) / median(steps) for r in results["rows"] if (steps := r["virtual_ns"])]
    if apart:
        lines.append(
            f"Between a contender's fastest and slowest step lie {median(apart):.1%} of its median step in the median "
            f"of contenders, {max(apart):.0%} at most."
        )
    if late:
        lines.append(
            f"Real transfers came after their emulated end in {len(late)} of {len(results['rows'])} contenders, "
            f"{median(late):.0f} of them in the median, {max(late)} at most (a busy machine). The step's clock is not "
            "concerned."
        )
    return lines


def reached(everyone: Sequence[Measured], whole: Sequence[float], today: Sequence[float]) -> list[str]:
    """Lines of Markdown: the ratios of :func:`at_each_peak` in geometric mean, and the least peaks."""
    lines = []
    for name, ratios in (("the whole sweep", whole), ("what does not use ours", today)):
        if ratios:
            lines.append(
                f"- At {len(ratios)} peaks of ours, {name} takes {geometric_mean(ratios):.3f} of our time in geometric "
                f"mean, {min(ratios):.3f} where it is best."
            )
    least = {who: min((m for m in everyone if m.ours is who), key=lambda m: m.peak_bytes, default=None)
             for who in (True, False)}
    for who, one in least.items():
        if one is not None:
            lines.append(f"- Least peak of {'ours' if who else 'the sweep'}: {_mb(one.peak_bytes)} MB ({one.title}).")
    return lines


def _verdict(everyone: Sequence[Measured], whole: Sequence[float], today: Sequence[float]) -> list[str]:
    lines = reached(everyone, whole, today)
    off = [abs(m.predicted_peak_bytes / m.peak_bytes - 1) for m in everyone if m.ours and m.predicted_peak_bytes]
    if off:
        lines.append(f"- Predicted peaks of ours are off by {max(off):.1%} at most ({len(off)} points).")
    unequal = [m.title for m in everyone if not m.equal]
    lines.append(f"- Losses are {'bit-equal for all' if not unequal else 'not bit-equal for ' + '; '.join(unequal)}.")
    return lines


def page(everything: Sequence[dict[str, Any]]) -> list[str]:
    """The page's lines."""
    text = [
        "Two real ranks on the emulated link, fully sharded parameters; `step` is the median of forward and backward "
        "on a clock that other load does not move, `peak` what a step holds above what it found, from the "
        "allocator's events. Contenders take turns, step by step.",
        "",
        "Ours has one setting, `memory_budget`, and `reshard_after_forward=\"auto\"`. `=...` of 110% is an absolute "
        "budget of 110% of the step's planned peak as Inductor would run it. The sweep is every combination of who "
        "orders (default Inductor, in-tree reorder, our order at its defaults), parameters gathered again, kept or "
        "left to ours, and torch's `activation_memory_budget` (percent saved) or checkpointed blocks. A ratio above "
        "1 says that ours is faster within the same memory.",
    ]
    return text + [line for results in everything for line in section(results)]


def _draw(everything: Sequence[dict[str, Any]], path: Path) -> None:
    from tools.shared.plot import curves

    panels = {}
    for results in everything:
        everyone = measured(results)
        panels[f"{results['model']}, {results['rate']}"] = fronts(everyone)
    curves(path, panels, "peak / default Inductor's", "step, ms", log_x=False)


def fronts(everyone: Sequence[Measured]) -> dict[str, list[tuple[float, float]]]:
    """Step in ms over the share of default Inductor's peak: of ours, of the sweep, and of what does not use ours."""
    default = next(m.peak_bytes for m in everyone if m.name == REFERENCE)
    kinds = {
        "ours": [m for m in everyone if m.ours],
        "the sweep": [m for m in everyone if not m.ours],
        "without ours": [m for m in everyone if m.today],
    }
    return {name: [(m.peak_bytes / default, m.step_ns / 1e6) for m in front(ones)] for name, ones in kinds.items()}


def front(ones: Sequence[Measured]) -> list[Measured]:
    """Those that nobody among them beats in both memory and time, by memory."""
    best, found = math.inf, []
    for m in sorted(ones, key=lambda m: (m.peak_bytes, m.step_ns)):
        if m.step_ns < best:
            best = m.step_ns
            found.append(m)
    return found


def selected(patterns: Sequence[str] | None) -> list[str]:
    """Contenders by name or pattern, in the order of the sweep; the reference is always there.

    Raises:
        typer.BadParameter: a pattern that no name fits.
    """
    known = [*SWEEP, *BUDGETS]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in known):
            raise typer.BadParameter(f"contender {pattern} is not known; expected some of {', '.join(known)}")
    names = [name for name in known if not patterns or any(fnmatchcase(name, p) for p in patterns)]
    return names if REFERENCE in names else [REFERENCE, *names]


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.1f}"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f}"


def budgets(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable; of {', '.join(MODELS)}. Default: activations and parameters."),
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(RATES)}. Default: {', '.join(LINKS)}.")
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable, a name or a pattern such as ours-less-*; of {', '.join((*SWEEP, *BUDGETS))}."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved steps per contender and rate.")] = 3,
    kept: Annotated[
        Path, typer.Option(help="Links and cost profiles stay here: with them the next run finds its code in caches.")
    ] = Path("out/budgets"),
    name: Annotated[str, typer.Option(help="Of the page and its files.")] = "budgets",
    title: Annotated[str, typer.Option(help="Of the page.")] = "Memory budgets: step over peak",
    timeout_s: Timeout = 14_400,
    out: Out = RESULTS,
) -> None:
    """Step over peak memory: ours with one budget each against every combination of today's settings."""
    models = known_ones(model or ["activations", "parameters"], MODELS, "model")
    rates, names = known_ones(rate or LINKS, RATES, "rate"), selected(contender)
    console = Console(width=max(180, Console().width))
    everything: list[dict[str, Any]] = []
    wrong = []
    for key in models:
        job = {
            "layout": "fsdp",
            "sizes": MODELS[key],
            "contenders": names,
            "rates": rates,
            "rounds": rounds,
            "kept": str((kept / key).absolute()),
        }
        for results in run_job(job, 2, timeout_s, console):
            everything.append({**results, "model": key})
            console.print("\n".join(section(everything[-1])), markup=False)
            wrong += errors(results)
        # After every model: a run that is cut short leaves what it has.
        written = write(
            name,
            title,
            page(everything),
            everything,
            lambda path: _draw(everything, path),
            folder=out,
        )
        console.print(f"written: {written}")
    if wrong:
        raise typer.Exit(1)
