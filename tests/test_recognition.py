"""Every form in which a collective may be written: is it recognised, and does what applies to the plain form apply?

The table: rows are rewrites, each with a program over two tensors; columns are forms. A coalesced collective's members
are rewritten one by one and what is left travels together again.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist

from inductor_passes import _torch
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Verdict
from inductor_passes.rewrites.pass_ import RewriteCollectives
from tests.support import redistribute_programs as programs
from tests.support.redistribute_programs import MESH, Program, rewrite

HAS_WAIT_LISTS = hasattr(torch.ops._c10d_functional, "wait_tensors")
LISTS = pytest.param(
    "wait_list", marks=pytest.mark.skipif(not HAS_WAIT_LISTS, reason="this torch has no wait for a list")
)
FORMS = ("plain", "kwargs", "coalesced", LISTS)
COALESCED = {
    "all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
    "all_reduce": "all_reduce_coalesced",
}


def op(name):
    return _torch.collective_op(name)


def communicate(program, form, name, tensors, *args):
    """The results of one collective per tensor, or of one for all of them."""
    if form in ("plain", "kwargs"):
        starts = []
        for tensor in tensors:
            if form == "plain":
                starts.append(program.call(op(name), tensor, *args))
            else:
                names = [a.name for a in op(name)._schema.arguments]
                given = dict(reversed(list(zip(names, (tensor, *args)))))
                starts.append(program.call(op(name), **given))
    else:
        whole = program.call(op(COALESCED[name]), list(tensors), *args)
        starts = [program.call(operator.getitem, whole, i) for i in range(len(tensors))]
    if form == "wait_list":
        waited = program.call(op("wait_tensors"), starts)
        return [program.call(operator.getitem, waited, i) for i in range(len(tensors))]
    return [program.call(op("wait_tensor"), start) for start in starts]


def nested_gathers(program, form, groups):
    inner = communicate(program, form, "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
    return communicate(program, form, "all_gather_into_tensor", inner, 2, groups[(0,)])


def nested_reductions(program, form, groups):
    inner = communicate(program, form, "all_reduce", program.inputs, "max", groups[(1,)])
    return communicate(program, form, "all_reduce", inner, "max", groups[(0,)])


def nested_scatters(program, form, groups):
    inner = communicate(program, form, "reduce_scatter_tensor", program.inputs, "max", 2, groups[(0,)])
    return communicate(program, form, "reduce_scatter_tensor", inner, "max", 4, groups[(1,)])


def reduced_then_scattered(program, form, groups):
    inner = communicate(program, form, "all_reduce", program.inputs, "max", groups[(0,)])
    return communicate(program, form, "reduce_scatter_tensor", inner, "max", 4, groups[(1,)])


def scattered_then_gathered(program, form, groups):
    inner = communicate(program, form, "reduce_scatter_tensor", program.inputs, "max", 4, groups[(1,)])
    return communicate(program, form, "all_gather_into_tensor", inner, 4, groups[(1,)])


def cast_behind(program, form, groups):
    whole = communicate(program, form, "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
    return [program.call(torch.ops.prims.convert_element_type.default, w, torch.bfloat16) for w in whole]


def gathered_twice(program, form, groups):
    whole = communicate(program, form, "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
    again = communicate(program, form, "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
    return [program.call(torch.ops.aten.add.Tensor, a, b) for a, b in zip(whole, again)]


def equal_already(program, form, groups):
    inner = communicate(program, form, "all_reduce", program.inputs, "max", groups[(1,)])
    return communicate(program, form, "all_reduce", inner, "max", groups[(1,)])


TABLE = [
    # rewrite, program, collectives of the plain form before and after
    ("R1", nested_gathers, 4, 2),
    ("R2", nested_reductions, 4, 2),
    ("R3", nested_scatters, 4, 2),
    ("R4", reduced_then_scattered, 4, 4),
    ("R6", scattered_then_gathered, 4, 2),
    ("R7", cast_behind, 2, 2),
    ("R14", gathered_twice, 4, 2),
    ("R15", equal_already, 4, 2),
]
SHAPES = [(64, 96), (128, 96)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "build", "before", "after"), TABLE, ids=[row[0] for row in TABLE])
def test_what_applies_to_the_plain_form_applies_to_every_form(name, build, before, after, form) -> None:
    together = form in ("coalesced", "wait_list")
    with programs.world() as groups:
        program = Program(*SHAPES)
        results = build(program, form, groups)
        graph = program.output(*results)
        assert len(GraphView(graph).collectives) == (before // 2 if together else before)
        _, text, report = programs.apply(rewrite(name), graph, SHAPES)
        applied = [d for d in report.decisions if d.subject == name and d.verdict is Verdict.APPLIED]
        assert len(applied) == 2
        assert len(GraphView(graph).collectives) == (after // 2 if together else after), text
        assert ("coalesced" in text) == together
        assert {d.subject for d in report.decisions if d.verdict is Verdict.APPLIED} == (
            {name, "coalesced"} if together else {name}
        )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognised(form) -> None:
    with programs.world() as groups:
        program = Program((8, 4), (16, 4))
        gathered = communicate(program, form, "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
        scattered = communicate(program, form, "reduce_scatter_tensor", gathered, "AVG", 4, groups[(1,)])
        results = communicate(program, form, "all_reduce", scattered, "sum", groups[(0,)])
        view = GraphView(program.output(*results))
        found = {}
        for c in view.collectives:
            sizes = found.setdefault((c.kind, c.reduce_op, c.group.ranks), [0, 0, 0])
            sizes[0] += c.input_bytes
            sizes[1] += c.output_bytes
            sizes[2] += len(c.inputs)
            assert c.waits and sum(c.member_bytes) == c.input_bytes
        row, column = MESH.group(0, (1,)), MESH.group(0, (0,))
        assert found == {
            ("all_gather", "", row): [384, 1536, 2],
            ("reduce_scatter", "avg", row): [1536, 384, 2],
            ("all_reduce", "sum", column): [384, 384, 2],
        }


def test_a_coalesced_collective_stays_whole_when_nothing_comes_of_it() -> None:
    with programs.world() as groups:
        program = Program(*SHAPES)
        graph = program.output(*communicate(program, "coalesced", "all_reduce", program.inputs, "sum", groups[(0,)]))
        names = [n.name for n in graph.nodes]
        before, text, report = programs.apply(RewriteCollectives(), graph, SHAPES)
        assert before == text and not report.changed and names == [n.name for n in graph.nodes]


def test_it_stays_whole_when_its_members_gain_less_than_a_message_costs() -> None:
    with programs.world() as groups:
        program = Program((4, 2), (4, 3))
        a, b = communicate(program, "coalesced", "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
        graph = program.output(program.call(torch.ops.prims.convert_element_type.default, a, torch.bfloat16), b)
        before, text, report = programs.apply(RewriteCollectives(), graph, [(4, 2), (4, 3)])
        (decision,) = (d for d in report.decisions if d.subject == "coalesced")
        assert before == text and not report.changed
        assert decision.verdict is Verdict.REFUSED and decision.gain_ns < 0


def test_of_large_tensors_one_member_may_leave_and_the_others_stay_together() -> None:
    shapes = [(8192, 512), (64, 3), (64, 5)]
    with programs.world() as groups:
        program = Program(*shapes)
        a, b, c = communicate(program, "coalesced", "all_gather_into_tensor", program.inputs, 4, groups[(1,)])
        graph = program.output(program.call(torch.ops.prims.convert_element_type.default, a, torch.bfloat16), b, c)
        _, text, _ = programs.apply(RewriteCollectives(), graph, shapes)
        found = {len(c.inputs): c.dtypes[0] for c in GraphView(graph).collectives}
        assert found == {1: torch.bfloat16, 2: torch.float32}, text


def test_a_refusal_of_a_member_is_the_whole_ones() -> None:
    with programs.world() as groups:
        program = Program(*SHAPES)
        inner = communicate(program, "coalesced", "all_reduce", program.inputs, "sum", groups[(1,)])
        graph = program.output(*communicate(program, "coalesced", "all_reduce", inner, "sum", groups[(0,)]))
        wholes = [c.start.name for c in GraphView(graph).collectives]
        _, _, report = programs.apply(RewriteCollectives(), graph, SHAPES)
        (decision,) = (d for d in report.decisions if d.subject == "R2")
        assert decision.node == wholes[1] and decision.setting == 'redistribute="reassociate"'


def test_reduce_ops_as_objects_and_numbers() -> None:
    kinds = dist.ReduceOp
    assert [_torch.reduce_op_name(one) for one in ("SUM", kinds.SUM, kinds.AVG, kinds(kinds.MAX), 0)] == [
        "sum",
        "sum",
        "avg",
        "max",
        "sum",
    ]
    two, three = (dist._make_nccl_premul_sum(factor) for factor in (2.0, 3.0))
    assert _torch.reduce_op_name(two) != _torch.reduce_op_name(three) != "premul_sum"


@pytest.mark.skipif(
    str(op("all_reduce")._schema.arguments[-1].type) == "str", reason="this torch takes groups by name only"
)
def test_groups_as_objects_and_a_graph_for_all_ranks() -> None:
    """A rewrite keeps the node that looks a group up; a flat group has no name that holds on every rank."""
    with programs.world() as groups:
        resolve = dist.distributed_c10d._resolve_process_group
        program = Program((64, 96))
        rows, columns = (program.graph.placeholder(f"group{m}") for m in (1, 0))
        rows.meta["val"], columns.meta["val"] = resolve(groups[(1,)]), resolve(groups[(0,)])
        (x,) = program.inputs
        gather = op("all_gather_into_tensor")
        inner = program.call(op("wait_tensor"), program.call(gather, x, 4, rows))
        outer = program.call(op("wait_tensor"), program.call(gather, inner, 2, columns))
        graph = program.output(program.call(torch.ops.prims.convert_element_type.default, outer, torch.bfloat16))
        view = GraphView(graph)
        assert [c.group.ranks for c in view.collectives] == [MESH.group(0, (1,)), MESH.group(0, (0,))]
        report = programs.run_pass(RewriteCollectives(), graph).report.passes[0]
        said = {(d.subject, d.verdict.value): d for d in report.decisions}
        assert ("R7", "applied") in said and "compiled for all ranks" in said["R1", "refused"].detail
        assert [c.group_argument for c in GraphView(graph).collectives] == [rows, columns]
        assert {c.dtypes[0] for c in GraphView(graph).collectives} == {torch.bfloat16}


COMPLEX = [
    ("R1", lambda p, g: nested_gathers(p, "plain", g), 1),
    ("R2", lambda p, g: nested_all_reduced(p, g), 1),
    ("R14", lambda p, g: gathered_twice(p, "plain", g), 1),
]


def nested_all_reduced(program, groups):
    inner = communicate(program, "plain", "all_reduce", program.inputs, "sum", groups[(1,)])
    return communicate(program, "plain", "all_reduce", inner, "sum", groups[(0,)])


@pytest.mark.parametrize(("name", "build", "count"), COMPLEX, ids=[row[0] for row in COMPLEX])
def test_complex_tensors(name, build, count) -> None:
    with programs.world() as groups:
        program = Program((16, 6), dtype=torch.complex64)
        graph = program.output(*build(program, groups))
        _, text, report = programs.apply(
            RewriteCollectives("reassociate", only=(name,)), graph, [(16, 6)], torch.complex64
        )
        assert [d.verdict for d in report.decisions if d.subject == name] == [Verdict.APPLIED] * count
        assert len(GraphView(graph).collectives) == count, text


def test_a_member_may_be_a_term_twice() -> None:
    """Found by a random program: the certificate named what came of the member twice."""
    with programs.world() as groups:
        program = Program((4, 3), (4, 3))
        a, b = communicate(program, "coalesced", "all_reduce", program.inputs, "sum", groups[(1,)])
        add = torch.ops.aten.add.Tensor
        graph = program.output(program.call(add, a, program.call(add, b, a)))
        shapes = [(4, 3)] * 2
        _, text, report = programs.apply(RewriteCollectives("reassociate", only=("R5",)), graph, shapes)
        assert report.changed and len(GraphView(graph).collectives) == 1, text
