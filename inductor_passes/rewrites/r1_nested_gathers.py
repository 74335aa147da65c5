"""R1: two nested all_gathers become one over the flat group.

before::

    y = wait(all_gather(x, a)); z = wait(all_gather(y, b))

after::

    z = wait(all_gather(x, a*b))        (with a local transposition where the flat group nests the other way round)

Matches an all_gather whose input is the wait of another and that nothing else reads, when the two groups of a rank form
a grid and their flat group exists. The collectives gather equal sizes along dimension 0 by definition; padding or
slicing between them (uneven sharding) is a node between them, and then this does not match.

Bit-exact: data moves, nothing is computed. Saves one collective; bytes stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.operators import CollectiveKind
from inductor_passes.rewrites.nested import nested, straight_or_flipped
from inductor_passes.rewrites.work import Match, Work
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import gathered, transposed


class MergeNestedGathers:
    """See the module's docstring."""

    name: ClassVar[str] = "R1"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather."""
        return work.collectives(CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The pair that ends here."""
        pair = nested(work, root, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_GATHER)
        if pair is None or pair.between.nodes:
            return None
        pair.undisturbed(work)
        first, second = pair.first, pair.second
        ranks, group = work.joint_group(second, first)
        straight = straight_or_flipped(second, first)
        inner, outer = first.group.size, second.group.size

        def build(emit: Emitter) -> torch.fx.Node:
            whole = gathered(emit, first.inputs[0], inner * outer, group)
            return whole if straight else transposed(emit, whole, inner, outer)

        after = work.collective_ns(CollectiveKind.ALL_GATHER, first.input_bytes, second.output_bytes, ranks)
        copy = 0 if straight else work.copy_ns(second.output_bytes or 0)
        return Match(
            work.price_ns(first, second) - after - copy,
            f"{inner} x {outer} ranks",
            lambda: work.replace(self.name, second.start, pair.removed, build),
            "one flat ring is slower than two levels",
        )
