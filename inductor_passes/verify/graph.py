"""What any single FX graph must satisfy; O(nodes + edges).

A buffer is *in flight* from the start of a collective until the waits of all its results. Meanwhile the link reads its
inputs and writes its results (and the memory that an in-place or out variant was given). While in flight an input must
not be written, and a result must neither be read nor written, through any chain of views.

Every result of a start must be waited for. Bodies of higher-order ops are checked as graphs of their own and must wait
for what they start. A result that is returned without a wait is ``unwaited-output``. Torch can wait for it outside of
the graph. So if a reference is given that returns it unwaited too, there is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role, source_line
from inductor_passes.report import Finding
from inductor_passes.verify.facts.operators import by_name, nodes_in
from inductor_passes.verify.facts.storages import Block
from inductor_passes.verify.facts.view import View

#: Rule about results that Inductor keeps in an input's memory.
OVERWRITTEN = "result-overwritten"


def finding(rule: str, node: torch.fx.Node, message: str, other: torch.fx.Node | None = None) -> Finding:
    """A :class:`~inductor_passes.report.Finding` at a node, with the user's source line."""
    return Finding(rule, node.name, message, "" if other is None else other.name, source_line(node))


def topology(graph: torch.fx.Graph) -> list[Finding]:
    """Definitions before uses, every operand in this graph, names unique, one output and it comes last."""
    found: list[Finding] = []
    position: dict[torch.fx.Node, int] = {}
    names: set[str] = set()
    outputs = 0
    for index, node in enumerate(graph.nodes):
        if outputs:
            found.append(finding("topology", node, f"{node.name} comes after the output"))
        for operand in node.all_input_nodes:
            if operand not in position:
                found.append(finding("topology", node, f"{node.name} uses {operand.name} before it is there", operand))
        if node.name in names:
            found.append(finding("topology", node, f"two nodes have the name {node.name}"))
        names.add(node.name)
        position[node] = index
        outputs += node.op == "output"
    if not outputs:
        found.append(Finding("topology", "", "the graph has no output node"))
    return found


class _Flight:
    """Which storages are in flight at a point of the program."""

    def __init__(self) -> None:
        self.written_by: dict[Block, torch.fx.Node] = {}
        self.read_by: dict[Block, dict[torch.fx.Node, None]] = {}
        self.results: dict[torch.fx.Node, set[Block]] = {}
        self.inputs: dict[torch.fx.Node, list[Block]] = {}

    def issue(self, start: torch.fx.Node, inputs: list[Block], results: list[Block]) -> None:
        self.results[start] = set(results)
        self.inputs[start] = inputs
        for storage in results:
            self.written_by[storage] = start
        for storage in inputs:
            self.read_by.setdefault(storage, {})[start] = None

    def land(self, storage: Block) -> None:
        start = self.written_by.pop(storage, None)
        if start is None:
            return
        left = self.results[start]
        left.discard(storage)
        if not left:
            for read in self.inputs[start]:
                self.read_by[read].pop(start, None)

    def writer(self, storage: Block) -> torch.fx.Node | None:
        return self.written_by.get(storage)

    def reader(self, storage: Block) -> torch.fx.Node | None:
        return next(iter(self.read_by.get(storage, ())), None)


def waits_and_flight(view: View) -> list[Finding]:
    """Waits complete; no read before the wait; no write to a buffer in flight."""
    found: list[Finding] = []
    storages = view.storages
    flight = _Flight()
    waitable = _waitable(view, flight)
    unwaited: set[Block] = set()
    for node in view.nodes:
        role = view.roles[node]
        if role is Role.WAIT:
            for storage in storages.of(node):
                flight.land(storage)
                if storage not in waitable:
                    found.append(
                        finding("wait-without-start", node, f"{node.name} waits for memory that no collective writes")
                    )
            continue
        if role is Role.OUTPUT:
            for operand in dict.fromkeys(nodes_in(node.args)):
                for storage in storages.of(operand):
                    if (start := flight.writer(storage)) is not None and storage not in unwaited:
                        unwaited.add(storage)
                        found.append(
                            finding("unwaited-output", start, f"{start.name} is returned without a wait", operand)
                        )
            continue
        found.extend(_conflicts(view, flight, node))
        if role is Role.START or node in view.transfer_waits:
            written = view.facts[node].writes
            results = list(storages.of(node))
            results += [s for n in written for s in storages.of(n) if s not in results]
            inputs = [s for n in node.all_input_nodes for s in storages.of(n) if s not in results]
            flight.issue(node, inputs, results)
    for storage, start in flight.written_by.items():
        if storage not in unwaited:
            found.append(finding("missing-wait", start, f"{start.name} has a result that is never waited for"))
    return found


