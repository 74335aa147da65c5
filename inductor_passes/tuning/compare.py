"""Measured beside predicted, with the reason of every large difference."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.report import Cause, CollectiveTiming, KernelTiming, Timing
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import AT_MOST, MEASURED, SHARED, Account, Kernel, Transfer

#: A difference below this share of the larger time, or below so many ns, has no reason.
_SHARE, _LEAST_NS = 0.1, 50_000
#: Kernels that take so many times longer beside a transfer than alone are slowed down by it.
_SLOWED = 1.15
#: A class of kernels whose mean predicted time is below so many times the fixed cost of a kernel is bound by launches.
_LAUNCHES = 3


def timing(planned: Planned, found: Account, note: str = "", profile: str = "", profile_hash: str = "") -> Timing:
    """The comparison of a graph for its report."""
    return Timing(
        steps=found.steps,
        ranks=found.ranks,
        predicted_ns=planned.timeline.makespan_ns,
        measured_ns=found.step_ns,
        collectives=tuple(_collective(planned, k, one) for k, one in enumerate(found.transfers)),
        kernels=tuple(_kernels(planned, found.kernels)),
        profile=profile,
        profile_hash=profile_hash,
        note=note,
    )


def _far(predicted_ns: int, measured_ns: int) -> bool:
    difference = abs(predicted_ns - measured_ns)
    return difference > max(_LEAST_NS, _SHARE * max(predicted_ns, measured_ns))


def _collective(planned: Planned, k: int, found: Transfer) -> CollectiveTiming:
    one = planned.collectives[k]
    predicted, stall = planned.problem.tasks[one.task].duration_ns, planned.timeline.exposed_ns[one.task]
    cause = Cause.CLOSE
    off = found.known in (MEASURED, SHARED) and _far(predicted, found.transfer_ns)
    # A bound says something only where the prediction is above it.
    off = off or (found.known == AT_MOST and predicted > found.transfer_ns and _far(predicted, found.transfer_ns))
    if _far(stall, found.stall_ns) or off:
        difference = abs(found.stall_ns - stall)
        if found.stall_ns > stall and 2 * found.for_peer_ns > difference:
            cause = Cause.SKEW
        elif off:
            cause = Cause.COST if planned.about.measured_costs else Cause.UNKNOWN
        else:
            cause = Cause.SHIFTED
    return CollectiveTiming(
        label=one.label,
        name=one.name,
        kind=one.kind,
        size_bytes=one.size_bytes,
        predicted_ns=predicted,
        measured_ns=found.transfer_ns,
        known=found.known,
        predicted_stall_ns=stall,
        measured_stall_ns=found.stall_ns,
        skew_ns=found.skew_ns,
        late=found.late,
        cause=cause,
    )


def _kernels(planned: Planned, kernels: Sequence[Kernel]) -> list[KernelTiming]:
    """By class, the largest difference first."""
    classes: dict[str, list[Kernel]] = {}
    for one in kernels:
        classes.setdefault(planned.class_of(one.call), []).append(one)
    rows = []
    for name, ones in classes.items():
        predicted, measured = _sums(planned, ones)
        slower = _slower(planned, ones)
        cause = Cause.CLOSE
        if _far(predicted, measured):
            known = Cause.COST if planned.about.measured_costs else Cause.UNKNOWN
            launched = predicted < _LAUNCHES * planned.about.kernel_ns * len(ones)
            cause = Cause.CONTENTION if slower > _SLOWED else Cause.LAUNCH if launched else known
        rows.append(KernelTiming(name, len(ones), predicted, measured, round(slower, 3), cause))
    rows.sort(key=lambda row: (-abs(row.measured_ns - row.predicted_ns), row.kernels))
    return rows


def _sums(planned: Planned, kernels: Sequence[Kernel]) -> tuple[int, int]:
    return sum(planned.predicted_ns(one.call) for one in kernels), sum(one.measured_ns for one in kernels)


def _slower(planned: Planned, kernels: Sequence[Kernel]) -> float:
    """How many times longer than predicted kernels took beside transfers, against those alone; 0 without both."""
    ratios = []
    for beside in (True, False):
        predicted, measured = _sums(planned, [one for one in kernels if one.beside is beside])
        if not predicted or not measured:
            return 0.0
        ratios.append(measured / predicted)
    return ratios[0] / ratios[1]
