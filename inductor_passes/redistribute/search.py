"""The cheapest chain of steps between two layouts: A* over layouts.

Nodes are layouts (cuts per tensor dimension, pending reductions per mesh dimension). Edges:

- rearrange to the final data layout in one step, once no reduction is left to do;
- all_reduce over any set of mesh dimensions with one pending reduce op (one flat group);
- reduce_scatter over any such set, each of its dimensions cutting any tensor dimension innermost;
- gather the innermost cuts of a tensor dimension, one or several at once;
- cut a replicated mesh dimension (a local slice), or move an innermost cut to another tensor dimension.

The cost of a path is compared as (bytes, ns, working bytes) without a cost profile and as (ns, bytes, working bytes)
with one. The bound on what is left (Hart, Nilsson, Raphael 1968) counts messages: an element of which ``g`` partial
copies exist and which ``h`` ranks shall hold takes at least ``g - 1 + h - 1`` transfers, and the busiest rank at least
the average; without reductions left, what some rank lacks is a bound too. Most rearrangements meet the bound with one
exchange and need no search.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from inductor_passes.redistribute.spec import Layout, MeshCut
from inductor_passes.redistribute.steps import Pricing, Step
from inductor_passes.redistribute.traffic import missing

#: Layouts expanded before the best plan found so far is taken: a bound on planning time, equal on all ranks.
MAX_EXPANSIONS = 300

#: What is minimised, most important first.
PathCost = tuple[int, int, int]


@dataclass
class Search:
    """One search; ``pricing`` decides what cheap means."""

    pricing: Pricing
    target: Layout
    _movements: dict[tuple[Layout, Layout], Step | None] = field(default_factory=dict)

    def key(self, step: Step) -> PathCost:
        """What is minimised, most important first."""
        if self.pricing.profile is None:
            return (step.bytes, step.cost_ns, step.working_bytes)
        return (step.cost_ns, step.bytes, step.working_bytes)

    def movement(self, before: Layout, after: Layout) -> Step | None:
        """The cheapest single step between layouts with equal pending reductions; None when they are equal."""
        if before == after:
            return None
        pair = (before, after)
        if pair not in self._movements:
            self._movements[pair] = min(self.pricing.movements(before, after), key=self.key)
        return self._movements[pair]

    def rearrange(self, before: Layout, after: Layout) -> list[Step]:
        """The cheapest chain between layouts with equal pending reductions."""
        return Search(self.pricing, after, self._movements).run(before)

    def run(self, source: Layout) -> list[Step]:
        """The cheapest chain from ``source`` to the target."""
        best: tuple[PathCost, list[Step]] | None = None
        cost: dict[Layout, PathCost] = {source: (0, 0, 0)}
        came: dict[Layout, tuple[Layout, Step]] = {}
        queue: list[tuple[PathCost, int, Layout, PathCost]] = [(self._bound(source), 0, source, (0, 0, 0))]
        counter = itertools.count(1)
        expansions = 0
        while queue:
            estimate, _, layout, spent = heapq.heappop(queue)
            if best is not None and not self._promising(estimate, best[0]):
                break
            if cost[layout] != spent:
                continue
            expansions += 1
            if expansions > MAX_EXPANSIONS and best is not None:
                break
            finish = self._finish(layout)
            if finish is not None:
                total = spent
                for step in finish:
                    total = _plus(total, self.key(step))
                if best is None or total < best[0]:
                    best = (total, self._path(came, layout) + finish)
                if not self._promising(estimate, best[0]):
                    break
                if self._settled(layout, finish):
                    continue
            for step in self._edges(layout):
                reached = _plus(spent, self.key(step))
                known = cost.get(step.after)
                if known is not None and known <= reached:
                    continue
                bound = _plus(reached, self._bound(step.after))
                if best is not None and not self._promising(bound, best[0]):
                    continue
                cost[step.after] = reached
                came[step.after] = (layout, step)
                heapq.heappush(queue, (bound, next(counter), step.after, reached))
        assert best is not None, f"no plan from {source} to {self.target}"
        return best[1]

    def _promising(self, bound: PathCost, best: PathCost) -> bool:
        """Whether something with this bound may beat ``best``; with a profile by more than the 1% it resolves."""
        if self.pricing.profile is None:
            return bound < best
        return bound[0] * 101 < best[0] * 100

    @staticmethod
    def _path(came: dict[Layout, tuple[Layout, Step]], layout: Layout) -> list[Step]:
        steps: list[Step] = []
        while layout in came:
            layout, step = came[layout]
            steps.append(step)
        return steps[::-1]

    def _todo(self, layout: Layout) -> tuple[int, ...]:
        """Mesh dims whose pending reduction has to be done."""
        return tuple(m for m in layout.partial_dims if self.target.partial[m] != layout.partial[m])

    def _finish(self, layout: Layout) -> list[Step] | None:
        """One rearrangement and the partitions that make ``layout`` the target; None with reductions to do."""
        if self._todo(layout):
            return None
        target = self.target
        data = Layout(target.mesh_shape, target.shape, target.cuts, layout.partial)
        move = self.movement(layout, data)
        return ([move] if move is not None else []) + partitions(self.pricing, data, target)

    def _settled(self, layout: Layout, finish: list[Step]) -> bool:
        """Whether finishing from here in one step is certainly best: it moves no byte more than the bound and time
        follows bytes (no profile, or nothing moves)."""
        moved = sum(step.bytes for step in finish)
        if self.pricing.profile is not None and moved:
            return False
        data = Layout(layout.mesh_shape, layout.shape, self.target.cuts, layout.partial)
        return moved <= missing(layout, data) * self.pricing.itemsize

    def _bound(self, layout: Layout) -> PathCost:
        """A lower bound on the key of the rest; see the module's docstring."""
        least = self._least_bytes(layout)
        ns = self.pricing.least_ns(least)
        return (least, ns, 0) if self.pricing.profile is None else (ns, least, 0)

    def _least_bytes(self, layout: Layout) -> int:
        todo = self._todo(layout)
        target = self.target
        if not todo:
            data = Layout(target.mesh_shape, target.shape, target.cuts, layout.partial)
            return missing(layout, data) * self.pricing.itemsize
        shape = layout.mesh_shape
        kept = math.prod(shape[m] for m in layout.partial_dims if m not in todo)
        pieces = math.prod(shape[m] for m in todo)
        holders = math.prod(shape) // kept // math.prod(shape[m] for m in target.shard_dims)
        transfers = math.prod(layout.shape) * kept * (pieces - 1 + holders - 1)
        return max(1, transfers * self.pricing.itemsize // math.prod(shape))

    def _edges(self, layout: Layout) -> Iterator[Step]:
        price = self.pricing
        todo = self._todo(layout)
        for size in range(1, len(todo) + 1):
            for dims in itertools.combinations(todo, size):
                op = layout.partial[dims[0]]
                if any(layout.partial[m] != op for m in dims):
                    continue
                rest = tuple("" if m in dims else p for m, p in enumerate(layout.partial))
                reduced = Layout(layout.mesh_shape, layout.shape, layout.cuts, rest)
                yield price.reduce(layout, reduced, dims, op)
                for scattered in self._scatters(layout, dims):
                    yield price.reduce(layout, Layout(layout.mesh_shape, layout.shape, scattered, rest), dims, op)
        for d, cuts in enumerate(layout.cuts):
            for k in range(1, len(cuts) + 1):
                step = self.movement(layout, self._with(layout, d, cuts[:-k]))
                if step is not None:
                    yield step
            if cuts and cuts[-1][1] == 1:
                for other, onto in enumerate(layout.cuts):
                    if other != d:
                        moved = self._with(self._with(layout, d, cuts[:-1]), other, onto + (cuts[-1],))
                        step = self.movement(layout, moved)
                        if step is not None:
                            yield step
        for m in layout.replicate_dims:
            for d, cuts in enumerate(layout.cuts):
                step = self.movement(layout, self._with(layout, d, cuts + ((m, 1),)))
                if step is not None:
                    yield step

    def _scatters(self, layout: Layout, dims: tuple[int, ...]) -> Iterator[tuple[tuple[MeshCut, ...], ...]]:
        """All cuts after scattering over ``dims``: each appended to some tensor dim, in the target's order when the
        target has them on that tensor dim, else ascending."""
        rank = {m: k for cuts in self.target.cuts for k, (m, _) in enumerate(cuts)}
        ordered = sorted(dims, key=lambda m: (rank.get(m, len(rank)), m))
        for where in itertools.product(range(len(layout.shape)), repeat=len(ordered)):
            cuts = list(layout.cuts)
            for m, d in zip(ordered, where):
                cuts[d] += ((m, 1),)
            yield tuple(cuts)

    @staticmethod
    def _with(layout: Layout, dim: int, cuts: tuple[MeshCut, ...]) -> Layout:
        return Layout(
            layout.mesh_shape, layout.shape, layout.cuts[:dim] + (cuts,) + layout.cuts[dim + 1 :], layout.partial
        )


def partitions(pricing: Pricing, layout: Layout, target: Layout) -> list[Step]:
    """Local steps that turn replicated mesh dims into the target's pending reductions."""
    steps = []
    for m, op in enumerate(target.partial):
        if op and layout.partial[m] != op:
            partial = layout.partial[:m] + (op,) + layout.partial[m + 1 :]
            after = Layout(layout.mesh_shape, layout.shape, layout.cuts, partial)
            steps.append(pricing.partition(layout, after, (m,), op))
            layout = after
    return steps


def _plus(a: PathCost, b: PathCost) -> PathCost:
    """Bytes and times add up; the working set is the largest."""
    return (a[0] + b[0], a[1] + b[1], max(a[2], b[2]))
