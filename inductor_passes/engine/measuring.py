"""The last step of an FX graph whose messages were narrowed: where the settings ask, each gets an operator behind it
that measures its error.

Nothing of the graph reads what these operators compute, and they come after all decisions: collectives, their order and
their messages are those of the graph without them. They keep what was narrowed in memory until it is measured.
"""

from __future__ import annotations

import hashlib

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes._torch import measure_op
from inductor_passes.engine.compilation import Compilation
from inductor_passes.rewriting.contract import Rounding
from inductor_passes.rewriting.emit import Emitter

_MEASURE = torch.ops.inductor_passes.measure_rounding.default


def insert(graph: torch.fx.Graph, compilation: Compilation) -> str:
    """Measure the narrowed collectives if that is asked for, and say in their reports under which names; O(nodes).

    Returns:
        What the report should say about that; "" for nothing.
    """
    settings, narrowed = compilation.config, compilation.narrowed
    if not narrowed or not settings.measured_every:
        return ""
    if settings.codegen == "inductor" and _torch.inductor_option("cpp_wrapper", False):
        return "errors are not measured: C++ code would have to call back into Python"
    nodes = {node.name: node for node in graph.nodes}
    prefix = f"{compilation.report.phase} graph {_digest(graph)}"
    for one in narrowed:
        # A message that a later pass made anew is none that was measured.
        found = [r for r in one.roundings if r.rows in nodes and r.message in nodes]
        several = len(found) > 1
        one.report.places = tuple(
            f"{prefix}: {one.report.name}" + f", rounding {k + 1}" * several for k in range(len(found))
        )
        for rounding, place in zip(found, one.report.places):
            _measure(graph, nodes, rounding, settings.measured_every, place)
    return ""


def _digest(graph: torch.fx.Graph) -> str:
    """What tells graphs of a process apart, equal in every process that gets this graph's code from a cache."""
    lines = (f"{node.name} {node.target} {node.args} {_shape(node)}" for node in graph.nodes)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _shape(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""


def _measure(
    graph: torch.fx.Graph, nodes: dict[str, torch.fx.Node], rounding: Rounding, every: int, place: str
) -> None:
    measure_op.restart(place)
    rows, message = nodes[rounding.rows], nodes[rounding.message]
    emit = Emitter(graph, message)
    with emit.standing_for(message):
        device = message.meta["val"].device
        result = emit.call(torch.ops.aten.full.default, [], 0.0, dtype=torch.float32, device=device)
        with graph.inserting_after(result):
            call = graph.call_function(
                _MEASURE, (rows, message, result, rounding.form, rounding.bound, every, place)
            )
        call.meta["val"] = None


