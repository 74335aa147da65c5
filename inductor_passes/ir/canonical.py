"""What must not differ between ranks when the order of collectives is decided.

Ranks agree on a plan only when they solve the same problem. Uneven shards break that: one rank pads its shard before
a gather, its neighbour has nothing to pad, and trimming after a reduction differs likewise. The collectives themselves
are of equal (padded) size everywhere. So everything that only prepares a collective's input from graph inputs counts as
part of the collective's start, with the sizes of the collective, whatever a rank has to do for it; and everything
that only trims a collective's result counts as part of its wait. Where shards are uneven every rank is charged for a
padded copy, and what follows a reduction element by element on its way out of the graph counts as trimming too.

That makes problems equal where uneven shards are those of parameters and gradients. Where they are in the middle of a
graph (a sequence that ranks cannot share evenly) compute itself differs, and no two ranks have the same problem: see
:class:`Shards`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import UNPACK, CollectiveKind

#: Operators that only move, pad or convert data: all that uneven shards need around a collective.
_MOVES = frozenset(
    {
        "aten::constant_pad_nd",
        "aten::_to_copy",
        "aten::clone",
        "aten::cat",
        "aten::copy",
        "aten::slice_scatter",
        "aten::full",
        "aten::new_zeros",
        "aten::zeros",
        "aten::empty",
        "aten::new_empty",
        "aten::split_with_sizes_copy",
        UNPACK,
        "prims::convert_element_type",
    }
)


#: Operators that lengthen a shard to the size of the largest.
PADS = frozenset({"aten::constant_pad_nd"})
#: Those that every rank has alike, whatever its shard's size.
COPIES = frozenset({"aten::_to_copy", "aten::cat", "prims::convert_element_type"})

#: Shape in which a padded piece of a gradient is reduced over replicas, before the padding is taken off. Without it a
#: rank with a whole piece cannot know whether others take it off before, and send less.
WHOLE_PIECE = (1, 1, -1)

#: Key in the ``meta`` of an exchange of which a pass states all ranks' traffic (``verify.messages``).
STATED = "inductor_passes_messages"

#: Why something is left alone where :attr:`Shards.ranks_agree` is False.
UNEQUAL = "ranks hold pieces of unequal size and could come to different decisions"


def moves_data(view: GraphView, node: torch.fx.Node) -> bool:
    """Whether a node only moves, pads or converts data, or is a view."""
    role = view.roles[node]
    return role is Role.FREE or (role is Role.COMPUTE and _torch.op_name(node.target) in _MOVES)


def _written(view: GraphView) -> set[torch.fx.Node]:
    """Nodes whose memory is written to after it was made."""
    return {n for storage in view.storages.all if storage.writers for n in storage.members}


def given(view: GraphView) -> set[torch.fx.Node]:
    """Graph inputs and what is only moved, padded or converted from them. O(nodes + edges)."""
    found: set[torch.fx.Node] = set()
    for node in view.nodes:
        if view.roles[node] is Role.INPUT or (moves_data(view, node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def preparations(view: GraphView) -> dict[torch.fx.Node, torch.fx.Node]:
    """Compute nodes that only prepare a collective's input from graph inputs -> that collective's start.

    A node qualifies when all its inputs are graph inputs (or qualify themselves) and all its users are one start (or
    qualify for it). O(nodes + edges), by one sweep forwards and one backwards.
    """
    roles = view.roles
    from_inputs = given(view)
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    written = _written(view)
    for node in reversed(view.nodes):
        if node not in from_inputs or roles[node] is Role.INPUT:
            continue
        if node in written or not written.isdisjoint(node.all_input_nodes):
            continue
        # A view may be saved for backward as well: it moves nothing.
        free = roles[node] is Role.FREE
        starts = {
            user if roles[user] is Role.START else found.get(user)
            for user in node.users
            if not (free and user.op == "output")
        }
        if len(starts) == 1 and (start := starts.pop()) is not None:
            found[node] = start
    return found


def trims(
    view: GraphView, uneven: Collection[Collective] = ()
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Compute nodes that only cut or copy a wait's result and leave the graph -> that wait.

    A node qualifies when its only tensor input is a wait of a reduction (through views or nodes that qualify) and its
    value is used by graph outputs only (or by nodes that qualify). Nobody else may write to what it touches: it would
    move ahead of the write. What follows the waits of ``uneven`` may compute, element by element; what it makes of
    several waits (the gradients of a parameter that is read twice are added) counts to the last of them.
    """
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    root: dict[torch.fx.Node, torch.fx.Node] = {}
    leaves: set[torch.fx.Node] = set()
    written = _written(view)
    computing = {wait for collective in uneven for wait in collective.waits}

    def elementwise(node: torch.fx.Node) -> bool:
        return bool(computing) and view.roles[node] is Role.COMPUTE and _torch.is_pointwise(node.target)

    for node in reversed(view.nodes):
        # Most nodes have a user that goes on with them: that is asked first.
        if any(user not in leaves and user.op != "output" for user in node.users):
            continue
        if not moves_data(view, node) and not elementwise(node):
            continue
        if node not in written and written.isdisjoint(node.all_input_nodes):
            leaves.add(node)
    place: dict[torch.fx.Node, int] = {}
    for number, node in enumerate(view.nodes):
        role = view.roles[node]
        if role is Role.WAIT:
            root[node], place[node] = node, number
        elif node in leaves:
            sources = {root[n] for n in node.all_input_nodes if n in root}
            if not sources or any(n not in root for n in node.all_input_nodes):
                continue
            if not (sources <= computing or (len(sources) == 1 and moves_data(view, node))):
                continue
            root[node] = max(sources, key=place.__getitem__)
            if role is Role.COMPUTE:
                found[node] = root[node]
    return found


