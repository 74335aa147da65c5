"""Regions behind gathers of columns that can be computed on each rank's own columns.

A gather has one walk over what follows it, in graph order: what is met keeps columns apart, reduces them, reads one per
row, reads the rank's own, or needs all of them.
"""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.layouts import noted
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.rewrites.chain import own_group
from inductor_passes.rewrites.movement import is_split, name_of, pieces_read, step_behind
from inductor_passes.rewrites.own_cuts import may_be_own
from inductor_passes.rewrites.packing import sizes
from inductor_passes.rewrites.permutation import unpack_ahead
from inductor_passes.rewrites.replicas import equal_and_own, tensor_operands
from inductor_passes.rewrites.rows import reduced_dims
from inductor_passes.rewrites.work import Work
from inductor_passes.verify.messages import OWN_KEY

VIEWS = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "reshape"))
SAME = frozenset(("aten::alias", "aten::detach"))
_CONSTANTS = frozenset(("aten::full", "aten::scalar_tensor"))
#: What cuts, joins or places rows where their argument ``dim`` is not that of the columns. `logits[:, :-1]` is a slice,
#: and its gradient a slice_scatter; a loss in pieces splits rows, and its gradient is joined.
_ALONG_A_DIM = frozenset(f"aten::{name}" for name in ("slice", "slice_scatter", "select", "select_scatter", "cat"))
#: Reductions over columns -> over ranks.
REDUCED = {"aten::sum": "sum", "aten::mean": "sum", "aten::amax": "max", "aten::amin": "min"}
#: The same of truth values, which travel as numbers of :data:`COUNTED`. Inductor asks so whether a row of scaled logits
#: is finite.
LOGICAL = {"aten::any": "max", "aten::all": "min"}
COUNTED = torch.int32


class Differs(IntEnum):
    """What a value has of values that may differ between ranks: nothing, a factor or a term per column (which
    ``replicas="implied"`` says is equal), one made of numbers that may be a rank's own, or something per row."""

    NOTHING = 0
    COLUMNS = 1
    NUMBERS = 2
    ROWS = 3


@dataclass
class Region:
    """What follows one gather.

    Attributes:
        gather: it. ``moved``: the nodes that put its columns side by side, the last of which is ``whole``.
        columns: of ``whole``.
        members: nodes with the extent of all columns, which get the rank's own, in graph order -> what in them may
            differ between ranks.
        reductions: nodes that reduce the columns of a member.
        picks: nodes that read one column per row of a member.
        own: nodes that are the rank's own columns of a member -> that member.
        computed: members that are more than the gathered columns in another shape.
        equal: other nodes that are known to be equal on the ranks.
        read_whole: nodes that need all columns.
        own_rows: a node that takes rows which may be other ones on every rank.
        unequal: a member that is reduced although something in it may differ between ranks.
        unclear: a piece of a member that may be the rank's own columns, or anything else.
        narrow: what would be added up over ranks in a type that rounds more coarsely than float32, or reduced at all in
            one of a byte, which not every library reduces. (An extreme rounds nothing, nor does an element that one
            rank has, to which the others add 0.)
    """

    gather: Collective
    moved: list[torch.fx.Node]
    columns: int
    members: dict[torch.fx.Node, Differs] = field(default_factory=dict)
    reductions: dict[torch.fx.Node, None] = field(default_factory=dict)
    picks: dict[torch.fx.Node, None] = field(default_factory=dict)
    own: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    computed: set[torch.fx.Node] = field(default_factory=set)
    equal: set[torch.fx.Node] = field(default_factory=set)
    read_whole: list[torch.fx.Node] = field(default_factory=list)
    own_rows: torch.fx.Node | None = None
    unequal: torch.fx.Node | None = None
    unclear: torch.fx.Node | None = None
    narrow: torch.fx.Node | None = None

    @property
    def whole(self) -> torch.fx.Node:
        """All columns."""
        return self.moved[-1]

    @property
    def ranks(self) -> int:
        """Of the group."""
        return self.gather.group.size


def begun(work: Work, root: torch.fx.Node) -> Region | None:
    """A gather whose result is put side by side along the last dimension, and read in no other way."""
    gather = work.collective(root, CollectiveKind.ALL_GATHER)
    if gather is None:
        return None
    (wait,) = gather.waits
    nodes = _side_by_side(wait, gather.group.size)
    shape = sizes(nodes[-1]) if nodes else None
    if not nodes or shape is None or not nodes[-1].meta["val"].is_floating_point() or not isinstance(shape[-1], int):
        return None
    return Region(gather, [wait, *nodes], shape[-1])


