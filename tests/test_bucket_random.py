"""Random programs, random merges: every bit on every rank, and nothing that the verifier objects to."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import event, given, settings
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.merge import MergeError, merge
from tests.support.bucket_graphs import (
    Program,
    assert_same_bits,
    aten,
    check_fakes,
    inputs_by_rank,
    output_layouts,
    run_all_ranks,
)
from tests.support.world import fake_world

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)
RANKS = 4


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """A straight-line program: each step names an operation and the earlier values it reads (modulo their number)."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    groups = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
    start = st.tuples(st.just("start"), st.sampled_from(kinds), st.integers(0, 50), st.sampled_from(groups))
    other = st.one_of(
        st.tuples(st.just("input"), st.integers(1, 5), st.sampled_from(DTYPES)),
        st.tuples(st.just("wait"), st.integers(0, 50)),
        st.tuples(st.just("pointwise"), st.integers(0, 50)),
        st.tuples(st.just("cast"), st.integers(0, 50), st.sampled_from(DTYPES)),
        st.tuples(st.just("transpose"), st.integers(0, 50)),
        st.tuples(st.just("add"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("update"), st.integers(0, 50)),
    )
    pieces = draw(st.lists(st.tuples(start, other, other), min_size=4, max_size=8))
    return [step for piece in pieces for step in piece]


def build(groups: list[str], program: list[tuple[Any, ...]]) -> torch.fx.GraphModule:
    """The program as a graph; steps that do not fit (nothing to read, sizes that do not divide) are left out."""
    p = Program()
    inputs = [p.input(RANKS, 3) for _ in range(3)]
    inputs += [p.input(RANKS, step[1], dtype=step[2]) for step in program if step[0] == "input"]
    values, open_starts, updates = list(inputs), [], []
    for step in program:
        name, pick = step[0], lambda k: values[k % len(values)]
        if name == "start":
            _, kind, source, group = step
            x = pick(source)
            if x.meta["val"].shape[0] % RANKS or x.meta["val"].numel() > 4096:
                continue
            open_starts.append(p.start(kind, x, groups[group]))
        elif name == "wait" and open_starts:
            values.append(p.wait(open_starts.pop(step[1] % len(open_starts))))
        elif name == "pointwise":
            values.append(p.call(aten.neg.default, pick(step[1])))
        elif name == "cast":
            values.append(p.call(aten._to_copy.default, pick(step[1]), dtype=step[2]))
        elif name == "transpose":
            values.append(p.call(aten.permute.default, pick(step[1]), [1, 0]))
        elif name == "add":
            a, b = pick(step[1]), pick(step[2])
            if a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dtype == b.meta["val"].dtype:
                values.append(p.call(aten.add.Tensor, a, b))
        elif name == "update":
            target = inputs[step[1] % len(inputs)]
            if all(target not in start.all_input_nodes for start in open_starts):
                updates.append(p.call(aten.mul_.Tensor, target, 2))
    values += [p.wait(start) for start in open_starts]
    return p.done(*values, *updates)


@settings(max_examples=60, deadline=None)
@given(steps(), st.randoms(use_true_random=False), st.sampled_from(["packed", "coalesced"]))
def test_random_merges_of_random_programs(program, random, form) -> None:
    with fake_world(RANKS) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        gm = build([world, *(mesh.get_group(d).group_name for d in (0, 1))], program)
        inputs, layouts = inputs_by_rank(gm, RANKS), output_layouts(gm)
        before, reference = run_all_ranks(gm, inputs), verify.snapshot(gm.graph)
        view = GraphView(gm.graph)
        found, refused = candidates(view)
        assert len(found) + len(refused) == len(view.collectives)
        deps = Dependencies(view)
        by_key: dict[object, list] = {}
        for candidate in found:
            by_key.setdefault(candidate.key, []).append(candidate.collective)
        buckets: list[list] = []
        for members in by_key.values():
            random.shuffle(members)
            bucket: list = []
            for member in members:
                if deps.conflict(bucket, member) is None:
                    bucket.append(member)
                    deps.merge(bucket)
            if len(bucket) > 1:
                buckets.append(bucket)
        event(f"{len(buckets)} buckets")
        merged = merge(gm.graph, view, buckets, forms=[form] * len(buckets))
        gm.graph.lint()
        gm.recompile()
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        certificates = [verify.Certificate("bucket", m.removed, m.added, claim=verify.Claim.MERGE) for m in merged]
        findings = verify.check(gm.graph, reference=reference, certificates=certificates, group_order="any")
        assert not findings, findings
        assert_same_bits(before, run_all_ranks(gm, inputs))
        assert len(GraphView(gm.graph).collectives) == len(view.collectives) - sum(len(b) - 1 for b in buckets)


@settings(max_examples=60, deadline=None)
@given(steps(), st.randoms(use_true_random=False))
def test_merges_happen_exactly_when_they_are_acyclic(program, random) -> None:
    """The rewrite refuses what data makes dependent and merges what the bit sets call independent.

    A hazard of doing something in place goes away when the operand is packed; the bit sets keep it, to be safe.
    """
    with fake_world(RANKS) as world:
        gm = build([world] * 3, program)
        view = GraphView(gm.graph)
        found, _ = candidates(view)
        by_key: dict[object, list] = {}
        for candidate in found:
            by_key.setdefault(candidate.key, []).append(candidate.collective)
        pools = [members for members in by_key.values() if len(members) > 1]
        random.shuffle(pools)
        deps, groups, legal = Dependencies(view), [], True
        for members in pools[:2]:
            groups.append(random.sample(members, 2))
            legal = legal and deps.independent(groups[-1])
            if legal:
                deps.merge(groups[-1])
        if not groups:
            return
        code, hazards = str(gm.graph), bool(view.ordering_edges())
        try:
            merge(gm.graph, view, groups)
        except MergeError:
            event("refused")
            assert not legal and str(gm.graph) == code
        else:
            event("merged")
            assert legal or hazards
            gm.graph.lint()
