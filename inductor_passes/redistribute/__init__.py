"""Redistributions: collective algebra on meshes, the planner that works without compiling, and its execution.

``plan_redistribution`` finds the cheapest steps between two layouts, ``redistribute`` runs them, ``prepare_groups``
creates the process groups that they need.
"""

from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.plan import RedistributionPlan, plan_redistribution
from inductor_passes.redistribute.spec import Partial, Replicate, Shard, Spec, SpecError

__all__ = [
    "Mesh",
    "Partial",
    "RedistributionPlan",
    "Replicate",
    "Shard",
    "Spec",
    "SpecError",
    "plan_redistribution",
    "prepare_groups",
    "redistribute",
]


def __getattr__(name: str) -> object:
    """``prepare_groups`` and ``redistribute`` need torch.distributed and are imported on first use."""
    if name == "prepare_groups":
        from inductor_passes.redistribute.prepare import prepare_groups

        return prepare_groups
    if name == "redistribute":
        from inductor_passes.redistribute.execute import redistribute

        return redistribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
