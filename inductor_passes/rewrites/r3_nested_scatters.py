"""R3: two nested reduce_scatters become one over the flat group.

before::

    y = wait(reduce_scatter(x, op, a)); z = wait(reduce_scatter(y, op, b))

after::

    z = wait(reduce_scatter(x, op, a*b))    (with a local transposition where the flat group nests the other way round)

Matches equal reduce ops where nothing else reads the inner result, the two groups of a rank form a grid and their flat
group exists. Both collectives split dimension 0 evenly by definition, so the flat one does.

Reassociates sums, averages and products (min, max and integer sums are exact). Saves one collective; bytes per rank are
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.operators import CollectiveKind
from inductor_passes.rewrites.nested import nested, straight_or_flipped
from inductor_passes.rewrites.work import Match, Work
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import scattered, transposed


class MergeNestedScatters:
    """See the module's docstring."""

    name: ClassVar[str] = "R3"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every reduce_scatter."""
        return work.collectives(CollectiveKind.REDUCE_SCATTER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The pair that ends here."""
        pair = nested(work, root, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER)
        if pair is None or pair.between.nodes:
            return None
        first, second = pair.first, pair.second
        work.same_reduction(first, second)
        pair.undisturbed(work)
        ranks, group = work.joint_group(first, second)
        # Rank (i, j) ends with chunk i * b + j; the flat group hands chunk s to its member s.
        straight = straight_or_flipped(first, second)
        a, b = first.group.size, second.group.size

        def build(emit: Emitter) -> torch.fx.Node:
            packed = first.inputs[0] if straight else transposed(emit, first.inputs[0], a, b)
            return scattered(emit, packed, second.reduce_op, a * b, group)

        after = work.collective_ns(CollectiveKind.REDUCE_SCATTER, first.input_bytes, second.output_bytes, ranks)
        copy = 0 if straight else work.copy_ns(first.input_bytes or 0)
        return Match(
            work.price_ns(first, second) - after - copy,
            f"{a} x {b} ranks",
            lambda: work.replace(self.name, second.start, pair.removed, build),
            "one flat ring is slower than two levels",
        )
