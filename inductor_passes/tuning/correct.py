"""A cost profile corrected by what the ranks measured of graphs; see ``trace.reprofile`` for how.

Kernels that ran while nothing transferred tell how much longer others of their class took beside transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.fit import fit_line
from inductor_passes.cost.profile import MOST_SLOWDOWN, CostProfile
from inductor_passes.trace.profiled import Pair
from inductor_passes.trace.reprofile import others_scaled, profile_from, scaled_compute, unfitted
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import AT_MOST, UNKNOWN, Account

#: How the name of a corrected profile begins; then comes the name of the one that was corrected, and a colon.
_TUNED = "tuned from "
#: Works whose largest is less than this multiple of the smallest do not tell a fixed cost from a speed.
_SPREAD = 4.0
#: Work that was predicted to take less than one part in so many of what was measured says nothing about its speed.
_LEAST = 50.0
_FASTEST = 0.05
#: What transfers slow kernels down by, on groups of one layout by collectives of one kind.
_Which: TypeAlias = tuple[GroupLayout, str]
#: A kernel ran alone when transfers were under way for less than this share of it, and beside one from the other on.
_ALONE, _BESIDE = 0.1, 0.25
#: Kernels that ran alone tell what those of their class take when they are at least so many and such a part of it.
_LEAST_ALONE, _PART_ALONE = 2, 0.05
#: A slowdown below this share is noise.
_SLOWDOWN = 0.1


@dataclass(frozen=True)
class Others:
    """What ranks that do not have a graph of this rank's measured of the collectives of one of theirs."""

    digest: str
    ranks: tuple[int, ...]
    steps: int
    pairs: tuple[Pair, ...]


def others_of(base: CostProfile, planned: Planned, account: Account) -> Others:
    """For other ranks."""
    pairs = _pairs(base, planned, as_calibrated(base, planned, account))
    return Others(planned.about.digest, account.ranks, account.steps, tuple(pairs))


def corrected(
    base: CostProfile, found: Sequence[tuple[Planned, Account]], others: Sequence[Others] = ()
) -> CostProfile:
    """``base`` with everything that was measured laid over it; the same for the same input on every rank.

    Its name says where it comes from: the profile before, how many steps of which plans on how many ranks.
    """
    found = [(planned, as_calibrated(base, planned, account)) for planned, account in found]
    pairs = _all_pairs(base, found, others)
    plans = " ".join(sorted({planned.about.digest for planned, _ in found} | {one.digest for one in others}))
    ranks = len({rank for _, account in found for rank in account.ranks}.union(*(one.ranks for one in others)))
    steps = max([*(account.steps for _, account in found), *(one.steps for one in others)])
    again = base.name.startswith(_TUNED)
    before = base.name.removeprefix(_TUNED).rpartition(": ")[0] if again else base.name
    name = f"{_TUNED}{before}: {steps} steps on {ranks} ranks from {base.hash()}, plans {plans}"
    profile = profile_from(base, pairs, name, every_size=True)
    return _with_kernels(others_scaled(base, profile, pairs), found)


def as_calibrated(base: CostProfile, planned: Planned, account: Account) -> Account:
    """The account with what a message costs its host where kernels show it.

    A library sends on threads of its own. What these take from the host shows at the kernels that run meanwhile, and
    not at the calls that issue and wait. Charged to the kernels, each would look longer and merging worthless. So where
    messages of a kind cost less at their calls than was calibrated, and kernels took longer than predicted, the
    difference is the messages', as far as kernels took longer. What all took together stays the same.
    """
    tasks = [planned.problem.tasks[one.task] for one in planned.collectives]
    kinds: dict[_Which, list[int]] = {}
    for place, one in enumerate(planned.collectives):
        kinds.setdefault((base.layout(one.ranks), one.kind), []).append(place)
    lacking: dict[int, float] = {}
    for places in kinds.values():
        expected = sum(tasks[place].issue_ns for place in places)
        short = expected - sum(account.transfers[place].issue_ns for place in places)
        if short > 0:
            lacking.update({place: short * tasks[place].issue_ns / expected for place in places})
    longer = {one.call: max(0, one.measured_ns - planned.predicted_ns(one.call)) for one in account.kernels}
    excess, wanted = sum(longer.values()), sum(lacking.values())
    if not excess or not wanted:
        return account
    moved = min(1.0, excess / wanted)
    transfers = tuple(
        replace(one, issue_ns=one.issue_ns + round(moved * lacking.get(place, 0.0)))
        for place, one in enumerate(account.transfers)
    )
    taken = moved * wanted / excess
    kernels = tuple(
        replace(one, measured_ns=one.measured_ns - round(taken * longer[one.call])) for one in account.kernels
    )
    return replace(account, transfers=transfers, kernels=kernels)


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
    """A call that computes.

    Attributes:
        name: its class, see :meth:`Planned.class_of`; ``library``: whether it holds a library kernel.
        kernels: of how many it is.
        predicted_ns: what these were predicted to take; ``work_ns`` without the fixed cost of each.
        measured_ns: what all took.
        shares: of its time, in which collectives of a kind were under way on groups of a layout.
        unsure: maybe of others too.
    """

    name: str
    library: bool
    kernels: int
    predicted_ns: float
    work_ns: float
    measured_ns: float
    shares: Mapping[_Which, float]
    unsure: bool

    @property
    def alone(self) -> bool:
        return not self.unsure and sum(self.shares.values()) < _ALONE

    @property
    def each(self) -> tuple[float, float]:
        return self.work_ns / self.kernels, self.measured_ns / self.kernels

    def by_itself(self, slowdowns: Mapping[_Which, float]) -> _Work:
        """As if nothing had transferred beside it."""
        whole = max(1.0, sum(self.shares.values()))
        gained = sum(share / whole * (1 - 1 / (1 + slowdowns.get(which, 0.0))) for which, share in self.shares.items())
        return replace(self, measured_ns=self.measured_ns * (1 - gained))


