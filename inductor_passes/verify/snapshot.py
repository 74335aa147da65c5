"""A graph as plain data, taken before a pass, so that what came out can be held against it without a graph copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Finding
from inductor_passes.verify import effects
from inductor_passes.verify.events import Event, events


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node.

    Attributes:
        target: the op's full name, the placeholder's or attribute's name.
        operands: names of the nodes among the arguments, in argument order, repeated as often as they occur.
        literals: everything else among the arguments, as text.
        value: dtypes and shapes of the result as text, "" when unknown or no tensor.
        channel: see :func:`inductor_passes.ir.ops.effect_channel`.
        writes: names of the operands that it writes.
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
    writes: tuple[str, ...]
    segment: str
    versions: tuple[tuple[str, str], ...]
    structure: int
    source: str


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
    """What a graph was: nodes in order, collectives, what other ranks see, its own findings, its peak (or None)."""

    nodes: Mapping[str, NodeRecord]
    collectives: Mapping[str, CollectiveRecord]
    events: tuple[Event, ...]
    findings: frozenset[tuple[str, str, str]]
    peak_bytes: int | None

    @property
    def group_order(self) -> dict[str, tuple[str, ...]]:
        """Names of the starts of each process group, in order."""
        order: dict[str, list[str]] = {}
        for collective in self.collectives.values():
            order.setdefault(collective.group, []).append(collective.name)
        return {group: tuple(names) for group, names in order.items()}

    def channel(self, channel: str) -> tuple[str, ...]:
        """Names of the nodes of an effect channel, in order."""
        return tuple(n.name for n in self.nodes.values() if n.channel == channel)

    @property
    def fences(self) -> tuple[str, ...]:
        """Names of the fences, in order."""
        return tuple(n.name for n in self.nodes.values() if n.role is Role.FENCE)


def finding_key(finding: Finding) -> tuple[str, str, str]:
    """Identity of a finding between two versions of a graph."""
    return finding.rule, finding.node, finding.other


def take(view: GraphView, findings: list[Finding], peak: int | None) -> ReferenceSnapshot:
    """The snapshot of a graph that has been looked at already."""
    nodes: dict[str, NodeRecord] = {}
    structures: dict[torch.fx.Node, int] = {}
    writes = {node: effects.writes(node, view.roles[node]) for node in view.nodes}
    versions = _Versions(view, writes)
    segment = ""
    for node in view.nodes:
        role = view.roles[node]
        operands: list[torch.fx.Node] = []
        literals: list[str] = []
        for argument in node.args:
            _take_apart(argument, operands, literals)
        for key in sorted(node.kwargs):
            literals.append(key + "=")
            _take_apart(node.kwargs[key], operands, literals)
        target = str(node.target)
        text = "".join(literals)
        identity = (node.name,) if node.op in ("placeholder", "output") else ()
        structures[node] = hash((target, text, tuple(structures[o] for o in operands if o in structures), identity))
        written = writes[node]
        nodes[node.name] = NodeRecord(
            name=node.name,
            op=node.op,
            target=target,
            role=role,
            operands=tuple(o.name for o in operands),
            literals=text,
            value=describe(node.meta.get("val")),
            channel=ops.effect_channel(node, role),
            writes=tuple(w.name for w in written),
            segment=segment,
            versions=versions.visit(node, role, written),
            structure=structures[node],
            source=ops.source_line(node) if role in (Role.START, Role.FENCE) else "",
        )
        if role is Role.FENCE:
            segment = node.name
    return ReferenceSnapshot(
        nodes=nodes,
        collectives=collectives(view),
        events=events(view),
        findings=frozenset(map(finding_key, findings)),
        peak_bytes=peak,
    )


def collectives(view: GraphView) -> dict[str, CollectiveRecord]:
    """Every collective of a graph by its start's name, in order."""
    result: dict[str, CollectiveRecord] = {}
    for c in view.collectives:
        arguments = _torch.op_arguments(c.start)
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
            source=ops.source_line(c.start),
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


def describe(value: object) -> str:
    """dtype and shape of a value's tensors as text."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(describe, value)) + "]"
    return ""


def _take_apart(value: object, operands: list[torch.fx.Node], literals: list[str]) -> None:
    """Split an argument into nodes and text, in order; a node leaves a mark in the text."""
    if isinstance(value, torch.fx.Node):
        operands.append(value)
        literals.append("%,")
    elif isinstance(value, (list, tuple)):
        literals.append("(")
        for item in value:
            _take_apart(item, operands, literals)
        literals.append("),")
    elif isinstance(value, dict):
        literals.append("{")
        for key, item in value.items():
            literals.append(f"{key}:")
            _take_apart(item, operands, literals)
        literals.append("},")
    elif isinstance(value, slice):
        literals.append("slice")
        _take_apart((value.start, value.stop, value.step), operands, literals)
    elif isinstance(value, torch.Tensor):
        literals.append(f"tensor:{describe(value)},")
    else:
        literals.append(f"{value!r},")


class _Versions:
    """For each storage that somebody writes to after its birth: its last writer so far."""

    def __init__(self, view: GraphView, writes: Mapping[torch.fx.Node, list[torch.fx.Node]]) -> None:
        self.view = view
        self.last: dict[FxStorage, str] = {}
        self.written: dict[FxStorage, str] = {}
        ordinal: dict[torch.fx.Node, int] = {}
        touched = {s for written in writes.values() for w in written for s in view.storages.of(w)}
        for storage in view.storages.all:
            number = ordinal.get(storage.producer, 0)
            ordinal[storage.producer] = number + 1
            if storage in touched:
                self.written[storage] = f"{storage.producer.name}#{number}"

    def visit(self, node: torch.fx.Node, role: Role, written: list[torch.fx.Node]) -> tuple[tuple[str, str], ...]:
        if not self.written:
            return ()
        operands = node.all_input_nodes if role is Role.OUTPUT else [*effects.reads(node, role), *written]
        result = {
            self.written[s]: self.last.get(s, "")
            for o in operands
            for s in self.view.storages.of(o)
            if s in self.written
        }
        for operand in written:
            for storage in self.view.storages.of(operand):
                self.last[storage] = node.name
        return tuple(result.items())
