"""What every pass writes down: plain, versioned data that trace, report and tests read.

A candidate that a pass looked at yields one :class:`Decision`; a pass yields one :class:`PassReport`; a compiled
graph yields one :class:`GraphReport`. Everything converts to and from JSON without loss and holds no NaN or infinity.
Units: ns and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from inductor_passes.records.convert import check_version, convert, plain
from inductor_passes.records.limits import Count, Integer, Number
from inductor_passes.records.words import BoundOn

SCHEMA_VERSION = 1
#: What a graph may be.
PHASES = ("forward", "backward", "inference")


#: The setting of a row that is not profitable, where no setting or change is known that would make it so.
NOTHING = "nothing"
#: In the detail of a collective whose gain is an upper bound.
GAIN_AT_MOST = "gain at most"


class Verdict(str, Enum):
    """Whether a pass changed what it looked at."""

    APPLIED = "applied"
    REFUSED = "refused"


class Reason(str, Enum):
    """The closed vocabulary of reasons. A decision without one of these is a bug."""

    PROFITABLE = "profitable"
    ASKED = "asked for"
    HIDDEN = "hidden"
    NOT_PROFITABLE = "not profitable"
    NO_INDEPENDENT_COMPUTE = "no independent compute left"
    DATA_DEPENDENCY = "data dependency"
    LANE_BUSY = "lane busy"
    MEMORY_BUDGET = "memory budget"
    LATENCY_BOUND = "latency-bound"
    FENCE = "order fixed by fence"
    HEAD = "first communication, nothing to hide it behind"
    TAIL = "last communication, nothing left to hide it behind"
    ALREADY_OPTIMAL = "input order is already best"
    NO_COLLECTIVES = "no collectives"
    NO_HINT = "symbolic size without a hint"
    RANGE = "not known for the whole range of sizes"
    UNSUPPORTED = "unsupported form"
    MIXED_DTYPE = "mixed dtypes"
    MIXED_REDUCE_OP = "mixed reduce ops"
    DIFFERENT_GROUP = "different group"
    NUMERICS = "would change numerics"
    VERIFIER = "verifier finding"
    UNPROVEN = "could not be proven"
    EXCEPTION = "exception in the pass"
    SLOWER = "simulated slower than the input"
    FRAGILE = "slower when durations are not as estimated"
    OVER_BUDGET = "above the memory budget"
    DISABLED = "switched off"
    RANKS_DIFFER = "ranks differ"
    PLAN_PINNED = "pinned by plan file"


class NothingPlanned(str, Enum):
    """Why nothing was planned in a process: what stands in the place of reports."""

    FSDP2 = "FSDP2"
    DDP = "DDP"
    REPLICATE = "replicate"
    FSDP1 = "FSDP1"
    GRAPH_BREAKS = "graph breaks"
    NOTHING_DISTRIBUTED = "nothing distributed"
    MANAGED = "managed elsewhere"
    ONE_RANK = "one rank"
    LEFT_TO_INDUCTOR = "left to Inductor"


@dataclass(frozen=True)
class Parameter:
    """A parameter that a collective carries, for people.

    Attributes:
        name: as ``named_parameters()`` of the compiled module has it, e.g. ``layers.0.attention.wq.weight``.
        module: path of the module that reads it there, e.g. ``layers.0.attention.wq``; "" is the compiled module.
    """

    name: str
    module: str = ""


@dataclass(frozen=True)
class Decision:
    """One candidate, one verdict.

    Attributes:
        subject: what was considered, e.g. ``reorder``, ``bucket``, ``R1``.
        node: the FX or scheduler node's name.
        verdict / reason: see the enums; ``detail`` adds numbers or names for people.
        source: the user's ``file:line`` or "".
        group: process-group name or "".
        gain_ns: estimated gain; 0 when unknown.
        setting: the option that would change the verdict, e.g. ``memory_budget="+5%"``, :data:`NOTHING`, or "".
        parameters: names of those that the node carries.
    """

    subject: str
    node: str
    verdict: Verdict
    reason: Reason
    detail: str = ""
    source: str = ""
    group: str = ""
    gain_ns: Integer = 0
    setting: str = ""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something the verifier holds against a graph or a schedule.

    Attributes:
        rule: short kebab-case name of the broken rule, e.g. ``read-before-wait``.
        node: where; ``other`` the node it conflicts with, or "".
        message: what was found, what was expected.
        parameters: names of those that ``node`` and ``other`` carry.
    """

    rule: str
    node: str
    message: str
    other: str = ""
    source: str = ""
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = f" ({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.rule}: {self.message}{about}"


@dataclass
class PassReport:
    """What one pass did to one graph. ``rolled_back`` is None when its result was kept."""

    name: str
    changed: bool = False
    decisions: list[Decision] = field(default_factory=list)
    rolled_back: Reason | None = None
    detail: str = ""
    findings: list[Finding] = field(default_factory=list)
    metrics: dict[str, Number] = field(default_factory=dict)
    duration_ns: Count = 0


