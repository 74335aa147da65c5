"""A graph as lines of text. If two ranks have equal lines, they take equal decisions about the graph.

The lines hold everything that a decision may depend on: facts that the caller names (settings, versions, costs), the
process groups, and one line per node in graph order. A node's line has its operator, operands by their place in this
list, literals, dtypes, sizes, strides, and what of the user's program it was traced from. Collectives are nodes like
others: their operand says which tensor they move. Graphs inside of higher-order operators are written out where they
are first used.

Left out is what may differ between ranks with one program: names of nodes and groups, indices of devices, the padding
of uneven shards (``uneven``), which of several equal device meshes is meant, the peer of a point-to-point message
(each rank orders what is around it by rules that hold whoever the peer is), and open numbers (``literals``), which
ranks compare separately.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.agreement import pieces
from inductor_passes.agreement.arguments import Open, Texts
from inductor_passes.agreement.difference import FACT, SOURCE
from inductor_passes.agreement.grid import Grid, participants
from inductor_passes.agreement.literals import Kind, Literals
from inductor_passes.agreement.roles import IncomparableError, Roles
from inductor_passes.agreement.uneven import Uneven, uneven
from inductor_passes.ir import ops
from inductor_passes.ir.canonical import handed_on, moves_data
from inductor_passes.ir.groups import Group, resolve
from inductor_passes.ir.layouts import noted
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView, behind
from inductor_passes.operators import CollectiveKind

#: Arguments that name the other end of a point-to-point message.
_PEERS = frozenset({"dst", "src", "peer_list"})
#: Facts that follow from the graph: where they differ, the first difference to show is in the graph.
FOLLOWS = frozenset({"sizes", "step"})
_INPUT = re.compile(r"(primals_|tangents_|arg)\d")


@dataclass(frozen=True)
class Description:
    """What a rank says of a graph.

    Attributes:
        lines: in order; the user's source line is behind a bar and does not count.
        literals: the numbers that are left open in them.
        grid: the ranks that have to say the same.
    """

    lines: tuple[str, ...]
    literals: Literals
    grid: Grid

    @property
    def digest(self) -> str:
        """32 hex digits: equal on ranks with equal lines, the user's source lines apart, and the same participants."""
        text = "\n".join(line.partition(SOURCE)[0] for line in (*self.lines, str(self.grid), self.literals.kinds))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe(
    view: GraphView,
    facts: Mapping[str, str],
    rank: int,
    world_size: int,
    describe_group: Callable[[Group], str] | None = None,
    *,
    made_alike: bool = False,
) -> Description:
    """The description of a graph by ``rank``; O(nodes + edges).

    Args:
        made_alike: see :func:`pieces.opened`.

    Raises:
        IncomparableError: the graph holds what one rank cannot describe to another, or its groups name no set of ranks
            that could agree; the message says what.
    """
    grid, groups = concerned(view, rank, world_size), used_groups(view)
    roles = Roles(rank, grid, describe_group)
    largest = max((group.size for group in groups), default=1)
    writer = _Writer(view, uneven(view), roles, rank, largest, made_alike)
    body = list(writer.graph(view.graph))
    head = [f"{FACT}{name}: {value}" for name, value in sorted(facts.items()) if name not in FOLLOWS]
    tail = [f"{FACT}{name}: {value}" for name, value in sorted(facts.items()) if name in FOLLOWS]
    head += roles.lines
    positions = roles.positions() if writer.open else []
    literals = Literals(
        tuple(one.value for one in writer.open),
        "".join(one.kind.value for one in writer.open),
        tuple(positions),
        tuple(len(head) + one.line for one in writer.open),
    )
    return Description((*head, *body, *tail), literals, grid)


def concerned(view: GraphView, rank: int, world_size: int) -> Grid:
    """The ranks that take part in a graph's collectives, as ``rank`` sees it.

    Raises:
        IncomparableError: its groups name no set of ranks that could agree; the message says why.
    """
    groups = used_groups(view)
    missing = next((group for group in groups if not group.ranks), None)
    if missing is not None:
        raise IncomparableError(f"process group {missing.name!r} does not exist in this process")
    grid = participants([group.ranks for group in groups], rank, world_size)
    if isinstance(grid, str):
        raise IncomparableError(grid)
    return grid


