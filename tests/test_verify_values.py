"""Values: forged rewrites of what our passes produced are all refused; legal ones never are."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.fx
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.verify.messages import Messages
from tests.support import value_forgeries as made
from tests.support.graphs import aten, c10d
from tests.support.random_layers import random_layers
from tests.support.value_forgeries import Rewritten, groups, overlapped, planned, reductions
from tests.support.verify_graphs import apply_order, random_program
from tests.support.world import fake_world, grouped_world, mesh_world
from tests.test_redistribute_chains import sliced_gather

cast = torch.ops.prims.convert_element_type.default
gather_start, wait_op = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
Forge = Callable[[Rewritten], None]
BASES: dict[str, tuple[int, Callable[[], Rewritten]]] = {
    "gathers": (4, made.gathers),
    "all_reduces": (4, reductions),
    "reduce_scatters": (4, lambda: reductions("reduce_scatter", "avg")),
    "narrow sums": (4, made.narrow_sums),
    "effects": (4, made.effects),
    "body": (4, made.with_body),
    "async gather": (2, lambda: overlapped("ag0_mm")),
    "async scatter": (2, lambda: overlapped("mm_rs0")),
    "async bias": (2, lambda: overlapped("ag1_addmm_of_a_row")),
    "narrow product": (4, made.narrow_product),
    "async uneven parts": (2, lambda: overlapped("ag0_prime_rows")),
    "async two gathers": (2, lambda: overlapped("rows_of_two_gathers")),
    "exchange": (2, made.exchanged),
    "own slice": (6, lambda: planned(lambda: sliced_gather(0, 0, "redistribute"))),
}


@contextmanager
def base(name: str) -> Iterator[Rewritten]:
    """A rewritten graph in its world."""
    ranks, build = BASES[name]
    with mesh_world((2, 3)) if ranks == 6 else fake_world(ranks):
        yield build()


def put(node: torch.fx.Node, place: int, value: object) -> None:
    """Replace an argument."""
    node.update_arg(place, value)


def packed(r: Rewritten) -> list[torch.fx.Node]:
    """The members of the message."""
    return list(r.calls(aten.cat.default)[0].args[0])  # type: ignore[arg-type]


def pack(r: Rewritten, members: list[torch.fx.Node]) -> None:
    put(r.calls(aten.cat.default)[0], 0, members)


def swap_members(r: Rewritten) -> None:
    a, b, *rest = packed(r)
    pack(r, [b, a, *rest])


def pack_one_twice(r: Rewritten) -> None:
    a, _, *rest = packed(r)
    pack(r, [a, a, *rest])


def drop_a_member(r: Rewritten) -> None:
    a, *rest = packed(r)
    pack(r, [r.insert(a, aten.zeros_like.default, a), *rest])


def shift_an_offset(r: Rewritten) -> None:
    piece = r.calls(aten.slice.Tensor)[0]
    put(piece, 2, piece.args[2] + 1)
    put(piece, 3, piece.args[3] + 1)


def swap_pieces(r: Rewritten) -> None:
    a, b, *_ = r.calls(aten.slice.Tensor)
    (a.args, b.args) = (b.args, a.args)


def transpose_what_is_unpacked(r: Rewritten) -> None:
    for view in r.calls(aten.view.default):
        shape = view.meta["val"].shape
        if len(shape) == 2 and shape[0] == shape[1] and any(n.target is not aten.view.default for n in view.users):
            turned = r.insert(view, aten.permute.default, view, [1, 0])
            for user in [user for user in view.users if user is not turned]:
                user.replace_input_with(view, turned)
            return
    raise AssertionError("nothing square is unpacked")


def unpack_members_as_rows(r: Rewritten) -> None:
    """Take every rank's rows for consecutive columns: the gather of another dimension."""
    view = next(v for v in r.calls(aten.view.default) if tuple(v.meta["val"].shape) == (16, 16))
    pieces = r.insert(view, aten.view.default, view, [4, 4, 16])
    turned = r.insert(pieces, aten.permute.default, pieces, [1, 0, 2])
    whole = r.insert(turned, aten.reshape.default, turned, [16, 16])
    view.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not pieces)


def start_of(r: Rewritten) -> torch.fx.Node:
    return next(n for n in r.graph.nodes if "all_reduce" in n.name or "reduce_scatter" in n.name)


def other_reduce_op(r: Rewritten) -> None:
    put(start_of(r), 1, "max")


def sum_for_avg(r: Rewritten) -> None:
    put(start_of(r), 1, "sum")


def other_group(r: Rewritten) -> None:
    start = start_of(r)
    put(start, len(start.args) - 1, groups_seen["b"])


groups_seen: dict[str, str] = {}


