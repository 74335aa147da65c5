"""Members of coalesced collectives are rewritten one by one, if that pays.

A rewrite looks at single collectives. So coalesced ones are taken apart, everything is rewritten, and what is left of
each of them, as well as what became of its members, travels together again in the coalesced form. Taking apart costs a
latency for every message more than before; the rewrites of its members have to gain more than that. Where they do not,
the graph is put back and rewritten with that collective whole. Collectives whose members were merged with each other
win or lose together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch.fx

from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.rewrites.work import COALESCED, Work
from inductor_passes.rewriting.contract import Facts
from inductor_passes.rewriting.members import Refused, slots
from inductor_passes.rewriting.merge import MergeError, merge
from inductor_passes.rewriting.split import Split, split, split_wait, splittable, waits_for_lists

Refusals = Sequence[tuple[tuple[str, torch.fx.Node], Decision]]


@dataclass(frozen=True)
class Together:
    """What became of the coalesced collectives that were taken apart.

    Attributes:
        paid: a decision for every one of which that paid.
        refused: why the others should have stayed whole, and what would have to be different for their members.
    """

    paid: list[Decision]
    refused: list[Decision]


class Taken:
    """The coalesced collectives of one graph as it came.

    Attributes:
        candidates: names of all starts that can be taken apart.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._wholes = {c.start.name: c for c in splittable(facts.view)}
        # The nodes do not outlive being taken apart; what is asked of the wholes afterwards is plain.
        self._sources = {name: source_line(c.start) for name, c in self._wholes.items()}
        self.candidates = frozenset(self._wholes)

    def apart(self, graph: torch.fx.Graph, names: frozenset[str]) -> list[Split]:
        """Take these apart, and all waits for lists, in place."""
        done = [split_wait(graph, wait) for wait in waits_for_lists(self._facts.view)]
        view = GraphView(graph) if done else self._facts.view
        done += [split(graph, c) for c in splittable(view) if c.start.name in names]
        return done

    def together(
        self,
        work: Work,
        splits: Sequence[Split],
        applied: Sequence[tuple[frozenset[str], int]],
        refusals: Refusals,
    ) -> Together:
        """Put what is left together again, and say for which collectives it paid to take them apart.

        Args:
            applied: per rewrite that touched members, whose members these were, and what it gained in ns.
            refusals: the run's, by rewrite and root.
        """
        sizes = {one.name: len(one.starts) for one in splits if one.starts}
        if not sizes:
            return Together([], [])
        families = _connected(names for names, _ in applied)
        refused = [
            replace(decision, node=name)
            for (_, root), decision in refusals
            for name in work.families.get(root, ())
            if not any(name in family for family in families)
        ]
        merged = self._merge(work, GraphView(work.graph), families)
        paid = []
        for family in families:
            gain = sum(ns for names, ns in applied if names <= family)
            gain += sum(work.price_ns(self._wholes[name]) - self._price_apart(work, name) for name in sorted(family))
            gain += sum(ns for names, ns in merged if names <= family)
            for name in sorted(family):
                if gain > 0:
                    paid.append(self._decision(name, Verdict.APPLIED, Reason.PROFITABLE, sizes[name], gain))
                else:
                    refused.append(self._decision(name, Verdict.REFUSED, Reason.NOT_PROFITABLE, sizes[name], gain))
        return Together(paid, refused)

    def _merge(
        self, work: Work, view: GraphView, families: Sequence[frozenset[str]]
    ) -> list[tuple[frozenset[str], int]]:
        """Put single collectives of each family together; whose they were, and what it saves in ns."""
        alike: dict[tuple[int, tuple[object, ...]], list[Collective]] = {}
        for collective in view.collectives:
            names = work.families.get(collective.start, frozenset())
            number = next((k for k, family in enumerate(families) if names & family), None)
            if number is None or collective.in_place or not _fits(view, collective):
                continue
            what = (collective.kind, collective.group, collective.reduce_op, collective.dtypes)
            alike.setdefault((number, what), []).append(collective)
        groups = [(families[number], found) for (number, _), found in alike.items() if len(found) > 1]
        if not groups:
            return []
        try:
            made = merge(work.graph, view, [found for _, found in groups], forms=["coalesced"] * len(groups))
        except MergeError:
            return []
        saved = []
        for (family, found), one in zip(groups, made):
            work.applications.add(COALESCED, list(one.removed), list(one.added), list(one.results))
            ranks = found[0].group.ranks
            sizes = [sum(c.input_bytes or 0 for c in found), sum(c.output_bytes or 0 for c in found)]
            saved.append((family, work.price_ns(*found) - work.collective_ns(one.kind, sizes[0], sizes[1], ranks)))
        return saved

    def _price_apart(self, work: Work, name: str) -> int:
        whole = self._wholes[name]
        total = 0
        for size, received in _sizes(whole):
            total += work.collective_ns(whole.kind, size, received, whole.group.ranks)
        return total

    def _decision(self, name: str, verdict: Verdict, reason: Reason, members: int, gain: int) -> Decision:
        what = "taken apart" if verdict is Verdict.APPLIED else "its members gain less than the messages that they need"
        whole = self._wholes[name]
        return Decision(
            COALESCED, name, verdict, reason, f"{members} members: {what}", self._sources[name], whole.group.name, gain
        )


def _connected(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Unions of sets that overlap, in order of first occurrence."""
    found: list[frozenset[str]] = []
    for one in sets:
        touching = [other for other in found if other & one]
        joined = one.union(*touching)
        at = found.index(touching[0]) if touching else len(found)
        found = [other for other in found if other not in touching]
        found.insert(min(at, len(found)), joined)
    return found


def _fits(view: GraphView, collective: Collective) -> bool:
    shared = (user for node in collective.inputs for user in node.users if user is not collective.start)
    if any(user in view.by_start for user in shared):
        # Inductor may do an all_reduce in place when it is the last to use its operand: the order must not change.
        return False
    try:
        slots(view, collective)
    except Refused:
        return False
    return True


def _sizes(whole: Collective) -> list[tuple[int, int]]:
    """(input bytes, output bytes) per member, by hint."""
    facts, ranks = whole.kind.facts, whole.group.size
    multiplied, divided = (ranks if facts.input_share else 1), (ranks if facts.output_share else 1)
    return [(size, size * multiplied // divided) for size in whole.member_bytes]
