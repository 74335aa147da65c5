"""All regions around one collective with their prices; places that look alike are searched once.

Growing and pricing takes a few milliseconds for each dimension, number of parts and reach. Layers repeat: what was
found around one collective is carried over to all that have the same surroundings (``alike``), and only what differs
is worked out for each, the time that the schedule leaves exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from inductor_passes.async_tp.alike import Nodes, Places, Seen
from inductor_passes.async_tp.gate import Priced, Pricer
from inductor_passes.async_tp.region import Grower, Grown, Reach, Recipe, Refusal, Region, axes, blocks
from inductor_passes.async_tp.rules import shape_of
from inductor_passes.async_tp.slab import Partial, Widths
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason

#: How many collectives downstream may join, tried one after the other while more join.
_FURTHER = (0, 1, 4, 32)
#: With how many places, the latest first, a new one is compared, beside the one that is expected.
_COMPARED = 8


class Cutting(Protocol):
    """What the search asks of the pass's options."""

    @property
    def contracting(self) -> bool:
        """Whether sums over a cut axis may be computed as sums of parts."""

    def widths_of(self, extent: object) -> tuple[Widths, ...]:
        """Into which parts a dimension may be cut."""


@dataclass(frozen=True, eq=False)
class Around:
    """What was found around a collective.

    Attributes:
        options: all regions with how they were grown, in the order in which they were found.
        refusal: why there are no more.
    """

    collective: Collective
    options: tuple[tuple[Recipe, Priced], ...]
    refusal: Refusal | None


@dataclass(eq=False)
class _Place:
    """A collective around which regions were grown: what came of it, and the place of the collective behind it."""

    key: Hashable
    found: Around
    seen: Seen
    followed_by: _Place | None = None


class Search:
    """Searches one graph.

    Attributes:
        searched: collectives around which regions were grown; the others look like one of these.
    """

    def __init__(self, cutting: Cutting, view: GraphView, pricer: Pricer) -> None:
        self._cutting, self._view, self._pricer = cutting, view, pricer
        self._grower = Grower(view)
        self._places = Places(view, pricer.duration_ns, self._grower.about)
        self._known: dict[Hashable, list[_Place]] = {}
        self._latest: _Place | None = None
        self.searched: list[Collective] = []

    def around(self, collective: Collective) -> Around:
        """All regions around a collective."""
        key = self._places.key(collective.start)
        known = self._known.setdefault(key, [])
        # Layers follow each other: what came behind the place before when that was met last.
        expected = None if self._latest is None else self._latest.followed_by
        candidates = [place for place in reversed(known[-_COMPARED:]) if place is not expected]
        if expected is not None and expected.key == key:
            candidates.insert(0, expected)
        for place in candidates:
            nodes = self._places.match(place.seen, place.found.collective.start, collective.start)
            if nodes is not None:
                self._met(place)
                return self._carried_over(place.found, nodes, collective)
        self._grower.seen = seen = Seen()
        found = self._searched(collective)
        seen.close()
        known.append(_Place(key, found, seen))
        self._met(known[-1])
        return found

    def _met(self, place: _Place) -> None:
        if self._latest is not None:
            self._latest.followed_by = place
        self._latest = place

    def again(self, recipe: Recipe, collective: Collective) -> Priced:
        """A region that was found before, grown as it was."""
        grow = self._grower.backward if recipe.upstream else self._grower.forward
        regions = grow(collective, recipe.dim, recipe.widths, recipe.reach)
        assert not isinstance(regions, Refusal)
        return self._pricer.price(regions[recipe.beside])

    def _carried_over(self, found: Around, nodes: Nodes, collective: Collective) -> Around:
        options = tuple(
            (replace(recipe, start=collective.start.name), self._elsewhere(priced, nodes, collective))
            for recipe, priced in found.options
        )
        why = found.refusal
        if why is not None and why.node is not None:
            why = replace(why, node=nodes[why.node])
        return Around(collective, options, why)

    def _elsewhere(self, priced: Priced, nodes: Nodes, collective: Collective) -> Priced:
        region = priced.region
        moved = Region(
            region.widths,
            {nodes[n]: cut for n, cut in region.cuts.items()},
            {nodes[n]: {nodes[i]: part for i, part in needs.items()} for n, needs in region.needs.items()},
            tuple(self._view.by_start[nodes[c.start]] for c in region.collectives),
            {nodes[n]: dot for n, dot in region.matmuls.items()},
            (collective.label, region.axis[1]),
        )
        return self._pricer.like(priced, moved, tuple((nodes[n], part) for n, part in priced.order.order))

    def _searched(self, collective: Collective) -> Around:
        self.searched.append(collective)
        grower = self._grower
        grow = [grower.forward] if collective.kind == CollectiveKind.ALL_GATHER else [grower.backward]
        if collective.kind == CollectiveKind.ALL_TO_ALL:
            grow.append(grower.forward)
        found: list[tuple[Recipe, Priced]] = []
        why: Refusal | None = None
        seen: set[tuple[object, ...]] = set()
        tries = [
            (dim, widths, direction)
            for dim in axes(collective)
            for widths in self._cutting.widths_of(shape_of(collective.inputs[0])[dim] // blocks(collective, dim))
            for direction in grow
        ]
        for dim, widths, direction in tries:
            for contracting in (True, False)[not self._cutting.contracting :]:
                first = Recipe(
                    collective.start.name, dim, widths, Reach(contracting), direction == grower.backward, beside=False
                )
                regions, refusal = _grown(direction, collective, first)
                for recipe, region in regions:
                    key = (widths, tuple(region.cuts.items()))
                    if key not in seen:
                        seen.add(key)
                        found.append((recipe, self._pricer.price(region)))
                if refusal is not None:
                    why = _clearer(why, refusal)
                elif not any(isinstance(cut, Partial) for _, region in regions for cut in region.cuts.values()):
                    # Nothing is contracted: without it the regions are the same.
                    break
        return Around(collective, tuple(found), None if found else why)


def _grown(
    grow: Callable[[Collective, int, Widths, Reach], Grown], collective: Collective, first: Recipe
) -> tuple[list[tuple[Recipe, Region]], Refusal | None]:
    """The regions around one axis, up to the nearest matmuls and beyond, and why there are no more."""
    found: list[tuple[Recipe, Region]] = []
    joined = 0
    for further in _FURTHER:
        recipe = replace(first, reach=replace(first.reach, further=further))
        regions = grow(collective, recipe.dim, recipe.widths, recipe.reach)
        if isinstance(regions, Refusal):
            return found, regions
        found += [(replace(recipe, beside=number > 0), region) for number, region in enumerate(regions)]
        if len(regions[0].collectives) == joined:
            # Whoever reaches further would have met the next one by now.
            break
        joined = len(regions[0].collectives)
    return found, None


def _clearer(old: Refusal | None, new: Refusal) -> Refusal:
    """The refusal that says more: about the surroundings rather than about one axis."""
    if old is None or (old.reason is not Reason.NO_INDEPENDENT_COMPUTE and new.reason is Reason.NO_INDEPENDENT_COMPUTE):
        return new
    return old
