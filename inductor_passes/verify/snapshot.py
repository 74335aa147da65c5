"""A graph as plain data, taken before a pass, to compare the result with; no copy of the graph is needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role, source_line
from inductor_passes.ir.parameters import names_by_node
from inductor_passes.report import Finding
from inductor_passes.verify import transfers
from inductor_passes.verify.constants import Literals
from inductor_passes.verify.events import Event, events
from inductor_passes.verify.facts import communication
from inductor_passes.verify.facts.higher_order import attribute
from inductor_passes.verify.facts.known import Words
from inductor_passes.verify.facts.operators import by_name
from inductor_passes.verify.facts.storages import Block
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.values import Program


class NodeRecord(NamedTuple):
    """One node.

    Attributes:
        target: the op's full name, the placeholder's or attribute's name.
        operands: names of the nodes among the arguments, in argument order, repeated as often as they occur.
        literals: everything else among the arguments, and what an attribute holds, as text (see ``constants``).
        value: dtypes, shapes and devices of the result as text, "" when unknown or no tensor.
        channel, certain: see :class:`inductor_passes.verify.facts.places.NodeFacts`.
        communicates: whether it is a collective, one that blocks included.
        writes: names of the operands that it writes.
        written: names of the nodes that brought the memory to life that it writes.
        segment: the last fence before it, "" at the beginning.
        versions: per written-to storage that it touches: (storage, name of the last writer before it).
        structure: equal for nodes that compute the same from the same inputs; comparable within a process.
    """

    name: str
    op: str
    target: str
    role: Role
    operands: tuple[str, ...]
    literals: str
    value: str
    channel: str
    communicates: bool
    writes: tuple[str, ...]
    written: tuple[str, ...]
    segment: str
    versions: tuple[tuple[str, str], ...]
    structure: int
    source: str
    certain: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective: what has to agree between ranks, and before and after a pass.

    ``key`` identifies it among equal ones independently of its node's name.
    """

    name: str
    kind: str
    group: str
    ranks: tuple[int, ...]
    reduce_op: str
    dtypes: tuple[str, ...]
    input_bytes: int | None
    output_bytes: int | None
    arguments: str
    waits: tuple[str, ...]
    source: str

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that other ranks must agree on, and that a pass must not change."""
        return (self.kind, self.group, self.reduce_op, self.dtypes, self.input_bytes, self.output_bytes, self.arguments)

    def __str__(self) -> str:
        reduce_op = f", {self.reduce_op}" if self.reduce_op else ""
        dtypes = ",".join(self.dtypes)
        return f"{self.kind}({dtypes}, {self.input_bytes} B, group {self.group}{reduce_op})"


@dataclass(frozen=True)
class ReferenceSnapshot:
    """What a graph was: nodes in order, collectives, what other ranks see, its own findings, its peak (or None).

    ``bodies`` are the graphs that its higher-order operators run, by attribute. ``held`` keeps alive what is compared
    by identity.
    ``program`` is what its values are derived from. ``parameters`` are the names that starts and waits carry.
    ``transfers`` are the messages between two ranks that are waited for in the graph.
    """

    nodes: Mapping[str, NodeRecord]
    collectives: Mapping[str, CollectiveRecord]
    events: tuple[Event, ...]
    findings: frozenset[tuple[str, str, str]]
    peak_bytes: int | None
    bodies: Mapping[str, ReferenceSnapshot] = field(default_factory=dict)
    held: tuple[object, ...] = ()
    program: Program | None = None
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transfers: Mapping[str, transfers.TransferRecord] = field(default_factory=dict)

    @property
    def group_order(self) -> dict[str, tuple[str, ...]]:
        """Names of the starts of each process group, in order."""
        order: dict[str, list[str]] = {}
        for collective in self.collectives.values():
            order.setdefault(collective.group, []).append(collective.name)
        return {group: tuple(names) for group, names in order.items()}

    def channel(self, *channels: str) -> tuple[str, ...]:
        """Names of the nodes of effect channels, in order; without draws that draw nothing."""
        return tuple(n.name for n in self.nodes.values() if n.channel in channels and not n.certain)

    @property
    def fences(self) -> tuple[str, ...]:
        """Names of the fences, in order. Transfers that have an order of their own are none."""
        return tuple(n.name for n in self.nodes.values() if n.role is Role.FENCE and n.name not in self.transfers)


def finding_key(finding: Finding) -> tuple[str, str, str]:
    """Identity of a finding between two versions of a graph."""
    return finding.rule, finding.node, finding.other


def take(
    view: View,
    findings: list[Finding],
    peak: int | None,
    bodies: Mapping[str, ReferenceSnapshot] | None = None,
    *,
    for_ranks: bool = False,
) -> ReferenceSnapshot:
    """The snapshot of a graph that has been looked at already."""
    nodes: dict[str, NodeRecord] = {}
    structures: dict[torch.fx.Node, int] = {}
    versions = _Versions(view)
    constants = Literals()
    segment = ""
    messages = transfers.records(view)
    for node in view.nodes:
        facts = view.facts[node]
        role = facts.role
        words = view.known.words(node, view.values, functools.partial(_words, node, constants))
        text = words.literals
        if node.op == "get_attr":
            text += _held(node, constants)
        identity = (node.name,) if node.op in ("placeholder", "output") else ()
        operands = tuple([structures[o] for o in words.operands if o in structures])
        structures[node] = hash((words.target, text, operands, identity))
        nodes[node.name] = NodeRecord(
            name=node.name,
            op=node.op,
            target=words.target,
            role=role,
            operands=tuple([o.name for o in words.operands]),
            literals=text,
            value=words.value,
            channel=transfers.CHANNEL if node.name in messages else facts.channel,
            certain=facts.certain,
            communicates=_communicates(node, role),
            writes=tuple([w.name for w in facts.writes]),
            written=_written(view, facts.writes) if facts.writes else (),
            segment=segment,
            versions=versions.visit(node),
            structure=structures[node],
            source=source_line(node) if role in (Role.START, Role.FENCE) else "",
        )
        if role is Role.FENCE:
            segment = node.name
    return ReferenceSnapshot(
        nodes=nodes,
        collectives=collectives(view),
        events=events(view) if for_ranks else (),
        findings=frozenset(map(finding_key, findings)),
        peak_bytes=peak,
        bodies=bodies or {},
        held=tuple(constants.held),
        program=Program(view),
        parameters=names_by_node(view.graph),
        transfers=messages,
    )


def _written(view: View, writes: tuple[torch.fx.Node, ...]) -> tuple[str, ...]:
    """Names of the nodes that brought the memory of ``writes`` to life."""
    return tuple(dict.fromkeys(block.producer.name for node in writes for block in view.storages.of(node)))


def _words(node: torch.fx.Node, constants: Literals) -> tuple[Words, bool]:
    """Arguments and value as text, and whether all literals are such that the text cannot change."""
    before = constants.passing
    operands: list[torch.fx.Node] = []
    literals: list[str] = []
    for argument in node.args:
        _take_apart(argument, operands, literals, constants)
    for key in sorted(node.kwargs):
        literals.append(key + "=")
        _take_apart(node.kwargs[key], operands, literals, constants)
    words = Words(str(node.target), tuple(operands), "".join(literals), value_text(node.meta.get("val")))
    return words, constants.passing == before


def _held(node: torch.fx.Node, constants: Literals) -> str:
    """What an attribute holds. A graph is compared node by node instead."""
    held = attribute(node)
    return "graph" if isinstance(held, torch.fx.GraphModule) else constants.text(held)


def _communicates(node: torch.fx.Node, role: Role) -> bool:
    return role is Role.START or (_torch.is_op(node.target) and communication.takes_a_group(node.target))


def collectives(view: View) -> dict[str, CollectiveRecord]:
    """Every collective of a graph by its start's name, in order."""
    result: dict[str, CollectiveRecord] = {}
    for c in view.collectives:
        arguments = by_name(c.start.target, c.start.args, c.start.kwargs)
        extra = {
            k: arguments[k] for k in ("src", "group_size", "output_split_sizes", "input_split_sizes") if k in arguments
        }
        result[c.start.name] = CollectiveRecord(
            name=c.start.name,
            kind=c.kind,
            group=c.group.name,
            ranks=c.group.ranks,
            reduce_op=c.reduce_op,
            dtypes=tuple(str(d).removeprefix("torch.") for d in c.dtypes),
            input_bytes=c.input_bytes,
            output_bytes=c.output_bytes,
            arguments=_hinted(extra),
            waits=tuple(w.name for w in c.waits),
            source=source_line(c.start),
        )
    return result


