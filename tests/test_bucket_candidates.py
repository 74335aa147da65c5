"""Which collectives may travel together, and the reason for each that may not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.fx
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Decision, Reason, Verdict
from tests.support.bucket_graphs import Program, aten, c10d
from tests.support.world import fake_world


def look(gm: torch.fx.GraphModule, **options: bool) -> tuple[list[list[str]], dict[str, Decision]]:
    """(labels of candidates by key, refusals by label)."""
    view = GraphView(gm.graph)
    found, refused = candidates(view, **options)
    groups: dict[object, list[str]] = {}
    for candidate in found:
        groups.setdefault(candidate.key, []).append(candidate.collective.label)
    label = {c.start.name: c.label for c in view.collectives}
    assert len(found) + len(refused) == len(view.collectives), "a collective without a verdict"
    assert all(d.verdict is Verdict.REFUSED for d in refused)
    return list(groups.values()), {label[d.node]: d for d in refused}


def test_mixed_dtypes_may_be_moved_but_not_reduced_together() -> None:
    with fake_world(2) as world:
        p = Program()
        wide, narrow = p.input(4), p.input(4, dtype=torch.bfloat16)
        gm = p.done(*(p.collective(k, x, world) for k in ("all_gather", "reduce_scatter") for x in (wide, narrow)))
        groups, refused = look(gm)
        assert groups == [["AG0", "AG1"]]
        assert {label: d.reason for label, d in refused.items()} == {
            "RS2": Reason.MIXED_DTYPE,
            "RS3": Reason.MIXED_DTYPE,
        }
        assert "bfloat16" in refused["RS2"].detail and refused["RS2"].source == "model.py:5"


def test_other_groups_ops_and_kinds_stay_apart() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        a, b = (mesh.get_group(d).group_name for d in (0, 1))
        p = Program()
        x = p.input(4, 4)
        gm = p.done(
            p.collective("all_gather", x, a),
            p.collective("all_gather", x, b),
            p.collective("all_reduce", x, a, "sum"),
            p.collective("all_reduce", x, a, "max"),
            p.collective("reduce_scatter", x, a),
        )
        groups, refused = look(gm)
        assert groups == []
        assert [refused[k].reason for k in ("AG0", "AG1", "AR2", "AR3", "RS4")] == [
            Reason.DIFFERENT_GROUP,
            Reason.DIFFERENT_GROUP,
            Reason.MIXED_REDUCE_OP,
            Reason.MIXED_REDUCE_OP,
            Reason.ALREADY_OPTIMAL,
        ]


def test_nothing_crosses_a_fence() -> None:
    with fake_world(2) as world:
        p = Program()
        x = p.input(4)
        first = p.collective("all_gather", x, world)
        p.call(c10d.broadcast.default, x, 0, world)  # known, but not waited for
        fence = p.call(aten.nonzero_static.default, x, size=4)
        fence.target = aten.nonzero.default
        fence.args, fence.kwargs = (x,), {}
        gm = p.done(first, p.collective("all_gather", x, world))
        _, refused = look(gm)
        assert refused["AG0"].reason is Reason.FENCE and refused["BC1"].reason is Reason.UNSUPPORTED


def test_forms_that_cannot_travel() -> None:
    with fake_world(2) as world:
        p = Program()
        x = p.input(4)
        unwaited = p.start("all_gather", x, world)
        read_early = p.start("all_gather", x, world)
        peeked = p.call(aten.view.default, read_early, [2, 4])
        waited = p.wait(read_early)
        written = p.collective("all_gather", x, world)
        write = p.call(aten.add_.Tensor, written, 1.0)
        in_place = p.wait(p.call(c10d.all_reduce_.default, p.call(aten.clone.default, x), "sum", world))
        plain = [p.collective("all_gather", x, world) for _ in range(2)]
        gm = p.done(unwaited, peeked, waited, write, in_place, *plain)
        groups, refused = look(gm)
        assert groups == [["AG4", "AG5"]]
        assert {k: d.reason for k, d in refused.items()} == dict.fromkeys(
            ["AG0", "AG1", "AG2", "AR3"], Reason.UNSUPPORTED
        )
        assert "in flight" in refused["AG1"].detail and "writes to" in refused["AG2"].detail


def test_unequal_splits_are_refused_unless_asked_for() -> None:
    with fake_world(2) as world:
        p = Program()
        x = p.input(4, 2)
        uneven = [p.wait(p.call(c10d.all_to_all_single.default, x, [1, 3], [3, 1], world)) for _ in range(2)]
        even = [p.collective("all_to_all", x, world) for _ in range(2)]
        gm = p.done(*uneven, *even)
        groups, refused = look(gm)
        assert groups == [["A2A2", "A2A3"]] and {d.reason for d in refused.values()} == {Reason.RANKS_DIFFER}
        assert look(gm, uneven_all_to_all=True)[0] == [["A2A0", "A2A1", "A2A2", "A2A3"]]


def test_sizes_without_hints_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with fake_world(2) as world:
        p = Program()
        p.mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
        x = p.input(4, 2)
        with p.mode:
            x.meta["val"] = torch.empty(env.create_unbacked_symint(), 2)
        gm = p.done(*(p.collective("all_gather", x, world) for _ in range(2)))
        groups, refused = look(gm)
        assert groups == [] and {d.reason for d in refused.values()} == {Reason.NO_HINT}


def test_recompute_tags_matter_before_partitioning_only() -> None:
    with fake_world(2) as world:
        p = Program()
        gm = p.done(*(p.collective("all_gather", p.input(4), world) for _ in range(4)))
        for number, collective in enumerate(GraphView(gm.graph).collectives):
            collective.start.meta["recompute"] = number % 2
        assert look(gm)[0] == [["AG0", "AG1", "AG2", "AG3"]]
        assert look(gm, joint=True)[0] == [["AG0", "AG2"], ["AG1", "AG3"]]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[bool, list[int]]]:
    """Nodes in order: (is it a collective, inputs among the earlier nodes)."""
    count = draw(st.integers(3, 14))
    return [
        (draw(st.booleans()), draw(st.lists(st.integers(0, max(0, i - 1)), min_size=1, max_size=2)))
        for i in range(count)
    ]


def build(world: str, nodes: list[tuple[bool, list[int]]]) -> torch.fx.GraphModule:
    p = Program()
    values = [p.input(2)]
    for communicates, sources in nodes:
        x = values[sources[0] % len(values)]
        for source in sources[1:]:
            x = p.call(aten.add.Tensor, x, values[source % len(values)])
        values.append(p.collective("all_reduce", x, world) if communicates else p.call(aten.neg.default, x))
    return p.done(*values)


@settings(max_examples=60, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_dependencies_against_search(nodes, random) -> None:
    """Bit sets agree with a search over the graph; after merges with a search over the contracted graph."""
    with fake_world(2) as world:
        gm = build(world, nodes)
        view = GraphView(gm.graph)
        deps = Dependencies(view)
        contracted: dict[torch.fx.Node, int] = {}
        for c in view.collectives:
            contracted |= dict.fromkeys((c.start, *c.waits), c.index)
        hazards: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for before, after in view.ordering_edges():
            hazards.setdefault(after, []).append(before)

        def reachable(start: int) -> set[int]:
            """Collectives (by contracted number) that contracted node ``start`` depends on."""
            stack = [n for n, number in contracted.items() if number == start]
            seen = set(stack)
            while stack:
                node = stack.pop()
                for source in (*node.all_input_nodes, *hazards.get(node, ())):
                    same = [n for n, k in contracted.items() if k == contracted.get(source)] or [source]
                    stack.extend(n for n in same if n not in seen)
                    seen.update(same)
            return {contracted[n] for n in seen if n in contracted} - {start}

        for _ in range(4):
            for a in view.collectives:
                expected = reachable(contracted[a.start])
                for b in view.collectives:
                    if contracted[a.start] != contracted[b.start]:
                        assert deps.depends(a, b) == (contracted[b.start] in expected), (a.label, b.label)
            if len(view.collectives) < 2:
                return
            a, b = random.sample(view.collectives, 2)
            if contracted[a.start] == contracted[b.start]:
                continue
            related = deps.depends(a, b) or deps.depends(b, a)
            group = [c for c in view.collectives if contracted[c.start] in (contracted[a.start], contracted[b.start])]
            assert deps.independent([a, b]) == (not related)
            if related:
                with pytest.raises(ValueError, match="depend on each other"):
                    deps.merge(group)
            else:
                deps.merge(group)
                for c in group:
                    contracted |= dict.fromkeys((c.start, *c.waits), contracted[a.start])
