"""What collectives cost as they are and narrowed: each message on the link of its own group, and the kernels around."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from inductor_passes.compress.form import Form
from inductor_passes.compress.levels import Levels
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind


@dataclass(frozen=True)
class Price:
    """What a collective costs, all in ns and in bytes that this rank sends.

    Attributes:
        link_ns: on its lane; of two levels, on both.
        before_ns / after_ns: of the compute lane, to the start (issuing it included) and behind the wait.
        sent_bytes: of the message; twice for a reduction to all ranks; of two levels, of what goes between hosts.
    """

    link_ns: int
    before_ns: int
    after_ns: int
    sent_bytes: int

    @property
    def all_ns(self) -> int:
        """On all lanes."""
        return self.link_ns + self.before_ns + self.after_ns


def as_it_is(collective: Collective, profile: CostProfile) -> Price:
    """Of a collective that is not narrowed."""
    given, got = collective.input_bytes or 0, collective.output_bytes or 0
    sent = 2 * given if collective.kind is CollectiveKind.ALL_REDUCE else given
    link, issue = _message(collective.kind, given, got, collective.group.ranks, profile)
    return Price(link, issue, 0, sent)


def price(collective: Collective, form: Form, profile: CostProfile, kept: bool = False) -> Price:
    """What a collective costs in a form: its messages, and the kernels that narrow, widen and add.

    Args:
        kept: this rank widens its own message too.
    """
    kind, itemsize, ranks = collective.kind, collective.dtypes[0].itemsize, collective.group.ranks
    elements = math.prod(collective.inputs[0].meta["val"].shape)
    found = _narrow(kind, elements, itemsize, form, ranks, profile)
    if not kept:
        return found
    message = found.sent_bytes // (2 if kind is CollectiveKind.ALL_REDUCE else 1)
    return replace(found, before_ns=found.before_ns + _kernel(profile, message, elements * itemsize))


def _message(
    kind: CollectiveKind, given: int, got: int, ranks: tuple[int, ...], profile: CostProfile
) -> tuple[int, int]:
    """Time on the link, and to issue it."""
    return profile.communication_ns(kind, given, got, ranks), profile.issue_ns(kind, given, got, ranks)


def _kernel(profile: CostProfile, read: int, written: int) -> int:
    return profile.compute_ns(0, read + written, "float32", 1)


def _narrow(
    kind: CollectiveKind, elements: int, itemsize: int, form: Form, ranks: tuple[int, ...], profile: CostProfile
) -> Price:
    """Of a collective of so many elements over these ranks."""
    pieces = 1 if kind is CollectiveKind.ALL_GATHER else len(ranks)
    message = pieces * form.message_bytes(-(-elements // pieces))
    before = _kernel(profile, elements * itemsize, message)
    if kind is CollectiveKind.ALL_GATHER:
        link, issue = _message(CollectiveKind.ALL_GATHER, message, message * len(ranks), ranks, profile)
        after = _kernel(profile, message * len(ranks), elements * itemsize * len(ranks))
        return Price(link, issue + before, after, message)
    link, issue = _message(CollectiveKind.ALL_TO_ALL, message, message, ranks, profile)
    if kind is CollectiveKind.ALL_REDUCE:
        piece = message // len(ranks)
        second, again = _message(CollectiveKind.ALL_GATHER, piece, message, ranks, profile)
        after = _kernel(profile, message, piece) + again + _kernel(profile, message, elements * itemsize)
        return Price(link + second, issue + before, after, 2 * message)
    kept = elements // len(ranks) if kind is CollectiveKind.REDUCE_SCATTER else elements
    return Price(link, issue + before, _kernel(profile, message, kept * itemsize), message)


def in_two_levels(
    collective: Collective, form: Form, levels: Levels, inside_first: bool, profile: CostProfile
) -> Price:
    """What a collective costs that is narrow between hosts and wide inside them.

    Args:
        inside_first: of an all_gather: which of the two gathers comes first.
    """
    kind, item = collective.kind, collective.dtypes[0].itemsize
    elements = math.prod(collective.inputs[0].meta["val"].shape)
    places, hosts = levels.inside.ranks, levels.between.ranks
    given = elements * item
    if kind is CollectiveKind.ALL_GATHER:
        many = len(places) if inside_first else len(hosts)
        first = given if inside_first else given * len(hosts)
        wide = _message(kind, first, first * len(places), places, profile)
        narrow = _narrow(kind, elements * (many if inside_first else 1), item, form, hosts, profile)
        # Gathered place by place, and read host by host, or the other way round.
        whole = given * len(places) * len(hosts)
        moved = _kernel(profile, whole, whole) if levels.by_host != inside_first else 0
        before, after = (wide[1], moved) if inside_first else (0, wide[1] + moved)
        return _joined(wide[0], before, after, narrow)
    piece = -(-elements // len(places))
    scatter = _message(CollectiveKind.REDUCE_SCATTER, piece * len(places) * item, piece * item, places, profile)
    narrow = _narrow(kind, piece, item, form, hosts, profile)
    if kind is CollectiveKind.REDUCE_SCATTER:
        moved = _kernel(profile, given, given) if levels.by_host else 0
        return _joined(scatter[0], scatter[1] + moved, 0, narrow)
    gather = _message(CollectiveKind.ALL_GATHER, piece * item, piece * len(places) * item, places, profile)
    return _joined(scatter[0] + gather[0], scatter[1], gather[1], narrow)


def _joined(link: int, before: int, after: int, narrow: Price) -> Price:
    """The wide messages inside a host, and the narrow one between hosts."""
    return Price(narrow.link_ns + link, narrow.before_ns + before, narrow.after_ns + after, narrow.sent_bytes)


def between_bytes(collective: Collective, levels: Levels) -> int:
    """What two levels would send between hosts if nothing were narrowed."""
    given = collective.input_bytes or 0
    if collective.kind is CollectiveKind.ALL_GATHER:
        return given
    return given * (2 if collective.kind is CollectiveKind.ALL_REDUCE else 1) // levels.inside.size
