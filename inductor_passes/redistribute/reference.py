"""What ``DTensor.redistribute`` does by default: the chain of changes, one mesh dimension each, that plans are held to.

The exact tier keeps every reduction of this chain as it is: same kind, same group, same buffer, same order. Only the
movement of data between reductions is planned anew, which changes no bit.

The rule (torch 2.11 to 2.15, default planner): with a sharded source, go from the innermost mesh dimension to the
outermost and change each placement to its target, or to Replicate when the target is a shard of a tensor dimension
whose outer cuts are not yet those of the target; then go from the outermost to the innermost and change what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.redistribute.spec import Layout, MeshCut, Partial, Placement, Replicate, Shard, Spec, layout_of


@dataclass(frozen=True)
class Anchor:
    """A reduction, or the split of a replicated value into a pending one, that the exact tier must keep."""

    mesh_dim: int
    before: Layout
    after: Layout
    reduce_op: str
    partition: bool = False


def chain(source: Spec, target: Spec) -> list[tuple[int, Placement, Placement]]:
    """(mesh dim, from, to) in DTensor's order, for layouts without shard order and strided shards."""
    current = list(source.placements)
    wanted = list(target.placements)
    steps: list[tuple[int, Placement, Placement]] = []

    def change(m: int, to: Placement) -> None:
        if current[m] != to:
            if isinstance(current[m], Shard) and isinstance(to, Partial):
                steps.append((m, current[m], Replicate()))
                current[m] = Replicate()
            steps.append((m, current[m], to))
            current[m] = to

    sharded = any(isinstance(p, Shard) and source.mesh.shape[m] > 1 for m, p in enumerate(current))
    if sharded and source.mesh.ndim > 1:
        for m in reversed(range(source.mesh.ndim)):
            to = wanted[m]
            if isinstance(to, Shard):
                outer_now = [i for i in range(m) if current[i] == to]
                outer_then = [i for i in range(m) if wanted[i] == to]
                if outer_now != outer_then:
                    to = Replicate()
            change(m, to)
    for m in range(source.mesh.ndim):
        change(m, wanted[m])
    return steps


def anchors(source: Spec, target: Spec) -> list[Anchor]:
    """The reductions of DTensor's plan, in order.

    For strided shards and shard orders, where DTensor searches, they are derived from the target's order of cuts.
    """
    plain = not source.shard_order and not target.shard_order
    plain = plain and not any(
        isinstance(p, Shard) and p.split_factor > 1 for p in (*source.placements, *target.placements)
    )
    return _from_chain(source, target) if plain else _in_order(source, target)


def _from_chain(source: Spec, target: Spec) -> list[Anchor]:
    result = []
    current = list(source.placements)
    for m, old, new in chain(source, target):
        before = _layout(source, current)
        current[m] = new
        if source.mesh.shape[m] == 1:
            continue
        after = _layout(source, current)
        if isinstance(old, Partial) and isinstance(new, Partial):
            current[m] = Replicate()
            middle = _layout(source, current)
            current[m] = new
            result.append(Anchor(m, before, middle, old.reduce_op))
            result.append(Anchor(m, middle, after, new.reduce_op, partition=True))
        elif isinstance(old, Partial):
            result.append(Anchor(m, before, after, old.reduce_op))
        elif isinstance(new, Partial):
            result.append(Anchor(m, before, after, new.reduce_op, partition=True))
    return result


def _in_order(source: Spec, target: Spec) -> list[Anchor]:
    """Reductions one mesh dimension at a time: scattered where the target cuts by that dimension next, after the local
    cuts that come before it; the others reduced in place, in ascending order."""
    result = []
    layout, final = source.layout, target.layout
    todo = [m for m in layout.partial_dims if layout.partial[m] != final.partial[m]]
    while todo:
        step = None
        for d, wanted in enumerate(final.cuts):
            cuts = layout.cuts[d]
            while wanted[: len(cuts)] == cuts and len(cuts) < len(wanted):
                cuts += (wanted[len(cuts)],)
                m = cuts[-1][0]
                if m in todo:
                    before = _with_cuts(layout, d, cuts[:-1])
                    step = Anchor(m, before, _with_partial(_with_cuts(before, d, cuts), m, ""), layout.partial[m])
                if m not in layout.replicate_dims:
                    break
            if step is not None:
                break
        if step is None:
            step = Anchor(todo[0], layout, _with_partial(layout, todo[0], ""), layout.partial[todo[0]])
        result.append(step)
        layout = step.after
        todo.remove(step.mesh_dim)
    layout = Layout(final.mesh_shape, final.shape, final.cuts, layout.partial)
    for m, op in enumerate(final.partial):
        if op and layout.partial[m] != op:
            after = _with_partial(layout, m, op)
            result.append(Anchor(m, layout, after, op, partition=True))
            layout = after
    return result


def _with_cuts(layout: Layout, dim: int, cuts: tuple[MeshCut, ...]) -> Layout:
    return Layout(layout.mesh_shape, layout.shape, layout.cuts[:dim] + (cuts,) + layout.cuts[dim + 1 :], layout.partial)


def _with_partial(layout: Layout, m: int, op: str) -> Layout:
    partial = layout.partial[:m] + (op,) + layout.partial[m + 1 :]
    return Layout(layout.mesh_shape, layout.shape, layout.cuts, partial)


def _layout(spec: Spec, placements: list[Placement]) -> Layout:
    return layout_of(spec.mesh.shape, placements, spec.shape)
