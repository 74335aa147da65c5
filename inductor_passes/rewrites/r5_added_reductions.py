"""R5: the sum of several all_reduces becomes the all_reduce of a sum.

before::

    z = wait(all_reduce(x, a)) + t + wait(all_reduce(y, a))

after::

    z = t + wait(all_reduce(x + y, a))

Matches ``sum`` and ``avg`` with equal group, op and shape in one tree of additions whose inner sums nothing else reads;
all sides may pass through the same data movement, and keep the same piece. Other terms of the tree stay. What keeps
several pieces, each of which is added to the same piece of the others, is reduced once too. reduce_scatters likewise;
what packs each of their inputs packs the sum instead, once.

Results that are widened before they are added are widened before they are reduced: the message is as wide as the sum::

    z = cast(wait(all_reduce(x, a)), float32) + cast(wait(all_reduce(y, a)), float32)
    z = wait(all_reduce(cast(x, float32) + cast(y, float32), a))

Reassociates; without a cast, in a narrow dtype the addition now precedes the reduction. With one, ranks are added up in
the wider type. Saves all but one of the collectives: in tensor parallel backwards the input gradients of linears that
share an input are such a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import Movement, movement_behind
from inductor_passes.rewrites.paths import Path, ends, path_behind
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import reduced, scattered

KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
#: Additions looked through on the way to the top of a tree, and terms taken from it.
MAX_TERMS = 256


@dataclass(frozen=True)
class Side:
    """One term of a sum: what ``path`` makes of the wait of ``collective``."""

    collective: Collective
    path: Path


@dataclass(frozen=True)
class Total:
    """A tree of additions: its outermost one, all of them, its terms, and which of these are reduced."""

    top: torch.fx.Node
    inner: tuple[torch.fx.Node, ...]
    terms: tuple[torch.fx.Node, ...]
    sides: dict[torch.fx.Node, Side]

    @staticmethod
    def at(work: Work, top: torch.fx.Node) -> Total:
        """The tree below an outermost addition, as the graph is now."""
        inner, terms = _terms(top)
        found = {term: path_behind(term) for term in terms}
        behind = {term: work.behind(path.source, *KINDS) for term, path in found.items()}
        sides = {t: Side(c, found[t]) for t, c in behind.items() if c is not None}
        return Total(top, tuple(inner), tuple(terms), sides)

    def of(self, members: list[Collective]) -> list[Side]:
        """The terms that these collectives reduce, in order; one that is added twice comes twice."""
        starts = {c.start for c in members}
        found = [self.sides[t] for t in self.terms if t in self.sides]
        return [side for side in found if side.collective.start in starts]


class AddBeforeReducing:
    """See the module's docstring."""

    name: ClassVar[str] = "R5"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_reduce and reduce_scatter."""
        return work.collectives(*KINDS)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The reductions that are added to this one; the last of them is the root, so that each sum matches once."""
        collective = work.collective(root, *KINDS)
        tops = [] if collective is None else _tops(collective)
        if collective is None or not tops:
            return None
        totals = [Total.at(work, top) for top in tops]
        others = {s.collective.start: s.collective for s in totals[0].sides.values()}
        if root not in others or len(others) < 2:
            return None
        alike = [c for c in others.values() if _signature(c) == _signature(collective)]
        wanted = _uses(collective)
        members = [c for c in alike if wanted is not None and _same_uses(wanted, _uses(c))]
        if len(alike) < 2:
            refuse(Reason.DIFFERENT_GROUP, "the other reductions of the sum are of another kind")
        if len(members) < 2:
            if max(c.start for c in alike) is not root:
                return None
            refuse(Reason.DATA_DEPENDENCY, "the reduction has other readers, or another piece of it is added")
        if max(c.start for c in members) is not root:
            return None
        if collective.reduce_op not in ("sum", "avg"):
            refuse(Reason.MIXED_REDUCE_OP, f"{collective.reduce_op} of a sum is not the sum of {collective.reduce_op}")
        work.may_reassociate(collective, "adds before reducing")
        self._unwritten(work, totals, members)
        names = [c.start.name for c in members if c is not collective]
        return Match(
            work.price_ns(*members) - _price_of(work, collective, totals[0]),
            "with " + ", ".join(names),
            lambda: self._apply(work, tops, members),
        )

    def _unwritten(self, work: Work, totals: list[Total], members: list[Collective]) -> None:
        for total in totals:
            work.never_written(*total.inner)
            for side in total.of(members):
                work.never_written(side.path.source, *side.path.nodes)
        for one in members:
            pack = movement_behind(one.inputs[0])
            for node in (pack.source, *pack.nodes):
                work.unwritten(node, min(node, one.start), totals[0].top)

    def _apply(self, work: Work, tops: list[torch.fx.Node], members: list[Collective]) -> None:
        last = max(members, key=lambda c: c.start)
        made: list[torch.fx.Node] = []
        for top in tops:
            # Terms of a later sum may have been made of an earlier one.
            total = Total.at(work, top)

            def build(emit: Emitter, total: Total = total) -> torch.fx.Node:
                if not made:
                    made.append(_reduced(emit, total.of(members), last, total.top.meta["val"].dtype))
                return _rebuilt(emit, total, members, made[0])

            removed = {*total.inner}
            if top is tops[-1]:
                removed |= _behind(members)
            work.replace(self.name, last.start, sorted(removed, reverse=True), build, result=top)


