"""R18: what follows a gather of columns is done on each rank's own columns: a softmax, a loss over classes.

before::

    x = cat(split(wait(all_gather(logits, a)), dim=0), dim=-1); y = x - amax(x); z = y - log(sum(exp(y)))
    picked = gather(z, -1, target); grad = split(exp(z) * g, dim=-1)[own]

after::

    y = logits - wait(all_reduce(amax(logits), max, a)); z = y - log(wait(all_reduce(sum(exp(y)), sum, a)))
    picked = wait(reduce_scatter(pick(z, own columns, wait(all_gather(target, a))), sum, a)); grad = exp(z) * g

The region grows from a gather along the last dimension through operators that treat columns alike: pointwise ones,
views and slices of other dimensions, sums over other dimensions. It ends where a value of all columns is no longer
needed: at a sum, a maximum or a minimum over the columns (the rank's own, then an all_reduce), at one element per row
(the rank that has it gives it, the others give 0; each rank has targets of its own, so these are gathered and the
elements scattered), and at the rank's own columns. If anything else reads all columns the gather stays.

Right because every operator of the region computes a column from that column of its operands, and a sum or an extreme
of all columns is that of the ranks' own. Values that other ranks' columns depend on have to be equal on the ranks
(``replicas``): a factor per row, or per column where ``replicas="implied"`` does not say that it is. For what only
becomes the rank's own columns nothing has to be. Sums are added up in another order:
this reassociates. Columns that the group does not divide are left alone.

Saved is the gather, which for a vocabulary is the largest message of a step, the copy that puts columns side by side,
and (ranks - 1) / ranks of computing, reading and keeping the columns. In training forward keeps columns for backward,
so this is looked for in the joint graph.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes._torch.pick_op import OPERATOR as PICK
from inductor_passes.ir import ops
from inductor_passes.ir.layouts import noted
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.report import Reason
from inductor_passes.rewrites.chain import own_group
from inductor_passes.rewrites.movement import is_split, name_of, pieces_read, step_behind
from inductor_passes.rewrites.packing import Size, sizes
from inductor_passes.rewrites.permutation import unpack_ahead
from inductor_passes.rewrites.replicas import equal_values, tensor_operands
from inductor_passes.rewrites.row_regions import size_bytes
from inductor_passes.rewrites.rows import reduced_dims
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, gathered, reduced, scattered
from inductor_passes.rewriting.numbers import Numbers
from inductor_passes.verify.messages import OWN_KEY

_VIEWS = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "reshape"))
_SAME = frozenset(("aten::alias", "aten::detach"))
_CONSTANTS = frozenset(("aten::full", "aten::scalar_tensor"))
#: Reductions over columns -> over ranks.
_REDUCED = {"aten::sum": "sum", "aten::mean": "sum", "aten::amax": "max", "aten::amin": "min"}


class _Differs(IntEnum):
    """What a value has of values that may differ between ranks: nothing, a factor or a term per column (which
    ``replicas="implied"`` says is equal), or something per row."""

    NOTHING = 0
    COLUMNS = 1
    ROWS = 2


@dataclass
class _Region:
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
        unequal: a member that is reduced although something in it may differ between ranks.
        unclear: a piece of a member that may be the rank's own columns, or anything else.
    """

    gather: Collective
    moved: list[torch.fx.Node]
    columns: int
    members: dict[torch.fx.Node, _Differs] = field(default_factory=dict)
    reductions: dict[torch.fx.Node, None] = field(default_factory=dict)
    picks: dict[torch.fx.Node, None] = field(default_factory=dict)
    own: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    computed: set[torch.fx.Node] = field(default_factory=set)
    equal: set[torch.fx.Node] = field(default_factory=set)
    read_whole: list[torch.fx.Node] = field(default_factory=list)
    unequal: torch.fx.Node | None = None
    unclear: torch.fx.Node | None = None

    @property
    def whole(self) -> torch.fx.Node:
        """All columns."""
        return self.moved[-1]

    @property
    def ranks(self) -> int:
        """Of the group."""
        return self.gather.group.size


