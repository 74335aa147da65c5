"""Which collectives depend on which: reachability restricted to collectives, in near-linear time.

Merging collectives contracts them into one node of the dependency graph, which stays acyclic if and only if no path
leads from one member to another. Instead of searching paths per pair, one sweep in graph order carries a bit set of
collectives through the graph, O(edges * collectives / word size), and drops a node's set after its last reader.
What is merged forms groups, with the set of what a group depends on kept complete; a collective that was not merged is
asked through the groups that it depends on. So several merges are checked against each other too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch.fx

from inductor_passes.ir.view import Collective, GraphView


class Dependencies:
    """Transitive dependencies between the collectives of a graph, under a growing set of merges.

    Args:
        kept: further pairs (before, after) of starts and waits, in graph order, that stay in order.

    Attributes:
        visits: edges looked at while building; the measure of work for tests.
    """

    def __init__(self, view: GraphView, kept: Iterable[tuple[torch.fx.Node, torch.fx.Node]] = ()) -> None:
        # Of collectives as they came. Merged ones have what they depend on, and all that is merged with it, by group.
        self._ancestors = [0] * len(view.collectives)
        self._groups: dict[int, tuple[int, int]] = {}
        self._group_of: dict[int, int] = {}
        self._merged = self._next = 0
        self.visits = 0
        extra: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for before, after in (*view.ordering_edges(), *kept):
            extra.setdefault(after, []).append(before)
        last_reader: dict[torch.fx.Node, int] = {}
        for position, node in enumerate(view.nodes):
            for source in (*node.all_input_nodes, *extra.get(node, ())):
                last_reader[source] = position
        dying: dict[int, list[torch.fx.Node]] = {}
        for source, position in last_reader.items():
            dying.setdefault(position, []).append(source)

        owners: dict[torch.fx.Node, int] = {}
        for collective in view.collectives:
            for member in (collective.start, *collective.waits):
                owners[member] = owners.get(member, 0) | 1 << collective.index
        reached: dict[torch.fx.Node, int] = {}
        for position, node in enumerate(view.nodes):
            bits = 0
            for source in (*node.all_input_nodes, *extra.get(node, ())):
                bits |= reached.get(source, 0)
                self.visits += 1
            own = owners.get(node, 0)
            if own:
                for index in _indices(own):
                    self._ancestors[index] |= bits & ~(1 << index)
                bits |= own
            if bits and node in last_reader:
                reached[node] = bits
            for source in dying.get(position, ()):
                reached.pop(source, None)

    def copy(self) -> Dependencies:
        """The same dependencies, to be merged independently of these."""
        other = copy.copy(self)
        other._groups, other._group_of = dict(self._groups), dict(self._group_of)
        return other

    def independent(self, members: Iterable[Collective]) -> bool:
        """Whether no member depends on another: merging them keeps the graph acyclic."""
        mask = _mask(members)
        return not any(self._before(index) & mask for index in _indices(mask))

    def conflict(self, members: Iterable[Collective], candidate: Collective) -> Collective | None:
        """The first of ``members`` that depends on ``candidate`` or that it depends on, None if there is none."""
        ancestors, bit = self._before(candidate.index), 1 << candidate.index
        for member in members:
            if ancestors >> member.index & 1 or self._before(member.index) & bit:
                return member
        return None

    def merge(self, members: Iterable[Collective]) -> None:
        """Treat ``members``, and what they were merged with before, as one: what depends on one depends on all.

        O(members + groups).

        Raises:
            ValueError: the members depend on each other.
        """
        mask = together = 0
        absorbed: dict[int, None] = {}
        for member in members:
            group = self._group_of.get(member.index)
            if group is not None:
                absorbed[group] = None
            mask |= 1 << member.index if group is None else self._groups[group][0]
            together |= self._before(member.index)
        if together & mask:
            raise ValueError("collectives that depend on each other cannot be merged")
        # The largest keeps its number: the others' members are entered anew.
        kept = max(absorbed, key=lambda group: self._groups[group][0].bit_count(), default=self._next)
        self._next += kept == self._next
        known = self._groups[kept][0] if kept in self._groups else 0
        for index in _indices(mask & ~known):
            self._group_of[index] = kept
        for group in absorbed:
            del self._groups[group]
        for group, (own, before) in self._groups.items():
            if before & mask:
                self._groups[group] = own, before | mask | together
        self._groups[kept] = mask, together
        self._merged |= mask

    def depends(self, later: Collective, earlier: Collective) -> bool:
        """Whether ``later`` cannot start before ``earlier`` was started."""
        return bool(self._before(later.index) >> earlier.index & 1)

    def _before(self, index: int) -> int:
        """The collectives that one depends on, by its own paths and through what is merged."""
        group = self._group_of.get(index)
        if group is not None:
            return self._groups[group][1]
        found = self._ancestors[index]
        left = found & self._merged
        while left:
            # What a group depends on is complete: what it covers need not be asked any more.
            own, before = self._groups[self._group_of[left.bit_length() - 1]]
            found |= own | before
            left &= ~(own | before)
        return found


def _mask(members: Iterable[Collective]) -> int:
    mask = 0
    for member in members:
        mask |= 1 << member.index
    return mask


def _indices(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
