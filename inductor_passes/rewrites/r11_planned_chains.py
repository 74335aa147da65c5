"""R11: a chain of gathers, exchanges, own slices and reductions becomes the cheapest plan between its two ends.

before::

    y = wait(all_gather(x, a)); z = wait(all_gather(cat(split(y)), b)); r = split(z)[own]

after::

    r = unpack(wait(all_to_all(pack(x), a*b)))          or a gather, a slice, nothing: whatever costs least

Matches what ``chain`` can read with certainty, even shards only, and replaces the beginning of the chain for which the
planner of ``plan_redistribution`` saves most. Nothing but reductions become fewer of least bytes, or are left to R2,
R3, R4 and R6. A gather whose own slice is taken again is the identity, a gather of which another slice is taken becomes
an exchange: cases of the same rule.

Without reductions bit-exact: only data moves, and every element of the result is the element of the global tensor that
the layouts say. With reductions every element is the reduction of the same operands, in another order: sums, averages
and products count as reassociating (min, max and integer sums are exact). All reductions of a chain have one op.
Complex elements travel as pairs of real ones.
Saves bytes (a gather sends k times what an exchange does) and collectives; the cost profile decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.search import Search
from inductor_passes.redistribute.steps import Pricing
from inductor_passes.report import Reason
from inductor_passes.rewrites.chain import Chain, chains_from, refuse_ambiguous
from inductor_passes.rewrites.planned import as_many_or_more, builder, check_replaceable, described
from inductor_passes.rewrites.unroll import Unroller, group_names
from inductor_passes.rewrites.work import EXCHANGE, Match, Refusal, Work, refuse


class PlanChains:
    """See the module's docstring."""

    name: ClassVar[str] = "R11"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather, reduction and shard_dim_alltoall."""
        yield from work.collectives(
            CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER
        )
        yield from work.named(EXCHANGE)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The beginning of the chain from here that gains most."""
        best: Match | None = None
        refusal: Refusal | None = None
        chains = chains_from(work, root)
        for chain in chains:
            if len(chain.steps) < 2:
                continue
            try:
                match = self._planned(work, chain)
            except Refusal as why:
                refusal = why
                continue
            if match is not None and (best is None or match.gain_ns > best.gain_ns):
                best = match
        if best is None and refusal is not None:
            raise refusal
        if best is None and chains:
            refuse_ambiguous(chains[-1])
        return best

    def _planned(self, work: Work, chain: Chain) -> Match | None:
        """The plan for a chain; None when it costs what the chain costs."""
        work.for_this_rank()
        value = chain.source.meta["val"]
        for reduction in chain.reductions:
            work.may_reassociate(reduction)
        if chain.reductions and value.dtype.is_complex:
            refuse(Reason.UNSUPPORTED, "sums of complex numbers in a chain")
        mesh = chain.mesh()
        layouts = chain.layouts(mesh)
        source, target = chain.as_pairs(layouts) if value.dtype.is_complex else layouts
        if not (source.is_even and target.is_even):
            refuse(Reason.UNSUPPORTED, "sizes that do not divide")
        pricing = Pricing(mesh, value.dtype.itemsize // (2 if value.dtype.is_complex else 1), work.facts.profile)
        steps = Search(pricing, target).run(source)
        rank = _torch.process_rank()
        names = group_names(mesh, rank, steps)
        check_replaceable(work, chain.source, chain.nodes, chain.node, steps)
        build = builder(Unroller(mesh, rank, names), chain.source, steps)
        gain = chain.collectives_ns + pricing.copy_ns(2 * chain.copied_bytes) - sum(step.cost_ns for step in steps)
        if gain == 0 and len(steps) >= len(chain.steps):
            return None
        if len(chain.reductions) == len(chain.steps):
            cheapest = Search(Pricing(mesh, pricing.itemsize), target).run(source)
            if as_many_or_more(steps, cheapest, len(chain.reductions)):
                return None
        return Match(
            gain,
            f"{', '.join(chain.steps)} becomes {described(steps)}",
            lambda: work.replace(
                self.name, chain.nodes[0], tuple(reversed(chain.nodes)), build, result=chain.node
            ),
            "the cheapest plan is slower",
        )