@dataclass(frozen=True)
class Shards:
    """What a graph shows about shards of unequal size, in a way that every rank sees.

    What is gathered from padded shards is cut, and what is reduced into them is padded, on all ranks alike. (That a
    shard itself is padded or trimmed only the smaller ranks see.)

    Attributes:
        uneven: gathers and reductions whose shards differ in size.
        padded: all_reduces of what such reductions gave, with the padding.
        owner: nodes that count as part of a start or a wait, see :func:`preparations` and :func:`trims`.
        apart: the first collective for which ranks compute with pieces of unequal size (uneven shards in the middle of
            the graph, an all_to_all of unequal pieces unless every rank hands all of its rows on to one).
    """

    uneven: frozenset[Collective]
    owner: dict[torch.fx.Node, torch.fx.Node]
    padded: frozenset[Collective] = frozenset()
    apart: Collective | None = None

    @property
    def ranks_agree(self) -> bool:
        """Whether every rank has the same problem, as far as the graph tells.

        Otherwise nothing that all ranks must do alike may depend on durations or peaks.
        """
        return self.apart is None


def shards(view: GraphView) -> Shards:
    """See :class:`Shards`; O(nodes + edges)."""
    uneven = frozenset(c for c in view.collectives if _is_uneven(view, c))
    uneven |= _gathered_alike(view, uneven)
    pieces, padded = _whole_pieces(view, uneven)
    owner = {**preparations(view), **trims(view, uneven | padded)}
    pieced = uneven | padded
    apart = (
        c
        for c in view.collectives
        if (c.kind is CollectiveKind.ALL_TO_ALL and _has_unequal_splits(c.start) and handed_on(c.start) is None)
        or (c in pieced and not _is_at_the_edge(view, c, owner, pieces))
    )
    return Shards(uneven, owner, padded, next(apart, None))


def _gathered_alike(view: GraphView, uneven: Collection[Collective]) -> set[Collective]:
    """Gathers of a shard that an uneven one gathers, too: of a result that nobody reads, nobody sees that it is cut.

    Other ranks pad the shard for each gather, and torch makes one of those that are alike.
    """
    gathers = [c for c in uneven if c.kind is CollectiveKind.ALL_GATHER]
    if not gathers:
        return set()
    movable = given(view)
    wanted = {_gathered(c, movable) for c in gathers}
    others = (c for c in view.collectives if c.kind is CollectiveKind.ALL_GATHER and c not in uneven)
    return {c for c in others if (what := _gathered(c, movable)) in wanted and what[0]}


def _gathered(gather: Collective, movable: Collection[torch.fx.Node]) -> tuple[object, ...]:
    """Which graph inputs are gathered, and into how much: the same on ranks that pad them."""
    found, seen, todo = set[torch.fx.Node](), set(gather.inputs), list(gather.inputs)
    while todo:
        node = todo.pop()
        if node.op in ("placeholder", "get_attr"):
            found.add(node)
        elif node not in movable:
            return (frozenset(),)
        for before in node.all_input_nodes:
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return frozenset(found), gather.group.name, gather.dtypes, gather.output_bytes


def _whole_pieces(
    view: GraphView, uneven: Collection[Collective]
) -> tuple[frozenset[torch.fx.Node], frozenset[Collective]]:
    """What uneven reductions gave, with its padding, on its way to all_reduces (these starts included); and those."""
    # Node after an uneven reduction -> whether nothing was cut off on any rank, as its shape says.
    whole: dict[torch.fx.Node, bool] = {
        wait: False for c in uneven if c.kind is CollectiveKind.REDUCE_SCATTER for wait in c.waits
    }
    if not whole:
        return frozenset(), frozenset()
    padded: set[Collective] = set()
    for node in view.nodes:
        known = [whole[n] for n in node.all_input_nodes if n in whole]
        if not known or node.op == "output":
            continue
        collective = view.by_start.get(node)
        if collective is not None:
            if collective.kind is CollectiveKind.ALL_REDUCE and all(known):
                padded.add(collective)
                whole[node] = True
                whole.update((wait, _is_marked(wait)) for wait in collective.waits)
        elif node not in whole and moves_data(view, node):
            whole[node] = all(known) or _is_marked(node)
    pieces = frozenset(node for node, is_whole in whole.items() if is_whole)
    return pieces, frozenset(padded)


