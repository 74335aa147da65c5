"""R5: the sum of several all_reduces becomes the all_reduce of a sum.

before::

    z = wait(all_reduce(x, a)) + t + wait(all_reduce(y, a))

after::

    z = t + wait(all_reduce(x + y, a))

Matches ``sum`` and ``avg`` with equal group, op, shape and dtype in one tree of additions whose inner sums nothing else
reads; all sides may pass through the same data movement. Other terms of the tree stay. reduce_scatters likewise; what
packs each of their inputs packs the sum instead, once.

Reassociates, and in a narrow dtype the addition now precedes the reduction. Saves all but one of the collectives: in
tensor parallel backwards the input gradients of linears that share an input are such a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx

from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import Movement, movement_behind, step_ahead
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import reduced, scattered

KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
#: Additions looked through on the way to the top of a tree, and terms taken from it.
MAX_TERMS = 256


@dataclass(frozen=True)
class Side:
    """One term of the sum: ``movement`` of the wait of ``collective``."""

    term: torch.fx.Node
    collective: Collective
    movement: Movement

    @property
    def chain(self) -> tuple[torch.fx.Node, ...]:
        """From the wait to the term."""
        return (self.collective.waits[0], *self.movement.nodes)

    def signature(self) -> tuple[object, ...]:
        """Equal for terms that may be reduced together."""
        value = self.collective.inputs[0].meta["val"]
        c = self.collective
        return (c.kind, c.group, c.reduce_op, tuple(value.shape), value.dtype, self.movement.signature)


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
        top = None if collective is None else _top_of_sum(collective.waits[0])
        if collective is None or top is None:
            return None
        inner, terms = _terms(top)
        sides = [side for side in (_side(work, t) for t in terms) if side is not None]
        mine = next((s for s in sides if s.collective.start is root), None)
        if mine is None or len(sides) < 2:
            return None
        alike = [s for s in sides if s.signature() == mine.signature()]
        if len(alike) < 2:
            refuse(Reason.DIFFERENT_GROUP, "the other reductions of the sum are of another kind")
        if max(s.collective.start for s in alike) is not root:
            return None
        if collective.reduce_op not in ("sum", "avg"):
            refuse(Reason.MIXED_REDUCE_OP, f"{collective.reduce_op} of a sum is not the sum of {collective.reduce_op}")
        work.may_reassociate(collective, "adds before reducing")
        work.never_written(top, *inner)
        inside = {*inner, *(n for s in alike for n in s.chain)}
        for side in alike:
            for node in side.chain:
                if not inside.issuperset(node.users):
                    refuse(Reason.DATA_DEPENDENCY, "the reduction has other readers")
            work.never_written(*side.chain)
            pack = movement_behind(side.collective.inputs[0])
            for node in (pack.source, *pack.nodes):
                work.unwritten(node, min(node, side.collective.start), top)
        after = work.price_ns(collective)
        rest = [t for t in terms if t not in {s.term for s in alike}]
        return Match(
            work.price_ns(*(s.collective for s in alike)) - after,
            "with " + ", ".join(s.collective.start.name for s in alike if s is not mine),
            lambda: self._apply(work, top, inner, alike, rest),
        )

    def _apply(
        self, work: Work, top: torch.fx.Node, inner: list[torch.fx.Node], sides: list[Side], rest: list[torch.fx.Node]
    ) -> None:
        last = max(sides, key=lambda s: s.collective.start)

        def build(emit: Emitter) -> torch.fx.Node:
            packs = [movement_behind(side.collective.inputs[0]) for side in sides]
            if len({(p.signature, str(p.source.meta["val"].shape)) for p in packs}) > 1:
                packs = [Movement(side.collective.inputs[0], (), side.collective.inputs[0]) for side in sides]
            # What packs each of them packs the sum, once.
            total = packs[0].source
            for pack in packs[1:]:
                total = emit.call(torch.ops.aten.add.Tensor, total, pack.source)
            total = packs[-1].replayed(emit, total)
            c = last.collective
            if c.kind == CollectiveKind.ALL_REDUCE:
                result = reduced(emit, total, c.reduce_op, c.group_argument)
            else:
                result = scattered(emit, total, c.reduce_op, c.group.size, c.group_argument)
            result = last.movement.replayed(emit, result)
            if rest:
                others = rest[0]
                for term in rest[1:]:
                    others = emit.call(torch.ops.aten.add.Tensor, others, term)
                result = emit.call(torch.ops.aten.add.Tensor, others, result)
            return result

        chains = [n for s in sides for n in (*reversed(s.chain), s.collective.start)]
        # A reduction may be a term twice.
        removed = tuple(dict.fromkeys((top, *(n for n in inner if n is not top), *chains)))
        work.replace(self.name, last.collective.start, removed, build)


def _is_sum(node: torch.fx.Node) -> bool:
    """Addition of two tensors of one shape and dtype."""
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    a, b = node.args
    return (
        isinstance(a, torch.fx.Node)
        and isinstance(b, torch.fx.Node)
        and a is not b
        and len({(str(n.meta["val"].shape), n.meta["val"].dtype) for n in (a, b, node)}) == 1
    )


def _top_of_sum(node: torch.fx.Node) -> torch.fx.Node | None:
    """The outermost addition that a value reaches with nobody else reading on the way; None without an addition."""
    top = None
    for _ in range(MAX_TERMS):
        user = step_ahead(node) if top is None else None
        if user is not None:
            node = user
            continue
        users = list(node.users)
        if len(users) != 1 or not _is_sum(users[0]):
            return top
        top = node = users[0]
    return top


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


def _side(work: Work, term: torch.fx.Node) -> Side | None:
    movement = movement_behind(term)
    found = work.behind(movement.source, *KINDS)
    return None if found is None else Side(term, found, movement)
