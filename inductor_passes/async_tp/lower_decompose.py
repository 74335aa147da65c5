"""Lowering ``decompose``: every part of a region as ordinary graph nodes.

Before::

    s = all_gather(x); w = wait(s); y = mm(w, b)

after, for two parts::

    s0 = all_gather(x[:n]); s1 = all_gather(x[n:])
    w0 = wait(s0); y0 = mm(w0, b)
    w1 = wait(s1); y1 = mm(w1, b)
    y = cat(y0, y1)          # interleaved per rank where the gathered dimension was cut

Correct because every member maps over the axis that is cut (``rules``): part ``j`` of its result needs part ``j`` of
its operands, and the parts put together are the result, element by element, with the layout of before. Only a summed
axis adds up parts, in float32 or wider. Works on any backend; the planner
schedules the pieces like all other nodes, and Inductor fuses epilogues into them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.order import OrderKey
from inductor_passes.async_tp.region import Region, is_layout
from inductor_passes.async_tp.rules import is_split, rule_of
from inductor_passes.async_tp.slab import Partial, Slab, Uniform, assemble, scattered, take
from inductor_passes.async_tp.timeline import Instance
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.parts import mark_part
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.verify.messages import CUT_KEY, OWN_KEY

aten = torch.ops.aten



@dataclass
class Lowered:
    """What one region became.

    Attributes:
        keys: where new nodes want to stand.
        replaced: (old, new) names of nodes whose users read the new one now.
    """

    keys: dict[torch.fx.Node, OrderKey] = field(default_factory=dict)
    replaced: list[tuple[str, str]] = field(default_factory=list)


def lower(
    graph: torch.fx.Graph,
    region: Region,
    order: tuple[Instance, ...],
    position: dict[torch.fx.Node, int],
    moved: dict[torch.fx.Node, torch.fx.Node],
    prepared: Collection[torch.fx.Node] = (),
) -> Lowered:
    """Replace a region by its parts, in place.

    Args:
        order: the instances in the order in which they should run.
        position: of every node that was in the graph before any lowering.
        moved: nodes that earlier lowerings replaced, with what holds their value now; this one adds its own.
        prepared: of what is sent, what only makes it as long as on the other ranks. Every part has its own, so that it
            counts as part of that message on all ranks, whether or not they have to pad.

    Returns:
        What came; the graph is in a legal order, ``order.legal_order`` gives the intended one.
    """
    return _Lowering(graph, region, order, position, moved, prepared).run()


class _Lowering:
    def __init__(
        self,
        graph: torch.fx.Graph,
        region: Region,
        order: tuple[Instance, ...],
        position: dict[torch.fx.Node, int],
        moved: dict[torch.fx.Node, torch.fx.Node],
        prepared: Collection[torch.fx.Node],
    ) -> None:
        self.graph, self.region, self.position, self.moved, self.prepared = graph, region, position, moved, prepared
        self.needs = {
            node: {moved.get(operand, operand): part for operand, part in needs.items()}
            for node, needs in region.needs.items()
        }
        self.made: dict[Instance, torch.fx.Node] = {}
        self.taken: dict[tuple[torch.fx.Node, Slab, int], torch.fx.Node] = {}
        self.wholes: dict[torch.fx.Node, torch.fx.Node] = {}
        self.result = Lowered()
        self.anchor = min(position[n] for n in (region.matmuls or region.cuts))
        self.rank = {one: place for place, one in enumerate(order)}
        self.roots = {
            c.start for c in region.collectives if not any(i in region.cuts for i in region.needs[c.start])
        }
        waits = {c.waits[0] for c in region.collectives}
        self.last_waits = {
            w for w in waits if not any(u in region.cuts and not region.reads_whole(u, w) for u in w.users)
        }

    def run(self) -> Lowered:
        region = self.region
        joined = {*region.joined()}
        for node in region.cuts:
            emit = Emitter(self.graph, node.prev)
            with emit.standing_for(node):
                for part in range(region.parts):
                    before = len(emit.made)
                    self.made[node, part] = self._part(emit, node, part)
                    for new in emit.made[before:]:
                        self.result.keys[new] = self._key(node, part)
                        mark_part(new, region.collectives[0].start.name, part)
                if node in joined:
                    before = len(emit.made)
                    self.wholes[node] = self._whole(emit, node)
                    for new in emit.made[before:]:
                        self.result.keys[new] = (self.position[node], 1, len(region.cuts))
        self._redirect()
        return self.result

    def _key(self, node: torch.fx.Node, part: int) -> OrderKey:
        rank = self.rank[node, part]
        if node in self.roots:
            return (self.position[node], 0, rank)
        if node in self.last_waits:
            return (self.position[node], 1, rank)
        return (self.anchor, 0, rank)

    def _part(self, emit: Emitter, node: torch.fx.Node, part: int) -> torch.fx.Node:
        rule = rule_of(node)
        assert rule is not None
        cut = self.region.cuts[node]
        width = self.region.widths[part]
        args, kwargs = rule.call(node, cut, self.region.units, width)
        needs = self.needs[node]
        send = ops.role(node) is Role.START
        form = matmul.canonical(node)

        def operand(source: torch.fx.Node) -> torch.fx.Node:
            wanted = needs.get(source)
            if wanted is None:
                return self.wholes.get(source, source)
            if source in self.region.cuts:
                found = self.made[source, part]
            else:
                key = (source, wanted, part)
                if key not in self.taken:
                    origin = self._prepared_again(emit, source) if send else source
                    found = take(emit, origin, wanted, self.region.widths, part)
                    if form is not None and scattered(source.meta["val"], wanted, width):
                        found = emit.call(aten.clone.default, found)
                    self.taken[key] = found
                found = self.taken[key]
            if send and not _torch.is_contiguous(found.meta["val"]):
                found = emit.call(aten.clone.default, found, memory_format=torch.contiguous_format)
            return found

        target = node.target
        if isinstance(cut, Partial) and form is not None and form.product is not None:
            target, args, kwargs = form.product, (form.left, form.right), {}
        args, kwargs = torch.fx.node.map_arg((args, kwargs), operand)
        return _stating(node, emit.call(target, *args, **kwargs))

    def _prepared_again(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """What a node of ``prepared`` gives, made once more; other nodes themselves."""
        if node not in self.prepared:
            return node
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self._prepared_again(emit, n))
        return _stating(node, emit.call(node.target, *args, **kwargs))

    def _whole(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        cut = self.region.cuts[node]
        pieces = [self.made[node, part] for part in range(self.region.parts)]
        value = node.meta["val"]
        if isinstance(cut, Uniform):
            return pieces[0]
        if isinstance(cut, Slab):
            return assemble(emit, pieces, cut, self.region.widths, value)
        total = pieces[0]
        for piece in pieces[1:]:
            total = emit.call(aten.add.Tensor, total, piece)
        form = matmul.canonical(node)
        if form is not None and form.added is not None:
            total = emit.call(aten.add.Tensor, total, self.wholes.get(form.added, form.added))
        return total

    def _redirect(self) -> None:
        """Users outside read the wholes; views among the exits stay and view them; everything else goes."""
        region = self.region
        kept: set[torch.fx.Node] = set()
        for node in region.exits():
            stack = [node] if is_layout(node) else []
            while stack:
                one = stack.pop()
                if one in kept:
                    continue
                kept.add(one)
                stack.extend(i for i in one.all_input_nodes if i in region.cuts and is_layout(i))
        for node, whole in self.wholes.items():
            for user in list(node.users):
                if user in kept or user not in region.cuts:
                    user.replace_input_with(node, whole)
            self.moved[node] = whole
            self.result.replaced.append((node.name, whole.name))
        sources = {source for node in self.roots for source in node.all_input_nodes}
        for node in reversed(list(region.cuts)):
            if node not in kept:
                self.graph.erase_node(node)
        while sources:
            # What made a whole shard longer: every part has its own.
            node = sources.pop()
            if node in self.prepared and not node.users:
                sources.update(node.all_input_nodes)
                self.graph.erase_node(node)


def _stating(node: torch.fx.Node, copy: torch.fx.Node) -> torch.fx.Node:
    """``copy``, which says of its pieces and numbers what ``node`` does: a part is cut where the whole is.

    Of pieces of which several are read none is a rank's own, though copies may each be read for one.
    """
    copy.meta.update({key: node.meta[key] for key in (OWN_KEY, CUT_KEY) if key in node.meta})
    if is_split(node) and len({u.args[1] for u in node.users if u.target is operator.getitem and u.users}) > 1:
        copy.meta[CUT_KEY] = True
    return copy
