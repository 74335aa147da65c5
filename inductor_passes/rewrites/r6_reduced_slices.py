"""R6: a reduction of which a rank keeps its own piece is a reduce_scatter, and the other way round.

before::

    y = split(wait(all_reduce(x, op, a)), dim=k)[own]
    y = wait(all_gather(wait(reduce_scatter(x, op, a)), a))

after::

    y = wait(reduce_scatter(pack(x), op, a))        (pack: the pieces of dimension k behind each other)
    y = wait(all_reduce(x, op, a))

The first form matches a slice that is proven to be the rank's own along the group (see ``chain``); the second any pair
over one group that nothing else reads. Every element is the reduction of the same operands; their order may differ, so
sums, averages and products count as reassociating (min, max and integer sums are exact). The first saves half of the
bytes, the second a collective. (Slices of gathered tensors are R11's.)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.spec import REDUCE_OPS
from inductor_passes.rewrites.chain import own_group
from inductor_passes.rewrites.movement import is_split
from inductor_passes.rewrites.nested import nested
from inductor_passes.rewrites.packing import packed, static_shape
from inductor_passes.rewrites.work import Match, Work
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, reduced, scattered


class ReduceWhatIsKept:
    """See the module's docstring."""

    name: ClassVar[str] = "R6"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_reduce and all_gather."""
        return work.collectives(CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The slice behind a reduction, or the reduction before a gather."""
        reduction = work.collective(root, CollectiveKind.ALL_REDUCE)
        return self._scatter(work, reduction) if reduction is not None else self._whole(work, root)

    def _scatter(self, work: Work, reduction: Collective) -> Match | None:
        (wait,) = reduction.waits
        split = next(iter(wait.users), None) if len(wait.users) == 1 else None
        if split is None or not is_split(split) or static_shape(wait) is None:
            return None
        used = [piece for piece in split.users if piece.users]
        if len(used) != 1 or used[0].target is not operator.getitem or reduction.reduce_op not in REDUCE_OPS:
            return None
        group = own_group(split, used[0])
        if work.for_all_ranks or group is None or group != tuple(sorted(reduction.group.ranks)):
            return None
        work.may_reassociate(reduction, "reduces in another order")
        work.unwritten(reduction.inputs[0], reduction.start, used[0])
        work.never_written(wait, *used)
        dim = int(_torch.op_arguments(split).get("dim", 0)) % wait.meta["val"].ndim
        size = reduction.group.size

        def build(emit: Emitter) -> torch.fx.Node:
            whole = dense(emit, reduction.inputs[0])
            sent = packed(emit, whole, dim, size) if dim else whole
            return scattered(emit, sent, reduction.reduce_op, size, reduction.group_argument)

        removed = (used[0], *(p for p in split.users if p is not used[0]), split, wait, reduction.start)
        whole_bytes, ranks = reduction.input_bytes or 0, reduction.group.ranks
        after = work.collective_ns(CollectiveKind.REDUCE_SCATTER, whole_bytes, whole_bytes // size, ranks)
        copy = work.copy_ns(whole_bytes) if dim else 0
        return Match(
            work.price_ns(reduction) - after - copy,
            f"piece of dimension {dim} on {size} ranks",
            lambda: work.replace(self.name, reduction.start, removed, build),
            "reduce_scatter and its pack are slower",
        )

    def _whole(self, work: Work, root: torch.fx.Node) -> Match | None:
        pair = nested(work, root, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
        if pair is None or pair.between.nodes or pair.first.group != pair.second.group:
            return None
        work.may_reassociate(pair.first, "reduces in another order")
        pair.undisturbed(work)
        pair.may_be_reduced(work)
        first = pair.first

        def build(emit: Emitter) -> torch.fx.Node:
            return reduced(emit, first.inputs[0], first.reduce_op, first.group_argument)

        after = work.collective_ns(CollectiveKind.ALL_REDUCE, first.input_bytes, first.input_bytes, first.group.ranks)
        return Match(
            work.price_ns(first, pair.second) - after,
            f"{first.group.size} ranks",
            lambda: work.replace(self.name, first.start, pair.removed, build),
            "all_reduce is slower",
        )