@dataclass(frozen=True)
class CollectiveReport:
    """One collective in the final schedule.

    ``exposed_ns`` is the time the compute lane stands still for it, ``hidden_ns`` the rest of its duration.
    ``kind`` is a :class:`~inductor_passes.operators.CollectiveKind`, or what the label says in a problem that was made
    elsewhere. ``setting`` says what would help, :data:`NOTHING` that nothing known would. ``bucket`` says what a merged
    collective carries, e.g. ``bucket of 3``, and ``members`` names the starts that it was made of. ``parameters`` are
    those that it carries, in the order of the message; those of unknown name are left out.
    """

    name: str
    label: str
    kind: str
    lane: str
    ranks: tuple[Count, ...]
    size_bytes: Count
    duration_ns: Count
    hidden_ns: Integer
    exposed_ns: Integer
    exposed_before_ns: Integer
    reason: Reason
    detail: str = ""
    setting: str = ""
    gain_ns: Integer = 0
    source: str = ""
    bucket: str = ""
    members: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()


@dataclass
class NarrowedReport:
    """One collective that was sent in a narrower type.

    Attributes:
        name: of the start in the graph that came in; ``label`` and ``kind`` say what it was.
        form: the narrower type, as in the settings.
        block: elements that share a scale; 1: elements are cast.
        bytes_before / bytes_after: sent by this rank, twice for a reduction to all ranks.
        link_before_ns / link_after_ns: on its lane, as priced.
        bound: largest error of one rounding, relative to the largest element of its block (with ``block`` 1: to the
            element).
        places: under which names the roundings of this rank are measured; empty: they are not.
        measured: the largest error in the run that was measured last; None: none was.
        largest: in all runs that were measured.
        runs: how many were.
        parameters: names of those that it carries.
    """

    name: str
    label: str
    kind: str
    form: str
    block: Count
    bytes_before: Count
    bytes_after: Count
    link_before_ns: Count
    link_after_ns: Count
    bound: Number
    places: tuple[str, ...] = ()
    measured: Number | None = None
    largest: Number = 0.0
    runs: Count = 0
    source: str = ""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class RedistributionReport:
    """The collectives that one call of the user's program caused.

    Attributes:
        names: of the starts in the graph that came in.
        call: what was called, e.g. ``redistribute`` or ``add (backward)``; "" when the graph does not say.
        explicit: whether the call is one of DTensor's conversions; None when it is not known.
        source: the user's ``file:line`` or "".
        placements: per collective, e.g. ``S(1) -> R over 4 ranks``.
        bytes_before / bytes_after: sent per rank (ring model) before and after the rewrites.
        rewrites: those that were applied, e.g. ``R5``.
        refused: why others were not.
        parameters: names of those that the collectives carry.
    """

    names: tuple[str, ...]
    call: str
    explicit: bool | None
    source: str
    placements: tuple[str, ...]
    bytes_before: Count
    bytes_after: Count
    rewrites: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleReport:
    """Before and after of one planned schedule (``level`` is ``fx`` or ``scheduler``).

    ``gap`` is makespan / lower bound - 1; ``bound_on`` says of which orders the bound holds (``records.words.BoundOn``,
    "any memory" in reports of versions that knew no other). ``budget_bytes`` is the cap on the peak, None: unlimited.
    ``schedule_before`` and ``schedule_after`` are normalised strings, see ``Problem.schedule_text``.
    ``disturbed_*``: the mean step, and the longest, when durations are not as estimated (``schedule.robust``); 0 in
    reports of versions that did not ask. ``contention_*``: what kernels take longer because something transfers beside
    them; 0 where the cost profile knows no such slowdown. ``came_ns``: of ``fx``, the step of the graph as it came in,
    before any pass, in its own order; ``makespan_before_ns`` is that of the graph that was ordered, merged messages
    included; ``came_peak_bytes`` the same for memory. 0 where it is not known, and in reports of versions that did not
    ask. ``costs``: the cost profile and its hash, where they are not the graph's: those that a plan file brought.
    """

    level: str
    tasks: Count
    makespan_before_ns: Count
    makespan_after_ns: Count
    compute_ns: Count
    communication_ns: Count
    lower_bound_ns: Count
    gap: Number
    exposed_before_ns: Integer
    exposed_after_ns: Integer
    peak_before_bytes: Count
    peak_after_bytes: Count
    budget_bytes: Count | None
    digest: str
    schedule_before: str = ""
    schedule_after: str = ""
    method: str = ""
    disturbed_before_ns: Count = 0
    disturbed_after_ns: Count = 0
    disturbed_worst_ns: Count = 0
    bound_on: BoundOn = "any memory"
    contention_before_ns: Count = 0
    contention_after_ns: Count = 0
    came_ns: Count = 0
    came_peak_bytes: Count = 0
    costs: str = ""


class Cause(str, Enum):
    """Why a measured time is not what was predicted. Empty where the two are close."""

    CONTENTION = "contention"
    SKEW = "late peer"
    LAUNCH = "launch-bound"
    UNKNOWN = "cost unknown"
    COST = "other cost than assumed"
    SHIFTED = "other collectives took another time"
    CLOSE = ""


