"""What a graph sends, and how another one with the same collectives is made to send the same.

Collectives are text, see ``rewriting.messages``. Process groups follow separately: their ranks may run other graphs.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.pin.file import GraphPlan
from inductor_passes.pin.pins import Pins
from inductor_passes.rewriting.messages import (
    counterparts,
    gather_of_parameters,
    group_of,
    messages,
    within,
    without_sizes,
)

#: Members of each, see :class:`Variant`.
Buckets = tuple[tuple[int | str, ...], ...]
#: What is compared of two graphs in one group, see :func:`kinds_of`.
Kind = tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """A graph that ranks run: what they agreed on or, where they did not, what came.

    Attributes:
        came: its collectives before the passes, in order, see ``rewriting.messages``.
        sent: those that it has since.
        buckets: starts that were merged, by their places in ``came``; by name those that rewrites made.
        rewritten: collectives were changed in other ways than merging and reordering.
        left_out: what passes that do so left out, see ``GraphPlan.left_out``.
        phase: ``forward``, ``backward`` or ``inference``.
        graph: digest of the graph, "" where it has none.
        any_order: groups in which a variant may come with these collectives in another order.
    """

    came: tuple[str, ...]
    sent: tuple[str, ...]
    buckets: Buckets
    rewritten: bool = False
    phase: str = ""
    graph: str = ""
    any_order: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, Kind]:
        """See :func:`kinds_of`."""
        return kinds_of(self.came, self.any_order)

    def sent_in(self, group: str) -> tuple[str, ...]:
        """What it sends in one group."""
        return within(self.sent, (group,))

    def text(self) -> str:
        """What ranks with other graphs and the same collectives need of it."""
        return json.dumps({"came": self.came, "sent": self.sent, "buckets": self.buckets}, separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> Variant:
        """The inverse of :meth:`text`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        data = json.loads(text)
        came, sent = (tuple(map(str, data[key])) for key in ("came", "sent"))
        return Variant(came, sent, as_places(data["buckets"]))


def kinds_of(came: Sequence[str], any_order: Container[str]) -> dict[str, Kind]:
    """By group what is compared of two graphs' collectives in it; equal where they are the same for its other ranks.

    Ranks of one group may have equal graphs while those of another do not: with tensor parallelism inside of data
    parallelism, each group of the first may have batches of its own size.

    Args:
        any_order: see :func:`rewriting.messages.all_carry_parameters`.
    """
    found: dict[str, list[str]] = {}
    for text in came:
        found.setdefault(group_of(text), []).append(text)
    return {group: _compared(texts, group in any_order) for group, texts in sorted(found.items())}


def _compared(texts: list[str], parameters: bool) -> Kind:
    """What a group's messages are to other ranks.

    A gather of a parameter is known by it, wherever it comes, and of two equal ones one could take the other's place.
    So is a reduction where all messages carry parameters, unless two are equal: parts of the gradient of a parameter
    that is used twice could not take each other's place. Everything else has its order.
    """
    gathers = sorted(filter(gather_of_parameters, texts))
    others = [text for text in texts if not gather_of_parameters(text)]
    return (*gathers, *(sorted(others) if parameters and len(set(others)) == len(others) else others))


@dataclass(frozen=True)
class Part:
    """What a graph has to send in some groups because another graph sends it there."""

    variant: Variant
    groups: frozenset[str]

    @property
    def sent(self) -> tuple[str, ...]:
        """The messages, in order."""
        return within(self.variant.sent, self.groups)

    def buckets(self, collectives: Sequence[Collective], came: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
        """Its buckets by the starts of another graph; None where that has other collectives.

        Args:
            collectives: of that graph.
            came: their :func:`rewriting.messages`.
        """
        mine = [place for place, text in enumerate(self.variant.came) if group_of(text) in self.groups]
        theirs = [place for place, text in enumerate(came) if group_of(text) in self.groups]
        found = counterparts([came[place] for place in theirs], [self.variant.came[place] for place in mine])
        if found is None:
            return None
        names = {place: collectives[theirs[other]].start.name for place, other in zip(mine, found)}
        whole = len(mine) == len(self.variant.came)
        # Starts that rewrites made belong to the groups of those beside them.
        ours = [b for b in self.variant.buckets if whole or any(place in names for place in b)]
        return tuple(tuple(p if isinstance(p, str) else names[p] for p in bucket) for bucket in ours)


class Way(NamedTuple):
    """A way to make a graph send what it has to.

    Attributes:
        pins: the buckets.
        like: the order of messages, see ``rewriting.messages.order_like``.
        rewrite: whether collectives are changed in other ways, too.
    """

    pins: Pins
    like: tuple[tuple[str, ...], ...]
    rewrite: bool


@dataclass(frozen=True)
class Earlier:
    """What other ranks may send while this rank runs another graph.

    Attributes:
        parts: by groups, at least one.
        sizes: whether the sizes of what carries no parameters have to be equal, too.
    """

    parts: tuple[Part, ...]
    sizes: bool = True

    @staticmethod
    def of(variant: Variant, *, sizes: bool = True) -> Earlier:
        """All that one graph sends."""
        return Earlier((Part(variant, frozenset(map(group_of, variant.came))),), sizes)

    @property
    def phase(self) -> str:
        """Of the graph that most of it comes from."""
        return self.parts[0].variant.phase

    def within(self, groups: Container[str]) -> Earlier | None:
        """In certain groups only; None where there is nothing."""
        found = [Part(p.variant, frozenset(g for g in p.groups if g in groups)) for p in self.parts]
        parts = tuple(part for part in found if part.groups)
        return replace(self, parts=parts) if parts else None

    def is_sent(self, sent: Sequence[str]) -> bool:
        """Whether a graph with these messages sends it."""
        text = str if self.sizes else without_sizes
        return all(list(map(text, within(sent, p.groups))) == list(map(text, p.sent)) for p in self.parts)

    def ways(self, view: GraphView, rank: int) -> list[Way]:
        """Ways to make a graph send it, the best first. A graph that has the groups of one other graph has one way."""
        came, collectives = messages(view), view.collectives
        first = self.parts[0].variant
        everything = Part(first, frozenset(map(group_of, (*first.came, *came))))
        tried: list[tuple[tuple[Part, ...], bool]] = [((everything,), first.rewritten)]
        if self.parts != (everything,):
            # A batch of another size: what carries it is merged and ordered as there, where that can be done.
            tried += [(self.parts, True), (self.parts, False)]
        found = []
        for parts, rewrite in tried:
            buckets = [part.buckets(collectives, came) for part in parts]
            if None not in buckets:
                plan = GraphPlan(buckets=sum(filter(None, buckets), ()), left_out=first.left_out)
                pins = Pins(plan, "an earlier variant", "", rank, replan=True)
                found.append(Way(pins, tuple(part.sent for part in parts), rewrite))
        return found


def places(collectives: Sequence[Collective], buckets: Sequence[Sequence[str]]) -> Buckets:
    """Buckets of starts, by name, as places among a graph's collectives."""
    place = {one.start.name: number for number, one in enumerate(collectives)}
    return tuple(tuple(place.get(name, name) for name in bucket) for bucket in buckets)


def as_places(data: Sequence[Sequence[int | str]]) -> Buckets:
    """Buckets as they were read from JSON."""
    return tuple(tuple(one if isinstance(one, str) else int(one) for one in bucket) for bucket in data)