class ColumnsOnShards:
    """See the module's docstring."""

    name: ClassVar[str] = "R18"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather."""
        return work.collectives(CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The region behind a gather of columns."""
        region = _begun(work, root)
        if region is None:
            return None
        _Sweep(work, region).run()
        if not region.reductions and not region.picks:
            return None
        if region.read_whole:
            if work.exactness != "reassociate":
                return None
            # Somebody who returns the logits beside the loss should see what that costs.
            names = ", ".join(node.name for node in region.read_whole[:3])
            refuse(Reason.DATA_DEPENDENCY, f"{names} needs all {region.columns} columns")
        if region.unequal is not None:
            setting = 'replicas="implied"' if region.members[region.unequal] is _Differs.COLUMNS else ""
            said = f"what {region.unequal.name} is made of may differ between the ranks"
            refuse(Reason.DATA_DEPENDENCY, said, setting)
        if region.unclear is not None:
            refuse(Reason.DIFFERENT_GROUP, f"nothing shows that {region.unclear.name} is the rank's own columns")
        if work.exactness != "reassociate":
            refuse(Reason.NUMERICS, "sums over columns in another order", 'redistribute="reassociate"')
        _sizes_are_known(work, region)
        work.for_this_rank()
        work.never_written(*region.members, *region.moved, *region.own)
        work.unwritten(region.gather.inputs[0], region.gather.start, max((*region.members, *region.own)))
        return Match(
            _gain_ns(work, region),
            f"{region.columns} columns on {region.ranks} ranks: {len(region.reductions)} reductions, "
            f"{len(region.picks)} elements per row",
            lambda: _apply(work, self.name, region),
            "small messages take longer than the gather",
        )


def _begun(work: Work, root: torch.fx.Node) -> _Region | None:
    """A gather whose result is put side by side along the last dimension, and read in no other way."""
    gather = work.collective(root, CollectiveKind.ALL_GATHER)
    if gather is None:
        return None
    (wait,) = gather.waits
    nodes = _side_by_side(wait, gather.group.size)
    shape = sizes(nodes[-1]) if nodes else None
    if not nodes or shape is None or not nodes[-1].meta["val"].is_floating_point() or not isinstance(shape[-1], int):
        return None
    return _Region(gather, [wait, *nodes], shape[-1])


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


class _Sweep:
    """Follows the columns from the gather on, in graph order."""

    def __init__(self, work: Work, region: _Region) -> None:
        self._work, self._region = work, region
        self._todo: list[torch.fx.Node] = []
        self._seen: set[torch.fx.Node] = set()
        self._known: set[torch.fx.Node] | None = None
        self._implied = work.facts.config.replicas == "implied"

    def run(self) -> None:
        """Fill the region."""
        region = self._region
        region.members[region.whole] = _Differs.NOTHING
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
            plain = node.op == "call_function" and (name_of(node) in _SAME | _VIEWS or _torch.is_pointwise(node.target))
            if plain and not any(map(self._differs, operands)):
                region.equal.add(node)
                self._push(node)
            return
        if not self._is_understood(node, read[0], operands):
            region.read_whole.append(node)

    def _is_understood(self, node: torch.fx.Node, member: torch.fx.Node, operands: list[torch.fx.Node]) -> bool:
        """Take up what reads a member; False: it needs all columns."""
        region, name = self._region, name_of(node)
        if not _torch.is_op(node.target) or ops.mutated_inputs(node) or _torch.is_seeded_random(node.target):
            return False
        if is_split(node):
            return self._own(node, member)
        if name in _REDUCED and len(operands) == 1:
            return self._reduced(node, member)
        if name == "aten::gather":
            return self._picked(node, member)
        if not self._keeps_columns(node, operands):
            return False
        region.members[node] = max(map(self._differs, operands))
        if _torch.is_pointwise(node.target) or not region.computed.isdisjoint(operands):
            region.computed.add(node)
        self._push(node)
        return True

    def _differs(self, operand: torch.fx.Node) -> _Differs:
        """What in an operand may differ between ranks."""
        region = self._region
        if operand in region.members:
            return region.members[operand]
        if operand in region.equal or name_of(operand) in _CONSTANTS:
            return _Differs.NOTHING
        if self._known is None:
            self._known = equal_values(self._work, region.gather.group.ranks, implied=self._implied)
        if operand in self._known:
            return _Differs.NOTHING
        if not _torch.same_size((sizes(operand) or [0])[-1], region.columns):
            return _Differs.ROWS
        return _Differs.NOTHING if self._implied and not self._work.is_written(operand) else _Differs.COLUMNS

    def _needs_equal(self, member: torch.fx.Node) -> None:
        if self._region.members[member] is not _Differs.NOTHING and self._region.unequal is None:
            self._region.unequal = member

    def _own(self, split: torch.fx.Node, member: torch.fx.Node) -> bool:
        """A split of which the rank's own piece is read."""
        region = self._region
        used = [piece for piece in split.users if piece.users]
        dim = int(_torch.op_arguments(split).get("dim", 0)) % member.meta["val"].ndim
        if dim != member.meta["val"].ndim - 1 or len(used) != 1 or used[0].target is not operator.getitem:
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
        if name in _VIEWS or name in _SAME or name in ("aten::clone", "aten::expand"):
            return True
        if name == "aten::slice":
            return int(_torch.op_arguments(node).get("dim", 0)) % len(shape) != len(shape) - 1 or _torch.same_sizes(
                shape, sizes(members[0]) or []
            )
        return _torch.is_pointwise(node.target)


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


