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

from inductor_passes.cost.communication import GroupLayout, wire_bytes
from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint
from inductor_passes.operators import kind_of
from inductor_passes.trace.profiled import Measured, Pair

#: Sizes whose largest is less than this multiple of the smallest do not tell latency from bandwidth.
_SPREAD = 2.0
#: A size counts when it was measured at least this fraction (one in so many) as often as the most frequent one.
_OFTEN = 4
#: FLOPs at which a device spec's rate is written down when it has no measured points.
_POINTS = (1e6, 1e9, 1e12)
_DTYPES = ("float32", "bfloat16")


def updated_profile(base: CostProfile, measured: Sequence[Measured], name: str = "") -> CostProfile:
    """``base`` with everything that was measured laid over it; the same for the same input on every machine."""
    pairs = [pair for one in measured for pair in one.pairs]
    groups = {group.layout: group for group in base.groups}
    by_kind: dict[tuple[GroupLayout, str], list[Pair]] = {}
    for pair in pairs:
        if pair.what in ("transfer", "issue") and len(pair.ranks) > 1 and pair.kind:
            by_kind.setdefault((base.layout(pair.ranks), pair.kind), []).append(pair)
    for (layout, kind), found in sorted(by_kind.items()):
        cost = _collective(base, kind, found)
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
    spec = base.spec
    bandwidth = base.memory_bytes_per_s or spec.memory_bytes_per_s.value * spec.memory_efficiency.value
    kernel = base.kernel_ns if base.kernel_ns >= 0 else spec.kernel_ns.value
    points = base.matmul or tuple(
        MatmulPoint(dtype, flops, flops / (spec.peak_flops(dtype) * spec.matmul_efficiency.value) * 1e9)
        for dtype in _DTYPES
        for flops in _POINTS
    )
    return dataclasses.replace(
        base,
        name=name or f"{base.name}, corrected by a profile",
        measured=True,
        matmul=tuple(dataclasses.replace(p, ns=p.ns * matmul) for p in points),
        shapes=tuple(dataclasses.replace(r, ns_per_flop=r.ns_per_flop * matmul) for r in base.shapes),
        memory_bytes_per_s=bandwidth / rest,
        kernel_ns=kernel * rest,
        groups=tuple(groups[layout] for layout in sorted(groups)),
    )


def _ratio(predicted_ns: int, measured_ns: int) -> float:
    """How much longer it took than predicted; 1 where there is nothing to compare."""
    return measured_ns / predicted_ns if predicted_ns > 0 and measured_ns > 0 else 1.0


def _sizes(pair: Pair) -> tuple[int, int]:
    """Bytes in and out of a collective, from the larger of the two."""
    ranks = len(pair.ranks)
    facts = kind_of(pair.kind).facts
    sent = pair.size_bytes // ranks if facts.input_share else pair.size_bytes
    return sent, pair.size_bytes // ranks if facts.output_share else pair.size_bytes


def _collective(base: CostProfile, kind: str, found: Sequence[Pair]) -> CollectiveCost:
    transfers = [p for p in found if p.what == "transfer" and p.measured_ns > 0]
    # A share of a queue was cut by the old prediction; where there are transfers seen alone, they decide.
    transfers = [p for p in transfers if p.shared == 1] or transfers
    issues = [p for p in found if p.what == "issue" and p.measured_ns > 0]
    alpha, beta = _old_line(base, kind, found[0])
    if transfers:
        points = _medians(kind, transfers)
        if max(points) >= _SPREAD * max(1, min(points)):
            alpha, beta = fit_line([float(wire) for wire in points], list(points.values()))
        else:
            scale = sum(points.values()) / max(1.0, sum(alpha + beta * wire for wire in points))
            alpha, beta = alpha * scale, beta * scale
    issue = _ratio(sum(p.predicted_ns for p in issues), sum(p.measured_ns for p in issues))
    first = found[0]
    empty = base.issue_ns(kind, 0, 0, first.ranks)
    full = base.issue_ns(kind, *_sizes(first), first.ranks)
    per_byte = (full - empty) / max(1, first.size_bytes)
    return CollectiveCost(kind, alpha, beta, empty * issue, per_byte * issue)


def _medians(kind: str, transfers: Sequence[Pair]) -> dict[int, float]:
    """Wire bytes -> median ns over ranks and collectives, for the sizes that were seen often.

    One measurement is off either way: a rank that waits for a slower one adds, a late wake-up moves time from one
    transfer to the one before it.
    """
    by_size: dict[int, list[int]] = {}
    for p in transfers:
        by_size.setdefault(wire_bytes(kind, *_sizes(p), len(p.ranks)), []).append(p.measured_ns)
    most = max(len(found) for found in by_size.values())
    return {wire: float(median(ns)) for wire, ns in sorted(by_size.items()) if _OFTEN * len(ns) >= most}


def _old_line(base: CostProfile, kind: str, pair: Pair) -> tuple[float, float]:
    """Latency and ns per wire byte that ``base`` assumes."""
    ranks: Any = pair.ranks
    empty = base.communication_ns(kind, 0, 0, ranks)
    wire = wire_bytes(kind, *_sizes(pair), len(ranks))
    full = base.communication_ns(kind, *_sizes(pair), ranks)
    return float(empty), max(0.0, (full - empty) / wire) if wire else 0.0
