"""Graph rewrites: the graph before and after as text, all ranks in one process before and after, and the verifier."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from redistribute_ranks import simulate, simulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.pipeline import Context, new_report
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import group_name, prepare_groups
from inductor_passes.redistribute.rewrite_r1_nested_gathers import MergeNestedGathers
from inductor_passes.redistribute.rewrite_r2_nested_reductions import MergeNestedReductions
from inductor_passes.redistribute.rewrite_r3_nested_scatters import MergeNestedScatters
from inductor_passes.redistribute.rewrite_r4_scatter_first import ReduceOnShards
from inductor_passes.redistribute.rewrite_r5_added_reductions import AddBeforeReducing
from inductor_passes.redistribute.rewrite_r7_cast_before_gather import CastBeforeGather
from inductor_passes.redistribute.rewrite_r14_duplicate_gathers import ShareGathers
from inductor_passes.redistribute.rewrite_r15_needless_collectives import DropNeedless
from inductor_passes.report import Reason, Verdict

MESH = Mesh((2, 4))


@contextlib.contextmanager
def world():
    with simulated(8):
        prepare_groups(MESH)
        yield {m: group_name(MESH, m) for m in ((0,), (1,), (0, 1))}


class Program:
    """A graph under construction."""

    def __init__(self, *shapes, dtype=torch.float32):
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs = []
        for i, shape in enumerate(shapes):
            node = self.graph.placeholder(f"x{i}")
            with _disable_current_modes(), self.mode:
                node.meta["val"] = torch.empty(shape, dtype=dtype)
            self.inputs.append(node)

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _disable_current_modes(), self.mode:
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def collective(self, name, *args):
        return self.call(_torch.collective_op("wait_tensor"), self.call(_torch.collective_op(name), *args))

    def output(self, *nodes):
        self.graph.output(nodes)
        return self.graph


def text(graph):
    """One line: ops in order with their inputs, collectives with the size of their group."""
    words = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = str(node.target).split(".")[1]
        if name == "wait_tensor":
            continue
        groups = [a for a in node.args if isinstance(a, str) and a.isdigit()]
        ranks = [len(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(g))) for g in groups]
        words.append(name + (f"[{ranks[0]}]" if ranks else ""))
    return " ".join(words)


def run_on_all_ranks(graph, shapes, dtype=torch.float32):
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(1)
        values = [
            {r: torch.randint(-4, 5, shape, generator=generator).to(dtype) for r in range(8)} for shape in shapes
        ]
    outputs = torch.fx.GraphModule(torch.nn.Module(), graph)(*(simulate(v) for v in values))
    return [dict(o._local_tensors) for o in outputs]


def apply(pass_, graph, shapes, dtype=torch.float32):
    """Text before and after, the report; results are equal on all ranks and the verifier is content."""
    with _disable_current_modes():
        config, profile = PassConfig(), CostProfile.default("cuda", 8)
        before = text(graph)
        reference = verify.snapshot(graph)
    wanted = run_on_all_ranks(graph, shapes, dtype)
    with _disable_current_modes():
        context = Context(config, profile, new_report(graph, True, config, profile), False)
        report = pass_.run(graph, context)
        graph.lint()
        findings = verify.check(
            graph, reference=reference, certificates=context.certificates, group_order=pass_.group_order
        )
        assert not findings, findings
    got = run_on_all_ranks(graph, shapes, dtype)
    for a, b in zip(wanted, got):
        assert all(torch.equal(a[r], b[r]) and a[r].dtype == b[r].dtype for r in a)
    return before, text(graph), report


def nested(name, order, groups, *, op=None, dtype=torch.float32, size=16):
    program = Program((size, 3), dtype=dtype)
    node = program.inputs[0]
    for m in order:
        extra = () if op is None else (op,)
        if name != "all_reduce":
            extra += (MESH.shape[m],)
        node = program.collective(name, node, *extra, groups[(m,)])
    return program.output(node)


class Rewrites(TestCase):
    def check(self, pass_, graph, shapes, expected, dtype=torch.float32):
        before, after, report = apply(pass_, graph, shapes, dtype)
        self.assertExpectedInline(f"{before}\n{after}", expected)
        return report

    def test_r1(self):
        with world() as groups:
            report = self.check(
                MergeNestedGathers(),
                nested("all_gather_into_tensor", (1, 0), groups),
                [(16, 3)],
                """\