def half_on_the_wire(r: Rewritten) -> None:
    start = next(n for n in r.graph.nodes if n.target in (gather_start, c10d.all_reduce.default))
    (wait,) = [u for u in start.users if u.target is wait_op]
    source = start.args[0]
    narrow = r.insert(source, cast, source, torch.bfloat16)
    wide = r.insert(wait, cast, wait, torch.float32)
    put(start, 0, narrow)
    wait.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    with narrow.meta["val"].fake_mode:
        start.meta["val"] = wait.meta["val"] = start.meta["val"].to(torch.bfloat16)


def half_before_packing(r: Rewritten) -> None:
    """The same rounding, but as one member's own."""
    a, *rest = packed(r)
    narrow = r.insert(a, cast, a, torch.bfloat16)
    pack(r, [r.insert(narrow, cast, narrow, torch.float32), *rest])


def widen_before_the_sum(r: Rewritten) -> None:
    add = r.calls(aten.add.Tensor)[0]
    a, b = add.args
    wide = [r.insert(r.named("x1"), cast, x, torch.float32) for x in (a, b)]
    (outer,) = add.users
    total = r.insert(outer, aten.add.Tensor, *wide)
    outer.replace_all_uses_with(total)


def output_to(r: Rewritten, place: int, source: int) -> None:
    """Return one value in the place of another one."""
    output = r.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    values[place] = values[source]
    output.args = (tuple(values),)


def swap_equal_outputs(r: Rewritten) -> None:
    output = r.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    values[0], values[1] = values[1], values[0]
    output.args = (tuple(values),)


def read_before_the_wait(r: Rewritten) -> None:
    (wait,) = r.calls(wait_op)
    wait.replace_all_uses_with(wait.args[0])
    r.graph.output_node().prepend(wait)


def read_after_another_wait(r: Rewritten) -> None:
    waits = r.calls(wait_op)
    waits[1].replace_all_uses_with(waits[0])


def multiply_by_another_number(r: Rewritten) -> None:
    put(r.calls(aten.mul.Tensor)[0], 1, 2.5)


def along_another_dimension(r: Rewritten) -> None:
    put(r.calls(aten._softmax.default)[0], 1, 0)


def swap_factors(r: Rewritten) -> None:
    product = next(n for n in r.calls(aten.mm.default) if n.args[0].meta["val"].shape == n.args[1].meta["val"].shape)
    product.args = product.args[::-1]


def another_function(r: Rewritten) -> None:
    next(n for n in r.graph.nodes if n.target in (aten.neg.default, aten.relu.default)).target = aten.abs.default


def another_probability(r: Rewritten) -> None:
    put(r.calls(aten.bernoulli.p)[0], 1, 0.25)


def draw_from_something_else(r: Rewritten) -> None:
    draw = r.calls(aten.bernoulli.p)[0]
    put(draw, 0, r.insert(draw.args[0], aten.mul.Tensor, draw.args[0], 2.0))


def remove_a_fence(r: Rewritten) -> None:
    odd = r.calls(made.unknown)[0]
    odd.replace_all_uses_with(odd.args[0])
    r.graph.erase_node(odd)


def read_after_the_write(r: Rewritten) -> None:
    """What read the input before it was written to reads it afterwards."""
    write = r.calls(aten.mul_.Tensor)[0]
    write.append(r.calls(aten.mul.Tensor)[0])


def read_before_the_write(r: Rewritten) -> None:
    r.calls(aten.mul_.Tensor)[0].prepend(r.calls(aten.mul.Tensor)[1])


def write_twice_as_much(r: Rewritten) -> None:
    put(r.calls(aten.mul_.Tensor)[0], 1, 4.0)


def edit_the_body(r: Rewritten) -> None:
    body = r.gm.body
    next(n for n in body.graph.nodes if n.target is aten.mul.Tensor).update_arg(1, 3.0)


def run_the_body_on_something_else(r: Rewritten) -> None:
    put(r.calls(torch.ops.higher_order.invoke_subgraph)[0], 2, r.named("x1"))


def swap_joined_pieces(r: Rewritten) -> None:
    cat = r.calls(aten.cat.default)[-1]
    put(cat, 0, list(cat.args[0])[::-1])


def join_along_another_dimension(r: Rewritten) -> None:
    put(r.calls(aten.cat.default)[-1], 1, 0)
    (view,) = r.calls(aten.cat.default)[-1].users
    put(view, 1, [16, 12])


def multiply_one_piece_twice(r: Rewritten) -> None:
    first, second = r.calls(aten.mm.default)
    second.replace_all_uses_with(first)


def select_the_same_rows_twice(r: Rewritten) -> None:
    first, second = r.calls(aten.slice.Tensor)
    second.args = (second.args[0], *first.args[1:])