@dataclass(frozen=True)
class CollectiveTiming:
    """One collective, predicted and measured, in ns.

    ``known`` says how a transfer's time is known: ``measured``, ``shared`` (with the transfers before it, whose end
    nobody saw either), ``at most`` (nobody stood still for it), or "" (not at all). ``skew_ns`` is how long the first
    rank was ahead of the last one, ``late`` the rank that came last most often (-1: not known, or one rank's times).
    """

    label: str
    name: str
    kind: str
    size_bytes: Count
    predicted_ns: Count
    measured_ns: Count
    known: str
    predicted_stall_ns: Integer
    measured_stall_ns: Count
    skew_ns: Count = 0
    late: Integer = -1
    cause: Cause = Cause.CLOSE


@dataclass(frozen=True)
class KernelTiming:
    """One class of kernels, predicted and measured, in ns of a step.

    ``beside`` is how much longer its kernels took, against what was predicted, beside a transfer than alone; 0 where
    there were not both.
    """

    kernels: str
    calls: Count
    predicted_ns: Count
    measured_ns: Count
    beside: Number = 0.0
    cause: Cause = Cause.CLOSE


class SwapOutcome(str, Enum):
    """What became of a graph's second plan, see ``tune_swap``."""

    NOTHING = "nothing swapped"
    AGREED = "to be swapped in"
    SWAPPED = "swapped in"
    KEPT = "swapped in, faster"
    RETURNED = "swapped in, not faster, swapped back"
    UNMEASURED = "swapped in, not measured to be faster, stays"


@dataclass(frozen=True)
class Swap:
    """A graph planned again with what was measured of it.

    Attributes:
        outcome: so far; the last one counts.
        why: where it did not go on, in one sentence; or "".
        call: of the graph, 1 for the first, from which on the second plan runs; 0 where there is none.
        back: from which on the first plan runs again; 0 where there is none.
        before_ns / after_ns: the step of the first and of the second plan, measured on the slowest rank; 0: not known.
        predicted_ns: the step of the second plan.
        peak_bytes: its planned peak; 0 where it is not known, and in reports of versions that did not say it.
        plan: path of a file with the graph's plan that was measured to be the faster one; "" where none was written.
    """

    outcome: SwapOutcome
    why: str = ""
    call: Count = 0
    back: Count = 0
    before_ns: Count = 0
    after_ns: Count = 0
    predicted_ns: Count = 0
    plan: str = ""
    peak_bytes: Count = 0


@dataclass(frozen=True)
class Timing:
    """What the setting ``tune`` measured of a graph, beside what was predicted.

    Attributes:
        steps: that were timed.
        ranks: whose times these are: one rank's own, or all that compile the graph.
        predicted_ns / measured_ns: of the step, measured on the slowest rank.
        profile: path of the corrected cost profile, "" where none was written.
        profile_hash: of its content, equal on all ranks.
        note: what was not done, and why; or "".
        swap: what became of the second plan; None without the setting ``tune_swap``.
    """

    steps: Count
    ranks: tuple[Count, ...]
    predicted_ns: Count
    measured_ns: Count
    collectives: tuple[CollectiveTiming, ...] = ()
    kernels: tuple[KernelTiming, ...] = ()
    profile: str = ""
    profile_hash: str = ""
    note: str = ""
    swap: Swap | None = None


@dataclass
class GraphReport:
    """Everything about one compiled graph; the payload of the summary artifact.

    ``phase`` is ``forward``, ``backward`` or ``inference``; forward and backward share a compile id, so
    (compile_id, phase, graph_index) identifies a graph within a rank's trace. ``plan`` is the graph's plan in the form
    of a plan file (``pin.file.GraphPlan``), empty when nothing was planned. ``region`` is the class of the module that
    was compiled, which names of parameters are relative to; "" when none are known. ``timing`` is there once the steps
    of the setting ``tune`` are over.
    """

    phase: str
    graph_index: Count
    compile_id: str = ""
    rank: Count = 0
    world_size: Count = 1
    torch_version: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    nodes: Count = 0
    passes: list[PassReport] = field(default_factory=list)
    schedules: list[ScheduleReport] = field(default_factory=list)
    collectives: list[CollectiveReport] = field(default_factory=list)
    redistributions: list[RedistributionReport] = field(default_factory=list)
    narrowed: list[NarrowedReport] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    order_check: str = ""
    digest: str = ""
    region: str = ""
    from_cache: bool = False
    cost_profile: str = ""
    notes: list[str] = field(default_factory=list)
    timing: Timing | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def schedule(self) -> ScheduleReport | None:
        """The schedule that was compiled: the last level planned."""
        return self.schedules[-1] if self.schedules else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able data."""
        return plain(self)  # type: ignore[no-any-return]

    @staticmethod
    def from_json(data: dict[str, Any]) -> GraphReport:
        """Inverse of :meth:`to_json`; unknown keys are ignored, a newer schema version is refused.

        Raises:
            RecordError: another schema version, a missing key or a value of another type; it names the place.
        """
        return convert(check_version(data, SCHEMA_VERSION, "report"), GraphReport, "a report")
