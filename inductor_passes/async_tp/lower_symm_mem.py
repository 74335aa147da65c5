"""Lowering ``symm_mem``: torch's own operators on CUDA symmetric memory, where they are provably right.

after::

    y, z = fused_all_gather_matmul(x, [b, d])             w = fused_matmul_reduce_scatter(a, b)

They are called with two-dimensional operands along dimension 0 only. There the stacked parts are blocks of rows, the
results are contiguous like those of the matmuls that go, and the form that scatters the wrong dimension (scaled
matmul and reduce-scatter along another dimension of more than two) cannot arise. Sum and average only: others are
accepted by torch's pass and fail when they run.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp.matmul import Matmul
from inductor_passes.async_tp.region import Region
from inductor_passes.async_tp.sites import Replacement, Site
from inductor_passes.groups.availability import Availability
from inductor_passes.rewriting.emit import Emitter

_NAMES = {
    (True, False): "fused_all_gather_matmul",
    (True, True): "fused_all_gather_scaled_matmul",
    (False, False): "fused_matmul_reduce_scatter",
    (False, True): "fused_scaled_matmul_reduce_scatter",
}


def unfit(site: Site, available: Availability) -> str:
    """Why torch's operators cannot compute a site, "" when they can."""
    if available.symmetric_memory:
        return available.symmetric_memory
    value = site.products[0].node.meta["val"]
    if value.device.type != available.device:
        return f"tensors on {value.device.type}; symmetric memory was established for {available.device}"
    scaled = [_scaled(form) for form in site.products]
    if any(scaled) and not all(scaled):
        return "scaled and plain matmuls read what is gathered"
    if not isinstance(site.rows, int) and (site.gathers or scaled[0]):
        return f"torch's operator computes no shape of {site.rows} rows per rank"
    if _torch.symmetric_op(_NAMES[site.gathers, scaled[0]]) is None:
        return f"this torch has no symm_mem::{_NAMES[site.gathers, scaled[0]]}"
    if not site.gathers and site.collective.reduce_op not in ("sum", "avg"):
        return f"reduction {site.collective.reduce_op!r}"
    if scaled[0]:
        return _scaled_unfit(site)
    bias = any(form.added is not None for form in site.products)
    return "its matmul adds a bias" if bias else ""


def _scaled(form: Matmul) -> bool:
    return _torch.op_name(form.node.target) == "aten::_scaled_mm"


def _scaled_unfit(site: Site) -> str:
    scales = {form.scales[0] for form in site.products}
    if len(scales) > 1:
        return "its matmuls scale what is gathered differently"
    if not site.gathers and site.products[0].added is not None:
        return "its matmul adds a bias"
    total = site.rows * site.collective.group.size
    shape = tuple(scales.pop().meta["val"].shape)
    # A scale of one row could be either kind, and torch's operator takes it for a scale of the shard's rows.
    if site.rows < 2 or shape not in ((), (1,), (1, 1), (total, 1)):
        return f"a scale of shape {shape} for {total} rows"
    return ""


def replace(into: Replacement, site: Site, region: Region) -> None:
    """Put an operator in the place of a site."""
    forms = into.products(site)
    scaled = _scaled(forms[0])
    target = _torch.symmetric_op(_NAMES[site.gathers, scaled])
    arguments = _torch.op_arguments(site.collective.start)
    group = arguments["group_name"]

    def gathered(emit: Emitter, shard: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node | None]:
        rights = [into.operand(emit, site, form.right) for form in forms]
        if scaled:
            both = emit.call(target, shard, rights, *_scaling(emit, into, site, forms, group))
        else:
            both = emit.call(target, shard, rights, 0, group, return_A=site.whole)
        results = emit.call(operator.getitem, both, 1)
        made = [emit.call(operator.getitem, results, number) for number in range(len(forms))]
        return made, emit.call(operator.getitem, both, 0) if site.whole else None

    def scattered(emit: Emitter) -> torch.fx.Node:
        (form,) = forms
        op = site.collective.reduce_op
        if not scaled:
            return emit.call(target, form.left, form.right, op, 0, group)
        values = _torch.op_arguments(form.node)
        shape = list(form.node.meta["val"].shape)
        return emit.call(
            target, form.left, form.right, *form.scales, op, 0, 0, group, shape, None, None,
            values.get("out_dtype"), bool(values.get("use_fast_accum", False)),
        )

    if site.gathers:
        into.gather(site, gathered)
    else:
        into.scatter(site, scattered)


def _scaling(
    emit: Emitter, into: Replacement, site: Site, forms: list[Matmul], group: object
) -> tuple[Any, ...]:
    """The arguments of the scaled gather behind its operands."""
    values = [_torch.op_arguments(form.node) for form in forms]
    biases = [None if form.added is None else into.operand(emit, site, form.added) for form in forms]
    return (
        into.operand(emit, site, forms[0].scales[0]),
        [into.operand(emit, site, form.scales[1]) for form in forms],
        0,
        group,
        biases,
        [None] * len(forms),
        [v.get("out_dtype") for v in values],
        [bool(v.get("use_fast_accum", False)) for v in values],
    )
