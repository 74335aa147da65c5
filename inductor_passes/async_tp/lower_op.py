"""Lowering ``op``: a collective and its matmul become one opaque operator on point-to-point messages.

before::

    s = all_gather(x); w = wait(s); y = mm(w, b)          y = mm(a, b); s = reduce_scatter(y); w = wait(s)

after::

    y = gathered_mm(x, b)                                 w = mm_scattered(a, b)

Correct because the operators (``ops``) compute just that. They know blocks of rows of one plain ``mm`` whose other
operand is not cut, where the collective's and the product's intermediate values have no other reader. ``decompose``
takes everything else. Other members of the region stay as they are.
"""

from __future__ import annotations

import torch
import torch.fx

import inductor_passes.async_tp.ops  # noqa: F401  registers the operators
from inductor_passes import _torch
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.sites import Replacement, Site
from inductor_passes.groups.availability import UNKNOWN, Availability
from inductor_passes.rewriting.emit import Emitter


def unfit(site: Site, available: Availability) -> str:
    """Why the operators cannot compute a site, "" when they can; a group of which nothing is known is taken to do."""
    if available.point_to_point not in ("", UNKNOWN):
        return available.point_to_point
    if len(site.products) > 1:
        return "several matmuls read what is gathered"
    if site.whole:
        return "what is gathered is read elsewhere too"
    name = _torch.op_name(site.products[0].node.target)
    return "" if name == "aten::mm" else f"{name} is no plain mm"


def replace(into: Replacement, site: Site, region: Region) -> None:
    """Put an operator in the place of a site."""
    collective = site.collective
    (form,) = into.products(site)
    common = (collective.group.size, collective.group_argument, region.parts)
    if site.gathers:

        def gathered(emit: Emitter, shard: torch.fx.Node) -> tuple[list[torch.fx.Node], None]:
            right = into.operand(emit, site, form.right)
            return [emit.call(torch.ops.inductor_passes.gathered_mm.default, shard, right, *common)], None

        into.gather(site, gathered)
    else:
        target = torch.ops.inductor_passes.mm_scattered.default
        into.scatter(site, lambda emit: emit.call(target, form.left, form.right, collective.reduce_op, *common))
