"""What a graph does not see of a data-parallel model: regions that are compiled and planned each by itself."""

from __future__ import annotations

from collections.abc import Set

import torch.fx
from torch import nn

from inductor_passes import _torch
from inductor_passes.simple_fsdp.access import managed_parameters
from inductor_passes.simple_fsdp.apply import applications

_LISTS = (nn.ParameterList, nn.ParameterDict)


def notes(graph: torch.fx.Graph) -> list[str]:
    """For each data-parallel model of which a graph computes a part only: how much, and what that costs.

    Compiling blocks by themselves (``block.compile()``) and graph breaks both lead to that. O(nodes + modules).
    """
    traced = _torch.traced_modules(graph)
    read = {id(source.owner) for source in _torch.parameter_sources().values() if source.owner is not None}
    found = []
    for model in applications():
        gathered = {id(part) for part in model.modules() if managed_parameters(part)}
        here = len(gathered & (read | _present(model, traced)))
        if 0 < here < len(gathered):
            found.append(
                f"a region: {here} of the {len(gathered)} modules of {type(model).__name__} whose parameters it "
                "gathers or reduces; the others are in other graphs, run without torch.compile, or are not used. "
                "Regions are planned each by itself: no collective moves from one into another, so what is exposed at "
                "the borders stays exposed. Compile the model as a whole where it can be"
            )
    return sorted(found)


def _present(model: nn.Module, traced: Set[int]) -> set[int]:
    """``id`` of the modules whose parameters may be read in a graph.

    Besides those that were called: what holds one of them (the module that was compiled is not noted itself), what one
    of them holds (attention reads its output layer's weight without a call), and lists of parameters, which nobody
    calls.
    """
    parts = list(model.modules())
    holding: set[int] = set()
    for part in reversed(parts):
        if id(part) in traced or any(id(child) in holding for child in part.children()):
            holding.add(id(part))
    held = {id(child) for part in parts if id(part) in traced for child in part.children()}
    children = (child for part in parts if id(part) in holding for child in part.children())
    return holding | held | {id(child) for child in children if isinstance(child, _LISTS)}