all_gather_into_tensor[4] all_gather_into_tensor[2]
all_gather_into_tensor[8]""",
            )
            assert [d.verdict for d in report.decisions] == [Verdict.APPLIED]

    def test_r1_other_way_round(self):
        with world() as groups:
            self.check(
                MergeNestedGathers(),
                nested("all_gather_into_tensor", (0, 1), groups),
                [(16, 3)],
                """\
all_gather_into_tensor[2] all_gather_into_tensor[4]
all_gather_into_tensor[8] view permute clone view""",
            )

    def test_r2(self):
        with world() as groups:
            self.check(
                MergeNestedReductions("reassociate"),
                nested("all_reduce", (0, 1), groups, op="sum"),
                [(16, 3)],
                """\
all_reduce[2] all_reduce[4]
all_reduce[8]""",
            )
            self.check(
                MergeNestedReductions(),
                nested("all_reduce", (1, 0), groups, op="max"),
                [(16, 3)],
                """\
all_reduce[4] all_reduce[2]
all_reduce[8]""",
            )

    def test_r3(self):
        with world() as groups:
            self.check(
                MergeNestedScatters("reassociate"),
                nested("reduce_scatter_tensor", (0, 1), groups, op="sum"),
                [(16, 3)],
                """\
reduce_scatter_tensor[2] reduce_scatter_tensor[4]
reduce_scatter_tensor[8]""",
            )
            self.check(
                MergeNestedScatters("reassociate"),
                nested("reduce_scatter_tensor", (1, 0), groups, op="avg"),
                [(16, 3)],
                """\
reduce_scatter_tensor[4] reduce_scatter_tensor[2]
view permute clone view reduce_scatter_tensor[8]""",
            )

    def test_r4(self):
        with world() as groups:
            program = Program((16, 3))
            whole = program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
            shard = program.collective("reduce_scatter_tensor", whole, "sum", 4, groups[(1,)])
            report = self.check(
                ReduceOnShards("reassociate"),
                program.output(shard),
                [(16, 3)],
                """\
all_reduce[2] reduce_scatter_tensor[4]
reduce_scatter_tensor[4] all_reduce[2]""",
            )
            assert report.decisions[0].detail == "192 to 48 bytes reduced"
            program = Program((4, 3))
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            total = program.collective("all_reduce", whole, "avg", groups[(0,)])
            self.check(
                ReduceOnShards("reassociate"),
                program.output(total),
                [(4, 3)],
                """\
all_gather_into_tensor[4] all_reduce[2]
all_reduce[2] all_gather_into_tensor[4]""",
            )
            program = Program((4, 3))
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            graph = program.output(program.collective("all_reduce", whole, "sum", groups[(1,)]))
            assert refusals(ReduceOnShards("reassociate"), graph, [(4, 3)]) == [Reason.DIFFERENT_GROUP]

    def test_r5(self):
        with world() as groups:
            program = Program((8, 6), (8, 6), (8, 6))
            sides = [program.collective("all_reduce", x, "sum", groups[(1,)]) for x in program.inputs]
            sides = [program.call(torch.ops.aten.view.default, s, [4, 12]) for s in sides]
            total = program.call(torch.ops.aten.add.Tensor, sides[0], sides[1])
            total = program.call(torch.ops.aten.add.Tensor, total, sides[2])
            graph = program.output(total)
            self.check(
                AddBeforeReducing("reassociate"),
                graph,
                [(8, 6)] * 3,
                """\
all_reduce[4] all_reduce[4] all_reduce[4] view view view add add
add add all_reduce[4] view""",
            )

    def test_r7(self):
        with world() as groups:
            program = Program((4, 6))
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            narrow = program.call(torch.ops.prims.convert_element_type.default, whole, torch.bfloat16)
            report = self.check(
                CastBeforeGather(),
                program.output(narrow),
                [(4, 6)],
                """\
all_gather_into_tensor[4] convert_element_type
convert_element_type all_gather_into_tensor[4]""",
            )
            assert report.decisions[0].detail == "torch.float32 to torch.bfloat16"

    def test_r14(self):
        with world() as groups:
            program = Program((4, 6))
            gathers = [
                program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)]) for _ in range(2)
            ]
            negated = program.call(torch.ops.aten.neg.default, gathers[1])
            self.check(
                ShareGathers(),
                program.output(gathers[0], negated),
                [(4, 6)],
                """\