def _is_marked(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return len(shape) == len(WHOLE_PIECE) and shape[:-1] == WHOLE_PIECE[:-1]


def _has_unequal_splits(start: torch.fx.Node) -> bool:
    lists = [a for a in (*start.args, *start.kwargs.values()) if isinstance(a, (list, tuple))]
    found = [{str(size) for size in sizes} for sizes in lists]
    # Where this rank sends and gets nothing at all, others do.
    return any(len(sizes) > 1 for sizes in found) or any(sizes == {"0"} for sizes in found)


def handed_on(start: torch.fx.Node) -> object | None:
    """How many rows every rank sends to one rank and gets from one, as in a ring (``permute_tensor``); else None.

    This rank's splits say so of this rank. A rank for which they do not has pieces of unequal size, and says that when
    graphs are compared. Nobody asks about an exchange that a pass made: some ranks may keep what they have in it.
    """
    if STATED in start.meta:
        return None
    arguments = _torch.op_arguments(start)
    rows = []
    for name in ("input_split_sizes", "output_split_sizes"):
        sizes = arguments.get(name)
        rows.append([s for s in sizes if type(s) is not int or s] if isinstance(sizes, (list, tuple)) else [])
    if rows == [[], []]:
        # Of nothing at all.
        return 0 if arguments.get("input_split_sizes") and arguments.get("output_split_sizes") else None
    if not all(len(one) == 1 for one in rows):
        return None
    sent, received = (one.meta.get("val") if isinstance(one, torch.fx.Node) else one for (one,) in rows)
    known = isinstance(sent, (int, torch.SymInt)) and isinstance(received, (int, torch.SymInt))
    return rows[0][0] if known and _torch.same_size(sent, received) else None


def _is_uneven(view: GraphView, collective: Collective) -> bool:
    if collective.kind == CollectiveKind.ALL_GATHER:
        return any(_is_cut(view, wait, collective.group.size) for wait in collective.waits)
    scatters = collective.kind is CollectiveKind.REDUCE_SCATTER
    return scatters and any(is_padded(view, node) for node in collective.inputs)


def _is_cut(view: GraphView, wait: torch.fx.Node, ranks: int) -> bool:
    """Whether the end of a dimension of the result is never read, as much of it as makes a size that ranks share."""
    todo = [wait]
    while todo:
        node = todo.pop()
        ends: dict[int, int] = {}
        readers = [user for user in node.users if user.op != "output"]
        for user in readers:
            if _torch.op_name(user.target) == "aten::slice":
                dim, end = _slice_end(user)
                ends[dim] = max(ends.get(dim, 0), end)
            else:
                ends[-1] = 0
            if moves_data(view, user):
                # Taken out of a message that several gathers share, or put together again.
                todo.append(user)
        value = node.meta.get("val")
        if len(ends) == 1 and -1 not in ends and isinstance(value, torch.Tensor):
            ((dim, end),) = ends.items()
            size = _torch.size_hint(value.shape[dim])
            if size is not None and end < size < end + ranks and size % ranks == 0:
                return True
    return False


def _slice_end(node: torch.fx.Node) -> tuple[int, int]:
    """Dimension and end of a slice that starts at the beginning with steps of one, else an end beyond any size."""
    arguments = (*node.args, *(None,) * (5 - len(node.args)))
    dim, start, end, step = (node.kwargs.get(k, a) for k, a in zip(("dim", "start", "end", "step"), arguments[1:]))
    value = node.all_input_nodes[0].meta.get("val")
    rank = value.dim() if isinstance(value, torch.Tensor) else 1
    last = _torch.size_hint(end.meta.get("val") if isinstance(end, torch.fx.Node) else end)
    if (start or 0) != 0 or (step or 1) != 1 or last is None or last < 0:
        return (dim or 0) % rank, 1 << 62
    return (dim or 0) % rank, last


def is_padded(view: GraphView, node: torch.fx.Node) -> bool:
    """Whether a value is the size of the largest shard because this rank lengthened it."""
    while view.role(node) is Role.FREE and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if view.role(node) is not Role.COMPUTE:
        return False
    name = _torch.op_name(node.target)
    return name in PADS or (name == "aten::cat" and any(is_padded(view, n) for n in node.all_input_nodes))


def _is_at_the_edge(
    view: GraphView,
    collective: Collective,
    owner: dict[torch.fx.Node, torch.fx.Node],
    pieces: Collection[torch.fx.Node],
) -> bool:
    """Whether what differs between ranks is graph inputs and outputs and what belongs to the collective itself."""
    if collective.kind == CollectiveKind.ALL_GATHER:
        todo, seen = list(collective.inputs), set(collective.inputs)
        while todo:
            node = todo.pop()
            near = [n for n in node.users if n.op != "output" and view.role(n) is not Role.START]
            if view.role(node) is not Role.INPUT:
                near += [node, *node.all_input_nodes]
            for other in near:
                role = view.role(other)
                if role not in (Role.INPUT, Role.FREE) and other not in owner:
                    return False
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return True
    todo = list(collective.waits)
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                continue
            if user not in owner and user not in pieces and view.role(user) is not Role.FREE:
                return False
            if view.role(user) is not Role.START:
                todo.append(user)
    return True
