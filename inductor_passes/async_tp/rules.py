"""How a cut passes through one operator: forward, backward, and the call on one part.

A rule answers three questions about a node that is computed part by part:

- ``result(node, operand, cut)``: the result's cut when one operand comes in parts;
- ``needs(node, cut)``: for each tensor operand the part that one part of the result needs (None: all of it);
- ``call(node, cut)``: arguments of the operator for a part of some units, operands still the whole graph's.

An operator without a rule ends a region; nothing is assumed about it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.rules_attention import RULES as ATTENTION
from inductor_passes.async_tp.rules_attention import Attention
from inductor_passes.async_tp.slab import Cut, Partial, Slab, Uniform, through_view

Needs = dict[torch.fx.Node, Slab | None]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Rule(Protocol):
    """See the module's docstring. ``units`` are those of the whole, ``width`` those of the part."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        """Forward."""

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        """Backward."""

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        """Arguments for one part."""


def rule_of(node: torch.fx.Node) -> Rule | None:
    """The rule of a node; None when it cannot be computed in parts."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _GETITEM
    if not _torch.is_op(node.target) or _torch.mutated_argument_names(node.target):
        return None
    name = _torch.op_name(node.target)
    if name == "aten::view":
        return _VIEW_DTYPE if isinstance(_torch.op_arguments(node).get("dtype"), torch.dtype) else _VIEW
    if name in _RULES:
        return _RULES[name]
    if _torch.is_seeded_random(node.target):
        return None
    return _POINTWISE if torch.Tag.pointwise in node.target.tags else None  # type: ignore[union-attr]


def carries(rule: Rule, cut: Cut) -> bool:
    """Whether a rule takes a cut whose parts are of symbolic size; True for every other cut."""
    return not (isinstance(cut, Slab) and cut.is_symbolic) or type(rule) in _SYMBOLIC


def is_split(node: torch.fx.Node) -> bool:
    """Whether the node cuts a tensor into a list of views."""
    return rule_of(node) is _SPLIT


def shape_of(node: torch.fx.Node) -> Sequence[Any]:
    """Shape of a node's value; of the first tensor for several results."""
    value = node.meta["val"]
    if isinstance(value, (list, tuple)):
        value = value[0]
    return tuple(value.shape)


def rank_of(node: torch.fx.Node) -> int:
    """Number of dimensions."""
    return len(shape_of(node))


def _tensor_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _first(node: torch.fx.Node) -> torch.fx.Node:
    source = next(iter(_torch.op_arguments(node).values()))
    assert isinstance(source, torch.fx.Node)
    return source


def _dim(value: int, rank: int) -> int:
    return value + rank if value < 0 else value


class _Plain:
    """Base: same arguments for every part."""

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        return tuple(node.args), dict(node.kwargs)


class _Pointwise(_Plain):
    """Elementwise with broadcasting: operands are cut as the result is, where they have that dimension."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        return cut.on(cut.dim + value.dim() - rank_of(operand))

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        return {n: matmul.broadcast_part(n, cut, node) for n in _tensor_inputs(node)}


class _Matmul(_Plain):
    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        form = matmul.canonical(node)
        return None if form is None or not _in_tiles(node, {operand: cut}) else form.result(operand, cut)

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        form = matmul.canonical(node)
        found = None if form is None else form.needs(cut)
        return None if found is None or not _in_tiles(node, found) else found


#: Columns and the inner dimension of these matmuls are multiples of it; the libraries refuse others.
TILES = {"aten::_scaled_mm": 16, "aten::_int_mm": 8}
#: Rows of a product of whole numbers are more than that, on CUDA.
FEWEST_ROWS = 16


def _in_tiles(node: torch.fx.Node, cuts: Mapping[torch.fx.Node, Cut | None]) -> bool:
    """Whether the parts of a matmul's operands have sizes that the libraries take."""
    name = _torch.op_name(node.target)
    if name not in TILES:
        return True
    arguments = _torch.op_arguments(node)
    left, right = arguments["self"], arguments["mat2"]
    for operand, cut in cuts.items():
        if not isinstance(cut, Slab):
            continue
        size = cut.outer * cut.inner
        if operand is left and cut.dim == 0:
            if name == "aten::_int_mm" and (cut.is_symbolic or size <= FEWEST_ROWS):
                return False
        elif operand in (left, right) and not _torch.is_multiple(size, TILES[name]):
            return False
    return True


