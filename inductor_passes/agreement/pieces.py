"""Which numbers of a graph are left open (``literals``): those that may say which piece of a tensor is the rank's own.

Ranks whose numbers differ only in that must leave the same ones open. These are: a cut out of a dimension, if it is the
k-th stretch of its length with k below the size of the largest process group; the index of a selected row or of a piece
of a split; integers that are compared with, added to or subtracted from integer tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.agreement.arguments import Open
from inductor_passes.agreement.literals import Kind

_SPLITS = frozenset({"aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind", "aten::tensor_split"})
_REGULAR = frozenset({"aten::split", "aten::chunk", "aten::unbind"})
_CUTS = frozenset({"aten::slice", "aten::slice_scatter"})
_ROWS = frozenset({"aten::select", "aten::select_scatter"})
_COUNTS = {"prims::iota": ("start",), "aten::arange": ("start", "end"), "aten::full": ("fill_value",)}

Found = list[tuple[Kind, int]]
PIECE, OFFSET = Open("?"), Open("?+")


def opened(
    node: torch.fx.Node, name: str, arguments: Mapping[str, object], largest: int, *, made_alike: bool = False
) -> tuple[dict[str, object], Found]:
    """The arguments of a node with the open numbers replaced, and these numbers in order.

    Args:
        name: of the operator, "" for a Python function.
        largest: number of ranks of the largest process group that the graph uses.
        made_alike: whole numbers that an operator makes are not left open: ranks make the same ones or differ.
    """
    changed = dict(arguments)
    found: Found = []
    if name in _CUTS:
        stretch = cut(node, arguments)
        if stretch is not None:
            dim, start, length, _ = stretch
            if length and start % length == 0 and start // length < largest:
                changed.update(dim=dim, start=PIECE, end=Open(f"of length {length}"))
                found.append((Kind.PIECE, start // length))
            else:
                changed.update(dim=dim, start=start, end=start + length)
    elif name in _ROWS:
        index = arguments.get("index")
        if type(index) is int and 0 <= index < largest:
            changed["index"] = PIECE
            found.append((Kind.PIECE, index))
    elif _counts_whole_numbers(node, name) and not (made_alike and name in _COUNTS):
        for key in _COUNTS.get(name, ("other",)):
            value = arguments.get(key)
            if type(value) is int:
                changed[key] = OFFSET
                found.append((Kind.OFFSET, value))
    return changed, found


def is_piece_of_split(node: torch.fx.Node) -> bool:
    """Whether a node takes one of the equal pieces of a split."""
    if node.target is not operator.getitem or not isinstance(node.args[0], torch.fx.Node):
        return False
    source = node.args[0]
    pieces = source.meta.get("val")
    return (
        source.op == "call_function"
        and _torch.op_name(source.target) in _SPLITS
        and isinstance(node.args[1], int)
        and isinstance(pieces, (list, tuple))
        and len({str(piece.shape) for piece in pieces if isinstance(piece, torch.Tensor)}) == 1
    )


def cut(node: torch.fx.Node, arguments: Mapping[str, object]) -> tuple[int, int, int, int] | None:
    """(dimension, start, length, size of the dimension) of a slice with steps of one; None where sizes are symbolic."""
    source = next(iter(node.all_input_nodes), None)
    value = source.meta.get("val") if source is not None else None
    if not isinstance(value, torch.Tensor) or not value.dim() or arguments.get("step", 1) not in (None, 1):
        return None
    dim, start, end = (arguments.get(key) for key in ("dim", "start", "end"))
    dim = (dim if isinstance(dim, int) else 0) % value.dim()
    size = value.shape[dim]
    start, end = 0 if start is None else start, size if end is None else end
    if type(start) is not int or type(end) is not int or type(size) is not int:
        return None
    first, last = (min(max(x + size if x < 0 else x, 0), size) for x in (start, end))
    return dim, first, max(0, last - first), size


def only_piece(node: torch.fx.Node, arguments: Mapping[str, object]) -> int | None:
    """In how many equal pieces a node cuts its source, of which it takes the only one that is read; else None.

    What is split twice in one way is read piece by piece as if it were split once: graphs that no common subexpressions
    were taken out of hold a split per piece.
    """
    if is_piece_of_split(node):
        (split, _) = node.args
        assert isinstance(split, torch.fx.Node)
        alike = [other for other in split.all_input_nodes[0].users if _cuts_like(other, split)]
        used = [piece for other in alike for piece in other.users if piece.users]
        indices = {piece.args[1] if piece.target is operator.getitem else None for piece in used}
        return len(split.meta["val"]) if len(indices) == 1 else None
    stretch = cut(node, arguments) if _torch.op_name(node.target) == "aten::slice" else None
    if stretch is None:
        return None
    _, _, length, size = stretch
    source = node.all_input_nodes[0]
    others = [user for user in source.users if user is not node and _torch.op_name(user.target) in _CUTS | _ROWS]
    return size // length if length and size % length == 0 and not others else None


def _cuts_like(other: torch.fx.Node, split: torch.fx.Node) -> bool:
    """Whether a reader of the same tensor cuts it as a split into equal pieces does; the split itself does."""
    if other is split:
        return True
    if other.op != "call_function" or _torch.op_name(other.target) not in _SPLITS:
        return False
    ours, theirs = list(split.meta["val"]), list(other.meta.get("val") or ())
    # Of these the last piece alone may be smaller. All shapes of all splits would be cubic in the number of pieces.
    looked = [*theirs[:1], *theirs[-1:]] if _torch.op_name(other.target) in _REGULAR else theirs
    return len(theirs) == len(ours) and all(str(piece.shape) == str(ours[0].shape) for piece in looked)


def _counts_whole_numbers(node: torch.fx.Node, name: str) -> bool:
    if name not in _COUNTS and not _torch.is_pointwise(node.target):
        return False
    tensors = [v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    own = node.meta.get("val")
    if name in _COUNTS:
        tensors = [own] if isinstance(own, torch.Tensor) else []
    return bool(tensors) and all(not (t.dtype.is_floating_point or t.dtype.is_complex) for t in tensors)
