"""What a node that runs a higher-order operator does."""

from __future__ import annotations

from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import communication, higher_order, operators
from inductor_passes.verify.facts.operators import nodes_in
from inductor_passes.verify.facts.places import NodeFacts, Places


def facts(places: Places, node: torch.fx.Node, name: str) -> NodeFacts:
    """Facts about a call to the higher-order operator ``name``."""
    if not higher_order.is_known(name):
        return places.unknown(node)
    if higher_order.is_kernel(name):
        return _kernel(places, node, name)
    if higher_order.calls_something(name):
        return _calling(places, node, name)
    return _running(places, node, name)


def _running(places: Places, node: torch.fx.Node, name: str) -> NodeFacts:
    """It does what its bodies do."""
    inside = places.look_inside(higher_order.bodies(node))
    given = places.given(node)
    shared = given if inside.returns or higher_order.is_loop(name) else ()
    # A body that draws and checks counts as a draw: its checks come when it runs.
    channel = next((c for c in ("random", "assert") if c in inside.channels), "")
    return places.made(
        node,
        Role.FENCE if inside.opaque else Role.COMPUTE,
        "fence" if inside.opaque else channel,
        shared=shared,
        writes=given if inside.writes else (),
    )


def _kernel(places: Places, node: torch.fx.Node, name: str) -> NodeFacts:
    """A Triton kernel; which of its tensors it writes to is not in the graph."""
    tensors = tuple(dict.fromkeys(n for n in nodes_in(node.kwargs.get("kwargs")) if places.holds_tensors(n)))
    if name.endswith("mutation"):
        return places.made(node, Role.COMPUTE, writes=tensors)
    made = places.made(node, Role.COMPUTE)
    made.reinplaced = tensors
    return made


def _calling(places: Places, node: torch.fx.Node, name: str) -> NodeFacts:
    """It calls an operator, on copies of what that writes to where it is a functionalised one."""
    inner = higher_order.called(node, name)
    if inner is None:
        return places.unknown(node)
    target, args, kwargs = inner
    what = operators.operator_of(target)
    plain = what.trusted and not what.name.startswith(communication.NAMESPACE)
    if higher_order.is_functionalised(name):
        return _functionalised(places, node, target, plain)
    signature, parts = operators.call(target, args, kwargs, places.values)
    seen = signature.observed
    opaque = not plain or seen is None or bool(seen.rebound) or name == "with_effects"
    everything = range(len(parts))
    aliased = everything if seen is None else sorted({i for r in operators.flat_results(seen.results) for i in r})
    return places.made(
        node,
        Role.FENCE if opaque else Role.COMPUTE,
        "random" if "rng" in name else "fence" if opaque else "",
        shared=[parts[i].node for i in aliased],
        writes=tuple(dict.fromkeys(parts[i].node for i in (everything if seen is None else signature.written))),
    )


def _functionalised(places: Places, node: torch.fx.Node, target: Any, plain: bool) -> NodeFacts:
    if "_all_bases" in node.kwargs:
        written = nodes_in(node.kwargs["_all_bases"])
    else:
        written = [n for name in sorted(_torch.declared_writes(target)) for n in nodes_in(node.kwargs.get(name))]
    draws = operators.operator_of(target).draws
    made = places.made(node, Role.COMPUTE if plain else Role.FENCE, "random" if draws else "" if plain else "fence")
    made.may_write = tuple(dict.fromkeys(written))
    return made
