"""Planning a redistribution: the cheapest equivalent of ``DTensor.redistribute`` between two layouts.

``plan_redistribution`` needs no process group, no device and no compilation: it is a pure function of the two specs,
the exactness tier and the cost profile, so all ranks get the same plan. Plans are cached by value.

Exactness tiers
    ``exact``: bit for bit what ``DTensor.redistribute`` returns, on every backend. Every reduction keeps its kind,
    group, buffer and place in the order; only data movement is planned anew. Reductions that do not round (min, max,
    any integer sum or product) may be planned freely.
    ``reassociate``: sums, averages and products may also be merged over mesh dimensions, moved across data movement
    and split into reduce_scatter and all_gather, so that floating-point results may differ in the last bits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from inductor_passes.redistribute.diagram import draw, duration, size
from inductor_passes.redistribute.reference import Anchor, anchors
from inductor_passes.redistribute.search import Search
from inductor_passes.redistribute.spec import Layout, Spec, SpecError
from inductor_passes.redistribute.steps import Pricing, Profile, Step

Exactness = Literal["exact", "reassociate"]
EXACTNESS: tuple[Exactness, ...] = ("exact", "reassociate")

#: Reduce ops that give the same bits in whatever order and groups the operands come.
ORDER_FREE = frozenset({"min", "max"})

CACHE_SIZE = 4096


@dataclass(frozen=True)
class RedistributionPlan:
    """The steps from ``source`` to ``target``.

    Attributes:
        source / target: the specs.
        steps: in order; empty when nothing has to be done.
        bytes: sent or received per rank over all steps, ring model, sum over steps of the busiest rank's.
        cost_ns: estimated time, copies included.
        peak_bytes: most memory that the plan uses on a rank at once, the source tensor included.
        exactness: ``exact`` when the result is bit for bit DTensor's, else ``reassociate``.
    """

    source: Spec
    target: Spec
    steps: tuple[Step, ...]
    bytes: int
    cost_ns: int
    peak_bytes: int
    exactness: Exactness

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(step.communicates for step in self.steps)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Sub-meshes (mesh dims) that the plan communicates on, without repetition, in order of use."""
        return tuple(OrderedDict.fromkeys(step.mesh_dims for step in self.steps if step.communicates))

    def __str__(self) -> str:
        word = "collective" if self.collectives == 1 else "collectives"
        totals = (
            f"{size(self.bytes)} per rank, {self.collectives} {word}, {duration(self.cost_ns)}, "
            f"peak {size(self.peak_bytes)}, {self.exactness}"
        )
        return draw(self.source, self.target, self.steps, totals)


def plan_redistribution(
    src: Any,
    dst: Any,
    *,
    cost_profile: Profile | None = None,
    exactness: Exactness = "exact",
) -> RedistributionPlan:
    """The cheapest plan from ``src`` to ``dst``.

    Args:
        src / dst: :class:`Spec`, a torch ``DTensorSpec`` with tensor meta, or a ``DTensor``; same mesh, shape, dtype.
        cost_profile: anything with ``communication_ns(kind, input_bytes, output_bytes, ranks)``; the plan then
            minimises time. None minimises bytes, then time on a default link.
        exactness: see the module's docstring.

    Raises:
        SpecError: specs that differ in more than placements, that cannot be planned, or an unknown tier.
    """
    if exactness not in EXACTNESS:
        raise SpecError(f"exactness={exactness!r} is not allowed; expected one of {', '.join(EXACTNESS)}")
    source, target = Spec.of(src), Spec.of(dst)
    for name in ("mesh", "shape", "dtype", "itemsize"):
        if getattr(source, name) != getattr(target, name):
            raise SpecError(
                f"source and target differ in {name}: {getattr(source, name)} and {getattr(target, name)}; "
                "only placements and shard order may change"
            )
    key = (source, target, exactness, _identity(cost_profile))
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    plan = _plan(source, target, cost_profile, exactness)
    with _lock:
        _cache[key] = plan
        while len(_cache) > CACHE_SIZE:
            _cache.popitem(last=False)
    return plan


_cache: OrderedDict[Any, RedistributionPlan] = OrderedDict()
_lock = threading.Lock()


def _identity(profile: Profile | None) -> object:
    """What stands for a profile in the cache's key: its content hash, else the object (kept alive by the key)."""
    content = getattr(profile, "hash", None)
    return content() if callable(content) else profile


def _plan(source: Spec, target: Spec, profile: Profile | None, exactness: Exactness) -> RedistributionPlan:
    search = Search(Pricing(source.mesh, source.itemsize, profile), target.layout)
    kept = anchors(source, target)
    rounding = [a for a in kept if not order_free(a.reduce_op, source.dtype)]
    # A single partition divides elementwise, which commutes with moving data.
    if not rounding or (len(kept) == 1 and kept[0].partition):
        return _finished(source, target, search.run(source.layout), "exact")
    exact = _finished(source, target, _keep_reductions(search, source.layout, kept), "exact")
    if exactness == "exact":
        return exact
    free = _finished(source, target, search.run(source.layout), "reassociate")
    return min(exact, free, key=lambda p: (p.bytes, p.cost_ns) if profile is None else (p.cost_ns, p.bytes))


def order_free(reduce_op: str, dtype: str) -> bool:
    """Whether a reduction of this dtype gives the same bits in any order."""
    return reduce_op in ORDER_FREE or (reduce_op != "avg" and dtype.startswith(("int", "uint", "bool")))


def _keep_reductions(search: Search, layout: Layout, kept: list[Anchor]) -> list[Step]:
    """DTensor's reductions as they are, with the cheapest movement between them."""
    steps: list[Step] = []
    for anchor in kept:
        steps += search.rearrange(layout, anchor.before)
        price = search.pricing.partition if anchor.partition else search.pricing.reduce
        steps.append(price(anchor.before, anchor.after, (anchor.mesh_dim,), anchor.reduce_op))
        layout = anchor.after
    return steps + search.rearrange(layout, search.target)


def _finished(source: Spec, target: Spec, steps: list[Step], exactness: Exactness) -> RedistributionPlan:
    held = source.layout.max_numel * source.itemsize
    peak = max((s.working_bytes + (held if i else 0) for i, s in enumerate(steps)), default=held)
    return RedistributionPlan(
        source=source,
        target=target,
        steps=tuple(steps),
        bytes=sum(s.bytes for s in steps),
        cost_ns=sum(s.cost_ns for s in steps),
        peak_bytes=peak,
        exactness=exactness,
    )