def _sizes_are_known(work: Work, region: _Region) -> None:
    """Refuse symbolic sizes that nothing can be estimated with, or that do not follow from the graph's inputs."""
    nodes = (*region.members, *region.reductions, *region.picks)
    found = [size for node in nodes for size in sizes(node) or () if isinstance(size, torch.SymInt)]
    found += [sizes(pick)[0] * region.ranks for pick in region.picks]  # type: ignore[index]
    symbolic = {_torch.size_key(size): size for size in found if isinstance(size, torch.SymInt)}
    numbers = Numbers(work.graph.nodes) if symbolic else None
    for size in symbolic.values():
        if _torch.size_hint(size) is None:
            refuse(Reason.NO_HINT, f"nothing says how large {size} usually is")
        if numbers is not None and not numbers.has(size):
            refuse(Reason.RANGE, f"{size} does not follow from the sizes of the graph's inputs")


def _gain_ns(work: Work, region: _Region) -> int:
    """Time saved, see the module's docstring."""
    ranks, group, whole = region.ranks, region.gather.group.ranks, size_bytes(region.whole)
    gain = work.price_ns(region.gather) + work.copy_ns(whole)
    for node in region.reductions:
        size = size_bytes(node)
        gain -= work.link_ns(CollectiveKind.ALL_REDUCE, size, size, group)
    for node in region.picks:
        index, size = size_bytes(_torch.op_arguments(node)["index"]), size_bytes(node)
        gain -= work.link_ns(CollectiveKind.ALL_GATHER, index, ranks * index, group)
        gain -= work.link_ns(CollectiveKind.REDUCE_SCATTER, ranks * size, size, group)
    # Inductor fuses what lies in between: all columns are read once for each pass over them.
    passes = max(1, len(region.reductions))
    return gain + work.facts.profile.compute_ns(0, passes * whole, "float32", 0) * (ranks - 1) // ranks


def _apply(work: Work, subject: str, region: _Region) -> None:
    shards = _OnShards(region)
    own_splits = {piece.all_input_nodes[0]: piece for piece in region.own}
    places = sorted({*region.members, *region.reductions, *region.picks, *own_splits} - {region.whole})

    def build(emit: Emitter) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        shards.new[region.whole] = region.gather.inputs[0]
        pairs = []
        for node in places:
            emit.cursor = node
            with emit.standing_for(node):
                if node in region.reductions:
                    pairs.append((node, shards.reduced(emit, node)))
                elif node in region.picks:
                    pairs.append((node, shards.picked(emit, node)))
                elif node in own_splits:
                    piece = own_splits[node]
                    pairs.append((piece, shards.new[region.own[piece]]))
                else:
                    shards.new[node] = shards.emitted(emit, node)
        return pairs

    unused = [piece for split in own_splits for piece in split.users if piece not in region.own]
    gone = {*places, *region.own, *unused, *region.moved, region.gather.start}
    work.replace(subject, region.gather.start, sorted(gone, reverse=True), build, before=region.gather.start)


