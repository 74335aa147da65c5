"""Lowering ``kernels``: our Triton kernels on memory that all ranks of a group map.

after::

    y, z, v = symm_gathered_mm(x, [b, d], [None, c])      w = symm_mm_scattered(a, b)

One kernel computes all ranks' rows and waits for them tile by tile; a bias is added before rounding, and the gathered
matrix comes out too where it has another reader. Sums over ranks run in rank order in float32, so all ranks get the
same bits; a matmul in tiles adds in another order than the library's.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

import inductor_passes.async_tp.kernel_ops  # noqa: F401  registers the operators, for graphs out of a cache too
from inductor_passes import _torch
from inductor_passes.async_tp.kernel_ops import KERNEL_DTYPES
from inductor_passes.async_tp.matmul import Matmul
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.sites import Replacement, Site
from inductor_passes.groups.availability import Availability
from inductor_passes.rewriting.emit import Emitter


def unfit(site: Site, available: Availability) -> str:
    """Why the kernels cannot compute a site, "" when they can."""
    if available.kernels:
        return available.kernels
    for form in site.products:
        value = form.node.meta["val"]
        name = _torch.op_name(form.node.target)
        if value.device.type != available.device:
            return f"tensors on {value.device.type}; kernels were established for {available.device}"
        if name not in ("aten::mm", "aten::addmm"):
            return f"{name} is no plain mm or addmm"
        dtypes = {n.meta["val"].dtype for n in (form.node, *form.node.all_input_nodes)}
        if len(dtypes) > 1 or value.dtype not in KERNEL_DTYPES:
            return f"dtypes {', '.join(sorted(map(str, dtypes)))}"
        if form.added is not None and not (site.gathers and _is_row(form)):
            return "it adds more than a bias per column"
    if site.collective.reduce_op not in ("", "sum", "avg"):
        return f"reduction {site.collective.reduce_op!r}"
    return ""


def _is_row(form: Matmul) -> bool:
    assert form.added is not None
    return tuple(form.added.meta["val"].shape) == (form.node.meta["val"].shape[1],)


def replace(into: Replacement, site: Site, region: Region) -> None:
    """Put an operator in the place of a site."""
    collective, forms = site.collective, into.products(site)
    common = (collective.group.size, _torch.op_arguments(collective.start)["group_name"])

    def gathered(emit: Emitter, shard: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node | None]:
        rights = [into.operand(emit, site, form.right) for form in forms]
        biases = [None if form.added is None else into.operand(emit, site, form.added) for form in forms]
        target = torch.ops.inductor_passes.symm_gathered_mm.default
        found = emit.call(target, shard, rights, biases, *common, site.whole)
        made = [emit.call(operator.getitem, found, number) for number in range(len(forms))]
        return made, emit.call(operator.getitem, found, len(forms)) if site.whole else None

    if site.gathers:
        into.gather(site, gathered)
    else:
        (form,) = forms
        target = torch.ops.inductor_passes.symm_mm_scattered.default
        into.scatter(site, lambda emit: emit.call(target, form.left, form.right, collective.reduce_op, *common))