def _waitable(view: View, flight: _Flight) -> set[Block]:
    """Memory that some collective writes, or may have been written by before the graph or by an unknown op."""
    result: set[Block] = set()
    for node in view.nodes:
        role = view.roles[node]
        if role in (Role.INPUT, Role.FENCE):
            result.update(view.storages.of(node))
        if role is Role.START:
            result.update(view.storages.of(node))
            for written in view.facts[node].writes:
                result.update(view.storages.of(written))
    own = {
        s
        for node in view.nodes
        if view.roles[node] is Role.START or node in view.transfer_waits
        for s in view.storages.of(node)
    }
    for node in view.nodes:
        if view.roles[node] is Role.WAIT:
            for storage in view.storages.of(node):
                if storage.producer.op == "placeholder" and storage not in own:
                    # a collective of the caller's that is still running on entry
                    flight.issue(storage.producer, [], [storage])
    return result


def _conflicts(view: View, flight: _Flight, node: torch.fx.Node) -> Iterator[Finding]:
    storages = view.storages
    facts = view.facts[node]
    written = dict.fromkeys((*facts.writes, *facts.may_write))
    for operand in view.reads(node):
        for storage in storages.of(operand):
            start = flight.writer(storage)
            if start is not None and operand not in written:
                yield finding(
                    "read-before-wait",
                    node,
                    f"{node.name} reads {operand.name}, which {start.name} is still writing: its wait comes later",
                    start,
                )
                break
    for operand in written:
        for storage in storages.of(operand):
            start = flight.writer(storage)
            if start is not None:
                yield finding(
                    "write-in-flight",
                    node,
                    f"{node.name} writes {operand.name} while {start.name} is writing it",
                    start,
                )
                break
            start = flight.reader(storage)
            if start is not None:
                yield finding(
                    "write-in-flight",
                    node,
                    f"{node.name} writes {operand.name} while {start.name} is reading it",
                    start,
                )
                break
    for operand in dict.fromkeys(facts.reinplaced):
        for storage in storages.of(operand):
            start = flight.reader(storage)
            if start is not None and not _used_after(view, storage, node):
                yield finding(
                    "write-in-flight",
                    node,
                    f"{node.name} is the last to use {operand.name}, so Inductor may do it in place, "
                    f"while {start.name} is reading it",
                    start,
                )
                break


def overwritten_results(view: View) -> list[Finding]:
    """Results that Inductor may keep in an input's memory, which something else is copied to before they are read.

    Inductor does an operator in place on a graph input when a later ``copy_`` writes that input and nothing reads it in
    between. It does not ask whether the operator's result is still needed behind that copy.
    """
    found: list[Finding] = []
    for node in view.nodes:
        for operand in dict.fromkeys(view.facts[node].reinplaced):
            copies = [user for user in operand.users if _is_copy(user) and user.args[0] is operand]
            later = [copy for copy in copies if view.position[copy] > view.position[node]]
            if operand.op not in ("placeholder", "get_attr") or not later:
                continue
            copy = min(later, key=view.position.__getitem__)
            # Of several results each is taken out of a list.
            result = {block for value in (node, *node.users) for block in view.storages.of(value)}
            source = copy.args[1]
            if isinstance(source, torch.fx.Node) and not result.isdisjoint(view.storages.of(source)):
                continue
            if not _read_between(view, operand, node, copy) and _needed_behind(view, result, copy):
                found.append(
                    finding(
                        OVERWRITTEN,
                        node,
                        f"nothing reads {operand.name} between {node.name} and {copy.name}, so Inductor lets "
                        f"{node.name} write to it, and {copy.name} overwrites the result, which is read later",
                        copy,
                    )
                )
    return found


def _read_between(view: View, operand: torch.fx.Node, node: torch.fx.Node, copy: torch.fx.Node) -> bool:
    """Whether a node between the two surely uses what the operand holds: all of it, or a part known to be in it.

    To Inductor a view is a use where it stands, if anything is made of it.
    """
    size = operand.meta["val"].numel() if "val" in operand.meta else None
    return any(
        view.position[node] < view.position[user] < view.position[copy]
        and (member in view.reads(user) or (user.users and user in storage.members))
        for storage in view.storages.of(operand)
        for member in storage.members
        if member is operand or (isinstance(v := member.meta.get("val"), torch.Tensor) and v.numel() == size)
        for user in member.users
    )