def _rebuilt(emit: Emitter, total: Total, members: list[Collective], result: torch.fx.Node) -> torch.fx.Node:
    """A sum of what is left and of the same piece as before of one reduction's ``result``."""
    sides = total.of(members)
    result = sides[-1].path.replayed(emit, result)
    rest = [t for t in total.terms if total.sides.get(t) not in sides]
    if not rest:
        return result
    others = rest[0]
    for term in rest[1:]:
        others = emit.call(torch.ops.aten.add.Tensor, others, term)
    return emit.call(torch.ops.aten.add.Tensor, others, result)


def _signature(c: Collective) -> tuple[object, ...]:
    """Equal for reductions that may be made one; those of another type are widened where they are added."""
    return (c.kind, c.group, c.reduce_op, tuple(c.inputs[0].meta["val"].shape))


def _reduced(emit: Emitter, sides: list[Side], last: Collective, dtype: torch.dtype) -> torch.fx.Node:
    """The reduction of what the sides send, added up in ``dtype``."""
    sent = [side.collective.inputs[0] for side in sides]
    packs = [movement_behind(node) for node in sent]
    if len({(p.signature, str(p.source.meta["val"].shape)) for p in packs}) > 1:
        packs = [Movement(node, (), node) for node in sent]
    # What packs each of them packs the sum, once.
    total = None
    for pack in packs:
        term = pack.source
        if term.meta["val"].dtype != dtype:
            term = emit.call(torch.ops.prims.convert_element_type.default, term, dtype)
        total = term if total is None else emit.call(torch.ops.aten.add.Tensor, total, term)
    assert total is not None
    total = packs[-1].replayed(emit, total)
    if last.kind == CollectiveKind.ALL_REDUCE:
        return reduced(emit, total, last.reduce_op, last.group_argument)
    return scattered(emit, total, last.reduce_op, last.group.size, last.group_argument)


def _price_of(work: Work, collective: Collective, total: Total) -> int:
    """Time of the one reduction that is left, in the type in which is added."""
    was, now = collective.dtypes[0].itemsize, total.top.meta["val"].dtype.itemsize
    sizes = [None if size is None else size * now // was for size in (collective.input_bytes, collective.output_bytes)]
    return work.collective_ns(collective.kind, sizes[0], sizes[1], collective.group.ranks)


def _tops(collective: Collective) -> list[torch.fx.Node]:
    """The outermost additions that a reduction is a term of, in order."""
    found = {_top(reader) for _, reader in ends(collective.waits[0]) if reader is not None and _is_sum(reader)}
    return sorted(found)


def _uses(collective: Collective) -> Counter[tuple[torch.fx.Node, str]] | None:
    """In which sums which pieces of a reduction are added; None where somebody else reads it."""
    found: Counter[tuple[torch.fx.Node, str]] = Counter()
    for end, reader in ends(collective.waits[0]):
        if reader is None or not _is_sum(reader):
            return None
        found[_top(reader), path_behind(end).signature] += sum(term is end for term in reader.args)
    return found


def _same_uses(one: Counter[tuple[torch.fx.Node, str]], other: Counter[tuple[torch.fx.Node, str]] | None) -> bool:
    """Whether two reductions are added at the same places: one piece each to every sum, or to one sum any number."""
    if other is None or one.keys() != other.keys():
        return False
    once = {*one.values(), *other.values()} == {1} and len({top for top, _ in one}) == len(one)
    return len(one) == 1 or once


def _behind(members: list[Collective]) -> set[torch.fx.Node]:
    """The reductions and all that is made of them, as the graph is now."""
    found, todo = set[torch.fx.Node](), [c.start for c in members]
    while todo:
        node = todo.pop()
        # Inner additions come along with their tree.
        if node not in found and not _is_sum(node):
            found.add(node)
            todo += list(node.users)
    return found


def _is_sum(node: torch.fx.Node) -> bool:
    """Addition of two tensors of one shape and dtype."""
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    a, b = node.args
    return (
        isinstance(a, torch.fx.Node)
        and isinstance(b, torch.fx.Node)
        and len({(str(n.meta["val"].shape), n.meta["val"].dtype) for n in (a, b, node)}) == 1
    )


def _top(node: torch.fx.Node) -> torch.fx.Node:
    """The outermost addition that an addition is part of with nobody else reading on the way."""
    for _ in range(MAX_TERMS):
        users = list(node.users)
        if len(users) != 1 or not _is_sum(users[0]):
            break
        node = users[0]
    return node


def _terms(top: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The additions of a tree, outermost first, and its terms from left to right."""
    inner: list[torch.fx.Node] = []
    terms: list[torch.fx.Node] = []
    todo = [top]
    while todo:
        node = todo.pop()
        if node is top or (_is_sum(node) and len(node.users) == 1 and len(inner) < MAX_TERMS):
            inner.append(node)
            todo += [n for n in reversed(node.args) if isinstance(n, torch.fx.Node)]
        else:
            terms.append(node)
    return inner, terms