class _View:
    """``view``, ``reshape``, ``_unsafe_view``: the cut moves to the dimension that holds its stride."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return through_view(cut, shape_of(operand), shape_of(node), units)

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        source = _first(node)
        if not isinstance(cut, Slab):
            return None
        before = through_view(cut, shape_of(node), shape_of(source), units)
        return None if before is None else {source: before}

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        assert isinstance(cut, Slab)
        arguments = _torch.op_arguments(node)
        given = list(arguments["size"] if "size" in arguments else arguments["shape"])
        shape = shape_of(node)
        if all(isinstance(size, int) for size in shape):
            given = list(shape)
        given[cut.dim] = cut.outer * cut.inner * width
        return (_first(node), given), {}


class _Moves(_Plain):
    """Operators that move dimensions around; ``select`` drops one."""

    def origins(self, node: torch.fx.Node) -> list[int | None]:
        """For each dimension of the result the operand's, None for a new one."""
        source, arguments = _first(node), _torch.op_arguments(node)
        rank = rank_of(source)
        name = _torch.op_name(node.target)
        dims: list[int | None] = list(range(rank))
        if name == "aten::permute":
            return [_dim(d, rank) for d in arguments["dims"]]
        if name in ("aten::t", "aten::transpose"):
            if rank < 2:
                return dims
            a, b = (0, 1) if name == "aten::t" else (_dim(arguments["dim0"], rank), _dim(arguments["dim1"], rank))
            dims[a], dims[b] = dims[b], dims[a]
            return dims
        if name == "aten::unsqueeze":
            dims.insert(_dim(arguments["dim"], rank + 1), None)
            return dims
        if name == "aten::squeeze":
            given = arguments.get("dim")
            chosen = range(rank) if given is None else [given] if isinstance(given, int) else given
            gone = {_dim(d, rank) for d in chosen if shape_of(source)[_dim(d, rank)] == 1}
            return [d for d in range(rank) if d not in gone]
        assert name == "aten::select", name
        dims.pop(_dim(arguments["dim"], rank))
        return dims

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        origins = self.origins(node)
        return cut.on(origins.index(cut.dim)) if cut.dim in origins else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        origin = self.origins(node)[cut.dim]
        return None if origin is None else {_first(node): cut.on(origin)}


class _Same(_Plain):
    """Layout-preserving operators with one operand: ``clone``, ``alias``, ``wait_tensor``, reductions over ranks."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return cut

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        return {_first(node): cut} if isinstance(cut, Slab) else None


class _ViewDtype(_Same):
    """A reinterpretation of bytes touches only the last dimension's size."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        same = node.meta["val"].element_size() == operand.meta["val"].element_size()
        return cut if same or cut.dim < rank_of(node) - 1 else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab) or self.result(node, _first(node), cut, units) is None:
            return None
        return {_first(node): cut}


class _Expand(_Same):
    """Broadcast dimensions are not cut; the size argument shrinks."""

    def _kept(self, node: torch.fx.Node, dim: int) -> int | None:
        source = _first(node)
        at = dim - (rank_of(node) - rank_of(source))
        return at if at >= 0 and str(shape_of(source)[at]) == str(shape_of(node)[dim]) else None

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        dim = cut.dim + rank_of(node) - rank_of(operand)
        return cut.on(dim) if self._kept(node, dim) is not None else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        at = self._kept(node, cut.dim)
        return {_first(node): None if at is None else cut.on(at)}

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        assert isinstance(cut, Slab)
        size = list(_torch.op_arguments(node)["size"])
        size[cut.dim] = cut.outer * cut.inner * width
        return (_first(node), size), {}


