"""Lowering ``op``: a collective and its matmul become one opaque operator.

before::

    s = all_gather(x); w = wait(s); y = mm(w, b)          y = mm(a, b); s = reduce_scatter(y); w = wait(s)

after::

    y = gathered_mm(x, b)                                 w = mm_scattered(a, b)

Correct because the operators (``ops``) compute just that. They know blocks of rows of one plain ``mm`` whose other
operand nobody cuts, with nobody else reading the collective's or the product's intermediate value; everything else is
for ``decompose``.
"""

from __future__ import annotations

import torch
import torch.fx

import inductor_passes.async_tp.ops  # noqa: F401  registers the operators
from inductor_passes import _torch
from inductor_passes.async_tp.lower_decompose import Lowered
from inductor_passes.async_tp.region import Region
from inductor_passes.bucket.emit import Emitter


def fits(region: Region) -> bool:
    """Whether the operators can compute a region."""
    if len(region.collectives) != 1 or len(region.cuts) != 3 or len(region.matmuls) != 1:
        return False
    collective = region.collectives[0]
    product = next(iter(region.matmuls))
    if _torch.op_name(product.target) != "aten::mm" or not product.meta["val"].dtype.is_floating_point:
        return False
    if not isinstance(collective.group_argument, str):
        return False
    wait = collective.waits[0]
    if collective.kind == "all_gather":
        return product.args[0] is wait and product.args[1] is not wait and set(wait.users) == {product}
    if collective.kind == "reduce_scatter":
        return collective.inputs[0] is product and set(product.users) == {collective.start}
    return False


def lower_op(
    graph: torch.fx.Graph,
    region: Region,
    position: dict[torch.fx.Node, int],
    moved: dict[torch.fx.Node, torch.fx.Node],
) -> Lowered:
    """Replace a region that :func:`fits` in place; arguments and result as ``lower_decompose.lower``."""
    (collective,) = region.collectives
    product, wait = next(iter(region.matmuls)), collective.waits[0]
    size, name = collective.group.size, collective.group_argument
    last = list(region.cuts)[-1]
    emit = Emitter(graph, last)
    with emit.standing_for(product):
        if collective.kind == "all_gather":
            target = torch.ops.inductor_passes.gathered_mm.default
            new = emit.call(target, collective.inputs[0], product.args[1], size, name, region.parts)
        else:
            target = torch.ops.inductor_passes.mm_scattered.default
            left, right = product.args
            new = emit.call(target, left, right, collective.reduce_op, size, name, region.parts)
    last.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    for node in (wait, collective.start, product) if last is wait else (product, wait, collective.start):
        graph.erase_node(node)
    moved[last] = new
    return Lowered(keys={new: (position[last], 0, 0)}, replaced=[(last.name, new.name)])