def add_one_summand_twice(r: Rewritten) -> None:
    add = r.calls(aten.add.Tensor)[0]
    put(add, 1, add.args[0])


def subtract_for_add(r: Rewritten) -> None:
    r.calls(aten.add.Tensor)[0].target = aten.sub.Tensor


def leave_out_the_bias(r: Rewritten) -> None:
    last = r.calls(aten.add.Tensor)[-1]
    last.replace_all_uses_with(last.args[0])


def add_the_bias_twice(r: Rewritten) -> None:
    last = r.calls(aten.add.Tensor)[-1]
    twice = r.insert(last, aten.add.Tensor, last, last.args[1])
    last.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)


def round_the_parts_of_a_product(r: Rewritten) -> None:
    """Two products of halves, each rounded, are added in float32."""
    (whole,) = r.calls(aten.addmm.default)
    bias, x, w = whole.args
    _rounded_for(r, whole, _in_halves(r, whole, x, w), bias)


def round_the_parts_of_a_reduced_product(r: Rewritten) -> None:
    """Each rank's product was rounded once, before it was reduced."""
    (whole,) = r.calls(aten.mm.default)
    _rounded_for(r, whole, _in_halves(r, whole, *whole.args), None)


def _in_halves(r: Rewritten, whole: torch.fx.Node, x: torch.fx.Node, w: torch.fx.Node) -> torch.fx.Node:
    total, last = None, whole
    for start in (0, 4):
        left = r.insert(last, aten.slice.Tensor, x, 1, start, start + 4)
        right = r.insert(left, aten.slice.Tensor, w, 0, start, start + 4)
        part = r.insert(right, aten.mm.default, left, right)
        last = r.insert(part, cast, part, torch.float32)
        total = last = last if total is None else r.insert(last, aten.add.Tensor, total, last)
    return total


def round_the_parts_of_a_sum(r: Rewritten) -> None:
    (whole,) = r.calls(aten.sum.dim_IntList)
    total, last = None, whole
    for start in (0, 4):
        half = r.insert(last, aten.slice.Tensor, whole.args[0], 1, start, start + 4)
        part = r.insert(half, aten.sum.dim_IntList, half, [1])
        last = r.insert(part, cast, part, torch.float32)
        total = last = last if total is None else r.insert(last, aten.add.Tensor, total, last)
    _rounded_for(r, whole, total, None)


def _rounded_for(r: Rewritten, whole: torch.fx.Node, total: torch.fx.Node, bias: torch.fx.Node | None) -> None:
    """The total, with a bias, rounded once, in the place of a value."""
    last = total
    if bias is not None:
        wide = r.insert(last, cast, bias, torch.float32)
        last = r.insert(wide, aten.add.Tensor, total, wide)
    once = r.insert(last, cast, last, whole.meta["val"].dtype)
    whole.replace_all_uses_with(once)
    r.graph.erase_node(whole)


def send_other_elements(r: Rewritten) -> None:
    """The slice that this rank keeps for itself goes to a peer."""
    piece = r.calls(aten.slice.Tensor)[0]
    put(piece, 2, 12)
    put(piece, 3, 24)


def keep_another_ranks_rows(r: Rewritten) -> None:
    """What came from a peer is taken for the own rows, and the other way round."""
    put(r.calls(aten.cat.default)[-1], 0, list(r.calls(aten.cat.default)[-1].args[0])[::-1])


def say_something_else(r: Rewritten) -> None:
    """Elements and statement are changed together: then the statement is not what the peers' rows are."""
    start = r.calls(c10d.all_to_all_single.default)[0]
    key = next(k for k, v in start.meta.items() if isinstance(v, Messages))
    said = start.meta[key]
    start.meta[key] = Messages(said.source, lambda sender, receiver: said.parts(receiver, sender))