class _OnShards:
    """Emits operators on the rank's own columns.

    Attributes:
        new: member -> its own columns.
    """

    def __init__(self, region: _Region) -> None:
        self._region = region
        self._group = region.gather.group_argument
        ranks = region.gather.group.ranks
        self._ranks, self._place = ranks, ranks.index(_torch.process_rank())
        self._cut: dict[torch.fx.Node, torch.fx.Node] = {}
        self._positions: torch.fx.Node | None = None
        self.new: dict[torch.fx.Node, torch.fx.Node] = {}

    @property
    def _own(self) -> int:
        return self._region.columns // self._region.ranks

    def emitted(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """A member on own columns of its operands."""
        name, source = name_of(node), node.all_input_nodes[0]
        shape: list[Size] = [*node.meta["val"].shape[:-1], self._own]
        if name in _SAME:
            return self.new[source]
        if name in _VIEWS:
            return emit.view(dense(emit, self.new[source]), shape)
        if name == "aten::expand":
            return emit.call(node.target, self.new[source], shape)
        if name == "aten::slice":
            dim = int(_torch.op_arguments(node).get("dim", 0)) % len(shape)
            if dim == len(shape) - 1:
                return self.new[source]
        brought = {o: self._brought(emit, o) for o in tensor_operands(node)}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: brought.get(n, n))
        return emit.call(node.target, *args, **kwargs)

    def reduced(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """A reduction of all columns."""
        (source,) = tensor_operands(node)
        args = [self.new[source] if a is source else a for a in node.args]
        part = emit.call(node.target, *args, **node.kwargs)
        whole = reduced(emit, part, _REDUCED[name_of(node)], self._group)
        if name_of(node) != "aten::mean":
            return whole
        return emit.call(torch.ops.aten.div.Tensor, whole, self._region.ranks)

    def picked(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """One element per row, wherever its column is."""
        arguments, size = _torch.op_arguments(node), self._region.ranks
        index = dense(emit, arguments["index"])
        rows = list(index.meta["val"].shape)
        every = emit.view(gathered(emit, index, size, self._group), [size, *rows])
        columns = self._own_positions(emit, index)
        found = emit.call(PICK.default, self.new[arguments["self"]], columns, every)
        return scattered(emit, emit.view(found, [size * rows[0], *rows[1:]]), "sum", size, self._group)

    def _brought(self, emit: Emitter, operand: torch.fx.Node) -> torch.fx.Node:
        """What own columns need of an operand: its own columns where it has all, or all of it."""
        if operand in self.new:
            return self.new[operand]
        shape = operand.meta["val"].shape
        if not shape or not _torch.same_size(shape[-1], self._region.columns):
            return operand
        if operand not in self._cut:
            self._cut[operand] = self._own_piece(emit, operand, len(shape) - 1)
        return self._cut[operand]

    def _own_positions(self, emit: Emitter, index: torch.fx.Node) -> torch.fx.Node:
        if self._positions is None:
            columns = emit.call(
                torch.ops.prims.iota.default,
                self._region.columns,
                start=0,
                step=1,
                dtype=torch.int64,
                device=index.meta["val"].device,
                requires_grad=False,
            )
            self._positions = self._own_piece(emit, columns, 0)
        return self._positions

    def _own_piece(self, emit: Emitter, whole: torch.fx.Node, dim: int) -> torch.fx.Node:
        pieces = emit.call(torch.ops.aten.split_with_sizes.default, whole, [self._own] * self._region.ranks, dim)
        pieces.meta[OWN_KEY] = self._ranks
        return emit.call(operator.getitem, pieces, self._place)
