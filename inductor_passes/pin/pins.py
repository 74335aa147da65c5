"""One graph's pinned plan: does it still fit, and which order does it ask for.

A plan fits when the graph that came in has the collectives that it was made for (names, kinds, sizes, group sizes), or
when it does not say which. It
is applied level by level: buckets, order of the FX tasks, order of the fused kernels. A level that is not written is
planned. Everything asked for is checked against the graph's own dependencies and the memory budget, and the verifier
looks at the result as at any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.pin.file import GraphPlan, PlanFile, PlanFileError
from inductor_passes.schedule.problem import Problem, ProblemError

if TYPE_CHECKING:
    from inductor_passes.schedule.plan import Plan

#: The method of a pinned order.
METHOD = "pinned"
#: How many names of each kind of difference an error lists.
_SHOWN = 4


class GivenUp(Exception):
    """A pinned plan cannot be used and the settings allow planning anew; the message says why."""


@dataclass(frozen=True)
class Pins:
    """What is pinned for the graph that is being compiled.

    Attributes:
        replan: give up the plan where it does not fit, instead of raising.
        given_up: why it was given up, "" while it holds.
    """

    graph: GraphPlan
    path: str
    digest: str
    rank: int
    replan: bool = False
    given_up: str = ""

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...] | None:
        """Pinned buckets, None when they are not pinned."""
        return self.graph.buckets

    def left_out_of(self, name: str) -> tuple[str, ...] | None:
        """The parts that a pass is to leave out, by the plan; None: the whole pass."""
        found = [said.partition("/") for said in self.graph.left_out or ()]
        mine = [part for head, _, part in found if head == name]
        return None if "" in mine else tuple(mine)

    def refuse(self, message: str) -> NoReturn:
        """The plan cannot be used: raise :class:`GivenUp`, or :class:`PlanFileError`, as the setting says."""
        text = f"{self.path}: {self.graph.title}: {message}"
        if not self.replan:
            raise PlanFileError(f'{text}. plan_mismatch="replan" plans such graphs anew')
        raise GivenUp(text)

    def fx_plan(self, problem: Problem, limit_bytes: int | None) -> Plan | None:
        """The pinned order of the FX tasks as a plan; None when it is not pinned.

        Raises:
            GivenUp, PlanFileError: see :meth:`refuse`.
        """
        hint = "; if buckets were changed, remove `order` and `kernels` to have them planned"
        names, order = [t.name for t in problem.tasks], self.graph.order
        if order is not None and self.rank != self.graph.rank:
            order = _renamed(order, names)
        return self._plan(problem, names, order, limit_bytes, "order", hint)

    def kernel_plan(self, problem: Problem, names: Sequence[str], limit_bytes: int | None) -> Plan | None:
        """The pinned order of the fused kernels as a plan; None when it is not pinned.

        Kernels may differ between ranks (one pads its shard, its neighbour does not); collectives do not, and their
        order is pinned on FX. So kernels of another rank that do not fit are planned here.
        """
        if self.foreign(names):
            return None
        hint = "; if `order` was changed, remove `kernels` to have them planned"
        return self._plan(problem, names, self.graph.kernels, limit_bytes, "kernels", hint)

    def foreign(self, names: Sequence[str]) -> str:
        """Why the pinned order of kernels is another rank's and does not fit here, in one sentence; "" otherwise."""
        pinned = self.graph.kernels
        if pinned is None or self.rank == self.graph.rank or {*pinned} == {*names}:
            return ""
        found = _difference(dict.fromkeys(pinned, ""), dict.fromkeys(names, ""))
        return f"`kernels` are those of rank {self.graph.rank}, and rank {self.rank} has others: {found}"

    def _plan(
        self,
        problem: Problem,
        names: Sequence[str],
        pinned: Sequence[str] | None,
        limit_bytes: int | None,
        what: str,
        hint: str,
    ) -> Plan | None:
        if pinned is None:
            return None
        number = {name: i for i, name in enumerate(names)}
        difference = _difference(dict.fromkeys(pinned, ""), dict.fromkeys(names, ""))
        if difference:
            self.refuse(f"`{what}` does not fit the graph: {difference}{hint}")
        order = tuple(number[name] for name in pinned)
        if broken := _broken_rule(problem, order, names):
            self.refuse(f"`{what}` is not allowed: {broken}{hint}")
        # Code from a cache reads pins, and nothing is planned then.
        from inductor_passes.schedule.plan import of_order

        # An order that changes nothing counts as the input's.
        found = of_order(problem, order, limit_bytes, METHOD if order != problem.input_order else "input")
        if limit_bytes is not None and found.peak_bytes > max(limit_bytes, found.input_peak_bytes):
            self.refuse(
                f"`{what}` needs {found.peak_bytes} bytes at its peak, the memory budget allows {limit_bytes}; "
                "raise memory_budget or move collectives later"
            )
        return found

    def combined(self, digest: str) -> str:
        """A plan's digest that also tells which file it was pinned by: ranks with other files have other digests."""
        return hashlib.sha256(f"{digest}|{self.digest}".encode()).hexdigest()[:16]