def used_groups(view: GraphView) -> list[Group]:
    """The process groups of the collectives in a graph, by first use; transfers and unknown operators name none."""
    found: dict[str, Group] = {}
    for node in view.nodes:
        if view.role(node) is Role.START:
            group = view.by_start[node].group
        elif node.op == "call_function" and _torch.op_name(node.target) in ops.BLOCKING_COLLECTIVES:
            group = resolve(behind(_torch.op_arguments(node).get("group_name", "")))
        else:
            continue
        found.setdefault(group.name, group)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Open:
    """An open number: where it is, and what it may say."""

    kind: Kind
    value: int
    line: int


class _Writer:
    def __init__(
        self, view: GraphView, ragged: Uneven, roles: Roles, rank: int, largest: int, made_alike: bool
    ) -> None:
        self._ragged = ragged
        self._roles = roles
        self._rank = rank
        self._largest, self._made_alike = largest, made_alike
        self._names: dict[torch.fx.Node, str] = {}
        self._bodies: dict[int, str] = {}
        self._texts = Texts(self._reference, roles)
        self._near, self._near_groups = _near_groups(view)
        exchanges = (c.start for c in view.collectives if c.kind is CollectiveKind.ALL_TO_ALL)
        self._handed_on = {start: rows for start in exchanges if (rows := handed_on(start)) is not None}
        self._lines = 0
        self._calls: dict[str, int] = {}
        self.open: list[_Open] = []

    def graph(self, graph: torch.fx.Graph, indent: str = "") -> Iterator[str]:
        """The lines of a graph, those of the graphs inside it included."""
        inputs = 0
        for node in graph.nodes:
            if node in self._ragged.stands_for:
                continue
            named = self._object_of(node)
            if named is not None:
                self._names[node] = named
                continue
            self._names[node] = f"%{len(self._names)}"
            if node.op == "placeholder":
                text = self._input(node, inputs)
                inputs += 1
            elif node.op == "get_attr":
                text = yield from self._attribute(node, indent)
            elif node.op == "output":
                text = f"return {self._texts.text(node.args[0])}"
            else:
                text = self._call(node)
            self._lines += 1
            # What is returned is described where it is computed; sizes of shards are left out there.
            returned = node.op == "output"
            value = "" if returned else self._texts.value(node.meta.get("val"), node not in self._ragged.sizeless)
            source = ops.source_line(node)
            yield f"{indent}{self._names[node]} = {text} {value}".rstrip() + (f"{SOURCE}{source}" if source else "")

    def _reference(self, node: torch.fx.Node) -> str:
        node = self._ragged.stands_for.get(node, node)
        return self._names[node]

    def _object_of(self, node: torch.fx.Node) -> str | None:
        """A process group or a device mesh that a node brings: it has no place of its own, equal ones are one."""
        if node.op == "placeholder":
            value = node.meta.get("val")
            return None if value is None or isinstance(value, torch.Tensor) else self._texts.named_object(value)
        return self._texts.named_object(_attribute(node)) if node.op == "get_attr" else None

    def _input(self, node: torch.fx.Node, number: int) -> str:
        target = str(node.target)
        # Names of saved values follow the numbering of nodes, which padding shifts.
        name = target if _INPUT.match(target) else ""
        return " ".join(part for part in (f"input {number}", name, _torch.input_description(node)) if part)

    def _attribute(self, node: torch.fx.Node, indent: str) -> Generator[str, None, str]:
        value = _attribute(node)
        if not isinstance(value, torch.fx.GraphModule):
            return self._texts.text(value)
        if id(value) not in self._bodies:
            self._bodies[id(value)] = f"graph {len(self._bodies)}"
            self._lines += 1
            yield f"{indent}{self._bodies[id(value)]}:"
            yield from self.graph(value.graph, indent + "  ")
        return self._bodies[id(value)]

    def _call(self, node: torch.fx.Node) -> str:
        name = _torch.op_name(node.target)
        if _torch.is_op(node.target):
            arguments = _torch.op_arguments(node)
        else:
            arguments = {**{str(i): value for i, value in enumerate(node.args)}, **node.kwargs}
        found: pieces.Found = []
        near = self._is_near_piece(node, arguments)
        if name.startswith("higher_order::triton_kernel_wrapper"):
            arguments = self._triton(arguments)
        elif pieces.is_piece_of_split(node):
            found.append((Kind.PIECE, int(arguments["1"])))
            arguments["1"] = pieces.PIECE
        elif ops.is_transfer(node):
            arguments = {key: value for key, value in arguments.items() if key not in _PEERS}
        elif node in self._handed_on:
            # To which rank is a rank's own, and no decision depends on it.
            arguments.update(input_split_sizes=[self._handed_on[node]], output_split_sizes=Open("of one rank"))
        written, more = pieces.opened(node, name, arguments, self._largest, made_alike=self._made_alike)
        for kind, value in (*found, *more):
            kind = Kind.NEAR if near and kind is Kind.PIECE else kind
            self.open.append(_Open(kind, value, self._lines))
        sizes = node not in self._ragged.sizeless
        shown = ", ".join(f"{key}={self._texts.argument(key, value, sizes)}" for key, value in written.items())
        called = _torch.traced_call(node)
        target = name + "." + _torch.op_overload_name(node.target) if _torch.is_op(node.target) else name
        text = f"{target or self._texts.text(node.target)}({shown})"
        return (f"{text} from {called}" if called else text) + self._layouts(node)

    def _layouts(self, node: torch.fx.Node) -> str:
        """What the call of a redistribution says. Of its ranks only how far they are apart, which a mesh repeats."""
        note = noted(node.meta)
        if note is None:
            return ""
        number = self._calls.setdefault(note.call, len(self._calls))
        apart = [rank - note.ranks[0] for rank in note.ranks]
        ends = f"{list(note.before)} -> {list(note.after)} {note.orders} of {list(note.shape)}"
        return f" of redistribution {number} {ends} on {list(note.mesh)} {apart}"

    @staticmethod
    def _triton(arguments: Mapping[str, object]) -> dict[str, object]:
        """Kernels and their constants are numbered by each process for itself."""
        kernel = _torch.kernel_identity(arguments.get("kernel_idx"))
        constants = _torch.kernel_constants(arguments.get("constant_args_idx"))
        if kernel is None or constants is None:
            raise IncomparableError("a Triton kernel is not in torch's table")
        return {**arguments, "kernel_idx": kernel, "constant_args_idx": constants}

    def _is_near_piece(self, node: torch.fx.Node, arguments: Mapping[str, object]) -> bool:
        """Whether a node takes the only piece that is read, next to a collective over as many ranks as there are
        pieces, so that a rewrite may take it for the rank's own.
        """
        count = None if node in self._ragged.cuts else pieces.only_piece(node, arguments)
        near = self._near.get(node, 0)
        return any(near >> k & 1 and group.size == count for k, group in enumerate(self._near_groups))


