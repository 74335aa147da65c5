"""R17: a redistribution whose layouts are known becomes the plan of ``plan_redistribution`` for them.

before, as DTensor traces ``[S(0), S(0)] -> [S(1), S(1)]`` on 4 x 4 ranks, on the last one::

    y = wait(all_gather(x, b)); z = wait(all_gather(y, a)); r = split(split(z, 4, 1)[3], 4, 1)[3]

after::

    r = unpack(wait(all_to_all(pack(x), a*b)))

Matches what ``redistributed`` can read: one call's nodes, with the layout before and after it; and calls that follow
each other, as one. Meshes with dimensions of equal size are included, sizes that the mesh does not divide are not. What
has no such note, since an operator redistributes its operands by itself, is left to R11.

Without reductions bit-exact: only data moves. Reductions keep their order with ``exact``, as the planner's tier of that
name has it; with ``reassociate`` they may be merged, moved and split.
Saves what the plan saves, and is refused where its copies cost more than its collectives gain, and where its exchange
has pieces of unequal size beside collectives of another kind: those are planned by their durations, which ranks then
see differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.layouts import COPY_KEY, noted
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.plan import Exactness, RedistributionPlan, plan_redistribution
from inductor_passes.redistribute.spec import Spec, SpecError
from inductor_passes.report import Reason
from inductor_passes.rewrites.audit import sent_bytes
from inductor_passes.rewrites.movement import name_of
from inductor_passes.rewrites.planned import as_many_or_more, builder, check_replaceable, described
from inductor_passes.rewrites.redistributed import Redistributed, redistributed
from inductor_passes.rewrites.unroll import Unroller, exchanges_equally, group_names
from inductor_passes.rewrites.work import EXCHANGE, Match, Refusal, Work, refuse

_OTHERS = (
    "ranks would exchange pieces of unequal size, and the graph's other collectives, which no call of redistribute "
    "causes, would be neither merged nor moved"
)


class PlanRedistributions:
    """See the module's docstring."""

    name: ClassVar[str] = "R17"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather, reduction and shard_dim_alltoall."""
        yield from work.collectives(CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
        yield from work.named(EXCHANGE)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The plan for the redistribution that begins here, or for the row of redistributions, that gains most."""
        found = redistributed(work, root)
        if found is None:
            return None
        best: Match | None = None
        refusal: Refusal | None = None
        while found is not None:
            try:
                match = self._planned(work, found)
                if match is not None and (best is None or match.gain_ns > best.gain_ns):
                    best = match
            except Refusal as why:
                refusal = refusal or why
            found = _longer(work, found)
        if best is None and refusal is not None:
            raise refusal
        return best

    def _planned(self, work: Work, found: Redistributed) -> Match | None:
        """None where the plan is what is there."""
        work.for_this_rank()
        value = found.source.meta["val"]
        paired = value.dtype.is_complex
        if paired and found.reductions:
            refuse(Reason.UNSUPPORTED, "sums of complex numbers")
        before, after = (_as_pairs(s) if paired else s for s in (found.before, found.after))
        plan = _plan(work, before, after)
        steps = list(plan.steps)
        cost_ns = sum(step.cost_ns for step in steps)
        collectives = sum(step.communicates for step in steps)
        if any(step.kind == "partition" for step in steps):
            refuse(Reason.UNSUPPORTED, "the result is pending a reduction that the source is not")
        names = group_names(before.mesh, _torch.process_rank(), steps)
        check_replaceable(work, found.source, found.nodes, found.result, steps)
        unequal = any(s.kind == "all_to_all" and not exchanges_equally(before.mesh, s) for s in steps)
        if unequal and not all(_is_of_a_call(start) for start in work.starts()):
            refuse(Reason.RANKS_DIFFER, _OTHERS)
        copies = work.copy_ns(found.copied_bytes)
        gain = found.collectives_ns + copies - cost_ns
        # A plan of as many collectives has to save more than rounding does.
        if collectives >= len(found.steps) and gain * 100 <= cost_ns:
            return None
        if len(found.reductions) == len(found.steps):
            least = plan_redistribution(before, after, exactness=plan.exactness)
            sent = sum(sent_bytes(one) for one in found.reductions)
            # As many of fewer bytes are a gain: what every rank slices anyway is sliced first.
            smaller = collectives <= len(found.steps) and sum(step.bytes for step in steps) < sent
            if as_many_or_more(steps, least.steps, len(found.reductions) + smaller):
                return None
        build = builder(Unroller(before.mesh, _torch.process_rank(), names), found.source, steps)
        return Match(
            gain,
            f"{', '.join(found.steps)} for {found.before} -> {found.after} becomes {described(steps)}",
            lambda: work.replace(self.name, found.nodes[0], found.nodes[::-1], build, result=found.result),
            "the plan is slower",
        )


def _longer(work: Work, found: Redistributed) -> Redistributed | None:
    """With the redistribution that alone reads the result; None where there is none."""
    inside = set(found.nodes)
    readers = [user for user in found.result.users if user not in inside]
    for reader in readers:
        note = noted(reader.meta)
        if note is None:
            continue
        # The first collective of the next one stands behind its padding and packing.
        root: torch.fx.Node | None = reader
        while root is not None and not _is_root(work, root):
            root = next((user for user in root.users if noted(user.meta) == note), None)
        try:
            following = None if root is None else redistributed(work, root)
        except Refusal:
            continue
        if following is None or following.source is not found.result or not set(readers) <= set(following.nodes):
            continue
        if (following.before.mesh, following.before.layout) == (found.after.mesh, found.after.layout):
            return found.followed_by(following)
    return None


def _is_of_a_call(start: torch.fx.Node) -> bool:
    return noted(start.meta) is not None or noted(start.meta, COPY_KEY) is not None


def _is_root(work: Work, node: torch.fx.Node) -> bool:
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    return work.collective(node, *kinds) is not None or name_of(node) == EXCHANGE


def _plan(work: Work, before: Spec, after: Spec) -> RedistributionPlan:
    tier: Exactness = "reassociate" if work.exactness == "reassociate" else "exact"
    try:
        return plan_redistribution(before, after, cost_profile=work.facts.profile, exactness=tier)
    except SpecError as why:
        refuse(Reason.UNSUPPORTED, str(why))


def _as_pairs(spec: Spec) -> Spec:
    """Complex elements read as pairs along one more dimension."""
    real = {"complex64": "float32", "complex128": "float64"}.get(spec.dtype, "float16")
    return replace(spec, shape=(*spec.shape, 2), dtype=real, itemsize=spec.itemsize // 2)