def _broken_rule(problem: Problem, order: Sequence[int], names: Sequence[str]) -> str:
    """The first dependency that an order breaks, in words; "" when it is legal."""
    position = {i: k for k, i in enumerate(order)}
    for i in order:
        task = problem.tasks[i]
        if task.start >= 0 and position[task.start] > position[i]:
            return f"{names[i]} waits for {names[task.start]}, which starts later"
    for i, preds in enumerate(problem.expanded):
        for p in preds:
            if position[p] > position[i]:
                fence = next((names[k] for k in (i, p) if problem.tasks[k].fence), "")
                why = f" ({fence} is a fence: nothing that communicates crosses it)" if fence else ""
                return f"{names[i]} runs before {names[p]}, which it depends on{why}"
    try:
        problem.check_order(order)
    except ProblemError as error:
        return str(error)
    return ""


def described(view: GraphView) -> dict[str, str]:
    """Start node -> what it does, for every collective of a graph; equal on ranks that run the same program."""
    return {c.start.name: _described(c) for c in view.collectives}


def _described(collective: Collective) -> str:
    size = max(collective.input_bytes or 0, collective.output_bytes or 0)
    kind = f"{collective.kind} {collective.reduce_op}".strip()
    return f"{kind} {size} bytes, {len(collective.group.ranks)} ranks"


def find(
    plans: PlanFile,
    phase: str,
    graph_index: int,
    collectives: Mapping[str, str],
    names: Mapping[str, tuple[str, ...]] | None = None,
    *,
    rank: int,
    replan: bool,
) -> Pins | None:
    """The plan for a graph, given up or not; None when the file says nothing about it.

    A graph is recognised by phase and collectives, so that a model that is compiled a second time in a process gets the
    plan of its first graph; then by phase and number, and the only plan of a phase is meant for every graph of it. A
    plan that does not say for which collectives, phase or number it was made fits any.

    Args:
        collectives: of the graph, see :func:`described`.
        names: start node -> parameters that it carries.

    Raises:
        PlanFileError: the file's plan of that number was made for other collectives, or it names a parameter that no
            collective carries, or several (unless ``replan``).
    """
    same_phase = [g for g in plans.graphs if g.phase in (phase, None)]
    fitting = [g for g in same_phase if g.collectives is not None and dict(g.collectives) == dict(collectives)]
    numbered = [g for g in same_phase if g.graph_index == graph_index]
    numbered = numbered or [g for g in same_phase if g.graph_index is None]
    numbered = numbered or (same_phase if len(same_phase) == 1 else [])
    fitting += [g for g in numbered if g.collectives is None]
    graph = next((g for g in fitting if g in numbered), next(iter([*fitting, *numbered]), None))
    if graph is None:
        return None
    pins = Pins(graph, plans.path, plans.digest, rank, replan)
    if graph in fitting:
        return resolved(pins, collectives, names or {})
    return _given_up(
        pins, "the graph has changed since the plan was made: " + _difference(graph.collectives or {}, collectives)
    )


