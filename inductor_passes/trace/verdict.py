"""The verdict on every collective of a planned order: hidden, or exposed for which binding reason.

A collective is exposed when the compute lane stands still for its transfer. The binding reason is found from its own
place in the simulated order. Looking back from its start: it queued for its lane, or a fence holds it, or its input
was ready but an earlier start does not fit into memory, or its input had only just been computed. Looking forward
from the stall: other work was ready but did not fit into memory, or none was ready. What is left decides between a
true data dependency (every kernel of the graph computes its input or needs its result), independent work that is
used up, and the graph's first and last communication.

Settings and gains come from planning again with one kind of constraint lifted (``trace/whatif.py``), once per reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inductor_passes.report import CollectiveReport
from inductor_passes.schedule.problem import Problem

if TYPE_CHECKING:
    from inductor_passes.schedule.simulate import Timeline


def explain(
    problem: Problem,
    order: Sequence[int],
    timeline_before: Timeline,
    timeline_after: Timeline,
    budget_bytes: int | None,
    *,
    order_before: Sequence[int] | None = None,
    ranks: Mapping[str, tuple[int, ...]] | None = None,
    buckets: Mapping[str, str] | None = None,
    what_if: bool = True,
) -> list[CollectiveReport]:
    """One report per ``START`` of ``problem``, in the order in which ``order`` issues them.

    Args:
        order: the order that was compiled; ``timeline_after`` is its simulation.
        timeline_before: the simulation of ``order_before`` (default: the input order).
        budget_bytes: the cap on the peak, None when unlimited.
        ranks: lane name -> global ranks of the communicator.
        buckets: task name of a start -> name of the bucket it stands for.
        what_if: plan again to find settings and gains; without it they are empty and 0.

    The exposed times add up to the makespan of ``timeline_after`` minus the busy time of the compute lane.
    """
    raise NotImplementedError
