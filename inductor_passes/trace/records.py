"""The JSON artifacts of a graph as records: what is written, what is read back, and what ``docs/schemas`` says.

``summary`` is a :class:`~inductor_passes.report.GraphReport` without the parts that have artifacts of their own,
``plan`` a :class:`~inductor_passes.pin.file.GraphPlan` and ``problem`` a
:class:`~inductor_passes.schedule.problem.ProblemRecord`, each with :class:`Identity`'s fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from inductor_passes.records.limits import MOST, Count, Integer, NotNegative, one_of
from inductor_passes.report import PHASES, CollectiveReport, Decision, NothingPlanned, PassReport, Timing


class Identity(Struct, kw_only=True):
    """What every payload carries, so that a reader can put the artifacts of one graph together."""

    schema_version: Literal[1]
    phase: Annotated[str, one_of(*PHASES)]
    graph_index: Count
    compile_id: str
    rank: Count


class ConfigArtifact(Identity, kw_only=True):
    """The settings a graph was compiled with."""

    config: dict[str, Any]
    cost_profile: str
    torch_version: str
    world_size: Count


class PassDecisions(Struct):
    """One pass with what it decided."""

    name: str
    decisions: list[Decision]


class DecisionsArtifact(Identity, kw_only=True):
    """Every candidate that a pass looked at, with verdict and reason; passes in the order of their runs."""

    passes: list[PassDecisions]


class GroupRecord(Struct):
    """A communicator's global ranks, also as start and stride when they are evenly spaced (else null)."""

    name: str
    ranks: tuple[Count, ...]
    start: Count | None
    stride: Integer | None


class CollectivesArtifact(Identity, kw_only=True):
    """The verdict on every collective of the final schedule. Times in ns, sizes in bytes, ranks global."""

    groups: list[GroupRecord]
    collectives: list[CollectiveReport]


class MeasuredMessage(Struct):
    """A narrowed collective's errors so far, see ``NarrowedReport``."""

    name: str
    measured: NotNegative
    largest: NotNegative
    runs: Count


class MeasuredArtifact(Identity, kw_only=True):
    """Errors of narrowed messages, measured while the graph runs; a graph's last such record counts."""

    narrowed: list[MeasuredMessage]


class FailureArtifact(Identity, kw_only=True):
    """A pass that was rolled back: why, and the graph that was refused, line by line."""

    pass_: PassReport = field(name="pass")
    graph: list[str]


class NothingPlannedArtifact(Identity, kw_only=True):
    """Why nothing was planned although graphs were compiled; ``line`` is for people."""

    reason: Annotated[str, one_of(*(reason.value for reason in NothingPlanned))]
    line: str
    world_size: Count


class TimingArtifact(Identity, kw_only=True):
    """What was measured of a graph in the steps of the setting ``tune``, beside what was predicted. Times in ns."""

    timing: Timing


# -- timelines, as Chrome and Perfetto know them; ts and dur are microseconds with three digits ----------------------

Microseconds: TypeAlias = Annotated[float, Meta(ge=0, le=MOST / 1000)]


class Named(Struct, omit_defaults=True):
    """The argument of a metadata event: a name, or a place in the order."""

    name: str | UnsetType = UNSET
    sort_index: Integer | UnsetType = UNSET


class Metadata(Struct, tag_field="ph", tag="M"):
    """What a process or thread is called."""

    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    args: Named
    pid: Count = 0
    tid: Count = 0


class SliceFacts(Struct, omit_defaults=True):
    """What a slice stands for; ``task`` is the task's number in the problem."""

    task: Count | UnsetType = UNSET
    label: str | UnsetType = UNSET
    node: str | UnsetType = UNSET
    bytes: Count | UnsetType = UNSET
    parameters: tuple[str, ...] | UnsetType = UNSET
    source: str | UnsetType = UNSET


class Slice(Struct, tag_field="ph", tag="X"):
    """Something that takes time on a thread."""

    name: str
    cat: Literal["compute", "wait", "issue", "transfer"]
    ts: Microseconds
    dur: Microseconds
    args: SliceFacts
    pid: Count = 0
    tid: Count = 0


class _Flow(Struct):
    name: str
    cat: str
    id: str
    ts: Microseconds
    pid: Count = 0
    tid: Count = 0


class FlowBegin(_Flow, tag_field="ph", tag="s"):
    """Where a collective is issued."""


class FlowStep(_Flow, tag_field="ph", tag="t"):
    """Where its transfer begins."""


class FlowEnd(_Flow, tag_field="ph", tag="f", kw_only=True):
    """Where its wait ends."""

    bp: Literal["e"]


class Sizes(Struct, omit_defaults=True):
    """Memory in use, and the cap on it."""

    bytes: Count
    budget: Count | UnsetType = UNSET


class Counter(Struct, tag_field="ph", tag="C"):
    """Memory in use from here on."""

    name: str
    ts: Microseconds
    args: Sizes
    pid: Count = 0
    tid: Count = 0


ChromeEvent: TypeAlias = Metadata | Slice | FlowBegin | FlowStep | FlowEnd | Counter


class ChromeTraceArtifact(Identity, kw_only=True):
    """A planned timeline for Perfetto. ts and dur are microseconds with three digits."""

    displayTimeUnit: Literal["ns"]
    traceEvents: list[ChromeEvent]
