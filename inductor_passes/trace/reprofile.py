"""A cost profile corrected by what was measured: profile a step, plan again with it, better.

Collectives: per kind and group layout a line through the measured transfers when their sizes differ enough to tell
latency from bandwidth, else the old line scaled. Compute: library calls and everything else are scaled by how much
longer they took than predicted. What was not measured stays as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

from inductor_passes.cost.communication import KINDS, GroupLayout, wire_bytes
from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint
from inductor_passes.operators import kind_of
from inductor_passes.trace.profiled import Measured, Pair

#: Sizes whose largest is less than this multiple of the smallest do not tell latency from bandwidth.
_SPREAD = 4.0
#: A line of measured times is believed down to such a part of the slope that the old line has when it is scaled to the
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
    by_kind: dict[tuple[GroupLayout, str], list[Pair]] = {}
    for pair in pairs:
        if pair.what in ("transfer", "issue") and len(pair.ranks) > 1 and pair.kind:
            by_kind.setdefault((base.layout(pair.ranks), pair.kind), []).append(pair)
    for (layout, kind), found in sorted(by_kind.items()):
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
    """``profile`` with the kinds that were not measured on a layout scaled as the one most above its prediction.

    Otherwise they would look cheaper on a link that is slower than assumed, and be chosen for that.

    Args:
        base: what durations were predicted with.
        pairs: from which ``profile`` was made.
    """
    groups = []
    for group in profile.groups:
        found = [p for p in pairs if len(p.ranks) > 1 and p.kind and base.layout(p.ranks) == group.layout]
        moved = [p for p in found if p.what == "transfer"]
        costs = list(group.costs)
        if moved:
            # What lines say of the same messages: one outlier does not count here either.
            factor = max(
                _ratio(*(sum(_transfer_ns(by, p) for p in moved if p.kind == kind) for by in (base, profile)))
                for kind in {p.kind for p in moved}
            )
            seen = {p.kind for p in moved}
            costs = [cost for cost in costs if cost.kind in seen]
            costs += [_scaled(base, kind, moved[0], factor) for kind in KINDS if kind not in seen]
        groups.append(dataclasses.replace(group, costs=tuple(costs)))
    return dataclasses.replace(profile, groups=tuple(groups))


def _scaled(base: CostProfile, kind: str, like: Pair, factor: float) -> CollectiveCost:
    """What ``base`` assumes of a kind on the layout of ``like``, with the time on the link ``factor`` times as long."""
    one = dataclasses.replace(like, kind=kind)
    alpha, beta = _old_line(base, kind, one)
    empty, full = base.issue_ns(kind, 0, 0, one.ranks), base.issue_ns(kind, *_sizes(one), one.ranks)
    per_byte = max(0.0, (full - empty) / max(1, one.size_bytes))
    return CollectiveCost(kind, alpha * factor, beta * factor, float(empty), per_byte)


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
    transfers = [p for p in found if p.what == "transfer" and p.measured_ns > 0]
    # A share of a queue was cut by the old prediction; where there are transfers seen alone, they decide.
    transfers = [p for p in transfers if p.shared == 1] or transfers
    issues = [p for p in found if p.what == "issue" and p.measured_ns > 0]
    alpha, beta = _old_line(base, kind, found[0])
    if transfers:
        points = _medians(kind, transfers, every_size)
        scale = sum(points.values()) / max(1.0, sum(alpha + beta * wire for wire in points))
        alpha, beta = alpha * scale, beta * scale
        if max(points) >= _SPREAD * max(1, min(points)):
            line = fit_line([float(wire) for wire in points], list(points.values()))
            # Small messages that all take as long would make the link infinitely fast for large ones.
            if line[1] >= beta / _FLATTER:
                alpha, beta = line
    issue = _ratio(sum(p.predicted_ns for p in issues), sum(p.measured_ns for p in issues))
    first = found[0]
    empty = base.issue_ns(kind, 0, 0, first.ranks)
    full = base.issue_ns(kind, *_sizes(first), first.ranks)
    per_byte = (full - empty) / max(1, first.size_bytes)
    return CollectiveCost(kind, alpha, beta, empty * issue, per_byte * issue)


def _medians(kind: str, transfers: Sequence[Pair], every_size: bool) -> dict[int, float]:
    """Wire bytes -> median ns over ranks and collectives, for the sizes that were seen often.

    One measurement is off either way: a rank that waits for a slower one adds, a late wake-up moves time from one
    transfer to the one before it.
    """
    by_size: dict[int, list[int]] = {}
    for p in transfers:
        by_size.setdefault(wire_bytes(kind, *_sizes(p), len(p.ranks)), []).append(p.measured_ns)
    most = max(len(found) for found in by_size.values())
    return {wire: float(median(ns)) for wire, ns in sorted(by_size.items()) if every_size or _OFTEN * len(ns) >= most}


def _old_line(base: CostProfile, kind: str, pair: Pair) -> tuple[float, float]:
    """Latency and ns per wire byte that ``base`` assumes."""
    ranks: Any = pair.ranks
    empty = base.communication_ns(kind, 0, 0, ranks)
    wire = wire_bytes(kind, *_sizes(pair), len(ranks))
    full = base.communication_ns(kind, *_sizes(pair), ranks)
    return float(empty), max(0.0, (full - empty) / wire) if wire else 0.0
