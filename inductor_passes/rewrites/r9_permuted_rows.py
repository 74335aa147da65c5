"""R9: rows stay in the order in which they were gathered, through everything that treats rows alike.

before::

    x = cat(split(wait(all_gather(shard, a))), 1)            [b, s, d], a copy
    y = mm(silu(mm(view(x), w1)), w2)
    z = wait(reduce_scatter(cat(split(view(y), dim=1)), a))  another copy

after::

    y = mm(silu(mm(view(wait(all_gather(shard, a))), w1)), w2)
    z = wait(reduce_scatter(y, a))

Matches the unpacking of a gather along dimension 1 of a tensor with several rows before it (with one row R10 applies),
and the region behind it of operators that act on rows independently (pointwise, matrix products from the right, views
that keep rows apart, reductions of other dimensions). The region ends in packs for a reduce_scatter, which the order of
the rows cancels, in products that contract all rows (weight gradients: both operands must be in the region), and in
restored copies wherever something else reads. Applied when that copies less than before.

Row by row the same numbers; a matrix product may tile rows differently and a contraction adds them in another order, so
it counts as reassociating. Saves one activation-sized copy per gather and per reduce_scatter of a sequence-parallel
block with batch > 1. Left alone where async tensor parallelism is on: it takes the pair of gather and product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import is_split, name_of
from inductor_passes.rewrites.packing import Joined, joined_split, static_shape, unpacked
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter

#: Nodes of a region.
MAX_REGION = 4096
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})
_REDUCTIONS = frozenset({"aten::sum", "aten::mean", "aten::amax"})


@dataclass(frozen=True)
class Rows:
    """How rows are permuted: ``[batch, pieces * part]`` lies in memory as ``[pieces, batch, part]``."""

    pieces: int
    batch: int
    part: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.pieces * self.batch * self.part

    def form(self, shape: list[int] | None) -> str:
        """``grid`` for [batch, rows of one, ...], ``flat`` for [rows, ...], ``across`` for [x, rows], else ""."""
        if shape is None:
            return ""
        if len(shape) >= 2 and shape[:2] == [self.batch, self.pieces * self.part]:
            return "grid"
        if shape and shape[0] == self.count:
            return "flat"
        return "across" if len(shape) == 2 and shape[1] == self.count else ""

    def permuted(self, shape: list[int], form: str) -> list[int]:
        """The shape of the permuted tensor."""
        return [self.pieces * self.batch, self.part, *shape[2:]] if form == "grid" else shape


def rows_of(entry: Joined | None) -> Rows | None:
    """The permutation that unpacking a gather along dimension 1 undoes; None for anything else."""
    if entry is None or (entry.split_dim, entry.cat_dim) != (0, 1) or entry.padding or not entry.even:
        return None
    shape = static_shape(entry.cat) if entry.closed else None
    if shape is None or shape[0] == 1 or shape[1] % entry.pieces:
        return None
    return Rows(entry.pieces, shape[0], shape[1] // entry.pieces)


@dataclass
class RowRegion:
    """Nodes whose rows may stay permuted.

    Attributes:
        forms: node -> its form; entries included.
        entries: unpacking cats among them.
        exits: packing cats that read a node of the region, and that node.
        contracted: nodes that consume all rows of operands in the region.
    """

    rows: Rows
    forms: dict[torch.fx.Node, str] = field(default_factory=dict)
    entries: dict[torch.fx.Node, Joined] = field(default_factory=dict)
    exits: dict[torch.fx.Node, Joined] = field(default_factory=dict)
    contracted: dict[torch.fx.Node, None] = field(default_factory=dict)

    def outside(self, node: torch.fx.Node) -> bool:
        """Whether something reads ``node`` in the old order of rows."""
        known = {s for joined in self.exits.values() for s in joined.nodes}
        return any(u not in self.forms and u not in self.contracted and u not in known for u in node.users)


class KeepRowsPermuted:
    """See the module's docstring."""

    name: ClassVar[str] = "R9"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every cat."""
        return work.named("aten::cat")

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The region of this unpacking; the first unpacking of a region is its root."""
        entry = joined_split(root)
        rows = rows_of(entry)
        if entry is None or rows is None or work.behind(entry.source, CollectiveKind.ALL_GATHER) is None:
            return None
        region = grown(work, root, rows)
        if min(region.entries) is not root:
            return None
        if work.exactness != "reassociate":
            refuse(Reason.NUMERICS, "adds rows of weight gradients in another order", 'redistribute="reassociate"')
        if work.facts.config.uses_async_tp:
            refuse(Reason.DISABLED, "async tensor parallelism takes the pair", 'async_tp="off"')
        restored = [n for n in region.forms if region.outside(n)]
        if any(region.forms[n] == "across" for n in restored):
            refuse(Reason.UNSUPPORTED, "something reads transposed rows in their old order")
        gone = [n for n in (*region.entries, *region.exits) if n not in restored]
        work.never_written(*region.forms, *region.exits, *(e.source for e in region.entries.values()))
        gain = sum(work.copy_ns(_bytes(n)) for n in gone) - sum(work.copy_ns(_bytes(n)) for n in restored)
        if len(gone) <= len(restored) or not gone:
            refuse(Reason.NOT_PROFITABLE, f"{len(restored)} copies to restore rows for {len(gone)} saved")
        return Match(
            gain,
            f"{len(gone)} copies of {rows.count} rows saved, {len(restored)} added",
            lambda: _apply(work, self.name, region, restored),
            "restoring the order of rows costs more",
        )


