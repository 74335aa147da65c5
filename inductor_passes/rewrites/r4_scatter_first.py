"""R4: a reduction is done on the shard, not on the whole.

before::

    y = wait(all_reduce(x, op, a)); z = wait(reduce_scatter(pack(y), op, b))
    y = wait(all_gather(x, b));     z = wait(all_reduce(unpack(y), op, a))

after::

    y = wait(reduce_scatter(pack(x), op, b)); z = wait(all_reduce(y, op, a))
    y = wait(all_reduce(x, op, a));           z = unpack(wait(all_gather(y, b)))

Matches orthogonal groups (a rank's two groups form a grid) where nothing else reads the inner result; the reduce ops
of the first form must be equal. The packing between the two (see ``movement``) only moves elements, and a reduction
acts on each alone. Gathering moves elements too, so the second form holds for every op. Hybrid-sharded gradients come
in the first form: a is the replicate axis, usually the slow one between hosts.

The first form reassociates sums, averages and products (min, max and integer sums are exact). The second reduces the
same operands in the same group; a ring may add a chunk's elements in another order, so it counts as reassociating too.
Saves ``2(a-1)/a * (1 - 1/b)`` of the whole tensor's bytes per rank, on the axis ``a``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import product
from inductor_passes.report import Reason
from inductor_passes.rewrites.nested import Nested, nested
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import gathered, reduced, scattered


class ReduceOnShards:
    """See the module's docstring."""

    name: ClassVar[str] = "R4"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every reduce_scatter and all_reduce."""
        return work.collectives(CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The pair that ends here."""
        pair = nested(work, root, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
        if pair is not None:
            work.same_reduction(pair.first, pair.second)
            return self._swap(work, pair, pair.first.input_bytes, pair.second.output_bytes, _scatter_first)
        pair = nested(work, root, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE)
        if pair is not None:
            work.may_reassociate(pair.second)
            pair.may_be_reduced(work)
            return self._swap(work, pair, pair.second.input_bytes, pair.first.input_bytes, _reduce_first)
        return None

    def _swap(
        self,
        work: Work,
        pair: Nested,
        whole: int | None,
        part: int | None,
        build: Callable[[Emitter, Nested], torch.fx.Node],
    ) -> Match:
        pair.undisturbed(work)
        first, second = pair.first, pair.second
        if product(first.group.ranks, second.group.ranks) is None:
            refuse(Reason.DIFFERENT_GROUP, "the groups form no grid")
        # The other collective stays what it is; only the reduction shrinks.
        reduction = first if second.kind == CollectiveKind.REDUCE_SCATTER else second
        before = work.price_ns(reduction)
        return Match(
            before - work.collective_ns(CollectiveKind.ALL_REDUCE, part, part, reduction.group.ranks),
            f"{whole} to {part} bytes reduced",
            lambda: work.replace(self.name, second.start, pair.removed, lambda emit: build(emit, pair)),
        )


def _scatter_first(emit: Emitter, pair: Nested) -> torch.fx.Node:
    first, second = pair.first, pair.second
    packed = pair.between.replayed(emit, first.inputs[0])
    shard = scattered(emit, packed, second.reduce_op, second.group.size, second.group_argument)
    return reduced(emit, shard, first.reduce_op, first.group_argument)


def _reduce_first(emit: Emitter, pair: Nested) -> torch.fx.Node:
    first, second = pair.first, pair.second
    shard = reduced(emit, first.inputs[0], second.reduce_op, second.group_argument)
    return pair.between.replayed(emit, gathered(emit, shard, first.group.size, first.group_argument))
