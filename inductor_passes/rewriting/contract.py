"""What a pass gets and what it gives back.

A pass is a function of its input: it gets a graph and :class:`Facts`, changes the graph in place and returns one
:class:`Outcome`. It keeps nothing, takes no snapshot and undoes nothing. The pipeline (``engine.pipeline``) verifies
the graph, holds it to the memory cap and to what ranks agree on, and keeps or drops the outcome as a whole.

A pass that has several ways to go names the next one instead of trying it: ``again`` asks for another run on the graph
as it was, ``otherwise`` says what to run when the result is above the cap or slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.canonical import Shards, shards
from inductor_passes.ir.view import GraphView
from inductor_passes.pin.pins import Pins
from inductor_passes.problems.fx import FxProblem, build
from inductor_passes.report import NarrowedReport, PassReport, RedistributionReport, ScheduleReport
from inductor_passes.schedule.least_memory import least_peak
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import Plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.tables import tables
from inductor_passes.verify.certificate import Certificate

GroupOrder = Literal["kept", "any"]
#: Why something is left alone where ranks have not said that they compile the same graph.
NOT_AGREED = "ranks did not agree that they compile the same graph"


class Beaten(Exception):
    """No order of what a pass could make of the graph is as fast as ``Facts.beat_ns``; the graph was not changed."""


@dataclass(frozen=True)
class Cap:
    """The memory cap of one FX graph: computed once, from the graph that came in.

    Attributes:
        input_peak_bytes: of that graph in its own order; None when a size has no hint.
        least_peak_bytes: of that graph in the order of least memory that is known: what a budget is relative to.
        limit_bytes: what no plan may exceed; None: unlimited, or unknown because a size has no hint.
        verified_peak_bytes: the peak of the graph that came in as the verifier counts it.
        generated_least_peak_bytes: like ``least_peak_bytes``, for the memory of the code that Inductor generates
            (``FxProblem.generated``); None where other code is generated, or that memory is not known.
        generated_limit_bytes: what merged collectives may not exceed in that memory; None: as ``limit_bytes``.
        absolute: the limit is a number of bytes, whatever the graph needed as it came in.
    """

    input_peak_bytes: int | None = None
    least_peak_bytes: int | None = None
    limit_bytes: int | None = None
    verified_peak_bytes: int | None = None
    generated_least_peak_bytes: int | None = None
    generated_limit_bytes: int | None = None
    absolute: bool = False

    @property
    def verified_limit_bytes(self) -> int | None:
        """The cap on what the verifier counts: as far above its idea of the graph that came in, in its own order.

        An absolute limit is held, too, by what needs no more bytes than that by the verifier's own count.
        """
        if self.limit_bytes is None or self.input_peak_bytes is None or self.verified_peak_bytes is None:
            return None
        relative = self.verified_peak_bytes + max(0, self.limit_bytes - self.input_peak_bytes)
        return max(relative, self.limit_bytes) if self.absolute else relative


@dataclass(frozen=True)
class Solved:
    """A problem with the plan that was made of it under the graph's cap.

    ``searched``: the plan is what ``schedule.effort.plan_with_effort`` finds, at ``normal`` and for this cap alone.
    """

    problem: Problem
    plan: Plan
    searched: bool = False


@dataclass(frozen=True, eq=False)
class Look:
    """One look at a graph as it is: what follows from it is worked out once, at the first use.

    ``compared``: see :attr:`Facts.compared`. ``known_peak_bytes``: its peak, when somebody has worked that out already.
    """

    view: GraphView
    config: PassConfig
    profile: CostProfile
    phase: str
    agreed: bool
    compared: bool = True
    known_peak_bytes: int | None = None

    @cached_property
    def problem(self) -> FxProblem:
        """See :attr:`Facts.problem`."""
        estimator = self.config.estimator
        return build(
            self.view, self.profile, name=self.phase, estimator=estimator, agreed=self.agreed, known=self.shards
        )

    @cached_property
    def shards(self) -> Shards:
        """See :attr:`Facts.shards`."""
        return shards(self.view)

    @cached_property
    def peak_bytes(self) -> int:
        """See :attr:`Facts.peak_bytes`."""
        return peak_bytes(self.problem.problem) if self.known_peak_bytes is None else self.known_peak_bytes

    def of(self, graph: torch.fx.Graph, known_peak_bytes: int | None = None) -> Look:
        """The same look at another graph."""
        return dataclasses.replace(self, view=GraphView(graph), known_peak_bytes=known_peak_bytes)

    def put_back(self, graph: torch.fx.Graph) -> Look:
        """The same look at the same graph, whose nodes may be other objects now: numbers stay what they are."""
        return self.of(graph, self.__dict__.get("peak_bytes", self.known_peak_bytes))

    @property
    def least_peak_bytes(self) -> int:
        """The peak of the graph in the order of least memory that is known."""
        return least_peak(tables(self.problem.problem))

    @property
    def generated_least_peak_bytes(self) -> int | None:
        """The same for the memory of Inductor's code; None where that is not known."""
        generated = self.problem.generated if self.config.codegen == "inductor" else None
        return None if generated is None else least_peak(tables(generated))


