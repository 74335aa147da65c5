"""What uneven shards make different between ranks, so that it does not count as a difference: see ``ir.canonical``.

A rank with a smaller shard pads it before the gather and trims its share after the reduction. Nodes that only do that
are left out of a graph's description. Other nodes that prepare a message or follow a reduction (a cast, a scaling) are
described without sizes, and so are the shards themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch.fx

from inductor_passes import _torch
from inductor_passes.agreement.roles import IncomparableError
from inductor_passes.ir.canonical import PADS, UNEQUAL, shards
from inductor_passes.ir.ops import Role, source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind

_PADDING = PADS | {"aten::clone"}


@dataclass(frozen=True)
class Uneven:
    """The differences that are allowed.

    Attributes:
        stands_for: nodes that are left out -> what a reader of theirs is said to read.
        sizeless: nodes whose sizes are left out.
        cuts: slices that take the padding off what was gathered, on all ranks the same. One row is left of a dimension
            of size 1: that is no rank's own piece, although it is as long as one.
    """

    stands_for: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    sizeless: frozenset[torch.fx.Node] = frozenset()
    cuts: frozenset[torch.fx.Node] = frozenset()


def uneven(view: GraphView) -> Uneven:
    """The differences that uneven shards of parameters and gradients may make; O(nodes + edges).

    Raises:
        IncomparableError: pieces of unequal size are in the middle of the graph, where compute itself differs.
    """
    found = shards(view)
    if found.apart is not None:
        where = source_line(found.apart.start)
        what = f"{found.apart.kind.value}{f' ({where})' if where else ''}"
        raise IncomparableError(f"{UNEQUAL}: {what}. With pieces of one size (padded, say) the graph would be planned")
    if not found.uneven:
        return Uneven()
    gathers = [c for c in found.uneven if c.kind == CollectiveKind.ALL_GATHER]
    starts = {c.start for c in gathers}
    reductions = found.padded.union(c for c in found.uneven if c.kind == CollectiveKind.REDUCE_SCATTER)
    waits = {wait for c in reductions for wait in c.waits}
    before = {node for node, owner in found.owner.items() if owner in starts}
    after = set(waits)
    sizeless = set(before)
    for node in view.nodes:
        free, inputs = view.role(node) is Role.FREE, node.all_input_nodes
        if found.owner.get(node) in waits or (free and inputs and all(n in after for n in inputs)):
            after.add(node)
        readers = [user for user in node.users if user.op != "output"]
        if view.role(node) is Role.INPUT and all(user in starts or user in before for user in readers):
            sizeless.add(node)
        elif free and inputs and not readers and all(n in sizeless for n in inputs):
            # A view of a shard that is only handed on.
            sizeless.add(node)
    sizeless |= after - waits
    stands_for: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in view.nodes:
        if node in sizeless and len(node.all_input_nodes) == 1:
            source = node.all_input_nodes[0]
            if view.role(node) is Role.FREE or _torch.op_name(node.target) in _PADDING:
                stands_for[node] = stands_for.get(source, source)
    return Uneven(stands_for, frozenset(sizeless), frozenset(_cuts(view, gathers)))


def _cuts(view: GraphView, gathers: Iterable[Collective]) -> Iterator[torch.fx.Node]:
    todo = [wait for gather in gathers for wait in gather.waits]
    while todo:
        for user in todo.pop().users:
            if _torch.op_name(user.target) == "aten::slice":
                yield user
            elif user.op == "call_function" and view.role(user) is Role.FREE:
                todo.append(user)
