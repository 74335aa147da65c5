"""What a graph does not see of a data-parallel model: regions that are compiled and planned each by itself."""

from __future__ import annotations

import torch.fx

from inductor_passes.simple_fsdp.access import managed_parameters
from inductor_passes.simple_fsdp.apply import applications

#: Where dynamo keeps the modules that a node was traced in, by ``id``; of a backward node's forward one, too.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def notes(graph: torch.fx.Graph) -> list[str]:
    """For each data-parallel model of which a graph computes a part only: how much, and what that costs; O(nodes).

    Compiling blocks by themselves (``block.compile()``) and graph breaks both lead to that.
    """
    traced = _modules(graph)
    found = []
    for model in sorted(applications(), key=lambda one: type(one).__name__):
        gathered = {id(part) for part in model.modules() if managed_parameters(part)}
        here = len(gathered & traced)
        if 0 < here < len(gathered):
            found.append(
                f"a region: {here} of the {len(gathered)} modules of {type(model).__name__} whose parameters it "
                "gathers or reduces. Regions are planned each by itself: no collective moves from one into another, so "
                "what is exposed at the borders stays exposed. Compile the model as a whole where it can be"
            )
    return found


def _modules(graph: torch.fx.Graph) -> set[int]:
    found = set()
    for node in graph.nodes:
        for key in _STACKS:
            for name in node.meta.get(key) or ():
                # A module that is called again has a number behind its id.
                digits = str(name).partition("@")[0]
                if digits.isdecimal():
                    found.add(int(digits))
    return found