@dataclass(frozen=True, eq=False)
class Facts:
    """What a pass may know; read-only, about the graph as the pass gets it.

    Attributes:
        look: at the graph.
        cap: on the peak of whatever comes out of all passes.
        pins: the plan that is pinned for this graph, None when there is none or it was given up.
        apart: starts that must keep to themselves: those of a matmul's parts, for instance.
        sums: buckets of a plan that runs; what is summed so that last bits depend on the message travels as it does
            there. None: as is best.
        solved: the plan of the graph as it is, when there is one.
        beat_ns: a makespan that is reached another way. A pass raises :class:`Beaten` when nothing that it could make
            of the graph can be faster; None: whatever comes out is wanted.
    """

    look: Look
    cap: Cap = Cap()
    pins: Pins | None = None
    apart: frozenset[str] = frozenset()
    sums: tuple[tuple[str, ...], ...] | None = None
    solved: Solved | None = None
    beat_ns: int | None = None

    @property
    def view(self) -> GraphView:
        """The graph's roles, collectives and storages."""
        return self.look.view

    @property
    def config(self) -> PassConfig:
        """Settings; equal on all ranks."""
        return self.look.config

    @property
    def profile(self) -> CostProfile:
        """Costs; equal on all ranks."""
        return self.look.profile

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` or ``inference``."""
        return self.look.phase

    @property
    def agreed(self) -> bool:
        """Whether all ranks that take part compile this graph.

        Without it no collective may be added, removed, changed or moved past another; the pipeline holds every pass to
        that.
        """
        return self.look.agreed

    @property
    def compared(self) -> bool:
        """Whether the numbers in the graph's calls are known to be equal on the ranks, or a rank's own by its position.

        Without it a rank may not compute for another one. A variant that one rank alone may have sends what the others
        send, and computes with numbers of its own.
        """
        return self.look.compared

    @property
    def limit_bytes(self) -> int | None:
        """The cap in bytes; None: unlimited."""
        return self.cap.limit_bytes

    @property
    def problem(self) -> FxProblem:
        """The scheduling problem of the graph.

        Raises:
            NoHintError: a size has no hint.
        """
        return self.look.problem

    @property
    def shards(self) -> Shards:
        """What the graph shows about shards of unequal size."""
        return self.look.shards

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks get one answer from durations and peaks."""
        return self.agreed and self.shards.ranks_agree

    @property
    def peak_bytes(self) -> int:
        """Peak of the graph in its order, as the planner sees it.

        Raises:
            NoHintError: a size has no hint.
        """
        return self.look.peak_bytes

    def of(self, graph: torch.fx.Graph, *, solved: Solved | None = None) -> Facts:
        """The same facts about a graph that has changed."""
        return dataclasses.replace(self, look=self.look.of(graph), solved=solved)

    def put_back(self, graph: torch.fx.Graph) -> Facts:
        """The same facts about the same graph, which was changed and is again as it was."""
        return dataclasses.replace(self, look=self.look.put_back(graph))


@dataclass(frozen=True)
class Scheduled:
    """An order that a pass gave to the whole graph.

    Attributes:
        fx: the problem, built before the order was applied.
        plan: the order.
        record: before and after, for the report.
    """

    fx: FxProblem
    plan: Plan
    record: ScheduleReport


@dataclass(frozen=True)
class Rounding:
    """A message of this rank that is narrower than what it carries, by the names of nodes.

    Attributes:
        rows: what is narrowed, [blocks, block] in float32.
        message: what is sent of it.
        form: the type, as in the settings.
        bound: on the relative error.
    """

    rows: str
    message: str
    form: str
    bound: float


@dataclass(frozen=True)
class Sent:
    """A collective that was narrowed: for the report, and what may be measured of it."""

    report: NarrowedReport
    roundings: tuple[Rounding, ...]


@dataclass(frozen=True)
class Outcome:
    """What a pass did; kept or dropped as a whole.

    Attributes:
        report: decisions, metrics, and whether the graph was changed.
        certificates: which nodes became which, for the verifier.
        before: how the graph as it came plans under the cap. Given when the pass is to be dropped unless the graph as
            it left it plans faster.
        solved: how the pass believes that the graph as it left it plans; used when that is the graph's problem.
        scheduled: the order that it gave to the graph.
        buckets: names of the starts that it merged, per bucket; ``carriers`` the starts that they became, in order.
        redistributions: for the report.
        narrowed: collectives that carry a narrower type now.
        apart: starts that later passes must not merge.
        given_up: why a pinned plan was given up, "" when it was not.
        pinned: the field of a plan file that asked for this, "" when none did. Where it cannot be kept the file is
            refused, or the pass is run again with the reason as its ``given_up``.
        after: facts about the graph as the pass left it, when it has looked at it.
        forced: a setting asks for the result whatever it costs: it is not compared with the graph as it came.
        insist: the setting with which the result would be kept although the graph plans no faster.
        again: run this on the graph as it was; nothing of this outcome is kept.
        otherwise: run this on the graph as it was when the result is above the cap or plans slower.
        smaller: passes that do a part of this, for graphs that are small enough to try whether one plans faster.
        notes: sentences that nobody who reads the report should miss.
        complaints: why a setting does nothing of what it asks for: the user is warned.
    """

    report: PassReport
    certificates: tuple[Certificate, ...] = ()
    before: Plan | None = None
    solved: Solved | None = None
    scheduled: Scheduled | None = None
    buckets: tuple[tuple[str, ...], ...] = ()
    carriers: tuple[str, ...] = ()
    redistributions: tuple[RedistributionReport, ...] = ()
    narrowed: tuple[Sent, ...] = ()
    apart: frozenset[str] = field(default_factory=frozenset)
    given_up: str = ""
    pinned: str = ""
    after: Facts | None = None
    forced: bool = False
    insist: str = ""
    again: Pass | None = None
    otherwise: Pass | None = None
    smaller: tuple[Pass, ...] = ()
    notes: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()


@runtime_checkable
class InParts(Protocol):
    """A pass that can do with less than it could do: what it leaves out is written to plan files."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the parts that it does without, in order."""

    def without(self, parts: Collection[str]) -> Pass:
        """The pass without these parts.

        Raises:
            ValueError: it has no such part.
        """


class Pass(Protocol):
    """A graph pass: a frozen dataclass whose fields are its options.

    ``group_order`` is ``any`` for a pass that may change the order of collectives within a process group (the same way
    on every rank, see ``ir.canonical``), else ``kept``: the verifier holds it to that. A pass that regroups sums
    says so by ``numerics = "reassociate"``; without it every value has to be the same bit for bit.
    """

    group_order: ClassVar[GroupOrder]

    @property
    def name(self) -> str:
        """Name in reports."""

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """Change the graph; one decision per candidate. May raise: the pipeline puts the graph back."""


def plannings(one: Pass) -> int:
    """How many times as long as an ordinary pass one takes, because it plans the graph itself: its ``plannings``."""
    found: int = getattr(one, "plannings", 1)
    return found


def may_shorten(one: Pass, facts: Facts) -> bool:
    """Whether a pass may change a graph so that an order can be faster than any order of the graph as it comes.

    A pass that sometimes does not has a method of this name; the others count as passes that do.
    """
    ask = getattr(one, "may_shorten", None)
    return ask is None or bool(ask(facts))