def resolved(pins: Pins, collectives: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> Pins:
    """The pins with nodes in the place of parameters.

    ``buckets`` and ``kept`` name a collective by its start node, by a parameter that it alone carries
    (``head.weight``), or by kind and parameter (``reduce_scatter head.weight``).

    Args:
        collectives: start node -> what it does, see :func:`described`.
        names: start node -> parameters that it carries.

    Raises:
        GivenUp, PlanFileError: see :meth:`Pins.refuse`. The pins are given up where that is allowed.
    """
    carriers: dict[str, list[str]] = {}
    for start, description in collectives.items():
        for name in names.get(start, ()):
            for said in (name, f"{description.split()[0]} {name}"):
                carriers.setdefault(said, []).append(start)
    graph, problem = pins.graph, ""

    def node(said: str) -> str:
        nonlocal problem
        found = [said] if said in collectives else carriers.get(said, [])
        if len(found) > 1:
            kinds = sorted({f"{collectives[start].split()[0]} {said}" for start in found if " " not in said})
            other = f"; expected one of {', '.join([*kinds, *found][: 2 * _SHOWN])}"
            problem = problem or f"{said!r} is carried by {len(found)} collectives{other}"
        return found[0] if len(found) == 1 else said

    buckets = None if graph.buckets is None else tuple(tuple(map(node, bucket)) for bucket in graph.buckets)
    kept = None if graph.kept is None else tuple(map(node, graph.kept))
    if not problem:
        try:
            return dataclasses.replace(pins, graph=dataclasses.replace(graph, buckets=buckets, kept=kept))
        except PlanFileError as error:
            problem = str(error)
    return _given_up(pins, problem)


def _given_up(pins: Pins, why: str) -> Pins:
    """The pinned plan with the reason why it cannot be used.

    Raises:
        PlanFileError: it may not be given up.
    """
    try:
        pins.refuse(why)
    except GivenUp as error:
        return dataclasses.replace(pins, given_up=str(error))


def find_kept(
    plans: PlanFile,
    graph_index: int | None,
    keepable: Sequence[str],
    names: Mapping[str, tuple[str, ...]] | None = None,
    *,
    replan: bool,
) -> Pins | None:
    """The forward plan that says which parameters stay gathered for backward; None when no plan does.

    Asked before forward and backward are taken apart, so the plan is recognised by naming all that could be kept.

    Args:
        graph_index: of the graph, None where it is not known yet.
        names: start node of a gather -> parameters that it carries.

    Raises:
        PlanFileError: the plan says so of a graph with other gathers, or of a gather that cannot be kept (unless
            ``replan``).
    """
    saying = [g for g in plans.graphs if g.phase in ("forward", None) and g.kept is not None]
    if not saying:
        return None
    fitting = [g for g in saying if g.collectives is None or all(name in g.collectives for name in keepable)]
    numbered = [g for g in fitting or saying if g.graph_index == graph_index]
    graph = next(iter([*numbered, *fitting, *saying]))
    pins = Pins(graph, plans.path, plans.digest, 0, replan)
    if graph in fitting:
        # All that can be kept are gathers.
        gathers = dict.fromkeys(keepable, CollectiveKind.ALL_GATHER.value)
        pins = resolved(dataclasses.replace(pins, graph=dataclasses.replace(graph, buckets=None)), gathers, names or {})
        if pins.given_up:
            return pins
        graph = pins.graph
    else:
        missing = ", ".join([n for n in keepable if n not in (graph.collectives or {})][:_SHOWN])
        return _given_up(pins, f"`kept` was written for another graph: this one also gathers {missing}")
    if unknown := [name for name in graph.kept or () if name not in keepable]:
        allowed = ", ".join(keepable[:_SHOWN]) + (" ..." if len(keepable) > _SHOWN else "")
        return _given_up(pins, f"`kept` names {', '.join(unknown[:_SHOWN])}; expected some of {allowed}")
    return pins


def nothing_to_keep(plans: PlanFile, graph_index: int | None, *, replan: bool) -> str:
    """Why the plan cannot be followed that says which parameters of a forward graph stay gathered, where none may; "".

    Args:
        graph_index: of the graph, None where it is not known yet.

    Raises:
        PlanFileError: there is such a plan for this graph (unless ``replan``).
    """
    forward = [graph for graph in plans.graphs if graph.phase in ("forward", None)]
    for graph in forward:
        # The only plan of a phase is meant for every graph of it.
        if graph.kept and (len(forward) == 1 or graph.graph_index in (graph_index, None)):
            names = ", ".join(graph.kept[:_SHOWN])
            why = f'`kept` names {names}, and no parameter of this graph has reshard_after_forward="auto"'
            return _given_up(Pins(graph, plans.path, plans.digest, 0, replan), why).given_up
    return ""


def _difference(planned: Mapping[str, str], found: Mapping[str, str]) -> str:
    """What is missing, new or changed in the graph against the plan; "" when nothing is."""
    parts = []
    missing = [n for n in planned if n not in found]
    new = [n for n in found if n not in planned]
    changed = [f"{n} ({planned[n]} -> {found[n]})" for n in planned if n in found and planned[n] != found[n]]
    for what, names in (("missing", missing), ("new", new), ("changed", changed)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
    return "; ".join(parts)


def _renamed(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """A pinned order in the names of another rank, which may number its own nodes differently: pads of uneven shards.

    Nodes are numbered as they are made, and made in the same order: of those that one rank alone knows, and that are
    called the same but for the number, the first is the first.
    """
    pinned, found = set(order), set(names)
    theirs, ours = (_by_base(n for n in one if n not in known) for one, known in ((order, found), (names, pinned)))
    renamed: dict[str, str] = {}
    for base, mine in ours.items():
        if len(mine) == len(theirs.get(base, ())):
            renamed.update(zip(theirs[base], mine))
    return tuple(renamed.get(name, name) for name in order)


def _by_base(names: Iterable[str]) -> dict[str, list[str]]:
    """Names without their number -> the names, by number."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        base, _, number = name.rpartition("_")
        key = (base, int(number)) if base and number.isdecimal() else (name, -1)
        found.setdefault(key[0], []).append((key[1], name))
    return {base: [name for _, name in sorted(ones)] for base, ones in found.items()}
