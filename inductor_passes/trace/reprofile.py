"""A cost profile corrected by what was measured: profile a step, plan again with it, better.

Collectives: per kind and group layout a line through the measured transfers when their sizes and times tell latency
from bandwidth, else the old line, of which the part that makes up the times takes most of the difference. Compute:
library calls and everything else are scaled by how much longer they took than predicted. What was not measured stays as
it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from inductor_passes.cost.communication import KINDS, GroupLayout, wire_bytes
from inductor_passes.cost.fit import fit_line, shared_out, slope_error, spread
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint
from inductor_passes.operators import kind_of
from inductor_passes.trace.profiled import Measured, Pair

#: Sizes whose largest is less than this multiple of the smallest do not tell latency from bandwidth.
_SPREAD = 4.0
#: A slope is believed where it is so many times its standard error: two of these are then half of it. The error of a
#: time is its spread over steps, not divided by the root of their number: what else a machine does lasts longer than a
#: step, so more of them do not make the median better.
_MARGIN = 4.0
#: The error of a time, as a share of it, that was measured once.
_ONCE = 0.1
#: A line of measured times is believed down to such a part of the slope that the old line has when it is moved to the
#: same times.
_FLATTER = 10.0
#: A size counts when it was measured at least this fraction (one in so many) as often as the most frequent one.
_OFTEN = 4
#: FLOPs at which a device spec's rate is written down when it has no measured points.
_POINTS = (1e6, 1e9, 1e12)
_DTYPES = ("float32", "bfloat16")


def updated_profile(base: CostProfile, measured: Sequence[Measured], name: str = "") -> CostProfile:
    """``base`` with everything that was measured laid over it; the same for the same input on every machine.

    Kinds of collectives that were not seen on a layout are scaled as those that were.
    """
    pairs = [pair for one in measured for pair in one.pairs]
    return others_scaled(base, profile_from(base, pairs, name), pairs)


def profile_from(base: CostProfile, pairs: Sequence[Pair], name: str = "", *, every_size: bool = False) -> CostProfile:
    """:func:`updated_profile` from quantities.

    Args:
        every_size: a size of a transfer counts also where it was measured less often than others: each measurement is
            a median already.
    """
    groups = {group.layout: group for group in base.groups}
    for (layout, kind), found in sorted(_by_kind(base, pairs).items()):
        cost = _collective(base, kind, found, every_size)
        group = groups.get(layout) or GroupCost(layout, "profiled", layout.link, ())
        others = tuple(c for c in group.costs if c.kind != kind)
        groups[layout] = dataclasses.replace(group, costs=(*others, cost))
    library = [p for p in pairs if p.what == "library"]
    blocks = [p for p in pairs if p.what == "block"]
    matmul = _ratio(sum(p.predicted_ns for p in library), sum(p.measured_ns for p in library))
    rest = _ratio(
        sum(p.predicted_ns for p in blocks) - sum(p.predicted_ns for p in library),
        sum(p.measured_ns for p in blocks) - sum(p.measured_ns for p in library),
    )
    scaled = scaled_compute(base, matmul, rest, _kernel_ns(base) * rest)
    return dataclasses.replace(
        scaled,
        name=name or f"{base.name}, corrected by a profile",
        measured=True,
        groups=tuple(groups[layout] for layout in sorted(groups)),
    )


def scaled_compute(base: CostProfile, library: float, memory: float, kernel_ns: float) -> CostProfile:
    """``base`` with library kernels that take ``library`` times as long, memory traffic that takes ``memory`` times as
    long, and another fixed cost per kernel."""
    spec = base.spec
    bandwidth = base.memory_bytes_per_s or spec.memory_bytes_per_s.value * spec.memory_efficiency.value
    points = base.matmul or tuple(
        MatmulPoint(dtype, flops, flops / (spec.peak_flops(dtype) * spec.matmul_efficiency.value) * 1e9)
        for dtype in _DTYPES
        for flops in _POINTS
    )
    return dataclasses.replace(
        base,
        matmul=tuple(dataclasses.replace(p, ns=p.ns * library) for p in points),
        shapes=tuple(dataclasses.replace(r, ns_per_flop=r.ns_per_flop * library) for r in base.shapes),
        memory_bytes_per_s=bandwidth / memory,
        kernel_ns=kernel_ns,
    )


def _kernel_ns(base: CostProfile) -> float:
    return base.kernel_ns if base.kernel_ns >= 0 else base.spec.kernel_ns.value


def others_scaled(base: CostProfile, profile: CostProfile, pairs: Sequence[Pair]) -> CostProfile:
    """``profile`` with the kinds that were not measured on a layout slowed down as the one most above its prediction.

    Otherwise they would look cheaper on a link that is slower than assumed, and be chosen for that.

    Args:
        base: what durations were predicted with.
        pairs: from which ``profile`` was made.
    """
    groups = []
    for group in profile.groups:
        found = [p for p in pairs if len(p.ranks) > 1 and p.kind and base.layout(p.ranks) == group.layout]
        moved: dict[str, list[Pair]] = {}
        for p in found:
            if p.what == "transfer":
                moved.setdefault(p.kind, []).append(p)
        costs = list(group.costs)
        if moved:
            # What lines say of the same messages: one outlier does not count here either.
            factors = {
                kind: _ratio(*(sum(_transfer_ns(by, p) for p in ones) for by in (base, profile)))
                for kind, ones in sorted(moved.items())
            }
            slowest = max(factors, key=lambda kind: factors[kind])
            costs = [cost for cost in costs if cost.kind in moved]
            costs += [_scaled(base, k, moved[slowest], factors[slowest]) for k in KINDS if k not in moved]
        groups.append(dataclasses.replace(group, costs=tuple(costs)))
    return dataclasses.replace(profile, groups=tuple(groups))


def _scaled(base: CostProfile, kind: str, like: Sequence[Pair], factor: float) -> CollectiveCost:
    """What ``base`` assumes of a kind, if the messages ``like`` took ``factor`` times as long as one of this kind."""
    ones = [dataclasses.replace(p, kind=kind) for p in like]
    one = ones[0]
    alpha, beta = _old_line(base, kind, one)
    sizes = [float(_wire(kind, p)) for p in ones]
    alpha, beta = shared_out(alpha, beta, sizes, factor * sum(alpha + beta * wire for wire in sizes))
    empty, full = base.issue_ns(kind, 0, 0, one.ranks), base.issue_ns(kind, *_sizes(one), one.ranks)
    per_byte = max(0.0, (full - empty) / max(1, one.size_bytes))
    return CollectiveCost(kind, alpha, beta, float(empty), per_byte, base.slowdown_percent(kind, one.ranks) / 100)


def _transfer_ns(by: CostProfile, pair: Pair) -> int:
    return by.communication_ns(pair.kind, *_sizes(pair), pair.ranks)


def _ratio(predicted_ns: int, measured_ns: int) -> float:
    """How much longer it took than predicted; 1 where there is nothing to compare."""
    return measured_ns / predicted_ns if predicted_ns > 0 and measured_ns > 0 else 1.0


def _sizes(pair: Pair) -> tuple[int, int]:
    """Bytes in and out of a collective, from the larger of the two."""
    ranks = len(pair.ranks)
    facts = kind_of(pair.kind).facts
    sent = pair.size_bytes // ranks if facts.input_share else pair.size_bytes
    return sent, pair.size_bytes // ranks if facts.output_share else pair.size_bytes


def _collective(base: CostProfile, kind: str, found: Sequence[Pair], every_size: bool) -> CollectiveCost:
    alpha, beta, _ = _line(base, kind, found, every_size)
    issues = [p for p in found if p.what == "issue" and p.measured_ns > 0]
    issue = _ratio(sum(p.predicted_ns for p in issues), sum(p.measured_ns for p in issues))
    first = found[0]
    empty = base.issue_ns(kind, 0, 0, first.ranks)
    full = base.issue_ns(kind, *_sizes(first), first.ranks)
    per_byte = (full - empty) / max(1, first.size_bytes)
    slowdown = base.slowdown_percent(kind, first.ranks) / 100
    return CollectiveCost(kind, alpha, beta, empty * issue, per_byte * issue, slowdown)


def _line(base: CostProfile, kind: str, found: Sequence[Pair], every_size: bool) -> tuple[float, float, str]:
    """Latency, ns per wire byte, and why measured times do not tell the two apart: "" where they do, or where there are
    none."""
    alpha, beta = _old_line(base, kind, found[0])
    transfers = [p for p in found if p.what == "transfer" and p.measured_ns > 0]
    if not transfers:
        return alpha, beta, ""
    # A share of a queue was cut by the old prediction; where there are transfers seen alone, they decide.
    alone = [p for p in transfers if p.shared == 1]
    points = _medians(kind, alone or transfers, every_size)
    sizes, times = [float(wire) for wire in points], list(points.values())
    alpha, beta = shared_out(alpha, beta, sizes, sum(times))
    if not alone:
        return alpha, beta, "no transfer was seen alone, only queues as a whole"
    if max(sizes) < _SPREAD * max(1.0, min(sizes)):
        return alpha, beta, f"the largest message has less than {_SPREAD:g} times the bytes of the smallest"
    fitted = fit_line(sizes, times)
    error = slope_error(sizes, _errors(kind, alone, points))
    if fitted[1] <= _MARGIN * error:
        return alpha, beta, f"what larger messages take longer is less than {_MARGIN:g} times its error"
    # Small messages that all take as long would make the link infinitely fast for large ones.
    if fitted[1] < beta / _FLATTER:
        return alpha, beta, f"larger messages take less than a {_FLATTER:g}th as much longer as they should"
    return (*fitted, "")


def _errors(kind: str, transfers: Sequence[Pair], points: Mapping[int, float]) -> list[float]:
    """The standard deviation of the time of each size in ns: from step to step, or from one message to another of equal
    size, the larger one. Few steps may be equal by chance: it is no less than the median over all of them."""
    steps: dict[int, list[float]] = {}
    times: dict[int, list[int]] = {}
    for p in transfers:
        times.setdefault(_wire(kind, p), []).append(p.measured_ns)
        if p.spread_ns is not None:
            steps.setdefault(_wire(kind, p), []).append(p.spread_ns)
    known = {
        wire: max(median(steps.get(wire, [0.0])), spread(ns) or 0.0)
        for wire, ns in times.items()
        if wire in steps or len(ns) > 1
    }
    least = median(known.values()) if known else 0.0
    return [max(known[wire], least) if wire in known else max(_ONCE * ns, least) for wire, ns in points.items()]


def unfitted(base: CostProfile, pairs: Sequence[Pair], *, every_size: bool = False) -> list[str]:
    """Sentences on the kinds and layouts whose latency and bandwidth the times in :func:`profile_from` do not tell
    apart."""
    kinds: dict[tuple[int, str], list[str]] = {}
    for (layout, kind), found in sorted(_by_kind(base, pairs).items()):
        if why := _line(base, kind, found, every_size)[2]:
            kinds.setdefault((layout.ranks, why), []).append(kind)
    return [
        f"latency and bandwidth of {', '.join(dict.fromkeys(ones))} between {ranks} ranks are not told apart: {why}"
        for (ranks, why), ones in kinds.items()
    ]


def _by_kind(base: CostProfile, pairs: Sequence[Pair]) -> dict[tuple[GroupLayout, str], list[Pair]]:
    by_kind: dict[tuple[GroupLayout, str], list[Pair]] = {}
    for pair in pairs:
        if pair.what in ("transfer", "issue") and len(pair.ranks) > 1 and pair.kind:
            by_kind.setdefault((base.layout(pair.ranks), pair.kind), []).append(pair)
    return by_kind


def _wire(kind: str, pair: Pair) -> int:
    return wire_bytes(kind, *_sizes(pair), len(pair.ranks))


def _medians(kind: str, transfers: Sequence[Pair], every_size: bool) -> dict[int, float]:
    """Wire bytes -> median ns over ranks and collectives, for the sizes that were seen often.

    One measurement is off either way: a rank that waits for a slower one adds, a late wake-up moves time from one
    transfer to the one before it. Where each is a median already (``every_size``), the slowest group of ranks counts.
    """
    by_size: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for p in transfers:
        by_size.setdefault(_wire(kind, p), {}).setdefault(p.ranks if every_size else (), []).append(p.measured_ns)
    counts = {wire: sum(map(len, groups.values())) for wire, groups in by_size.items()}
    most = max(counts.values())
    return {
        wire: float(max(median(ns) for ns in groups.values()))
        for wire, groups in sorted(by_size.items())
        if every_size or _OFTEN * counts[wire] >= most
    }


def _old_line(base: CostProfile, kind: str, pair: Pair) -> tuple[float, float]:
    """Latency and ns per wire byte that ``base`` assumes."""
    ranks: Any = pair.ranks
    empty = base.communication_ns(kind, 0, 0, ranks)
    wire = _wire(kind, pair)
    full = base.communication_ns(kind, *_sizes(pair), ranks)
    return float(empty), max(0.0, (full - empty) / wire) if wire else 0.0