all_gather_into_tensor[4] all_gather_into_tensor[4] neg
all_gather_into_tensor[4] neg""",
            )

    def test_r15(self):
        with world() as groups:
            program = Program((4, 6))
            program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
            once = program.collective("all_reduce", program.inputs[0], "max", groups[(1,)])
            twice = program.collective("all_reduce", once, "max", groups[(1,)])
            self.check(
                DropNeedless(),
                program.output(twice),
                [(4, 6)],
                """\
all_reduce[2] all_reduce[4] all_reduce[4]
all_reduce[4]""",
            )


def refusals(pass_, graph, shapes, dtype=torch.float32):
    before, after, report = apply(pass_, graph, shapes, dtype)
    assert before == after and not report.changed
    return [d.reason for d in report.decisions]


def test_three_levels_become_one():
    mesh = Mesh((2, 2, 2))
    with simulated(8):
        prepare_groups(mesh)
        names = [group_name(mesh, (m,)) for m in range(3)]
        for pass_, op, extra in [
            (MergeNestedGathers(), "all_gather_into_tensor", (2,)),
            (MergeNestedReductions("reassociate"), "all_reduce", ("sum",)),
            (MergeNestedScatters("reassociate"), "reduce_scatter_tensor", ("sum", 2)),
        ]:
            program = Program((16, 3))
            node = program.inputs[0]
            for m in (2, 1, 0) if op.startswith("all_gather") else (0, 1, 2):
                node = program.collective(op, node, *extra, names[m])
            _, after, report = apply(pass_, program.output(node), [(16, 3)])
            assert after == f"{op}[8]"
            assert [d.verdict for d in report.decisions] == [Verdict.APPLIED] * 2


def test_the_exact_tier_leaves_rounding_sums_alone_but_merges_integers():
    with world() as groups:
        graph = nested("all_reduce", (0, 1), groups, op="sum")
        assert refusals(MergeNestedReductions(), graph, [(16, 3)]) == [Reason.NUMERICS]
        graph = nested("reduce_scatter_tensor", (0, 1), groups, op="sum")
        assert refusals(MergeNestedScatters(), graph, [(16, 3)]) == [Reason.NUMERICS]
        graph = nested("all_reduce", (0, 1), groups, op="sum", dtype=torch.int64)
        _, after, _ = apply(MergeNestedReductions(), graph, [(16, 3)], torch.int64)
        assert after == "all_reduce[8]"


def test_refusals_are_decisions():
    with world() as groups:
        program = Program((16, 3))
        inner = program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
        outer = program.collective("all_reduce", inner, "max", groups[(1,)])
        graph = program.output(outer)
        assert refusals(MergeNestedReductions("reassociate"), graph, [(16, 3)]) == [Reason.MIXED_REDUCE_OP]

        program = Program((16, 3))
        inner = program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
        outer = program.collective("all_reduce", inner, "sum", groups[(1,)])
        graph = program.output(outer, program.call(torch.ops.aten.neg.default, inner))
        assert refusals(MergeNestedReductions("reassociate"), graph, [(16, 3)]) == [Reason.DATA_DEPENDENCY]

        program = Program((4, 6), dtype=torch.bfloat16)
        whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        wide = program.call(torch.ops.prims.convert_element_type.default, whole, torch.float32)
        assert refusals(CastBeforeGather(), program.output(wide), [(4, 6)], torch.bfloat16) == [Reason.NOT_PROFITABLE]

        program = Program((4, 6))
        first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        program.call(torch.ops.aten.add_.Tensor, first, 1)
        second = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        graph = program.output(program.call(torch.ops.aten.add.Tensor, first, second))
        assert refusals(ShareGathers(), graph, [(4, 6)]) == [Reason.DATA_DEPENDENCY]

        graph = nested("all_gather_into_tensor", (1, 0), groups)
        assert refusals(MergeNestedGathers("off"), graph, [(16, 3)]) == [Reason.DISABLED]


def test_a_missing_flat_group_is_named():
    with simulated(8):
        plain = Mesh((2, 2, 2))
        prepare_groups(plain, [(0,), (2,)])
        program = Program((16, 3))
        inner = program.collective("all_gather_into_tensor", program.inputs[0], 2, group_name(plain, (2,)))
        outer = program.collective("all_gather_into_tensor", inner, 2, group_name(plain, (0,)))
        assert refusals(MergeNestedGathers(), program.output(outer), [(16, 3)]) == [Reason.DIFFERENT_GROUP]


def test_bad_tier_is_named():
    with pytest.raises(ValueError, match='"exact", "reassociate" or "off"'):
        MergeNestedReductions("fast")
