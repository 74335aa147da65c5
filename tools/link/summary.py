"""What the link benchmark comes to, over pages: how a contender of ours stands against the others, link by link.

A *standing* compares one contender of ours with those that took turns with it in the same run; figures of different
runs are never divided by each other. Where several pages hold the same model on the same link, the newest one that has
the contender counts, so that every mean counts a model once per link; but none that left out who was the fastest other
contender on the page before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tools.link.report import best_in_tree, limit_ns, row
from tools.shared.record import geometric_mean

REFERENCE = "inductor"
#: Rates over which means go.
BUSY = ("balanced", "bandwidth-bound")
#: What the best contender's step over ours should not fall below.
NEVER_BELOW = 0.98
#: A prediction that is off by so much of the step, or more, is what tuning is for.
OFF = 0.1
#: Share of the step from which a single stall counts.
SHORT_STALL = 0.005


@dataclass(frozen=True)
class Standing:
    """A contender of ours against the others of its run; ratios of median steps, above 1 where ours is faster.

    Attributes:
        layout, title, rate: the model and the link.
        contender: of ours, by name.
        default: default Inductor's step over ours.
        in_tree: the best in-tree setting's over ours; None when none ran.
        other: the fastest contender's that is not ours, over ours. ``other_title``: who that is.
        limit: ours over the limit, above 1 where ours is slower.
        peak: our peak memory over default Inductor's.
        sharded: whether the limit counts head and tail, so that it can be reached.
        rivals: titles of all contenders that are not ours.
        page: which page of results it is from, "" when not asked.
    """

    layout: str
    title: str
    rate: str
    contender: str
    default: float
    in_tree: float | None
    other: float
    other_title: str
    limit: float
    peak: float
    sharded: bool
    rivals: tuple[str, ...] = ()
    page: str = ""

    def counts_over(self, known: Standing | None) -> bool:
        """Whether it counts in the place of an older one."""
        return known is None or known.other_title in self.rivals

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "rivals": list(self.rivals)}

    def cells(self) -> list[str]:
        """By ``HEADER``."""
        shown = ["-" if value is None else f"{value:.3f}" for value in (self.default, self.in_tree, self.other)]
        return [*shown, self.other_title, f"{self.limit:.3f}"]


HEADER = ("default / ours", "in-tree / ours", "best other / ours", "best other", "ours / limit")


def step_ns(results: dict[str, Any], name: str) -> float | None:
    """A contender's median step; None when it did not run."""
    found = row(results, name)
    return None if found is None else median(found["virtual_ns"])


def standing(results: dict[str, Any], name: str, page: str = "") -> Standing | None:
    """How the contender ``name`` stands in one run; None when it or the reference did not run."""
    mine, default = row(results, name), row(results, REFERENCE)
    if mine is None or default is None:
        return None
    step, in_tree = median(mine["virtual_ns"]), best_in_tree(results)
    others = [r for r in results["rows"] if r["family"] != "ours"]
    best = min(others, key=lambda r: median(r["virtual_ns"]))
    return Standing(
        layout=results["layout"],
        title=results["title"],
        rate=results["rate"],
        contender=name,
        default=median(default["virtual_ns"]) / step,
        in_tree=median(in_tree["virtual_ns"]) / step if in_tree else None,
        other=median(best["virtual_ns"]) / step,
        other_title=best["title"],
        limit=step / limit_ns(results),
        peak=mine["peak_bytes"] / default["peak_bytes"],
        sharded=results["sharded"],
        rivals=tuple(r["title"] for r in others),
        page=page,
    )


def newest(pages: Iterable[tuple[str, Sequence[dict[str, Any]]]], name: str) -> dict[tuple[str, str], Standing]:
    """(layout, rate) -> how ``name`` stands, of the newest page that has it and the fastest other.

    Args:
        pages: names and contents, the oldest first.
    """
    found: dict[tuple[str, str], Standing] = {}
    for page, everything in pages:
        for results in everything:
            one = standing(results, name, page)
            if one is not None and one.counts_over(found.get((one.layout, one.rate))):
                found[one.layout, one.rate] = one
    return found


def means(standings: Iterable[Standing]) -> str:
    """The geometric means over busy links as a sentence, with how many rows they are of."""
    busy = [one for one in standings if one.rate in BUSY]
    in_tree = [one.in_tree for one in busy if one.in_tree is not None]
    said = (
        f"Geometric mean over {' and '.join(BUSY)}: {geometric_mean(one.default for one in busy):.3f} times default "
        f"Inductor's speed ({len(busy)} rows)"
    )
    if not in_tree:
        return f"{said}; no in-tree setting was run."
    return f"{said}, {geometric_mean(in_tree):.3f} times the best in-tree setting's ({len(in_tree)} rows)."


def missing(
    found: Mapping[tuple[str, str], Standing], layouts: Mapping[str, str], rates: Sequence[str]
) -> list[str]:
    """Lines of Markdown: which links were not measured with which model.

    Args:
        layouts: names and titles.
    """
    lines = []
    for name, title in layouts.items():
        without = [rate for rate in rates if (name, rate) not in found]
        if without:
            lines.append(f"- {title}: {', '.join(without)}")
    return lines or ["- none"]