def grown(work: Work, root: torch.fx.Node, rows: Rows) -> RowRegion:
    """The largest region around ``root`` in which every operator can work on permuted rows."""
    region = RowRegion(rows)
    todo = [root]
    while todo and len(region.forms) < MAX_REGION:
        node = todo.pop()
        if node in region.forms:
            continue
        entry = joined_split(node)
        fits = entry is not None and rows_of(entry) == rows
        if entry is not None and fits and work.behind(entry.source, CollectiveKind.ALL_GATHER) is not None:
            region.entries[node] = entry
            region.forms[node] = "grid"
        elif _rowwise(node, rows):
            region.forms[node] = rows.form(static_shape(node))
            todo += [n for n in node.all_input_nodes if rows.form(static_shape(n))]
        else:
            continue
        todo += [user for user in node.users if rows.form(static_shape(user))]
    _prune(region)
    _keep_connected(region, root)
    for node in list(region.forms):
        for user in node.users:
            exit_ = _exit(user, rows) if is_split(user) else None
            if exit_ is not None:
                region.exits[exit_.cat] = exit_
            elif user not in region.forms and _contracts(user, region):
                region.contracted[user] = None
    return region


def _prune(region: RowRegion) -> None:
    """Take out, until nothing changes, nodes with an operand whose rows are in the old order."""
    todo = list(region.forms)
    while todo:
        node = todo.pop()
        if node not in region.forms or node in region.entries:
            continue
        if not all(n in region.forms for n in _row_operands(node, region.rows)):
            del region.forms[node]
            todo += [user for user in node.users if user in region.forms]


def _keep_connected(region: RowRegion, root: torch.fx.Node) -> None:
    seen: set[torch.fx.Node] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        near = [*node.users, *(() if node in region.entries else node.all_input_nodes)]
        # Operands of one contraction have to keep the same order.
        near += [n for user in node.users if _is_contraction(user, region.rows) for n in user.all_input_nodes]
        todo += [n for n in near if n in region.forms]
    region.forms = {n: region.forms[n] for n in sorted(seen)}
    region.entries = {n: e for n, e in region.entries.items() if n in seen}


def _row_operands(node: torch.fx.Node, rows: Rows) -> list[torch.fx.Node]:
    """Operands that must be permuted for the node to be."""
    name = name_of(node)
    if name in ("aten::mm", "aten::addmm"):
        a, b = node.args[-2:]
        form = rows.form(static_shape(node))
        return [n for n in ((b,) if form == "across" else (a,)) if isinstance(n, torch.fx.Node)]
    return [n for n in node.all_input_nodes if rows.form(static_shape(n))]


def _rowwise(node: torch.fx.Node, rows: Rows) -> bool:
    """Whether an operator, given permuted rows, returns the same rows permuted."""
    form = rows.form(static_shape(node))
    name = name_of(node)
    if not form or not _torch.is_op(node.target):
        return False
    if name == "aten::mm":
        # [rows, k] x [k, n], or [m, k] x [k, rows]; all rows contracted is no rowwise product.
        return rows.form(static_shape(node.args[0 if form == "flat" else 1])) == form != "grid"  # type: ignore[arg-type]
    if name == "aten::addmm":
        bias = static_shape(node.args[0])  # type: ignore[arg-type]
        a = static_shape(node.args[1])  # type: ignore[arg-type]
        return form == "flat" and rows.form(a) == "flat" and bias is not None and len(bias) == 1
    if name in ("aten::permute", "aten::t", "aten::transpose"):
        (source,) = node.all_input_nodes
        return {form, rows.form(static_shape(source))} == {"flat", "across"} and node.meta["val"].ndim == 2
    if name in _VIEWS:
        (source,) = node.all_input_nodes
        return form != "across" and rows.form(static_shape(source)) in ("flat", "grid")
    if name == "aten::clone" or _torch.is_pointwise(node.target):
        return form != "across" and all(_fits(n, node, form, rows) for n in node.all_input_nodes)
    if name in _REDUCTIONS:
        (source,) = node.all_input_nodes
        dims = _dims(node, source)
        first = {"grid": 2, "flat": 1}.get(form, 99)
        return rows.form(static_shape(source)) == form and bool(dims) and min(dims) >= first
    return False