def _needed_behind(view: View, result: set[Block], copy: torch.fx.Node) -> bool:
    return any(
        view.position[user] > view.position[copy]
        for storage in result
        for member in storage.members
        for user in member.users
    )


def _used_after(view: View, storage: Block, node: torch.fx.Node) -> bool:
    """Whether a buffer is needed after a node, so that the node cannot take it over.

    The caller's memory always is, unless the node's result is copied into it in the end.
    """
    copied_back = any(_is_copy(writer) and writer.args[1] is node for writer in storage.writers)
    if storage.producer.op in ("placeholder", "get_attr") and not copied_back:
        return True
    return any(
        view.position[user] > view.position[node]
        and (view.roles[user] is Role.OUTPUT or member in view.reads(user))
        and not (_is_copy(user) and user.args[0] is member)
        for member in storage.members
        for user in member.users
    )


def _is_copy(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and len(node.args) > 1


def metadata(view: View) -> list[Finding]:
    """Fake tensors are there and fit: results of collectives against their inputs and group size, waits, getitems."""
    found: list[Finding] = []
    for node in view.nodes:
        role = view.roles[node]
        if role in (Role.START, Role.WAIT, Role.COMPUTE) and "val" not in node.meta and node.users:
            found.append(finding("metadata", node, f"{node.name} has no fake tensor (meta['val'])"))
        elif role is Role.START:
            found.extend(finding("metadata", node, message) for message in _collective_errors(view, node))
        elif role is Role.WAIT:
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if source is not None and not _same(source.meta.get("val"), node.meta.get("val")):
                found.append(finding("metadata", node, f"{node.name} has another shape or dtype than {source.name}"))
    return found


def _same(a: object, b: object) -> bool:
    """Equal shape and dtype; unknown values are equal to everything."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and str(tuple(a.shape)) == str(tuple(b.shape))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    return True


def _tensors(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _shape(tensor: torch.Tensor) -> list[int | None]:
    return [_torch.size_hint(d) for d in tensor.shape]


def _collective_errors(view: View, node: torch.fx.Node) -> Iterator[str]:
    collective = view.by_start[node]
    arguments = by_name(node.target, node.args, node.kwargs)
    world = collective.group.size
    group_size = arguments.get("group_size", world)
    if world and isinstance(group_size, int) and group_size != world:
        yield f"{node.name} says group_size={group_size}; group {collective.group} has {world} ranks"
    inputs = [t for n in collective.inputs for t in _tensors(n.meta.get("val"))]
    outputs = _tensors(node.meta.get("val"))
    if len(inputs) != len(collective.inputs) or len(inputs) != len(outputs):
        yield f"{node.name} has {len(collective.inputs)} inputs and {len(outputs)} results"
        return
    for given, result in zip(inputs, outputs):
        if given.dtype != result.dtype:
            yield f"{node.name} turns {given.dtype} into {result.dtype}"
        if message := _shape_error(collective.kind, _shape(given), _shape(result), group_size, arguments):
            yield f"{node.name}: {message}"


def _shape_error(
    kind: str, given: list[int | None], result: list[int | None], group_size: object, arguments: dict[str, object]
) -> str:
    if None in given or None in result:
        return ""
    if kind in ("all_reduce", "broadcast"):
        return "" if given == result else f"{kind} turns shape {given} into {result}"
    if not given or not result:
        return f"{kind} of a scalar"
    if given[1:] != result[1:]:
        return f"{kind} turns shape {given} into {result}: only dimension 0 may change"
    if kind == "all_to_all":
        return _split_error(arguments, "output_split_sizes", result[0], group_size) or _split_error(
            arguments, "input_split_sizes", given[0], group_size
        )
    if not isinstance(group_size, int) or group_size == 0:
        return ""
    small, large = (given[0], result[0]) if kind == "all_gather" else (result[0], given[0])
    assert small is not None
    if small * group_size != large:
        return f"{kind} over {group_size} ranks turns {given[0]} rows into {result[0]}"
    return ""


def _split_error(arguments: dict[str, object], name: str, rows: int | None, group_size: object) -> str:
    splits = arguments.get(name)
    if not isinstance(splits, (list, tuple)) or not splits:
        return ""
    if isinstance(group_size, int) and group_size and len(splits) != group_size:
        return f"{name} has {len(splits)} entries for {group_size} ranks"
    sizes = [_torch.size_hint(s.meta.get("val") if isinstance(s, torch.fx.Node) else s) for s in splits]
    if None not in sizes and sum(s for s in sizes if s is not None) != rows:
        return f"{name}={sizes} does not add up to {rows} rows"
    return ""