def _near_groups(view: GraphView) -> tuple[dict[torch.fx.Node, int], list[Group]]:
    """Nodes that only move data between them and a collective -> its groups as bits, and the group of each bit.

    O(nodes + edges), by one sweep forwards from the waits and one backwards from the starts.
    """
    groups = list({collective.group.name: collective.group for collective in view.collectives}.values())
    number = {group.name: k for k, group in enumerate(groups)}
    before: dict[torch.fx.Node, int] = {}
    for node in view.nodes:
        if view.role(node) is Role.WAIT:
            for collective in view.collectives_of_wait.get(node, ()):
                before[node] = before.get(node, 0) | 1 << number[collective.group.name]
        elif any(n in before for n in node.all_input_nodes) and moves_data(view, node):
            for n in node.all_input_nodes:
                before[node] = before.get(node, 0) | before.get(n, 0)
    after: dict[torch.fx.Node, int] = {}
    for node in reversed(view.nodes):
        bits = 0
        for user in node.users:
            if view.role(user) is Role.START:
                bits |= 1 << number[view.by_start[user].group.name]
            elif user in after and moves_data(view, user):
                bits |= after[user]
        if bits:
            after[node] = bits
    return {node: before.get(node, 0) | after.get(node, 0) for node in (*before, *after)}, groups


def _attribute(node: torch.fx.Node) -> object:
    """What a ``get_attr`` node names."""
    value: object = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value
