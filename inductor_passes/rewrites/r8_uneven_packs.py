"""R8: the padding around an uneven collective is one copy.

before::

    y = cat([clone(p) ..., pad(last)], k)       with p, ..., last = split(x, k)
    y = clone(slice(cat(pieces, k), k, 0, n))

after::

    y = pad(x)                                  (x where nothing is padded)
    y = cat(pieces up to row n, k)

Matches pieces that are copied and padded one by one and then joined along the dimension that they were cut from, and
a joined tensor that is only read through a slice of its first rows. Nothing else may read what is in between.
Bit-exact: elements stay where they are. Saves a copy of the whole tensor and one kernel per piece. Local: ranks with
and without padding issue the same collectives. Not for a slice that may be the rank's own: on other ranks it is not of
the first rows, and what is rewritten next would differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import name_of
from inductor_passes.rewrites.own_cuts import may_be_own
from inductor_passes.rewrites.packing import Joined, joined_split, padded, static_shape
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter


class PackOnce:
    """See the module's docstring."""

    name: ClassVar[str] = "R8"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every cat."""
        return work.named("aten::cat")

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """What is copied twice around this cat."""
        joined = joined_split(root)
        if joined is not None and joined.copied and joined.split_dim == joined.cat_dim:
            return self._pad(work, joined)
        return self._trim(work, root)

    def _pad(self, work: Work, joined: Joined) -> Match:
        if not joined.closed:
            refuse(Reason.DATA_DEPENDENCY, "others read the pieces")
        work.never_written(joined.source, *joined.nodes)
        if not joined.padding:
            work.may_stand_for(joined.source, joined.cat)

        def build(emit: Emitter) -> torch.fx.Node:
            return padded(emit, joined.source, joined.split_dim, joined.padding)

        removed = (joined.cat, *reversed(joined.nodes[:-1]))
        return Match(
            work.copy_ns(_bytes(joined.cat)),
            f"{joined.pieces} pieces, {joined.padding} rows of padding",
            lambda: work.replace(self.name, joined.cat, removed, build),
        )

    def _trim(self, work: Work, cat: torch.fx.Node) -> Match | None:
        cut = _only_slice(cat)
        if cut is None:
            return None
        dim, stop = cut[1], cut[2]
        slicing = cut[0]
        if may_be_own(slicing):
            refuse(Reason.DATA_DEPENDENCY, f"{slicing.name} may take other rows on every rank")
        (copy,) = slicing.users if len(slicing.users) == 1 else (None,)
        removed: tuple[torch.fx.Node, ...] = (slicing, cat)
        if copy is not None and name_of(copy) == "aten::clone" and copy.meta["val"].is_contiguous():
            removed = (copy, slicing, cat)
        work.never_written(*removed)
        pieces = _torch.op_arguments(cat)["tensors"]
        work.never_written(*pieces)

        def build(emit: Emitter) -> torch.fx.Node:
            kept = []
            left = stop
            for piece in pieces:
                rows = piece.meta["val"].shape[dim]
                if left >= rows:
                    kept.append(piece)
                elif left > 0:
                    kept.append(emit.call(torch.ops.aten.slice.Tensor, piece, dim, 0, left))
                left -= rows
            return emit.call(torch.ops.aten.cat.default, kept, dim)

        return Match(
            # Without a copy behind the slice only the rows beyond it are saved.
            work.copy_ns(_bytes(slicing)) if len(removed) == 3 else 0,
            f"rows from {stop} on are not copied",
            lambda: work.replace(self.name, cat, removed, build),
        )


def _only_slice(cat: torch.fx.Node) -> tuple[torch.fx.Node, int, int] | None:
    """(slice, dimension, end) when nothing but a slice of the first rows along the joined dimension reads ``cat``."""
    if name_of(cat) != "aten::cat" or len(cat.users) != 1 or static_shape(cat) is None:
        return None
    (user,) = cat.users
    if name_of(user) != "aten::slice":
        return None
    arguments = _torch.op_arguments(user)
    rank = cat.meta["val"].ndim
    dim = arguments.get("dim", 0) % rank
    start, stop = arguments.get("start") or 0, arguments.get("end")
    joined = _torch.op_arguments(cat)
    rows = cat.meta["val"].shape[dim]
    whole_pieces = all(static_shape(p) is not None and len(static_shape(p) or ()) == rank for p in joined["tensors"])
    if start != 0 or type(stop) is not int or not 0 < stop < rows or arguments.get("step", 1) != 1:
        return None
    return (user, dim, stop) if whole_pieces and joined.get("dim", 0) % rank == dim else None


def _bytes(node: torch.fx.Node) -> int:
    return _torch.tensor_bytes(node.meta["val"]) or 0
