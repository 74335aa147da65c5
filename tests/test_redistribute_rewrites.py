"""Graph rewrites: the graph before and after as text, all ranks in one process before and after, and the verifier."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import TestCase

from inductor_passes import _torch
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import group_name, prepare_groups
from inductor_passes.report import Reason, Verdict
from inductor_passes.rewrites.pass_ import RewriteCollectives
from tests.support.redistribute_programs import MESH, Program, apply, nested, rewrite, settings_for, world
from tests.support.world import simulated


class Rewrites(TestCase):
    def check(self, pass_, graph, shapes, expected, dtype=torch.float32):
        before, after, report = apply(pass_, graph, shapes, dtype)
        self.assertExpectedInline(f"{before}\n{after}", expected)
        return report

    def test_r0(self):
        """Waits that torch 2.15 leaves behind when it merges gathers."""
        with world() as groups:
            program = Program((4, 6))
            first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            again = program.call(first.target, first.args[0])
            graph = program.output(program.call(torch.ops.aten.add.Tensor, first, again))
            report = self.check(
                rewrite("R0"),
                graph,
                [(4, 6)],
                """\
all_gather_into_tensor[4] add
all_gather_into_tensor[4] add""",
            )
            assert [d.detail for d in report.decisions] == ["2 waits for one result"]
            assert [n.target for n in graph.nodes].count(first.target) == 1

    def test_r0_waits_for_what_was_waited_for(self):
        """Found: ``wait_tensor(all_gather_tensor(x))`` of a program, whose gather waits by itself, kept rewrites off.

        A wait for an input stays: a graph before may have begun what it is for.
        """
        moves = [], [(torch.ops.aten.view.default, [2, 48])], [(torch.ops.aten.split.Tensor, 2)]
        with world() as groups:
            for steps in moves:
                program = Program((4, 6))
                first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
                whole = first
                for target, *args in steps:
                    whole = program.call(target, whole, *args)
                if isinstance(whole.meta["val"], (list, tuple)):
                    pieces = [program.call(operator.getitem, whole, k) for k in range(len(whole.meta["val"]))]
                    whole = program.call(torch.ops.aten.cat.default, pieces, 1)
                again = program.call(first.target, whole)
                narrow = program.call(torch.ops.prims.convert_element_type.default, again, torch.bfloat16)
                rewritten = apply(RewriteCollectives("exact", only=("R0", "R7")), program.output(narrow), [(4, 6)])
                assert [d.subject for d in rewritten[2].decisions] == ["R0", "R7"]
            program = Program((4, 6))
            graph = program.output(program.call(first.target, program.inputs[0]))
            assert not run_passes(graph, [rewrite("R0")], *settings_for()).report.passes[0].decisions

    def test_r0_makes_way_for_others(self):
        with world() as groups:
            program = Program((4, 6))
            first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            again = program.call(first.target, first.args[0])
            del again
            narrow = program.call(torch.ops.prims.convert_element_type.default, first, torch.bfloat16)
            self.check(
                RewriteCollectives("exact", only=("R0", "R7")),
                program.output(narrow),
                [(4, 6)],
                """\
all_gather_into_tensor[4] convert_element_type
convert_element_type all_gather_into_tensor[4]""",
            )

    def test_r0_leaves_what_is_written_to(self):
        with world() as groups:
            program = Program((4, 6))
            first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            again = program.call(first.target, first.args[0])
            program.call(torch.ops.aten.add_.Tensor, first, 1)
            graph = program.output(program.call(torch.ops.aten.neg.default, again))
            assert refusals(rewrite("R0"), graph, [(4, 6)]) == [Reason.DATA_DEPENDENCY]

    def test_r1(self):
        with world() as groups:
            report = self.check(
                rewrite("R1"),
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
                rewrite("R1"),
                nested("all_gather_into_tensor", (0, 1), groups),
                [(16, 3)],
                """\
all_gather_into_tensor[2] all_gather_into_tensor[4]
all_gather_into_tensor[8] view permute clone view""",
            )

    def test_r2(self):
        with world() as groups:
            self.check(
                rewrite("R2", "reassociate"),
                nested("all_reduce", (0, 1), groups, op="sum"),
                [(16, 3)],
                """\
all_reduce[2] all_reduce[4]
all_reduce[8]""",
            )
            self.check(
                rewrite("R2"),
                nested("all_reduce", (1, 0), groups, op="max"),
                [(16, 3)],
                """\