FORGERIES: list[tuple[str, Forge]] = [
    *[("gathers", f) for f in (swap_members, pack_one_twice, drop_a_member, shift_an_offset, swap_pieces)],
    *[("gathers", f) for f in (transpose_what_is_unpacked, unpack_members_as_rows, half_on_the_wire)],
    *[("gathers", f) for f in (half_before_packing, swap_equal_outputs, read_before_the_wait)],
    *[("gathers", f) for f in (multiply_by_another_number, swap_factors)],
    ("gathers", lambda r: output_to(r, 0, 1)),
    *[("all_reduces", f) for f in (swap_members, pack_one_twice, other_reduce_op, other_group, half_on_the_wire)],
    *[("all_reduces", f) for f in (shift_an_offset, along_another_dimension, another_function)],
    *[("reduce_scatters", f) for f in (sum_for_avg, swap_members, other_group)],
    ("all_reduces", lambda r: output_to(r, 1, 2)),
    *[("narrow sums", f) for f in (widen_before_the_sum, subtract_for_add)],
    *[("effects", f) for f in (another_probability, draw_from_something_else, remove_a_fence)],
    *[("effects", f) for f in (read_after_the_write, read_before_the_write, write_twice_as_much)],
    *[("body", f) for f in (edit_the_body, run_the_body_on_something_else)],
    *[("async gather", f) for f in (swap_joined_pieces, join_along_another_dimension, multiply_one_piece_twice)],
    *[("async gather", f) for f in (read_after_another_wait, shift_an_offset)],
    *[("async scatter", f) for f in (swap_joined_pieces, select_the_same_rows_twice, other_reduce_op)],
    *[("async bias", f) for f in (leave_out_the_bias, add_the_bias_twice, add_one_summand_twice, subtract_for_add)],
    *[("narrow product", f) for f in (round_the_parts_of_a_product, round_the_parts_of_a_sum)],
    ("narrow product", round_the_parts_of_a_reduced_product),
    *[("async uneven parts", f) for f in (swap_joined_pieces, shift_an_offset, read_after_another_wait)],
    *[("async two gathers", f) for f in (swap_joined_pieces, shift_an_offset, read_after_another_wait)],
    *[("exchange", f) for f in (add_one_summand_twice, subtract_for_add, shift_an_offset, another_function)],
    *[("own slice", f) for f in (send_other_elements, keep_another_ranks_rows, say_something_else)],
]


def _forgery_name(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", "").replace("<lambda>", "redirect an output")


@pytest.mark.parametrize("name", BASES)
def test_the_rewrites_themselves_are_proven(name):
    """Under a certificate that excuses everything, and with no value left to chance."""
    with base(name) as r:
        assert r.findings() == []


@pytest.mark.parametrize(("name", "forge"), FORGERIES, ids=_forgery_name)
def test_a_forged_rewrite_is_refused(name, forge):
    with base(name) as r:
        if forge is other_group:
            groups_seen.update(groups())
        forge(r)
        findings = r.findings()
    assert findings
    # What values alone tell: no other rule looks behind a certificate.
    assert forge in BY_OTHER_RULES or any(f.rule.startswith("value-") for f in findings), findings


#: Found without values: effects and bodies are nothing that a certificate covers; a read before a wait needs none.
BY_OTHER_RULES = (remove_a_fence, edit_the_body, read_before_the_wait)


def test_there_are_enough_kinds():
    assert len({forge for _, forge in FORGERIES}) >= 20


def test_legal_orders_of_random_graphs():
    """Writes, draws, views, coalesced and in-place collectives in any order that their builder calls legal."""
    orders = 0
    with grouped_world() as names:
        for seed in range(100):
            rng = random.Random(seed)
            program = random_program(rng, names)
            reference = verify.snapshot(program.graph)
            for _ in range(4):
                apply_order(program.graph, program.legal_order(rng))
                findings = verify.check(program.graph, reference=reference, group_order="any")
                assert [f for f in findings if f.rule.startswith("value")] == [], seed
                orders += 1
    assert orders == 400


@pytest.mark.parametrize("form", ["packed", "coalesced"])
def test_merges_in_random_layers(form):
    """Every merge is proven under a certificate that excuses everything."""
    changed = 0
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        for seed in range(40):
            r = made.merged(random_layers(seed, mesh), form)
            assert r.findings() == [], seed
            changed += list(r.before.nodes) != [n.name for n in r.graph.nodes]
    assert changed > 26


def test_a_node_under_another_name_is_still_proven():
    """Names tie kept values together; a value under a new name is proven from its operands."""
    with base("gathers") as r:
        product = r.calls(aten.mm.default)[0]
        product.replace_all_uses_with(again := r.insert(product, aten.mm.default, *product.args))
        r.graph.erase_node(product)
        again.name = "renamed"
        assert r.findings() == []


def test_an_operator_that_nothing_is_known_of_is_not_waved_through():
    """A replaced operand of an operator with unknown inner workings has to be equal as a whole."""
    with base("effects") as r:
        odd = r.calls(made.unknown)[0]
        put(odd, 0, r.insert(odd.args[0], aten.relu.default, odd.args[0]))
        assert any(f.rule.startswith("value-") for f in r.findings())


def test_a_picked_element_counts():
    """``getitem`` of another index is another value."""
    with fake_world(4):
        p = made.Program()
        x, y = p.input(4, 4), p.input(4, 4)
        world = groups()["world"]
        wait = [p.collective("all_gather", t, world) for t in (x, y)]
        r = made.merged(p.done(*wait), "coalesced")
        picks = r.calls(operator.getitem)
        picks[0].args, picks[1].args = picks[1].args, picks[0].args
        assert any(f.rule.startswith("value-") for f in r.findings())