def _side_by_side(wait: torch.fx.Node, ranks: int) -> list[torch.fx.Node]:
    """What puts the ranks' columns side by side, the result last; nothing where something else follows."""
    found = unpack_ahead(wait, ranks)
    if found is not None:
        dim, nodes = found
        return nodes if nodes and dim == nodes[-1].meta["val"].ndim - 1 else []
    split = next(iter(wait.users), None)
    # Of symbolic sizes the plain form is known.
    if len(wait.users) != 1 or split is None or not is_split(split) or len(split.meta["val"]) != ranks:
        return []
    cat = next((user for piece in split.users for user in piece.users), None)
    if cat is None or name_of(cat) != "aten::cat" or any(list(piece.users) != [cat] for piece in split.users):
        return []
    step, last = step_behind(cat), cat.meta["val"].ndim - 1
    dims = int(_torch.op_arguments(split).get("dim", 0)), int(_torch.op_arguments(cat).get("dim", 0)) % (last + 1)
    if step is None or step[0] is not wait or dims != (0, last):
        return []
    shapes = [list(piece.shape) for piece in split.meta["val"]]
    return list(step[1]) if all(_torch.same_sizes(shape, shapes[0]) for shape in shapes) else []


class Sweep:
    """Follows the columns from the gather on, in graph order."""

    def __init__(self, work: Work, region: Region) -> None:
        self._work, self._region = work, region
        self._todo: list[torch.fx.Node] = []
        self._seen: set[torch.fx.Node] = set()
        self._known: set[torch.fx.Node] | None = None
        self._own_values: set[torch.fx.Node] = set()
        self._implied = work.facts.config.replicas == "implied"

    def run(self) -> None:
        """Fill the region."""
        region = self._region
        region.members[region.whole] = Differs.NOTHING
        self._push(region.whole)
        while self._todo:
            self._follow(heapq.heappop(self._todo))

    def _push(self, node: torch.fx.Node) -> None:
        for user in node.users:
            if user not in self._seen:
                self._seen.add(user)
                heapq.heappush(self._todo, user)

    def _follow(self, node: torch.fx.Node) -> None:
        region, operands = self._region, tensor_operands(node)
        read = [o for o in operands if o in region.members]
        if not read:
            # Made of what was reduced: equal on the ranks as long as nothing else has a part in it.
            plain = node.op == "call_function" and (name_of(node) in SAME | VIEWS or _torch.is_pointwise(node.target))
            if plain and all(map(_has_no_own_number, (node, *operands))) and not any(map(self._differs, operands)):
                region.equal.add(node)
                self._push(node)
            return
        if not self._is_understood(node, read[0], operands):
            region.read_whole.append(node)

    def _is_understood(self, node: torch.fx.Node, member: torch.fx.Node, operands: list[torch.fx.Node]) -> bool:
        """Take up what reads a member; False: it needs all columns."""
        name = name_of(node)
        if node.target is operator.getitem and is_split(member):
            return self._entered(node, [member])
        if not _torch.is_op(node.target) or ops.mutated_inputs(node) or _torch.is_seeded_random(node.target):
            return False
        if is_split(node):
            dim, last = int(_torch.op_arguments(node).get("dim", 0)), member.meta["val"].ndim - 1
            if dim % (last + 1) == last:
                return self._own(node, member)
            # Of a piece alone nobody knows whether it is the rank's own: rows that differ are not reduced together.
            if len([piece for piece in node.users if piece.users]) < len(node.meta["val"]):
                self._region.own_rows = self._region.own_rows or node
                return False
            return self._entered(node, operands)
        if name in REDUCED and len(operands) == 1:
            return self._reduced(node, member)
        if name in LOGICAL and len(operands) == 1:
            # No dimensions at all would be none to torch, and all of them to a maximum.
            of_truth = member.meta["val"].dtype is torch.bool and _torch.op_arguments(node).get("dim") not in ((), [])
            return of_truth and self._reduced(node, member)
        if name == "aten::gather":
            return self._picked(node, member)
        if not self._keeps_columns(node, operands) or not _has_no_own_number(node):
            return False
        return self._entered(node, operands)

    def _entered(self, node: torch.fx.Node, operands: list[torch.fx.Node]) -> bool:
        """Take up another member, or the pieces of one."""
        region = self._region
        region.members[node] = max(map(self._differs, operands))
        if _torch.is_pointwise(node.target) or not region.computed.isdisjoint(operands):
            region.computed.add(node)
        self._push(node)
        return True

    def _differs(self, operand: torch.fx.Node) -> Differs:
        """What in an operand may differ between ranks."""
        region = self._region
        if operand in region.members:
            return region.members[operand]
        if operand in region.equal or (name_of(operand) in _CONSTANTS and _has_no_own_number(operand)):
            return Differs.NOTHING
        if self._known is None:
            ranks = region.gather.group.ranks
            self._known, self._own_values = equal_and_own(self._work, ranks, implied=self._implied)
        if operand in self._known:
            return Differs.NOTHING
        if not _torch.same_size((sizes(operand) or [0])[-1], region.columns):
            return Differs.ROWS
        if operand in self._own_values:
            return Differs.NUMBERS
        implied = self._implied and not self._work.is_written(operand)
        return Differs.NOTHING if implied else Differs.COLUMNS

    def _needs_equal(self, member: torch.fx.Node) -> None:
        if self._region.members[member] is not Differs.NOTHING and self._region.unequal is None:
            self._region.unequal = member

    def _travels(self, node: torch.fx.Node) -> None:
        name = name_of(node)
        least = 4 if REDUCED.get(name) == "sum" else 2
        dtype = COUNTED if name in LOGICAL else node.meta["val"].dtype
        if dtype.itemsize < least and self._region.narrow is None:
            self._region.narrow = node

    def _own(self, split: torch.fx.Node, member: torch.fx.Node) -> bool:
        """A split of which the rank's own piece is read."""
        region = self._region
        used = [piece for piece in split.users if piece.users]
        dim = member.meta["val"].ndim - 1
        if len(used) != 1 or used[0].target is not operator.getitem:
            return False
        if member not in region.computed:
            # Own columns of what was gathered are what was sent: nothing here is to do with that.
            return False
        if _owners(split, used[0], dim) != tuple(sorted(region.gather.group.ranks)):
            region.unclear = used[0]
        region.own[used[0]] = member
        return True

    def _reduced(self, node: torch.fx.Node, member: torch.fx.Node) -> bool:
        region, dims = self._region, reduced_dims(node)
        last = member.meta["val"].ndim - 1
        # What is counted is added up in another type, and a sum of that is another sum to the proof.
        if node.meta["val"].dtype != member.meta["val"].dtype:
            return False
        # Without dimensions all of them are reduced.
        if dims and last not in dims:
            region.members[node] = region.members[member]
            region.computed.add(node)
        else:
            self._needs_equal(member)
            self._travels(node)
            region.reductions[node] = None
            region.equal.add(node)
        self._push(node)
        return True

    def _picked(self, node: torch.fx.Node, member: torch.fx.Node) -> bool:
        arguments, shape = _torch.op_arguments(node), sizes(member) or []
        index = arguments["index"]
        rows = sizes(index) if isinstance(index, torch.fx.Node) else None
        if arguments["self"] is not member or rows is None or int(arguments["dim"]) % len(shape) != len(shape) - 1:
            return False
        if len(shape) < 2 or not _torch.same_sizes(rows, [*shape[:-1], 1]):
            return False
        self._needs_equal(member)
        self._travels(node)
        self._region.picks[node] = None
        return True

    def _keeps_columns(self, node: torch.fx.Node, operands: list[torch.fx.Node]) -> bool:
        """Whether every column of the result is made of that column of the operands."""
        shape, name = sizes(node), name_of(node)
        if not shape or not _torch.same_size(shape[-1], self._region.columns):
            return False
        members = [o for o in operands if o in self._region.members]
        if any(not _torch.same_size((sizes(o) or [0])[-1], self._region.columns) for o in members):
            return False
        if name in VIEWS or name in SAME or name in ("aten::clone", "aten::expand"):
            return True
        if name in _ALONG_A_DIM:
            # Of a select the result has a dimension less.
            source, dim = sizes(members[0]) or [], int(_torch.op_arguments(node).get("dim", 0))
            last = max(len(source), len(shape)) - 1
            if dim % (last + 1) != last:
                own = may_be_own(node)
                self._region.own_rows = self._region.own_rows or (node if own else None)
                return not own
            return name == "aten::slice" and _torch.same_sizes(shape, source)
        return _torch.is_pointwise(node.target)