all_reduce[4] all_reduce[2]
all_reduce[8]""",
            )

    def test_r2_leaves_what_another_collective_is_reading(self):
        """The merged all_reduce would be the last to use ``x``: Inductor could do it in place, under the reader."""
        with world() as groups:
            program = Program((16, 3))
            (x,) = program.inputs
            reading = program.call(_torch.collective_op("all_reduce"), x, "max", groups[(1,)])
            first = program.collective("all_reduce", x, "sum", groups[(0,)])
            second = program.collective("all_reduce", first, "sum", groups[(1,)])
            read = program.call(_torch.collective_op("wait_tensor"), reading)
            report = self.check(
                rewrite("R2", "reassociate"),
                program.output(second, read),
                [(16, 3)],
                """\
all_reduce[4] all_reduce[2] all_reduce[4]
all_reduce[4] all_reduce[2] all_reduce[4]""",
            )
            assert [d.reason for d in report.decisions] == [Reason.DATA_DEPENDENCY]

    def test_r3(self):
        with world() as groups:
            self.check(
                rewrite("R3", "reassociate"),
                nested("reduce_scatter_tensor", (0, 1), groups, op="sum"),
                [(16, 3)],
                """\
reduce_scatter_tensor[2] reduce_scatter_tensor[4]
reduce_scatter_tensor[8]""",
            )
            self.check(
                rewrite("R3", "reassociate"),
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
                rewrite("R4", "reassociate"),
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
                rewrite("R4", "reassociate"),
                program.output(total),
                [(4, 3)],
                """\
all_gather_into_tensor[4] all_reduce[2]
all_reduce[2] all_gather_into_tensor[4]""",
            )
            program = Program((4, 3))
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            graph = program.output(program.collective("all_reduce", whole, "sum", groups[(1,)]))
            assert refusals(rewrite("R4", "reassociate"), graph, [(4, 3)]) == [Reason.DIFFERENT_GROUP]

    def test_r5(self):
        with world() as groups:
            program = Program((8, 6), (8, 6), (8, 6))
            sides = [program.collective("all_reduce", x, "sum", groups[(1,)]) for x in program.inputs]
            sides = [program.call(torch.ops.aten.view.default, s, [4, 12]) for s in sides]
            total = program.call(torch.ops.aten.add.Tensor, sides[0], sides[1])
            total = program.call(torch.ops.aten.add.Tensor, total, sides[2])
            graph = program.output(total)
            self.check(
                rewrite("R5", "reassociate"),
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
                rewrite("R7"),
                program.output(narrow),
                [(4, 6)],
                """\
all_gather_into_tensor[4] convert_element_type
convert_element_type all_gather_into_tensor[4]""",
            )
            assert report.decisions[0].detail == "torch.float32 to torch.bfloat16"

    def test_r7_scaled(self):
        """A scale that an all_reduce made, a clamp and an fp8 type move with the cast."""
        with world() as groups:
            program = Program((4, 6), (4, 6))
            peak = program.collective("all_reduce", program.inputs[1], "max", groups[(1,)])
            scale = program.call(torch.ops.aten.amax.default, peak)
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            scaled = program.call(torch.ops.aten.mul.Tensor, whole, scale)
            limited = program.call(torch.ops.aten.clamp.default, scaled, -448.0, 448.0)
            narrow = program.call(torch.ops.prims.convert_element_type.default, limited, torch.float8_e4m3fn)
            back = program.call(torch.ops.prims.convert_element_type.default, narrow, torch.float32)
            report = self.check(
                rewrite("R7"),
                program.output(back),
                [(4, 6)] * 2,
                """\
