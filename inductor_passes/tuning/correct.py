"""A cost profile corrected by what the ranks measured of graphs; see ``trace.reprofile`` for how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import CostProfile
from inductor_passes.trace.profiled import Pair
from inductor_passes.trace.reprofile import others_scaled, profile_from, scaled_compute, unfitted
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import AT_MOST, UNKNOWN, Account

_TUNED = "; tuned: "
#: Works whose largest is less than this multiple of the smallest do not tell a fixed cost from a speed.
_SPREAD = 4.0
#: Work that was predicted to take less than one part in so many of what was measured says nothing about its speed.
_LEAST = 50.0
_FASTEST = 0.05


@dataclass(frozen=True)
class Others:
    """What ranks that do not have a graph of this rank's measured of the collectives of one of theirs."""

    digest: str
    ranks: tuple[int, ...]
    steps: int
    pairs: tuple[Pair, ...]


def others_of(base: CostProfile, planned: Planned, account: Account) -> Others:
    """For other ranks."""
    return Others(planned.about.digest, account.ranks, account.steps, tuple(_pairs(base, planned, account)))


def corrected(
    base: CostProfile, found: Sequence[tuple[Planned, Account]], others: Sequence[Others] = ()
) -> CostProfile:
    """``base`` with everything that was measured laid over it; the same for the same input on every rank.

    Its name says where it comes from: the profile before, how many steps of which plans on how many ranks.
    """
    pairs = _all_pairs(base, found, others)
    plans = " ".join(sorted({planned.about.digest for planned, _ in found} | {one.digest for one in others}))
    ranks = len({rank for _, account in found for rank in account.ranks}.union(*(one.ranks for one in others)))
    steps = max([*(account.steps for _, account in found), *(one.steps for one in others)])
    before = base.name.partition(_TUNED)[0]
    name = f"{before}{_TUNED}{steps} steps on {ranks} ranks from {base.hash()}, plans {plans}"
    profile = profile_from(base, pairs, name, every_size=True)
    return _with_kernels(others_scaled(base, profile, pairs), found)


def untold(
    base: CostProfile, found: Sequence[tuple[Planned, Account]], others: Sequence[Others] = ()
) -> list[str]:
    """What the times behind :func:`corrected` do not tell, in sentences."""
    return unfitted(base, _all_pairs(base, found, others), every_size=True)


def _all_pairs(
    base: CostProfile, found: Sequence[tuple[Planned, Account]], others: Sequence[Others]
) -> list[Pair]:
    pairs = [pair for planned, account in found for pair in _pairs(base, planned, account)]
    return pairs + [pair for one in others for pair in one.pairs]


def _pairs(base: CostProfile, planned: Planned, account: Account) -> list[Pair]:
    pairs = []
    seen = {(one.kind, base.layout(one.ranks)) for one, transfer in zip(planned.collectives, account.transfers)
            if transfer.known not in (AT_MOST, UNKNOWN)}
    for one, transfer in zip(planned.collectives, account.transfers):
        task = planned.problem.tasks[one.task]
        about = (one.kind, one.size_bytes, one.ranks)
        pairs.append(Pair("issue", one.label, task.issue_ns, transfer.issue_ns, *about))
        bound = transfer.known == AT_MOST
        if bound and ((one.kind, base.layout(one.ranks)) in seen or task.duration_ns <= transfer.transfer_ns):
            # A bound says something only where it is all that is known, and below what was predicted.
            continue
        if transfer.known != UNKNOWN:
            # A bound is not known any better than by itself.
            spread = float(transfer.transfer_ns if bound else transfer.spread_ns)
            found = Pair("transfer", one.label, task.duration_ns, transfer.transfer_ns, *about, transfer.among)
            pairs.append(replace(found, spread_ns=None if spread < 0 else spread))
    return pairs


@dataclass(frozen=True)
class _Work:
    """A call that computes: of how many kernels it is, what their work was predicted to take without the fixed cost of
    each, and what all took, in ns."""

    kernels: int
    predicted_ns: float
    measured_ns: float

    @property
    def each(self) -> tuple[float, float]:
        return self.predicted_ns / self.kernels, self.measured_ns / self.kernels


def _with_kernels(profile: CostProfile, found: Sequence[tuple[Planned, Account]]) -> CostProfile:
    """The profile with the fixed cost of a kernel and the speed of library kernels and of all others as measured.

    A call of n kernels takes n times the fixed cost and its work in proportion. Kernels of different sizes tell one
    from the other; where all are about as large, those with less work than the fixed cost are taken for launches.
    """
    work: dict[bool, list[_Work]] = {True: [], False: []}
    fixed_ns = found[0][0].about.kernel_ns
    for planned, account in found:
        for one in account.kernels:
            tasks = [planned.problem.tasks[task] for task in planned.calls[one.call].tasks]
            timed = [task for task in tasks if task.duration_ns]
            if timed and one.measured_ns:
                predicted = max(0.0, sum(task.duration_ns for task in timed) - len(timed) * fixed_ns)
                library = any(task.label for task in timed)
                work[library].append(_Work(len(timed), predicted, float(one.measured_ns)))
    everything = work[True] + work[False]
    if not everything:
        return profile
    count = sum(one.kernels for one in everything)
    fixed = sum(_fixed_ns(ones, fixed_ns) * sum(one.kernels for one in ones) for ones in work.values() if ones) / count
    return scaled_compute(profile, _speed(work[True], fixed), _speed(work[False], fixed), fixed)


def _fixed_ns(work: Sequence[_Work], before_ns: float) -> float:
    """Of a kernel, as these show it."""
    sizes, times = zip(*(one.each for one in work))
    if max(sizes) >= _SPREAD * max(1.0, min(sizes)):
        return fit_line(sizes, times)[0]
    return median(times) if median(sizes) < before_ns else before_ns


def _speed(work: Sequence[_Work], fixed_ns: float) -> float:
    """How many times longer than predicted the work took beyond the fixed cost; 1 where there was next to none."""
    predicted = sum(one.predicted_ns for one in work)
    measured = sum(one.measured_ns - fixed_ns * one.kernels for one in work)
    if measured <= 0 or predicted <= 0 or predicted * _LEAST < sum(one.measured_ns for one in work):
        return 1.0
    return max(_FASTEST, measured / predicted)