def _has_no_own_number(node: torch.fx.Node) -> bool:
    """Whether the numbers in a call are the same on all ranks: those of whole numbers may be a rank's own."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype is torch.bool)


def _owners(split: torch.fx.Node, piece: torch.fx.Node, dim: int) -> tuple[int, ...] | None:
    """The ranks of which each takes the piece at its own position; None where nothing says so.

    An operator's gradient is sliced without a call of the program. What Dynamo's graph says of the layouts that it is
    the gradient of says along which dimension of the mesh.
    """
    if OWN_KEY in split.meta:
        return tuple(sorted(split.meta[OWN_KEY]))
    note, rank = noted(split.meta), _torch.process_rank()
    if note is None or rank not in note.ranks or len(note.shape) != piece.meta["val"].ndim:
        return own_group(split, piece)
    if pieces_read(split) != {piece.args[1]}:
        return None
    sharded = f"S({dim})"
    cut = [m for m, ends in enumerate(zip(note.before, note.after)) if {*ends} == {sharded, "R"}]
    if len(cut) != 1:
        return None
    (group,) = (ranks for ranks in Mesh(note.mesh, note.ranks).groups((cut[0],)) if rank in ranks)
    return tuple(group) if len(group) == len(split.meta["val"]) and group.index(rank) == piece.args[1] else None