def behind(standings: Iterable[Standing]) -> list[str]:
    """Lines of Markdown: every row in which somebody else was faster, the worst first, and which miss the goal."""
    slower = sorted((one for one in standings if one.other < 1), key=lambda one: one.other)
    lines = [
        f"- {one.title}, {one.rate}: {one.other:.3f} of our step by {one.other_title}"
        + (f", below {NEVER_BELOW}" if one.other < NEVER_BELOW else "")
        for one in slower
    ]
    return lines or ["- nobody was faster in any row"]


def extremes(standings: Sequence[Standing]) -> list[str]:
    """Lines of Markdown: the rows farthest from the limit that can be reached, and highest in memory."""
    lines = []
    sharded = [one for one in standings if one.sharded]
    if sharded:
        far = max(sharded, key=lambda one: one.limit)
        lines.append(f"- farthest from a limit that can be reached: {far.limit:.3f} ({far.title}, {far.rate})")
    if standings:
        high = max(standings, key=lambda one: one.peak)
        lines.append(f"- highest peak over default Inductor's: {high.peak:.3f} ({high.title}, {high.rate})")
    return lines


@dataclass(frozen=True)
class Tuning:
    """A plan before and after its first steps were timed (``tune``), in one run.

    Attributes:
        standing: of the tuned plan.
        before_ns, after_ns: median steps.
        off_before, off_after: how far the predicted step is off, as a share of the measured one; None: not known.
        stalls_off: how far the tuned plan's stalls are off in the median, see :func:`stalls_off`; None: not known.
    """

    standing: Standing
    before_ns: float
    after_ns: float
    off_before: float | None
    off_after: float | None
    stalls_off: float | None = None

    def cells(self) -> list[str]:
        """By ``TUNING_HEADER``."""
        off = ["-" if one is None else f"{one:.1%}" for one in (self.off_before, self.off_after, self.stalls_off)]
        steps = [f"{one / 1e6:.0f}" for one in (self.before_ns, self.after_ns)]
        return [*steps, f"{self.before_ns / self.after_ns:.3f}", f"{self.standing.other:.3f}", *off]


TUNING_HEADER = (
    "before ms", "tuned ms", "before / tuned", "best other / tuned", "prediction off before", "tuned", "stalls off",
)  # fmt: skip


def tunings(
    pages: Iterable[tuple[str, Sequence[dict[str, Any]]]], before: str, after: str
) -> dict[tuple[str, str], Tuning]:
    """(layout, rate) -> what tuning did, of the newest page that has both contenders and the fastest other.

    Args:
        pages: names and contents, the oldest first.
    """
    found: dict[tuple[str, str], Tuning] = {}
    for page, everything in pages:
        for results in everything:
            one, rows = standing(results, after, page), [row(results, name) for name in (before, after)]
            if one is None or rows[0] is None or rows[1] is None:
                continue
            known = found.get((one.layout, one.rate))
            if not one.counts_over(None if known is None else known.standing):
                continue
            steps = [median(r["virtual_ns"]) for r in rows if r is not None]
            off = [_off(r.get("predicted_ns"), step) for r, step in zip(rows, steps) if r is not None]
            stalls = stalls_off(rows[1].get("stalls", ()), steps[1])
            found[one.layout, one.rate] = Tuning(one, steps[0], steps[1], off[0], off[1], stalls)
    return found


def _off(predicted_ns: float | None, measured_ns: float) -> float | None:
    return abs(predicted_ns - measured_ns) / measured_ns if predicted_ns else None


def stalls_off(stalls: Sequence[Sequence[float]], step_ns: float) -> float | None:
    """How far the stalls of a step are off in the median: the difference over the longer one of planned and measured.

    Stalls of which both are below :data:`SHORT_STALL` of the step do not count; None where none does.

    Args:
        stalls: (planned, measured) in ns of each collective.
    """
    long = [pair for pair in stalls if max(pair) >= SHORT_STALL * step_ns]
    return median(abs(planned - measured) / max(planned, measured) for planned, measured in long) if long else None


def tuning_means(found: Sequence[Tuning]) -> str:
    """What tuning gained, and how far predictions were off, as a sentence."""
    gained = geometric_mean(one.before_ns / one.after_ns for one in found)
    off = [
        [share for one in found if (share := getattr(one, name)) is not None] for name in ("off_before", "off_after")
    ]
    said = f"Geometric mean over {len(found)} rows: {gained:.3f} times as fast as before"
    if not all(off):
        return f"{said}."
    worst = [f"{median(shares):.1%} ({max(shares):.1%} at most)" for shares in off]
    text = f"{said}. The predicted step was off by {worst[0]} in the median, tuned by {worst[1]}."
    stalls = [one.stalls_off for one in found if one.stalls_off is not None]
    if stalls:
        text += f" Of {len(stalls)} tuned plans single stalls of at least {SHORT_STALL:.1%} of the step are known: in "
        text += f"the median of a plan they are off by {median(stalls):.1%} ({max(stalls):.1%} at most)."
    return text


def tuning_where_off(found: Sequence[Tuning]) -> str:
    """What tuning gained where the prediction was off, and where it still is, in two sentences; "" for nowhere."""
    off = [one for one in found if one.off_before is not None and one.off_before >= OFF]
    if not off:
        return ""
    gained = geometric_mean(one.before_ns / one.after_ns for one in off)
    still = sum(one.off_after is not None and one.off_after >= OFF for one in found)
    return (
        f"Over the {len(off)} rows whose prediction was off by {OFF:.0%} or more: {gained:.3f} times. "
        f"Tuned, it is off by as much in {still} rows."
    )