def _hinted(value: object) -> str:
    """Arguments as text, with symbolic sizes at their hints."""
    if isinstance(value, dict):
        return ", ".join(f"{k}={_hinted(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_hinted, value))}]"
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val", value.name)
    hint = _torch.size_hint(value)
    return str(value if hint is None else hint)


def value_text(value: object) -> str:
    """dtype, shape and device of a value's tensors as text."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)} {value.device}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(v)}" for key, v in value.items()) + "}"
    return ""


def _take_apart(value: object, operands: list[torch.fx.Node], literals: list[str], constants: Literals) -> None:
    """Split an argument into nodes and text, in order; a node leaves a mark in the text."""
    if isinstance(value, torch.fx.Node):
        operands.append(value)
        literals.append("%,")
    elif isinstance(value, (list, tuple)):
        literals.append("(")
        for item in value:
            _take_apart(item, operands, literals, constants)
        literals.append("),")
    elif isinstance(value, dict):
        literals.append("{")
        for key, item in value.items():
            literals.append(f"{key}:")
            _take_apart(item, operands, literals, constants)
        literals.append("},")
    elif isinstance(value, slice):
        literals.append("slice")
        _take_apart((value.start, value.stop, value.step), operands, literals, constants)
    else:
        literals.append(f"{constants.text(value)},")


class _Versions:
    """For each block that somebody writes to after its birth: its last writer so far."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.last: dict[Block, str] = {}
        self.written: dict[Block, str] = {}
        ordinal: dict[torch.fx.Node, int] = {}
        for block in view.storages.all:
            number = ordinal.get(block.producer, 0)
            ordinal[block.producer] = number + 1
            if block.writers:
                self.written[block] = f"{block.producer.name}#{number}"

    def visit(self, node: torch.fx.Node) -> tuple[tuple[str, str], ...]:
        """(block, last writer) of every block that a node touches and that is written to; then enter its own writes."""
        if not self.written:
            return ()
        view = self.view
        written = view.facts[node].writes
        operands = node.all_input_nodes if view.roles[node] is Role.OUTPUT else [*view.reads(node), *written]
        result = {
            self.written[b]: self.last.get(b, "") for o in operands for b in view.storages.of(o) if b in self.written
        }
        for operand in written:
            for block in view.storages.of(operand):
                self.last[block] = node.name
        return tuple(result.items())
