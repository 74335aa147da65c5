"""The last step of an FX graph: gathers that gloo would run beside each other get a form in which it can.

One operator takes the place of another, with the same arguments, result and name: no order, lifetime or message
changes, so that plan, proof and report hold. See ``_torch.gather_op`` for what is wrong with torch's own.
"""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes._torch import gather_op
from inductor_passes.config import PassConfig
from inductor_passes.ir.ops import Role, role

_CPU = torch.device("cpu")


def respell(graph: torch.fx.Graph, settings: PassConfig) -> str:
    """Put our operator in the place of torch's where gloo needs it; O(nodes).

    Returns:
        What was done, for the report; "" when nothing was.
    """
    if settings.codegen == "inductor" and _torch.inductor_option("cpp_wrapper", False):
        # C++ code would have to call back into Python.
        return ""
    starts = [node for node in graph.nodes if role(node) is Role.START]
    target = _torch.collective_op("all_gather_into_tensor")
    local = [node for node in starts if node.target is target and _is_local(node)]
    gloo = {name for name in {node.args[2] for node in local} if _torch.moves_with_gloo(name)}
    found = [node for node in local if node.args[2] in gloo]
    if len(starts) < 2 or not found:
        return ""
    if settings.codegen == "inductor":
        _torch.lower_as_collective(gather_op.OPERATOR)
    for start in found:
        start.target = gather_op.OPERATOR.default
    return f"{len(found)} all_gathers run as inductor_passes::all_gather: torch's own is not safe beside others on gloo"


def _is_local(start: torch.fx.Node) -> bool:
    """Of a CPU tensor with a dimension to gather along, on a group that is named in the graph."""
    if len(start.args) != 3 or not isinstance(start.args[0], torch.fx.Node) or not isinstance(start.args[2], str):
        return False
    value = start.args[0].meta.get("val")
    return isinstance(value, torch.Tensor) and value.device == _CPU and value.dim() > 0
