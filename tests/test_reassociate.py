"""Sums of reductions: pieces, casts, XLA's tests of all-reduce-reassociate, and forged graphs that are refused.

docs/peer_tests.md says which of XLA's tests is which. Values are small whole numbers, so results are equal to the bit
in any order of additions; they are compared on all ranks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx

from inductor_passes import _torch, verify
from inductor_passes.report import Finding, Reason
from inductor_passes.rewrites.pass_ import RewriteCollectives
from tests.support.redistribute_programs import Program, apply, rewrite, run_pass, world
from tests.support.value_forgeries import Rewritten

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
Groups = dict[tuple[int, ...], str]
Build = Callable[[Program, Groups], torch.fx.Node]
Forgery = Callable[[Rewritten, Groups], None]
SHAPE = (8, 6)


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with world() as found:
        yield found


def program(count: int, dtype: torch.dtype = torch.float32) -> Program:
    return Program(*[SHAPE] * count, dtype=dtype)


def add(p: Program, *terms: torch.fx.Node) -> torch.fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = p.call(aten.add.Tensor, total, term)
    return total


def reduced(p: Program, group: str, op: str = "sum") -> list[torch.fx.Node]:
    return [p.collective("all_reduce", x, op, group) for x in p.inputs]


def after(graph: torch.fx.Graph, count: int, dtype: torch.dtype = torch.float32) -> str:
    return apply(rewrite("R5", "reassociate"), graph, [SHAPE] * count, dtype)[1]


def refused(graph: torch.fx.Graph, count: int, dtype: torch.dtype = torch.float32) -> list[Reason | None]:
    before, text, report = apply(rewrite("R5", "reassociate"), graph, [SHAPE] * count, dtype)
    assert before == text
    return [d.reason for d in report.decisions]


# -- XLA's tests -------------------------------------------------------------------------------------------------------


def test_a_chain_and_a_tree(groups: Groups) -> None:
    p = program(4)
    assert after(p.output(add(p, *reduced(p, groups[(1,)]))), 4) == "add add add all_reduce[4]"
    p = program(4)
    a, b, c, d = reduced(p, groups[(1,)])
    assert after(p.output(add(p, add(p, a, b), add(p, c, d))), 4) == "add add add all_reduce[4]"


@pytest.mark.parametrize(("ops", "reason"), [
    (("sum", "max"), Reason.DIFFERENT_GROUP), (("max", "max"), Reason.MIXED_REDUCE_OP),
    (("avg", "sum"), Reason.DIFFERENT_GROUP), (("min", "min"), Reason.MIXED_REDUCE_OP),
])  # fmt: skip
def test_operations_that_do_not_fit(groups: Groups, ops: tuple[str, str], reason: Reason) -> None:
    p = program(2)
    sides = [p.collective("all_reduce", x, op, groups[(1,)]) for x, op in zip(p.inputs, ops)]
    assert reason in refused(p.output(add(p, *sides)), 2)


def test_groups_that_differ(groups: Groups) -> None:
    p = program(2)
    sides = [p.collective("all_reduce", x, "sum", groups[g]) for x, g in zip(p.inputs, ((0,), (1,)))]
    assert refused(p.output(add(p, *sides)), 2) == [Reason.DIFFERENT_GROUP] * 2


def test_other_readers(groups: Groups) -> None:
    p = program(2)
    sides = reduced(p, groups[(1,)])
    assert Reason.DATA_DEPENDENCY in refused(p.output(sides[0], add(p, *sides)), 2)


def test_added_to_itself(groups: Groups) -> None:
    """One reduction stays one; beside another one both become one."""
    p = program(1)
    (side,) = reduced(p, groups[(1,)])
    assert refused(p.output(add(p, side, side)), 1) == []
    p = program(2)
    a, b = reduced(p, groups[(1,)])
    assert after(p.output(add(p, add(p, a, a), b)), 2) == "add add all_reduce[4]"


@pytest.mark.parametrize(("value", "size", "merges"), [(0.0, 4, True), (-1.0, 4, False), (0.0, 9, True)])
def test_padded(groups: Groups, value: float, size: int, merges: bool) -> None:
    """XLA pads in front of the reduction and gives up where that sends more; here the padding stays behind it."""
    p = program(2)
    sides = [p.call(aten.constant_pad_nd.default, s, [0, size], value) for s in reduced(p, groups[(1,)])]
    graph = p.output(add(p, *sides))
    if merges:
        assert after(graph, 2) == "add all_reduce[4] constant_pad_nd"
    else:
        assert refused(graph, 2) == []


def test_reshaped(groups: Groups) -> None:
    p = program(2)
    sides = [p.call(aten.view.default, s, [48]) for s in reduced(p, groups[(1,)])]
    assert after(p.output(add(p, *sides)), 2) == "add all_reduce[4] view"


_PIECES: dict[str, Callable[[Program, torch.fx.Node], torch.fx.Node]] = {
    "slice": lambda p, x: p.call(aten.slice.Tensor, x, 0, 2, 6),
    "strided": lambda p, x: p.call(aten.slice.Tensor, x, 1, 1, 6, 2),
    "select": lambda p, x: p.call(aten.select.int, x, 1, 3),
    "narrow": lambda p, x: p.call(aten.narrow.default, x, 0, 4, 3),
    "split": lambda p, x: p.call(operator.getitem, p.call(aten.split.Tensor, x, 4), 1),
    "nested": lambda p, x: p.call(aten.select.int, p.call(aten.slice.Tensor, x, 0, 2, 6), 0, 1),
    "viewed": lambda p, x: p.call(aten.slice.Tensor, p.call(aten.permute.default, x, [1, 0]), 0, 1, 3),
}


@pytest.mark.parametrize("piece", _PIECES)
def test_a_piece_of_each(groups: Groups, piece: str) -> None:
    p = program(3)
    sides = [_PIECES[piece](p, s) for s in reduced(p, groups[(1,)])]
    text = after(p.output(add(p, *sides)), 3)
    assert text.startswith("add add all_reduce[4] ") and text.count("all_reduce") == 1


def test_different_pieces(groups: Groups) -> None:
    """Another place, or the same place of a tensor of another shape: the two that fit become one."""
    p = program(3)
    a, b, c = reduced(p, groups[(1,)])
    first = [p.call(aten.slice.Tensor, s, 0, 0, 4) for s in (a, b)]
    other = p.call(aten.slice.Tensor, c, 0, 4, 8)
    assert after(p.output(add(p, *first, other)), 3) == "all_reduce[4] slice add all_reduce[4] slice add"
    p = program(2)
    a, b = reduced(p, groups[(1,)])
    apart = p.call(aten.slice.Tensor, a, 0, 0, 4), p.call(aten.slice.Tensor, b, 0, 4, 8)
    assert Reason.DATA_DEPENDENCY in refused(p.output(add(p, *apart)), 2)


@pytest.mark.parametrize(("narrow", "wide"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                              (torch.float32, torch.float64)])  # fmt: skip
def test_widened_before_they_are_added(groups: Groups, narrow: torch.dtype, wide: torch.dtype) -> None:
    p = program(4, narrow)
    sides = [p.call(cast, s, wide) for s in reduced(p, groups[(1,)])]
    graph = p.output(p.call(cast, add(p, *sides), narrow))
    text = after(graph, 4, narrow)
    casts = " ".join(["convert_element_type"] * 2)
    assert text == f"{casts} add convert_element_type add convert_element_type add all_reduce[4] convert_element_type"
    (sent,) = [n for n in graph.nodes if n.target is _torch.collective_op("all_reduce")]
    assert sent.meta["val"].dtype == wide


def test_widened_and_added_to_a_wide_one(groups: Groups) -> None:
    p = program(2)
    a = p.collective("all_reduce", p.call(cast, p.inputs[0], torch.bfloat16), "sum", groups[(1,)])
    b = p.collective("all_reduce", p.inputs[1], "sum", groups[(1,)])
    text = after(p.output(add(p, p.call(cast, a, torch.float32), b)), 2)
    assert text == "convert_element_type convert_element_type add all_reduce[4]"


def test_a_sum_in_the_narrow_type_within_one_in_the_wide_type(groups: Groups) -> None:
    p = program(3, torch.bfloat16)
    a, b, c = reduced(p, groups[(1,)])
    wide = [p.call(cast, s, torch.float32) for s in (add(p, a, b), c)]
    assert after(p.output(add(p, *wide)), 3, torch.bfloat16).count("all_reduce") == 1


#: What is rounded and sent: sums and products in float32, of both inputs or of one.
OPERANDS: dict[str, Callable[[Program], torch.fx.Node]] = {
    "input": lambda p: p.inputs[0],
    "sum": lambda p: p.call(aten.add.Tensor, *p.inputs),
    "difference": lambda p: p.call(aten.sub.Tensor, *p.inputs),
    "doubled": lambda p: p.call(aten.mul.Tensor, p.inputs[1], 2.0),
    "scaled sum": lambda p: p.call(aten.mul.Tensor, p.call(aten.add.Tensor, *p.inputs), 0.5),
    "product": lambda p: p.call(aten.mul.Tensor, *p.inputs),
    "matmul": lambda p: p.call(aten.mm.default, p.inputs[0], p.call(aten.t.default, p.inputs[1])),
    "other matmul": lambda p: p.call(
        aten.mm.default, p.call(aten.relu.default, p.inputs[0]), p.call(aten.t.default, p.inputs[1])
    ),
    "row sum": lambda p: p.call(aten.expand.default, p.call(aten.sum.dim_IntList, p.inputs[0], [1], True), SHAPE),
}


def _rounded(p: Program, made: torch.fx.Node, to: torch.dtype = torch.bfloat16) -> torch.fx.Node:
    return p.call(cast, made, to)


def _of_one_shape(names: tuple[str, str]) -> bool:
    return sum("matmul" in name for name in names) in (0, 2)


@pytest.mark.parametrize(
    "names", [n for n in itertools.product(OPERANDS, OPERANDS) if _of_one_shape(n)], ids=lambda n: " + ".join(n)
)
def test_what_was_added_and_rounded_before_it_is_sent(groups: Groups, names: tuple[str, str]) -> None:
    """An operand that is a rounded sum of what the other is made of, too."""
    p = program(2)
    sent = [_rounded(p, OPERANDS[name](p)) for name in names]
    sides = [p.call(cast, p.collective("all_reduce", x, "sum", groups[(1,)]), torch.float32) for x in sent]
    text = after(p.output(add(p, *sides)), 2)
    assert text.count("all_reduce") == 1


@pytest.mark.parametrize("name", [n for n in OPERANDS if "matmul" not in n])
def test_what_is_rounded_in_the_place_of_what_was_not(groups: Groups, name: str) -> None:
    """Beside a narrow reduction, which may get wider, what is sent wide keeps its roundings, none or one or two."""
    group = groups[(1,)]

    def verdict(before: int, now: int) -> list[Finding]:
        operands: list[torch.fx.Node] = []

        def apart(p: Program, groups: Groups) -> torch.fx.Node:
            operands.append(_rounded(p, p.inputs[1]))
            operands.append(OPERANDS[name](p))
            for dtype in (torch.bfloat16, torch.float16):
                operands.append(p.call(cast, _rounded(p, operands[-1], dtype), torch.float32))
            narrow, wide = (p.collective("all_reduce", x, "sum", group) for x in (operands[0], operands[1 + before]))
            return add(p, p.call(cast, narrow, torch.float32), wide)

        def together(p: Program, groups: Groups) -> torch.fx.Node:
            sent = add(p, p.call(cast, operands[0], torch.float32), operands[1 + now])
            return p.collective("all_reduce", sent, "sum", group)

        return _instead(apart, groups, together)

    for before, now in itertools.product((0, 1, 2), repeat=2):
        assert (verdict(before, now) == []) == (before == now), (before, now)


@pytest.mark.parametrize("to", [torch.int32, torch.bfloat16])
def test_casts_that_lose_something(groups: Groups, to: torch.dtype) -> None:
    p = program(2)
    sides = [p.call(cast, s, to) for s in reduced(p, groups[(1,)])]
    assert refused(p.output(add(p, *sides)), 2) == []


def test_widened_reductions_of_several_operations(groups: Groups) -> None:
    p = program(4, torch.bfloat16)
    ops = ("sum", "max", "min", "product")
    sides = [p.collective("all_reduce", x, op, groups[(1,)]) for x, op in zip(p.inputs, ops)]
    graph = p.output(add(p, *(p.call(cast, s, torch.float32) for s in sides)))
    assert set(refused(graph, 4, torch.bfloat16)) == {Reason.DIFFERENT_GROUP}


def test_two_wide_messages_for_four_bytes_each_are_no_gain(groups: Groups) -> None:
    """float64 for two messages in bfloat16: twice the bytes."""
    p = Program(*[(8192, 8192)] * 2, dtype=torch.bfloat16)
    sides = [p.call(cast, s, torch.float64) for s in reduced(p, groups[(0, 1)])]
    report = run_pass(rewrite("R5", "reassociate"), p.output(add(p, *sides))).report.passes[0]
    assert not report.changed and Reason.NOT_PROFITABLE in [d.reason for d in report.decisions]


# -- several pieces ----------------------------------------------------------------------------------------------------


def _halves(p: Program, sides: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    return [[p.call(aten.slice.Tensor, s, 0, k, k + 4) for s in sides] for k in (0, 4)]


def test_every_piece_is_added_to_its_like(groups: Groups) -> None:
    """The second sum has a term that is made of the first one."""
    p = program(2)
    low, high = _halves(p, reduced(p, groups[(1,)]))
    first = add(p, *low)
    second = add(p, add(p, high[0], p.call(aten.relu.default, first)), high[1])
    text = after(p.output(first, second), 2)
    assert text == "add all_reduce[4] slice relu slice add"


@pytest.mark.parametrize("case", ["another piece", "another reader", "a piece twice"])
def test_pieces_of_which_one_is_read_otherwise(groups: Groups, case: str) -> None:
    p = program(2)
    low, high = _halves(p, reduced(p, groups[(1,)]))
    first = add(p, *low)
    if case == "another piece":
        results = [first, add(p, high[0], p.call(aten.relu.default, high[1]))]
    elif case == "another reader":
        results = [first, add(p, *high), low[0]]
    else:
        results = [first, add(p, high[0], add(p, *high))]
    assert Reason.DATA_DEPENDENCY in refused(p.output(*results), 2)


def test_two_pieces_of_one_sum(groups: Groups) -> None:
    p = program(2)
    low, high = _halves(p, reduced(p, groups[(1,)]))
    assert Reason.DATA_DEPENDENCY in refused(p.output(add(p, *low, *high)), 2)


def test_exact_adds_in_front_of_no_reduction_of_floats(groups: Groups) -> None:
    p = program(2, torch.bfloat16)
    sides = [p.call(cast, s, torch.float32) for s in reduced(p, groups[(1,)])]
    report = run_pass(rewrite("R5"), p.output(add(p, *sides))).report.passes[0]
    assert not report.changed and [d.reason for d in report.decisions] == [Reason.NUMERICS]
    p = program(2, torch.int32)
    low, high = _halves(p, reduced(p, groups[(1,)]))
    assert run_pass(rewrite("R5"), p.output(add(p, *low), add(p, *high))).report.passes[0].changed


# -- forgeries ---------------------------------------------------------------------------------------------------------


def _wide(groups: Groups) -> Rewritten:
    """Two narrow reductions, widened, a piece kept and added, after R5."""
    p = program(2, torch.bfloat16)
    sides = [p.call(cast, s, torch.float32) for s in reduced(p, groups[(1,)])]
    pieces = [p.call(aten.slice.Tensor, s, 0, 2, 6) for s in sides]
    graph = p.output(add(p, *pieces))
    made = Rewritten(torch.fx.GraphModule({}, graph), verify.snapshot(graph), "reassociate")
    assert run_pass(RewriteCollectives("reassociate", only=("R5",)), made.graph).report.passes[0].changed
    assert made.findings() == []
    return made


def _start(made: Rewritten) -> torch.fx.Node:
    (found,) = made.calls(_torch.collective_op("all_reduce"))
    return found


def _sum(made: Rewritten) -> torch.fx.Node:
    return made.calls(aten.add.Tensor)[0]


def _operation(op: str) -> Forgery:
    return lambda made, groups: _start(made).update_arg(1, op)


def _group(made: Rewritten, groups: Groups) -> None:
    _start(made).update_arg(2, groups[(0,)])


def _lost(made: Rewritten, groups: Groups) -> None:
    _start(made).update_arg(0, _sum(made).args[0])


def _doubled(made: Rewritten, groups: Groups) -> None:
    total = _sum(made)
    _start(made).update_arg(0, made.insert(total, aten.add.Tensor, total, total.args[1]))


def _offset(made: Rewritten, groups: Groups) -> None:
    (piece,) = made.calls(aten.slice.Tensor)
    piece.args = (piece.args[0], 0, 3, 7)


def _narrow(made: Rewritten, groups: Groups) -> None:
    """Adds and reduces in bfloat16, and widens at the end."""
    total, start = _sum(made), _start(made)
    (wait,) = start.users
    sent = made.insert(total, cast, total, torch.bfloat16)
    start.update_arg(0, sent)
    for node in (start, wait):
        node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    wide = made.insert(wait, cast, wait, torch.float32)
    wait.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _added_narrow(made: Rewritten, groups: Groups) -> None:
    """The two of a rank are added in bfloat16 and widened: the reference adds them in float32."""
    total = _sum(made)
    inputs = [a.args[0] for a in total.all_input_nodes]
    first = made.insert(total, aten.add.Tensor, *inputs)
    _start(made).update_arg(0, made.insert(first, cast, first, torch.float32))


def _half(made: Rewritten, groups: Groups) -> None:
    """By way of a type that does not hold all values."""
    total = _sum(made)
    side = total.all_input_nodes[0]
    half = made.insert(side, cast, side.args[0], torch.float16)
    total.replace_input_with(side, made.insert(half, cast, half, torch.float32))


def _crossed(made: Rewritten, groups: Groups) -> None:
    """One input twice in the place of both."""
    total = _sum(made)
    total.args = (total.args[0], total.args[0])


@pytest.mark.parametrize(
    "forge",
    [_operation("max"), _operation("avg"), _operation("product"), _group, _lost, _doubled, _offset, _narrow,
     _added_narrow, _half, _crossed],
    ids=["max", "avg", "product", "group", "lost", "doubled", "offset", "narrow", "added-narrow", "half", "crossed"],
)  # fmt: skip
def test_forged_sums_are_refused(groups: Groups, forge: Forgery) -> None:
    made = _wide(groups)
    forge(made, groups)
    assert made.findings()


def _instead(build: Build, groups: Groups, now: Build) -> list[Finding]:
    """Findings where ``now`` stands in the place of ``build``; a relu reads either."""
    p = program(2)
    total = build(p, groups)
    read = p.call(aten.relu.default, total)
    graph = p.output(read)
    made = Rewritten(torch.fx.GraphModule({}, graph), verify.snapshot(graph), "reassociate")
    with graph.inserting_before(read):
        read.replace_input_with(total, now(p, groups))
    graph.eliminate_dead_code()
    return made.findings()


def _of(*dtypes: torch.dtype) -> Build:
    """The sum, in the widest, of reductions in these types."""

    def build(p: Program, groups: Groups) -> torch.fx.Node:
        def side(x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
            narrow = p.call(cast, p.call(cast, x, torch.bfloat16), dtype)
            done = p.collective("all_reduce", narrow, "sum", groups[(1,)])
            return p.call(cast, done, torch.float32)

        return add(p, *(side(x, dtype) for x, dtype in zip(p.inputs, dtypes)))

    return build


def test_reductions_may_get_wider_and_not_narrower(groups: Groups) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    assert _instead(_of(narrow, narrow), groups, _of(wide, wide)) == []
    assert _instead(_of(narrow, wide), groups, _of(wide, wide)) == []
    all_wide = (wide, wide)
    for was, now in ((all_wide, (narrow, narrow)), ((wide, narrow), (narrow, wide)), (all_wide, (narrow, wide))):
        assert _instead(_of(*was), groups, _of(*now))