all_reduce[4] amax all_gather_into_tensor[4] mul clamp convert_element_type convert_element_type
all_reduce[4] amax mul clamp convert_element_type view all_gather_into_tensor[4] view convert_element_type""",
            )
            assert report.decisions[0].detail == "torch.float32 to torch.float8_e4m3fn"

    def test_r7_does_not_scale_by_what_may_differ(self):
        with world() as groups:
            program = Program((4, 6), (4, 6))
            scale = program.call(torch.ops.aten.amax.default, program.inputs[1])
            whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
            scaled = program.call(torch.ops.aten.mul.Tensor, whole, scale)
            narrow = program.call(torch.ops.prims.convert_element_type.default, scaled, torch.bfloat16)
            assert refusals(rewrite("R7"), program.output(narrow), [(4, 6)] * 2) == [Reason.DATA_DEPENDENCY]

    def test_r7_does_not_scale_by_numbers_that_were_not_compared(self):
        """In a variant that one rank alone may have another number may be written down."""
        cast, mul = torch.ops.prims.convert_element_type.default, torch.ops.aten.mul.Tensor
        with world() as groups:
            for scaled, compared in ((True, True), (True, False), (False, False)):
                program = Program((4, 6))
                whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
                whole = program.call(mul, whole, 0.25) if scaled else whole
                graph = program.output(program.call(cast, whole, torch.bfloat16))
                known = Known("inference", compared=compared)
                report = run_passes(graph, [rewrite("R7")], *settings_for(), known=known).report.passes[0]
                assert report.changed == (compared or not scaled)

    def test_r7_leaves_the_rounding_to_the_gather(self):
        """Inductor keeps 16 bits in float32 inside of a kernel: what is sent is rounded, what is cast there is not."""
        cast = torch.ops.prims.convert_element_type.default

        def graph(dtype, computed, *steps):
            program = Program((4, 6), dtype=dtype)
            x = program.call(torch.ops.aten.mul.Tensor, program.inputs[0], 0.37) if computed else program.inputs[0]
            x = program.collective("all_gather_into_tensor", x, 4, groups[(1,)])
            for target, *args in steps:
                x = program.call(target, x, *args)
            return program.output(program.call(cast, x, torch.float32) if x.meta["val"].itemsize == 1 else x)

        low, e4m3, scale = torch.bfloat16, (cast, torch.float8_e4m3fn), (torch.ops.aten.mul.Tensor, 0.5)
        with world() as groups:
            for dtype, steps in ((low, [e4m3]), (low, [scale, e4m3]), (torch.float32, [scale, (cast, low)])):
                for computed in (False, True):
                    gm = graph(dtype, computed, *steps)
                    _, _, report = apply(rewrite("R7"), gm, [(4, 6)], dtype)
                    assert report.changed != computed, (dtype, steps)
                    assert not computed or [d.reason for d in report.decisions] == [Reason.NUMERICS]
            gm = graph(torch.float32, True, (cast, low))
            assert apply(rewrite("R7"), gm, [(4, 6)], torch.float32)[2].changed

    def test_r14(self):
        with world() as groups:
            program = Program((4, 6))
            gathers = [
                program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)]) for _ in range(2)
            ]
            negated = program.call(torch.ops.aten.neg.default, gathers[1])
            self.check(
                rewrite("R14"),
                program.output(gathers[0], negated),
                [(4, 6)],
                """\