def _fits(operand: torch.fx.Node, node: torch.fx.Node, form: str, rows: Rows) -> bool:
    """Whether a pointwise operand has the node's rows, or the same values for all rows."""
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    shape, whole = static_shape(operand), node.meta["val"].ndim
    if shape is None:
        return False
    leading = 2 if form == "grid" else 1
    if rows.form(shape) == form and len(shape) == whole:
        return True
    missing = whole - len(shape)
    return missing >= leading or all(s == 1 for s in shape[: leading - missing])


def _dims(node: torch.fx.Node, source: torch.fx.Node) -> list[int]:
    dims = _torch.op_arguments(node).get("dim") or []
    rank = source.meta["val"].ndim
    return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _is_contraction(node: torch.fx.Node, rows: Rows) -> bool:
    """A product that adds up over all rows, or a sum over them."""
    if name_of(node) == "aten::mm":
        a, b = (static_shape(n) for n in node.args)  # type: ignore[arg-type]
        return rows.form(a) == "across" and rows.form(b) == "flat"
    if name_of(node) == "aten::sum" and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        leading = {"grid": {0, 1}, "flat": {0}}.get(rows.form(static_shape(source)))
        return leading is not None and leading <= set(_dims(node, source))
    return False


def _contracts(node: torch.fx.Node, region: RowRegion) -> bool:
    return _is_contraction(node, region.rows) and all(n in region.forms for n in node.all_input_nodes)


def _exit(split: torch.fx.Node, rows: Rows) -> Joined | None:
    """The packing for a reduce_scatter along dimension 1 that a split begins."""
    piece = next(iter(split.users), None)
    cat = next(iter(piece.users), None) if piece is not None else None
    joined = joined_split(cat) if cat is not None else None
    if joined is None or (joined.split_dim, joined.cat_dim) != (1, 0) or joined.padding or not joined.even:
        return None
    shape = static_shape(joined.source)
    same = shape is not None and shape[:2] == [rows.batch, rows.pieces * rows.part] and joined.pieces == rows.pieces
    return joined if same and joined.closed and not joined.copied and joined.nodes[0] is split else None


def _apply(work: Work, subject: str, region: RowRegion, restored: list[torch.fx.Node]) -> None:
    new: dict[torch.fx.Node, torch.fx.Node] = {n: entry.source for n, entry in region.entries.items()}
    ordered = sorted({*region.forms, *region.contracted, *region.exits})

    def build(emit: Emitter) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        pairs = []
        for node in ordered:
            emit.cursor = node
            if node in region.exits:
                pairs.append((node, new[region.exits[node].source]))
                continue
            if node not in region.entries:
                with emit.standing_for(node):
                    new[node] = _emit(emit, node, region, new)
            if node in region.contracted:
                pairs.append((node, new[node]))
            elif node in restored:
                pairs.append((node, _restored(emit, new[node], node, region)))
        return pairs

    insides = {n for joined in (*region.entries.values(), *region.exits.values()) for n in joined.nodes}
    kept = {e.source for e in region.entries.values()}
    removed = sorted({*ordered, *(n for n in insides if n not in kept)}, reverse=True)
    origin = next(iter(region.entries))
    work.replace(subject, origin, removed, build, before=origin)


def _emit(
    emit: Emitter, node: torch.fx.Node, region: RowRegion, new: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """The node on permuted operands."""
    if name_of(node) in _VIEWS:
        (source,) = node.all_input_nodes
        return emit.view(new[source], region.rows.permuted(list(node.meta["val"].shape), region.forms[node]))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
    return emit.call(node.target, *args, **kwargs)


def _restored(emit: Emitter, tensor: torch.fx.Node, old: torch.fx.Node, region: RowRegion) -> torch.fx.Node:
    """A copy with rows in the old order."""
    shape = list(old.meta["val"].shape)
    grid = emit.view(tensor, [region.rows.pieces * region.rows.batch, region.rows.part, *shape[-1:]]) if (
        region.forms[old] == "flat"
    ) else tensor
    return emit.view(unpacked(emit, grid, 1, region.rows.pieces), shape)


def _bytes(node: torch.fx.Node) -> int:
    return math.prod(node.meta["val"].shape) * int(node.meta["val"].dtype.itemsize)
