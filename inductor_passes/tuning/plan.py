"""What was planned of a graph, in the form in which times are compared with it.

It travels inside the generated module, so it is made of the problem, its planned order, and the calls of the generated
code with the tasks that each of them carries out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.records.convert import convert, plain
from inductor_passes.records.limits import AtLeastOne, Count
from inductor_passes.records.packed import pack, unpack
from inductor_passes.schedule.problem import Kind, Problem
from inductor_passes.schedule.simulate import Timeline, simulate

#: The class of kernels that Inductor generates and that hold no library operator.
FUSED = "fused kernels"


@dataclass(frozen=True)
class Call:
    """A call of the generated code: what it calls, as it is written there, and the tasks that it carries out."""

    name: str
    tasks: tuple[Count, ...]
    generated: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective of the plan.

    Attributes:
        task: of its start.
        name, label, kind, size_bytes, ranks: as in :class:`~inductor_passes.report.CollectiveReport`.
        start: the call that issues it; waits: those that wait for it.
    """

    task: Count
    name: str
    label: str
    kind: str
    size_bytes: Count
    ranks: tuple[Count, ...]
    start: Count = 0
    waits: tuple[Count, ...] = ()


@dataclass(frozen=True)
class About:
    """Which graph it is, and with what it was planned.

    Attributes:
        participants: ranks that compile the same graph; () where nobody was asked.
        timeout_s: how long they wait for each other.
        profile_path, profile_hash: of the cost profile; "" is the default one of ``device``.
        tune_file: where the corrected profile goes; "" beside Inductor's caches.
        swap: whether the graph is planned again, see ``tune_swap``.
    """

    phase: str
    graph_index: Count
    digest: str
    steps: AtLeastOne
    device: str
    participants: tuple[Count, ...]
    timeout_s: float
    profile_path: str = ""
    profile_hash: str = ""
    measured_costs: bool = False
    kernel_ns: float = 0.0
    tune_file: str = ""
    swap: bool = False


@dataclass(frozen=True)
class Planned:
    """A graph as it was planned."""

    about: About
    calls: tuple[Call, ...]
    collectives: tuple[Collective, ...]
    problem: Problem
    order: tuple[int, ...]
    timeline: Timeline = field(compare=False, repr=False)

    @staticmethod
    def of(
        about: About, calls: Sequence[Call], collectives: Sequence[Collective], problem: Problem, order: Sequence[int]
    ) -> Planned:
        """The plan, with each collective's calls."""
        where = {task: number for number, call in enumerate(calls) for task in call.tasks}
        waits: dict[int, list[int]] = {}
        for task in order:
            if problem.tasks[task].kind is Kind.WAIT and task in where:
                waits.setdefault(problem.tasks[task].start, []).append(where[task])
        placed = [
            Collective(c.task, c.name, c.label, c.kind, c.size_bytes, c.ranks, where[c.task], tuple(waits[c.task]))
            for c in collectives
            if c.task in where and c.task in waits
        ]
        placed.sort(key=lambda c: c.start)
        return Planned(about, tuple(calls), tuple(placed), problem, tuple(order), simulate(problem, tuple(order)))

    @functools.cached_property
    def link_of(self) -> dict[int, str]:
        """The link of each collective, by its place among ``collectives``."""
        lanes, tasks = self.problem.lanes, self.problem.tasks
        return {k: lanes[tasks[c.task].lane].link or lanes[tasks[c.task].lane].name
                for k, c in enumerate(self.collectives)}

    @functools.cached_property
    def communicating(self) -> frozenset[int]:
        """Calls that issue or wait."""
        return frozenset(n for c in self.collectives for n in (c.start, *c.waits))

    def predicted_ns(self, call: int) -> int:
        """Of what a call computes, beside the transfers that the plan has there."""
        begin, end, tasks = self.timeline.start_ns, self.timeline.end_ns, self.problem.tasks
        return sum(end[task] - begin[task] for task in self.calls[call].tasks if tasks[task].kind is Kind.COMPUTE)

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of every call its class, see :meth:`class_of`, and "" where it communicates."""
        return tuple("" if call in self.communicating else self.class_of(call) for call in range(len(self.calls)))

    def class_of(self, call: int) -> str:
        """The class of kernels that a call belongs to: an operator's name, or :data:`FUSED`."""
        one = self.calls[call]
        if one.generated:
            labels = {self.problem.tasks[task].label for task in one.tasks} - {""}
            return f"{min(labels)} (generated)" if labels else FUSED
        parts = one.name.removeprefix("torch.ops.").split(".")
        return parts[1] if len(parts) > 1 else parts[0]


def carried_out(
    statements: Sequence[tuple[str, str, tuple[str, ...]]],
    outputs: Sequence[tuple[str, tuple[str, ...]]],
) -> list[Call]:
    """Which tasks each call of the generated code carries out.

    A generated kernel may stand for several neighbouring fused nodes, of which it names the buffers that others read:
    it takes those before them that no call has taken.

    Args:
        statements: (what is called, ``extern`` or ``kernel``, buffers) in order, see ``_torch.generated_calls``.
        outputs: of every task in planned order: its kind, see ``_torch.snode_kind``, and the buffers that it defines.
    """
    place = {name: position for position, (_, names) in enumerate(outputs) for name in names}
    fused = [position for position, (kind, _) in enumerate(outputs) if kind == "fused"]
    taken: set[int] = set()
    calls: list[Call] = []
    for called, kind, names in statements:
        if kind == "extern":
            mine = sorted({place[n] for n in names if n in place} - taken)
        else:
            named = {place[n] for n in names if n in place and outputs[place[n]][0] == "fused"} - taken
            mine = [p for p in fused if p not in taken and p <= max(named)] if named else []
        taken.update(mine)
        calls.append(Call(called, tuple(mine), kind == "kernel"))
    return calls


def packed(planned: Planned) -> str:
    """As text for a generated module; equal for equal plans."""
    content = {
        "about": plain(planned.about),
        "calls": plain(planned.calls),
        "collectives": plain(planned.collectives),
        "problem": planned.problem.to_json(),
        "order": list(planned.order),
    }
    return pack(content)


def unpacked(text: str) -> Planned:
    """Inverse of :func:`packed`.

    Raises:
        ValueError: it is none.
    """
    content: Mapping[str, Any] = unpack(text)
    return Planned.of(
        convert(content["about"], About, "a plan"),
        convert(content["calls"], list[Call], "a plan"),
        convert(content["collectives"], list[Collective], "a plan"),
        Problem.from_json(content["problem"]),
        convert(content["order"], list[int], "a plan"),
    )
