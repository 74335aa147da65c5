"""Which layouts a redistribution is between, noted at the call before it is traced into collectives.

In Dynamo's graph a call of ``redistribute`` is one node, and its operand and its result are DTensors with their whole
placement: mesh, shard of every tensor dimension, global shape. What AOTAutograd traces from the call shows only what
this rank does along one mesh dimension after the other: which slice is the rank's own, what is padding and how large
the whole tensor is can only be guessed from it. So both layouts are entered in the call's annotations
(``meta["custom"]``), which torch copies to everything that it traces from the call, forward and backward.

A note is a statement of the program, not of a pass; it is no proof either. The verifier proves what is made of it.
"""

from __future__ import annotations

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.layouts import LAYOUTS_KEY, Noted
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.spec import Replicate, Spec, SpecError

#: Calls that change a layout. The gradient of ``from_local`` is brought to the layout of its result.
_CALLS = ("redistribute", "full_tensor", "from_local")


def note_layouts(graph: torch.fx.Graph) -> None:
    """Annotate the redistributions of one of Dynamo's graphs. Those that cannot be planned get no note."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        called = _torch.called_name(node.target)
        if called not in _CALLS:
            continue
        try:
            found = _noted(node, called)
        except SpecError:
            continue
        if found is not None:
            node.meta["custom"] = {**node.meta.get("custom", {}), LAYOUTS_KEY: found}


def ends(note: Noted) -> tuple[Spec, Spec]:
    """The layouts before and after the call; their dtype is not that of the tensor."""
    mesh = Mesh(note.mesh, note.ranks)
    before, after = (
        Spec(mesh, placements, note.shape, shard_order=order)  # type: ignore[arg-type]
        for placements, order in zip((note.before, note.after), note.orders)
    )
    return before, after


def _noted(node: torch.fx.Node, called: str) -> Noted | None:
    after = _spec(node)
    operand = node if called == "from_local" else node.args[0] if node.args else None
    before = _spec(operand) if isinstance(operand, torch.fx.Node) else None
    if before is None:
        return None
    if called == "full_tensor":
        whole = (Replicate(),) * before.mesh.ndim
        after = Spec(before.mesh, whole, before.shape, before.dtype, before.itemsize)
    if after is None or (after.mesh, after.shape) != (before.mesh, before.shape):
        return None
    return Noted(
        node.name,
        before.mesh.shape,
        before.mesh.ranks,
        before.shape,
        tuple(map(str, before.placements)),
        tuple(map(str, after.placements)),
        (before.shard_order, after.shard_order),
    )


def _spec(node: torch.fx.Node) -> Spec | None:
    value = node.meta.get("example_value")
    return None if getattr(value, "_spec", None) is None else Spec.of(value)