class _Slice(_Same):
    """A slice of another dimension, or of whole blocks of the one that is cut."""

    def _range(self, node: torch.fx.Node) -> tuple[int, Any, Any, Any]:
        arguments = _torch.op_arguments(node)
        source = _first(node)
        dim = _dim(arguments.get("dim", 0), rank_of(source))
        extent = shape_of(source)[dim]
        start, end = arguments.get("start"), arguments.get("end")
        start = 0 if start is None else start
        end = extent if end is None else end
        if isinstance(extent, int) and isinstance(start, int) and isinstance(end, int):
            start = min(max(start + extent if start < 0 else start, 0), extent)
            end = min(max(end + extent if end < 0 else end, 0), extent)
        return dim, start, end, arguments.get("step", 1)

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        dim, start, end, step = self._range(node)
        if dim != cut.dim:
            return cut
        block = cut.inner * units
        if not (isinstance(start, int) and isinstance(end, int)) or step != 1 or start % block or end % block:
            return None
        return Slab(dim, (end - start) // block, cut.inner) if end > start else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        source = _first(node)
        dim, start, end, step = self._range(node)
        if dim != cut.dim:
            return {source: cut}
        extent, block = shape_of(source)[dim], cut.inner * units
        if not all(isinstance(v, int) for v in (extent, start, end)) or step != 1:
            return None
        if start % block or end % block or extent % block:
            return None
        return {source: Slab(dim, extent // block, cut.inner)}

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        assert isinstance(cut, Slab)
        dim, start, end, _ = self._range(node)
        if dim != cut.dim:
            return tuple(node.args), dict(node.kwargs)
        return (_first(node), dim, start // units * width, end // units * width), {}


class _Split(_Same):
    """``split`` into pieces: the list is described by the cut of what was split; ``getitem`` picks from it."""

    def _dim(self, node: torch.fx.Node) -> int:
        return _dim(_torch.op_arguments(node).get("dim", 0), rank_of(_first(node)))

    def sizes(self, node: torch.fx.Node) -> list[Any]:
        """Extents of the pieces along the split dimension."""
        return [value.shape[self._dim(node)] for value in node.meta["val"]]

    def piece(self, node: torch.fx.Node, index: int, cut: Slab, units: int) -> Slab | None:
        """The cut of one piece of a list cut by ``cut``."""
        if cut.dim != self._dim(node):
            return cut
        size = self.sizes(node)[index]
        return Slab(cut.dim, size // (cut.inner * units), cut.inner)

    def whole(self, node: torch.fx.Node, cut: Slab, units: int) -> Slab | None:
        """The cut of the list that gives a piece the cut ``cut``."""
        if cut.dim != self._dim(node):
            return cut
        extent = shape_of(_first(node))[cut.dim]
        if not isinstance(extent, int) or extent % (cut.inner * units):
            return None
        found = Slab(cut.dim, extent // (cut.inner * units), cut.inner)
        return found if self._even(node, found, units) else None

    def _even(self, node: torch.fx.Node, cut: Slab, units: int) -> bool:
        sizes = self.sizes(node)
        return all(isinstance(s, int) and s > 0 and s % (cut.inner * units) == 0 for s in sizes)

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return cut if cut.dim != self._dim(node) or self._even(node, cut, units) else None

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        assert isinstance(cut, Slab)
        dim = self._dim(node)
        if dim != cut.dim:
            return tuple(node.args), dict(node.kwargs)
        sizes = [size // units * width for size in self.sizes(node)]
        if _torch.op_name(node.target) == "aten::split":
            return (_first(node), sizes[0], dim), {}
        return (_first(node), sizes, dim), {}


class _Getitem(_Plain):
    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        rule = rule_of(operand)
        index = node.args[1]
        if isinstance(rule, _Split) and isinstance(index, int):
            return rule.piece(operand, index, cut, units)
        if isinstance(rule, Attention) and isinstance(index, int):
            found = rule.output(index, cut)
            if isinstance(found, Uniform):
                return found
        return cut if cut.fits(shape_of(node), units) else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        if isinstance(cut, Uniform):
            return {source: cut.source}
        if not isinstance(cut, Slab):
            return None
        rule = rule_of(source)
        if rule is None:
            return None
        whole = rule.whole(source, cut, units) if isinstance(rule, _Split) else cut
        return None if whole is None else {source: whole}


class _Cat:
    """Concatenation: along another dimension all operands are cut alike, along the same one block by block."""

    def _dim(self, node: torch.fx.Node) -> int:
        return _dim(_torch.op_arguments(node).get("dim", 0), rank_of(node))

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        if cut.dim != self._dim(node):
            return cut
        extent = shape_of(node)[cut.dim]
        if not isinstance(extent, int) or extent % (cut.inner * units):
            return None
        return Slab(cut.dim, extent // (cut.inner * units), cut.inner)

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        wanted: list[tuple[torch.fx.Node, Slab | None]] = []
        for operand in _torch.op_arguments(node)["tensors"]:
            part = cut
            if cut.dim == self._dim(node):
                extent = shape_of(operand)[cut.dim]
                if not isinstance(extent, int) or extent == 0 or extent % (cut.inner * units):
                    return None
                part = Slab(cut.dim, extent // (cut.inner * units), cut.inner)
            wanted.append((operand, part))
        return matmul.merged(wanted)

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        return (list(_torch.op_arguments(node)["tensors"]), self._dim(node)), {}


class _Pad(_Same):
    """Padding of other dimensions than the one that is cut."""

    def _padded(self, node: torch.fx.Node, dim: int) -> bool:
        pad = _torch.op_arguments(node)["pad"]
        place = 2 * (rank_of(node) - 1 - dim)
        return any(p != 0 for p in pad[place : place + 2])

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return None if self._padded(node, cut.dim) else cut

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab) or self._padded(node, cut.dim):
            return None
        return {_first(node): cut}


class _Reduce(_Plain):
    """Reductions over other dimensions; a sum over the cut dimension is the sum of the parts' sums."""

    def __init__(self, sums: bool = False) -> None:
        self.sums = sums

    def _dims(self, node: torch.fx.Node) -> tuple[set[int], bool]:
        arguments = _torch.op_arguments(node)
        rank = rank_of(_first(node))
        given = arguments.get("dim", arguments.get("dims"))
        if given is None or (isinstance(given, (list, tuple)) and not given):
            dims = set(range(rank))
        else:
            dims = {_dim(d, rank) for d in ([given] if isinstance(given, int) else given)}
        return dims, bool(arguments.get("keepdim", False))

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        dims, keep = self._dims(node)
        if cut.dim in dims:
            return Partial(cut) if self.sums and not matmul.rounds_parts(node) else None
        return cut if keep else cut.on(cut.dim - sum(d < cut.dim for d in dims))

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if isinstance(cut, Partial):
            return {_first(node): cut.source} if self.sums else None
        assert isinstance(cut, Slab)
        dims, keep = self._dims(node)
        if keep:
            return None if cut.dim in dims else {_first(node): cut}
        kept = [d for d in range(rank_of(_first(node))) if d not in dims]
        return {_first(node): cut.on(kept[cut.dim])}


class _AlongOthers(_Same):
    """Operators along one dimension (softmax, cumulative sums): any other may be cut."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        along = _dim(_torch.op_arguments(node)["dim"], rank_of(node))
        return None if cut.dim == along else cut

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab) or self.result(node, _first(node), cut, units) is None:
            return None
        return {_first(node): cut}


class _AllGather(_Same):
    """Dimension 0 of the result holds one block per rank; every other dimension is as it was."""

    def _world(self, node: torch.fx.Node) -> int:
        return int(_torch.op_arguments(node)["group_size"])

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return Slab(0, cut.outer * self._world(node), cut.inner) if cut.dim == 0 else cut

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        if cut.dim:
            return {_first(node): cut}
        outer, rest = divmod(cut.outer, self._world(node))
        return None if rest else {_first(node): Slab(0, outer, cut.inner)}


class _ReduceScatter(_AllGather):
    """The inverse on dimension 0."""

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        if cut.dim:
            return cut
        outer, rest = divmod(cut.outer, self._world(node))
        return None if rest else Slab(0, outer, cut.inner)

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab):
            return None
        return {_first(node): Slab(0, cut.outer * self._world(node), cut.inner) if cut.dim == 0 else cut}


class _AllToAll(_Same):
    """Rows change places between ranks: a cut of another dimension, or within every rank's block of equal size."""

    def _splits(self, node: torch.fx.Node) -> tuple[list[Any], list[Any]]:
        arguments = _torch.op_arguments(node)
        return list(arguments["output_split_sizes"] or []), list(arguments["input_split_sizes"] or [])

    def _allowed(self, node: torch.fx.Node, cut: Slab, units: int) -> bool:
        if cut.dim:
            return True
        sizes = [*self._splits(node)[0], *self._splits(node)[1]]
        return bool(sizes) and all(isinstance(s, int) and s == sizes[0] and s % (cut.inner * units) == 0 for s in sizes)

    def result(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, units: int) -> Cut | None:
        return cut if self._allowed(node, cut, units) else None

    def needs(self, node: torch.fx.Node, cut: Cut, units: int) -> Needs | None:
        if not isinstance(cut, Slab) or not self._allowed(node, cut, units):
            return None
        return {_first(node): cut}

    def call(self, node: torch.fx.Node, cut: Cut, units: int, width: int) -> Call:
        assert isinstance(cut, Slab)
        received, sent = self._splits(node)
        if cut.dim == 0:
            received, sent = [s // units * width for s in received], [s // units * width for s in sent]
        arguments = _torch.op_arguments(node)
        return (_first(node), received, sent, arguments["group_name"]), {}


#: Rules that do no arithmetic with the size of a part.
_SYMBOLIC = (_Pointwise, _Matmul, _View, _Moves, _Same, _ViewDtype, _Expand, _AllGather, _ReduceScatter)
_POINTWISE, _GETITEM = _Pointwise(), _Getitem()
_MATMUL, _VIEW, _MOVES, _SAME = _Matmul(), _View(), _Moves(), _Same()
_SUM, _REDUCE, _ALONG, _SPLIT = _Reduce(sums=True), _Reduce(), _AlongOthers(), _Split()

_RULES: dict[str, Rule] = {
    **{f"aten::{name}": _MATMUL for name in ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_grouped_mm")},
    **{f"aten::{name}": _VIEW for name in ("reshape", "_unsafe_view")},
    **{f"aten::{name}": _MOVES for name in ("permute", "t", "transpose", "unsqueeze", "squeeze", "select")},
    **{f"aten::{name}": _SAME for name in ("alias", "detach", "clone", "_to_copy", "contiguous", "lift_fresh_copy")},
    **{f"aten::{name}": _REDUCE for name in ("mean", "amax", "amin", "var", "var_mean", "any", "logsumexp")},
    **{f"aten::{name}": _ALONG for name in ("_softmax", "_log_softmax", "cumsum")},
    **{f"aten::{name}": _SPLIT for name in ("split", "split_with_sizes")},
    "aten::sum": _SUM,
    "aten::expand": _Expand(),
    "aten::slice": _Slice(),
    "aten::cat": _Cat(),
    "aten::constant_pad_nd": _Pad(),
    **ATTENTION,
    "_c10d_functional::all_gather_into_tensor": _AllGather(),
    "_c10d_functional::reduce_scatter_tensor": _ReduceScatter(),
    "_c10d_functional::all_reduce": _SAME,
    "_c10d_functional::all_to_all_single": _AllToAll(),
    "_c10d_functional::wait_tensor": _SAME,
}
_VIEW_DTYPE = _ViewDtype()