def _with_kernels(profile: CostProfile, found: Sequence[tuple[Planned, Account]]) -> CostProfile:
    """The profile with what transfers slow kernels down by, and, for kernels by themselves, their fixed cost and the
    speed of library kernels and of all others, as measured.

    A call of n kernels takes n times the fixed cost and its work in proportion. Kernels of different sizes tell one
    from the other; where all are about as large, those with less work than the fixed cost are taken for launches.
    """
    fixed_ns = found[0][0].about.kernel_ns
    everything = [one for planned, account in found for one in _works(profile, planned, account, fixed_ns)]
    if not everything:
        return profile
    slowdowns = _with_untold(profile, _slowdowns(everything))
    everything = [one.by_itself(slowdowns) for one in everything]
    work = {library: [one for one in everything if one.library is library] for library in (True, False)}
    count = sum(one.kernels for one in everything)
    fixed = sum(_fixed_ns(ones, fixed_ns) * sum(one.kernels for one in ones) for ones in work.values() if ones) / count
    profile = scaled_compute(profile, _speed(work[True], fixed), _speed(work[False], fixed), fixed)
    groups = [
        replace(g, costs=tuple(replace(c, slowdown=slowdowns[g.layout, c.kind]) for c in g.costs))
        for g in profile.groups
    ]
    return replace(profile, groups=tuple(groups))


def _with_untold(profile: CostProfile, told: Mapping[_Which, float]) -> dict[_Which, float]:
    """What was told, and for all other kinds what an earlier run told, or the most of those on the same links."""
    found = {}
    for group in profile.groups:
        most = max((share for (layout, _), share in told.items() if layout == group.layout), default=0.0)
        for cost in group.costs:
            found[group.layout, cost.kind] = told.get((group.layout, cost.kind), cost.slowdown or most)
    return found


def _works(profile: CostProfile, planned: Planned, account: Account, fixed_ns: float) -> Iterator[_Work]:
    for one in account.kernels:
        tasks = [planned.problem.tasks[task] for task in planned.calls[one.call].tasks]
        timed = [task for task in tasks if task.duration_ns]
        if timed and one.measured_ns:
            predicted = float(sum(task.duration_ns for task in timed))
            shares: dict[_Which, float] = {}
            for place, share in one.covered:
                about = planned.collectives[place]
                which = profile.layout(about.ranks), about.kind
                shares[which] = shares.get(which, 0.0) + share
            yield _Work(
                planned.class_of(one.call),
                any(task.label for task in timed),
                len(timed),
                predicted,
                max(0.0, predicted - len(timed) * fixed_ns),
                float(one.measured_ns),
                shares,
                one.unsure,
            )


def _slowdowns(everything: Sequence[_Work]) -> dict[_Which, float]:
    """By what share kernels took longer beside collectives of a kind on groups of a layout.

    Kernels of a class that ran alone tell what the others of it would take alone. One that takes ``a`` ns alone and
    took ``m``, of which a transfer was under way for the share ``f``, did ``m (1 - f)`` of its work at full speed, so
    the rest of it, ``a - m (1 - f)``, took ``m f``.
    """
    took: dict[_Which, float] = {}
    rest: dict[_Which, float] = {}
    for name in sorted({one.name for one in everything}):
        mine = [one for one in everything if one.name == name]
        alone = [one for one in mine if one.alone]
        predicted = sum(one.predicted_ns for one in alone)
        if len(alone) < _LEAST_ALONE or predicted < _PART_ALONE * sum(one.predicted_ns for one in mine):
            continue
        factor = sum(one.measured_ns for one in alone) / predicted
        for one in mine:
            for which, share in one.shares.items():
                if not one.unsure and share >= _BESIDE:
                    slow_ns = one.measured_ns * min(1.0, share)
                    took[which] = took.get(which, 0.0) + slow_ns
                    rest[which] = rest.get(which, 0.0) + factor * one.predicted_ns - (one.measured_ns - slow_ns)
    found = {which: ns / rest[which] - 1 if rest[which] > 0 else 0.0 for which, ns in took.items()}
    return {which: min(MOST_SLOWDOWN, one) if one >= _SLOWDOWN else 0.0 for which, one in found.items()}


def _fixed_ns(work: Sequence[_Work], before_ns: float) -> float:
    """Of a kernel, as these show it."""
    sizes, times = zip(*(one.each for one in work))
    if max(sizes) >= _SPREAD * max(1.0, min(sizes)):
        return fit_line(sizes, times)[0]
    return median(times) if median(sizes) < before_ns else before_ns


def _speed(work: Sequence[_Work], fixed_ns: float) -> float:
    """How many times longer than predicted the work took beyond the fixed cost; 1 where there was next to none."""
    predicted = sum(one.work_ns for one in work)
    measured = sum(one.measured_ns - fixed_ns * one.kernels for one in work)
    if measured <= 0 or predicted <= 0 or predicted * _LEAST < sum(one.measured_ns for one in work):
        return 1.0
    return max(_FASTEST, measured / predicted)
