"""R18: what follows a gather of columns is done on each rank's own columns: a softmax, a loss over classes.

before::

    x = cat(split(wait(all_gather(logits, a)), dim=0), dim=-1); y = x - amax(x); z = y - log(sum(exp(y)))
    picked = gather(z, -1, target); grad = split(exp(z) * g, dim=-1)[own]

after::

    y = logits - wait(all_reduce(amax(logits), max, a)); z = y - log(wait(all_reduce(sum(exp(y)), sum, a)))
    picked = wait(reduce_scatter(pick(z, own columns, wait(all_gather(target, a))), sum, a)); grad = exp(z) * g

The region grows from a gather along the last dimension through operators that treat columns alike: pointwise ones,
views and slices of other dimensions, rows that are cut and joined, sums over other dimensions. It ends where a value of
all columns is no longer needed: at a sum, a maximum or a minimum over the columns (the rank's own, then an all_reduce;
`any` and `all` are these of 0 and 1), at one element per row (the rank that has it gives it, the others give 0, which
rounds in no type; each rank has targets of its own, so these are gathered and the elements scattered), and at the
rank's own columns. If anything else reads all columns the gather stays.

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

import operator
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes._torch.pick_op import OPERATOR as PICK
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.column_regions import (
    COUNTED,
    LOGICAL,
    REDUCED,
    SAME,
    VIEWS,
    Differs,
    Region,
    Sweep,
    begun,
)
from inductor_passes.rewrites.movement import is_split, name_of
from inductor_passes.rewrites.packing import Size, sizes
from inductor_passes.rewrites.replicas import tensor_operands
from inductor_passes.rewrites.row_regions import size_bytes
from inductor_passes.rewrites.rows import reduced_dims
from inductor_passes.rewrites.work import Match, Work, refuse, sizes_are_known
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, gathered, reduced, scattered
from inductor_passes.verify.messages import OWN_KEY


class ColumnsOnShards:
    """See the module's docstring."""

    name: ClassVar[str] = "R18"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather."""
        return work.collectives(CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The region behind a gather of columns."""
        region = begun(work, root)
        if region is None:
            return None
        Sweep(work, region).run()
        if not region.reductions and not region.picks:
            return None
        if not work.facts.compared:
            # What the columns go through before they are reduced has numbers: a temperature, a smoothing.
            refuse(Reason.RANKS_DIFFER, "ranks may compute columns with other numbers")
        if region.read_whole:
            if work.exactness != "reassociate":
                return None
            saved = [node for node in region.read_whole if node.op == "output"]
            if work.facts.look.phase == "forward" and work.facts.config.codegen == "inductor" and saved:
                # The joint graph was looked at, and has said why the logits are kept for backward.
                return None
            if region.own_rows is not None:
                refuse(Reason.DATA_DEPENDENCY, f"{region.own_rows.name} may take other rows on every rank")
            # Somebody who returns the logits beside the loss should see what that costs.
            names = ", ".join(node.name for node in region.read_whole[:3])
            refuse(Reason.DATA_DEPENDENCY, f"{names} needs all {region.columns} columns")
        if region.unequal is not None:
            setting = 'replicas="implied"' if region.members[region.unequal] is Differs.COLUMNS else ""
            said = f"what {region.unequal.name} is made of may differ between the ranks"
            refuse(Reason.DATA_DEPENDENCY, said, setting)
        if region.narrow is not None:
            dtype = str(region.narrow.meta["val"].dtype).removeprefix("torch.")
            said = f"{region.narrow.name} is in {dtype}, in which it is not split over ranks: use logits.float()"
            refuse(Reason.NUMERICS, said)
        if region.unclear is not None:
            refuse(Reason.DIFFERENT_GROUP, f"nothing shows that {region.unclear.name} is the rank's own columns")
        if work.exactness != "reassociate":
            refuse(Reason.NUMERICS, "sums over columns in another order", 'redistribute="reassociate"')
        nodes = (*region.members, *region.reductions, *region.picks)
        found = [size for node in nodes for size in sizes(node) or ()]
        sizes_are_known(work, [*found, *(sizes(pick)[0] * region.ranks for pick in region.picks)])  # type: ignore[index]
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


def _gain_ns(work: Work, region: Region) -> int:
    """Time saved, see the module's docstring."""
    ranks, group, whole = region.ranks, region.gather.group.ranks, size_bytes(region.whole)
    gain = work.price_ns(region.gather) + work.copy_ns(whole)
    for node in region.reductions:
        size = size_bytes(node) * (COUNTED.itemsize if name_of(node) in LOGICAL else 1)
        gain -= work.collective_ns(CollectiveKind.ALL_REDUCE, size, size, group)
    for node in region.picks:
        index, size = size_bytes(_torch.op_arguments(node)["index"]), size_bytes(node)
        gain -= work.collective_ns(CollectiveKind.ALL_GATHER, index, ranks * index, group)
        gain -= work.collective_ns(CollectiveKind.REDUCE_SCATTER, ranks * size, size, group)
    # Inductor fuses what lies in between: all columns are read once for each pass over them.
    passes = max(1, len(region.reductions))
    return gain + work.facts.profile.compute_ns(0, passes * whole, "float32", 0) * (ranks - 1) // ranks


def _apply(work: Work, subject: str, region: Region) -> None:
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

    def __init__(self, region: Region) -> None:
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
        if node.target is operator.getitem or is_split(node):
            return emit.call(node.target, self.new[source], *node.args[1:], **node.kwargs)
        shape: list[Size] = [*node.meta["val"].shape[:-1], self._own]
        if name in SAME:
            return self.new[source]
        if name in VIEWS:
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
        if name_of(node) in LOGICAL:
            return self._of_truth(emit, node, self.new[source])
        args = [self.new[source] if a is source else a for a in node.args]
        part = emit.call(node.target, *args, **node.kwargs)
        whole = reduced(emit, part, REDUCED[name_of(node)], self._group)
        if name_of(node) != "aten::mean":
            return whole
        return emit.call(torch.ops.aten.div.Tensor, whole, self._region.ranks)

    def _of_truth(self, emit: Emitter, node: torch.fx.Node, own: torch.fx.Node) -> torch.fx.Node:
        """Whether any or all of a row's columns are true: not every library reduces truth values."""
        op = LOGICAL[name_of(node)]
        extreme = {"max": torch.ops.aten.amax.default, "min": torch.ops.aten.amin.default}[op]
        numbers = emit.call(torch.ops.prims.convert_element_type.default, own, COUNTED)
        kept = bool(_torch.op_arguments(node).get("keepdim", False))
        whole = reduced(emit, emit.call(extreme, numbers, reduced_dims(node), kept), op, self._group)
        return emit.call(torch.ops.prims.convert_element_type.default, whole, torch.bool)

    def picked(self, emit: Emitter, node: torch.fx.Node) -> torch.fx.Node:
        """One element per row, wherever its column is."""
        arguments, size = _torch.op_arguments(node), self._region.ranks
        index = dense(emit, arguments["index"])
        rows = list(index.meta["val"].shape)
        every = emit.view(gathered(emit, index, size, self._group), [size, *rows])
        columns = self._own_positions(emit, index)
        found = emit.call(PICK.default, self.new[arguments["self"]], columns, every, self._region.columns)
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
