"""What the partitioner knows about a training step and the two graphs' compilations have to know.

Travels in ``GraphModule.meta``. The peaks steer plans, so they are part of the key under which Inductor caches a graph;
the report, which names the user's files, is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from inductor_passes.report import PassReport
from inductor_passes.trace.files import AskedFile

META_KEY = "inductor_passes_step"


@dataclass(frozen=True)
class StepFacts:
    """About one of the two graphs of a step.

    Attributes:
        own_peak_bytes: of the graph as it came out of the partitioner, in its input order.
        step_peak_bytes: the higher one of the two graphs' peaks, all parameters gathered again in backward.
        keep: what became of the choice which gathered parameters backward reuses, see ``step.keep``; None when there
            was none to make. Does not survive pickling.
        recompute: what became of the choice which activations backward computes again, see ``step.recompute``; None
            where the budget asks for none. Does not survive pickling.
        notes: about both, for the report. Do not survive pickling.
        curve: (peak in bytes, planned step in ns) of what is possible, by memory; empty where the budget asks for no
            choice. Does not survive pickling.
        proposed: names of the starts of each bucket with which the step was planned when it was chosen; steers plans.
        reached_bytes: what the step may need where its budget cannot be reached, else 0: what both
            graphs may need then.
        files: that were written about the step. Do not survive pickling.

    Both peaks are those of ``reorder.problem``: equal on ranks whose shards are of unequal size.
    """

    own_peak_bytes: int
    step_peak_bytes: int
    keep: PassReport | None = None
    recompute: PassReport | None = None
    notes: tuple[str, ...] = ()
    curve: tuple[tuple[int, int], ...] = ()
    proposed: tuple[tuple[str, ...], ...] = ()
    reached_bytes: int = 0
    files: tuple[AskedFile, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepFacts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        steering = self.proposed, self.reached_bytes
        return (StepFacts, (self.own_peak_bytes, self.step_peak_bytes, None, None, (), (), *steering))

    def attach(self, module: torch.fx.GraphModule) -> None:
        """Leave this with the graph."""
        module.meta[META_KEY] = self


def facts_of(graph: torch.fx.Graph) -> StepFacts | None:
    """What the partitioner left with a graph; None for graphs that it did not see (inference)."""
    module = graph.owning_module
    return None if module is None else module.meta.get(META_KEY)
