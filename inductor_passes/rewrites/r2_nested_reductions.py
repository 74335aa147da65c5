"""R2: two nested all_reduces become one over the flat group.

before::

    y = wait(all_reduce(x, op, a)); z = wait(all_reduce(y, op, b))

after::

    z = wait(all_reduce(x, op, a*b))

Matches equal reduce ops (sum, avg, min, max, product) where nothing else reads the inner result, the two groups of a
rank form a grid and their flat group exists; views and copies between the two move behind the joint one. An average of
averages over equal groups is the average.

Reassociates sums, averages and products (min, max and integer sums are exact); replicas along the outer group, which
nested reductions may leave different in the last bit, become equal. Saves ``2(a-1)/a + 2(b-1)/b - 2(ab-1)/(ab)`` of the
tensor's bytes per rank and one collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.operators import CollectiveKind
from inductor_passes.rewrites.nested import nested
from inductor_passes.rewrites.work import Match, Work
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import reduced


class MergeNestedReductions:
    """See the module's docstring."""

    name: ClassVar[str] = "R2"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_reduce."""
        return work.collectives(CollectiveKind.ALL_REDUCE)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The pair that ends here."""
        pair = nested(work, root, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_REDUCE)
        if pair is None:
            return None
        first, second = pair.first, pair.second
        work.same_reduction(first, second)
        pair.undisturbed(work)
        pair.may_be_reduced(work)
        ranks, group = work.joint_group(second, first)

        def build(emit: Emitter) -> torch.fx.Node:
            return pair.between.replayed(emit, reduced(emit, first.inputs[0], second.reduce_op, group))

        after = work.collective_ns(CollectiveKind.ALL_REDUCE, first.input_bytes, first.input_bytes, ranks)
        return Match(
            work.price_ns(first, second) - after,
            f"{len(ranks)} ranks",
            lambda: work.replace(self.name, second.start, pair.removed, build),
            "one flat ring is slower than two levels",
        )
