"""The record of one graph's compilation: what is known about it from outside, and what became of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.pin.pins import Pins
from inductor_passes.problems.fx import is_backward
from inductor_passes.report import GraphReport
from inductor_passes.rewriting.contract import Cap, Outcome, Scheduled, Sent
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.verify.rank_check import Steps


@dataclass(frozen=True)
class Known:
    """What is known about a graph from outside of it.

    Attributes:
        phase: ``forward``, ``backward`` or ``inference``.
        agreed: whether all ranks that take part compile this graph.
        compared: whether their numbers are known to be equal; not where a graph is made to send what another one sends.
        pins: the plan that is pinned for it.
        step: what the partitioner knows about the training step; None for inference.
        sums: see :class:`~inductor_passes.rewriting.contract.Facts`.
    """

    phase: str = "inference"
    agreed: bool = True
    compared: bool = True
    pins: Pins | None = None
    step: StepFacts | None = None
    sums: tuple[tuple[str, ...], ...] | None = None


@dataclass
class Compilation:
    """What became of one graph.

    Attributes:
        cap: on the graph's peak.
        least_peak_bytes: what the graph needs as the passes left it, see :class:`Cap`; None where nothing limits it.
        certificates: of the passes that were kept, in order.
        narrowed: collectives that carry a narrower type.
        scheduled: the order that the graph has now; None when nothing ordered it.
        buckets: names of the starts that were merged, per bucket.
        carriers: name of the start that a bucket became -> names of the starts that it was made of.
        left_out: passes that were undone, and parts that passes left out, see ``GraphPlan.left_out``; not of those that
            merge and reorder.
        larger_budget: what it takes in the place of ``memory_budget`` to send what another variant sends; "": nothing.
        graph_before / graph_after: as it came and as the FX passes left it, as text; "" unless somebody debugs.
        pins: the pinned plan as far as it still holds.
        rank_steps: what ``rank_check`` compared, by process group; empty when it is off.
        participants: ranks that compile this graph too, this one among them; () where that is not known.
        kept: the graph as it came (``engine.kept``), or why it cannot be planned again; "" where nobody asks.
        again: it is planned again while its code runs: nobody gets a report of its own.
    """

    config: PassConfig
    profile: CostProfile
    report: GraphReport
    known: Known
    cap: Cap = Cap()
    least_peak_bytes: int | None = None
    certificates: list[verify.Certificate] = field(default_factory=list)
    narrowed: list[Sent] = field(default_factory=list)
    scheduled: Scheduled | None = None
    buckets: list[tuple[str, ...]] = field(default_factory=list)
    carriers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    larger_budget: str = ""
    graph_before: str = ""
    graph_after: str = ""
    pins: Pins | None = None
    rank_steps: dict[str, Steps] = field(default_factory=dict)
    participants: tuple[int, ...] = ()
    kept: Any = ""
    again: bool = False

    @property
    def graphs(self) -> tuple[str, str]:
        """The readable graphs, before and after."""
        return self.graph_before, self.graph_after

    @property
    def backward(self) -> bool:
        """Whether the graph is a backward."""
        return self.known.phase == "backward"

    def enter(self, outcome: Outcome) -> None:
        """Enter all that a pass did."""
        self.certificates.extend(outcome.certificates)
        self.narrowed.extend(outcome.narrowed)
        self.report.narrowed.extend(one.report for one in outcome.narrowed)
        self.buckets.extend(outcome.buckets)
        for start, members in zip(outcome.carriers, outcome.buckets):
            self.carriers[start] = tuple(members)
        self.report.notes.extend(outcome.notes)
        if outcome.redistributions:
            self.report.redistributions = list(outcome.redistributions)
        if outcome.given_up and self.pins is not None:
            self.pins = dataclasses.replace(self.pins, given_up=outcome.given_up)
        if outcome.scheduled is not None:
            self.scheduled = outcome.scheduled
            self.report.schedules.append(outcome.scheduled.record)


def phase_of(graph: torch.fx.Graph, is_inference: bool) -> str:
    """``forward``, ``backward`` or ``inference``."""
    return "inference" if is_inference else "backward" if is_backward(graph) else "forward"


def graph_index() -> int:
    """Number of the graph that is being compiled."""
    name = _torch.aot_graph_name()
    index = name.rsplit("_", 1)[-1] if name else ""
    return int(index) if index.isdigit() else 0


def named(costs: CostProfile) -> str:
    """How a report names a cost profile."""
    return f"{costs.name} {costs.hash()}"


def new_report(graph: torch.fx.Graph, phase: str, config: PassConfig, profile: CostProfile) -> GraphReport:
    """An empty report that says which graph it is about."""
    rank, world = _torch.rank_and_world_size()
    return GraphReport(
        phase=phase,
        graph_index=graph_index(),
        compile_id=_torch.compile_id(),
        rank=rank,
        world_size=world,
        torch_version=torch.__version__,
        config=config.to_json(),
        nodes=len(graph.nodes),
        cost_profile=named(profile),
    )