all_gather_into_tensor[4] all_gather_into_tensor[4] neg
all_gather_into_tensor[4] neg""",
            )

    def test_r14_of_what_is_padded_twice(self):
        """A rank with a smaller shard pads it for every gather; the others, who pad nothing, share one."""
        with world() as groups:
            program, gather = Program((3, 6)), "constant_pad_nd all_gather_into_tensor[4]"
            gathers = []
            for _ in range(2):
                padded = program.call(torch.ops.aten.constant_pad_nd.default, program.inputs[0], [0, 0, 0, 1], 0.0)
                gathers.append(program.collective("all_gather_into_tensor", padded, 4, groups[(1,)]))
            negated = program.call(torch.ops.aten.neg.default, gathers[1])
            other = program.call(torch.ops.aten.constant_pad_nd.default, program.inputs[0], [0, 0, 1, 0], 0.0)
            apart = program.collective("all_gather_into_tensor", other, 4, groups[(1,)])
            self.check(
                rewrite("R14"),
                program.output(gathers[0], negated, apart),
                [(3, 6)],
                f"""\
{gather} {gather} neg {gather}
{gather} neg {gather}""",
            )

    def test_r15(self):
        with world() as groups:
            program = Program((4, 6))
            program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
            once = program.collective("all_reduce", program.inputs[0], "max", groups[(1,)])
            twice = program.collective("all_reduce", once, "max", groups[(1,)])
            self.check(
                rewrite("R15"),
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
            (rewrite("R1"), "all_gather_into_tensor", (2,)),
            (rewrite("R2", "reassociate"), "all_reduce", ("sum",)),
            (rewrite("R3", "reassociate"), "reduce_scatter_tensor", ("sum", 2)),
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
        assert refusals(rewrite("R2"), graph, [(16, 3)]) == [Reason.NUMERICS]
        graph = nested("reduce_scatter_tensor", (0, 1), groups, op="sum")
        assert refusals(rewrite("R3"), graph, [(16, 3)]) == [Reason.NUMERICS]
        graph = nested("all_reduce", (0, 1), groups, op="sum", dtype=torch.int64)
        _, after, _ = apply(rewrite("R2"), graph, [(16, 3)], torch.int64)
        assert after == "all_reduce[8]"


def test_refusals_are_decisions():
    with world() as groups:
        program = Program((16, 3))
        inner = program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
        outer = program.collective("all_reduce", inner, "max", groups[(1,)])
        graph = program.output(outer)
        assert refusals(rewrite("R2", "reassociate"), graph, [(16, 3)]) == [Reason.MIXED_REDUCE_OP]

        program = Program((16, 3))
        inner = program.collective("all_reduce", program.inputs[0], "sum", groups[(0,)])
        outer = program.collective("all_reduce", inner, "sum", groups[(1,)])
        graph = program.output(outer, program.call(torch.ops.aten.neg.default, inner))
        assert refusals(rewrite("R2", "reassociate"), graph, [(16, 3)]) == [Reason.DATA_DEPENDENCY]

        program = Program((4, 6), dtype=torch.bfloat16)
        whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        wide = program.call(torch.ops.prims.convert_element_type.default, whole, torch.float32)
        assert refusals(rewrite("R7"), program.output(wide), [(4, 6)], torch.bfloat16) == [Reason.NOT_PROFITABLE]

        program = Program((4, 6))
        first = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        program.call(torch.ops.aten.add_.Tensor, first, 1)
        second = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        graph = program.output(program.call(torch.ops.aten.add.Tensor, first, second))
        assert refusals(rewrite("R14"), graph, [(4, 6)]) == [Reason.DATA_DEPENDENCY]

        graph = nested("all_gather_into_tensor", (1, 0), groups)
        assert refusals(rewrite("R1", "off"), graph, [(16, 3)]) == [Reason.DISABLED]


_GATHER, _REDUCE, _SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"


@pytest.mark.parametrize(
    ("name", "inner", "outer", "meshes"),
    [
        ("R1", _GATHER, _GATHER, (1, 0)),
        ("R1", _GATHER, _GATHER, (0, 1)),
        ("R2", _REDUCE, _REDUCE, (0, 1)),
        ("R3", _SCATTER, _SCATTER, (0, 1)),
        ("R3", _SCATTER, _SCATTER, (1, 0)),
        ("R4", _REDUCE, _SCATTER, (0, 1)),
        ("R4", _GATHER, _REDUCE, (1, 0)),
    ],
)
def test_a_result_that_is_written_to_stays(name, inner, outer, meshes):
    """The verifier takes a write for the same one only where it is to the same node."""
    with world() as groups:
        program = Program((16, 3))
        result = program.inputs[0]
        for kind, mesh in zip((inner, outer), meshes):
            given = {_GATHER: (), _REDUCE: ("sum",), _SCATTER: ("sum",)}[kind]
            given += () if kind == _REDUCE else (MESH.shape[mesh],)
            result = program.collective(kind, result, *given, groups[(mesh,)])
        program.call(torch.ops.aten.mul_.Tensor, result, 2)
        assert refusals(rewrite(name, "reassociate"), program.output(result), [(16, 3)]) == [Reason.DATA_DEPENDENCY]


def test_a_sum_of_reductions_that_is_written_to_stays():
    with world() as groups:
        program = Program((8, 6), (8, 6))
        sides = [program.collective("all_reduce", x, "sum", groups[(1,)]) for x in program.inputs]
        total = program.call(torch.ops.aten.add.Tensor, *sides)
        program.call(torch.ops.aten.mul_.Tensor, total, 2)
        graph = program.output(total)
        assert Reason.DATA_DEPENDENCY in refusals(rewrite("R5", "reassociate"), graph, [(8, 6)] * 2)


@pytest.mark.parametrize("wide_first", [False, True])
def test_a_cast_result_that_is_written_to_stays(wide_first):
    cast = torch.ops.prims.convert_element_type.default
    with world() as groups:
        program = Program((8, 6), dtype=torch.bfloat16 if wide_first else torch.float32)
        x = program.inputs[0]
        if wide_first:
            x = program.call(cast, x, torch.float32)
        x = program.collective(_GATHER, x, MESH.shape[1], groups[(1,)])
        if not wide_first:
            x = program.call(cast, x, torch.bfloat16)
        program.call(torch.ops.aten.mul_.Tensor, x, 2)
        dtype = torch.bfloat16 if wide_first else torch.float32
        assert refusals(rewrite("R7"), program.output(x), [(8, 6)], dtype) == [Reason.DATA_DEPENDENCY]


def test_a_missing_flat_group_is_named():
    with simulated(8):
        plain = Mesh((2, 2, 2))
        prepare_groups(plain, [(0,), (2,)])
        program = Program((16, 3))
        inner = program.collective("all_gather_into_tensor", program.inputs[0], 2, group_name(plain, (2,)))
        outer = program.collective("all_gather_into_tensor", inner, 2, group_name(plain, (0,)))
        assert refusals(rewrite("R1"), program.output(outer), [(16, 3)]) == [Reason.DIFFERENT_GROUP]


def test_bad_tier_is_named():
    with pytest.raises(ValueError, match='"exact", "reassociate" or "off"'):
        rewrite("R2", "fast")
    with pytest.raises(ValueError, match="no rewrite 'R99'; expected some of R0"):
        rewrite("R99")
