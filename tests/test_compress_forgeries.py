"""Forged messages of every collective in every type, in one level and in two: the verifier refuses each.

A forgery edits a graph that the pass made and that is proven. Where a graph has several messages (an all_reduce), each
is forged. What no numbers of a form or a collective correspond to is left out by the forgery itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.fx
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.compress import emit
from inductor_passes.compress.form import form_of
from inductor_passes.compress.levels import levels_of
from inductor_passes.compress.two_levels import Way
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Finding
from inductor_passes.rewriting.emit import Emitter
from tests.support.bucket_graphs import Program
from tests.support.graphs import aten
from tests.support.world import fake_world
from tests.test_compress_levels import links

cast = torch.ops.prims.convert_element_type.default
NAMES = ("bf16", "int8", "e4m3", "e5m2")
KINDS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("all_gather between", "all_gather between, inside first", "reduce_scatter between", "all_reduce between"),
)
Node = torch.fx.Node


class DoesNotApply(Exception):
    """There is nothing of the kind in this graph."""


@dataclass
class Hop:
    """One narrow message.

    Attributes:
        message: what is sent.
        arrived: what the reading node widens, ``wide``.
        ranks: between which it travels.
        added: the additions of what arrives, in order; none in a gather.
    """

    message: Node
    arrived: Node
    wide: Node
    ranks: int
    added: list[Node]


class Forged:
    """A narrowed graph on rank 1 of four (2 hosts of 2 ranks), what it was, and what is said of it."""

    def __init__(self, kind: str, name: str, group: str) -> None:
        self.form, self.between = form_of(name, 64), "between" in kind
        p = Program()
        gm = p.done(p.call(aten.neg.default, p.collective(kind.split()[0], p.input(24, 32), group)))
        self.gm, self.before = gm, verify.snapshot(gm.graph)
        (collective,) = GraphView(gm.graph).collectives
        way = Way(levels_of(collective, links(2, 2)), "inside first" in kind) if self.between else None
        self.certificate = emit.replace(gm.graph, collective, self.form, way).certificate

    def findings(self) -> list[Finding]:
        """With every new node certified."""
        names = {node.name for node in self.gm.graph.nodes if node.op == "call_function"}
        given = replace(self.certificate, added=tuple(names - set(self.before.nodes)))
        self.gm.graph.lint()
        return verify.check(
            self.gm.graph,
            reference=self.before,
            certificates=[given],
            rounding=Fraction(8, 100),
            ranks_per_host=2 if self.between else None,
        )

    def hops(self) -> list[Hop]:
        """In graph order."""
        nodes = {node.name: node for node in self.gm.graph.nodes}
        return [self._hop(nodes[one.read]) for one in self.certificate.narrowed]

    def _hop(self, wide: Node) -> Hop:
        arrived = wide
        while arrived.target is not torch.ops._c10d_functional.wait_tensor.default:
            arrived = arrived.all_input_nodes[0]
        start = arrived.args[0]
        assert isinstance(start, Node) and isinstance(start.args[0], Node)
        message = start.args[0]
        while message.target is aten.view.default:
            message = message.args[0]  # type: ignore[assignment]
        exchanged = "all_to_all" in start.name
        terms = [n for n in wide.users if n.target is aten.slice.Tensor] if exchanged else []
        added = [n for n in self.gm.graph.nodes if n.target is aten.add.Tensor and _adds(n, terms)]
        ranks = arrived.meta["val"].shape[0] // message.meta["val"].shape[0]
        return Hop(message, arrived, wide, len(terms) or max(ranks, 2 if self.between else 4), added)


def _adds(node: Node, terms: list[Node]) -> bool:
    return len(node.args) > 1 and node.args[1] in terms


def behind(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node there."""
    return Emitter(node.graph, node).call(target, *args, **kwargs)


def instead(node: Node, target: Any, *args: Any) -> Node:
    """A new node that everybody reads in the place of one that it reads itself."""
    users = list(node.users)
    made = behind(node, target, *args)
    for user in users:
        user.replace_input_with(node, made)
    return made


def ancestors(node: Node, until: Node) -> Iterator[Node]:
    """What a node is computed from, nearest first, up to another node."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop(0)
        if one is until or one in seen:
            continue
        seen.add(one)
        yield one
        todo += one.all_input_nodes


def sending(made: Forged, hop: Hop, target: Any) -> list[Node]:
    """The nodes of a kind that narrow a message, nearest to it first; of blocks only."""
    if not made.form.share:
        raise DoesNotApply
    source = sent_rows(made, hop)
    found = [n for n in ancestors(hop.message, source) if n.target is target]
    if not found:
        raise DoesNotApply
    return found


def reading(made: Forged, hop: Hop, target: Any) -> list[Node]:
    """The nodes of a kind that widen what arrived."""
    if not made.form.share:
        raise DoesNotApply
    return [n for n in ancestors(hop.wide, hop.arrived) if n.target is target]


def sent_rows(made: Forged, hop: Hop) -> Node:
    """The blocks that are narrowed."""
    if not made.form.share:
        return hop.message.args[0]  # type: ignore[return-value]
    nodes = ancestors(hop.message, hop.message.graph.output_node())
    return next(n for n in nodes if n.target is aten.abs.default).args[0]  # type: ignore[return-value]


def is_sum(hop: Hop) -> None:
    if not hop.added:
        raise DoesNotApply


def int8_only(made: Forged) -> None:
    if made.form.dtype is not torch.uint8:
        raise DoesNotApply


# -- scales ------------------------------------------------------------------------------------------------------


def another_scale(made: Forged, hop: Hop) -> None:
    """The scale that is divided by is not the one that is sent."""
    sending(made, hop, aten.div.Tensor)[0].update_arg(1, sending(made, hop, aten.clamp_min.default)[0])


def scale_of_half(made: Forged, hop: Hop) -> None:
    sending(made, hop, aten.mul.Tensor)[0].update_arg(1, made.form.share / 2)


def scale_of_a_part(made: Forged, hop: Hop) -> None:
    peak = sending(made, hop, aten.amax.default)[0]
    part = behind(peak.args[0], aten.slice.Tensor, peak.args[0], 1, 0, 16)  # type: ignore[arg-type]
    peak.update_arg(0, part)


def scale_of_another_block(made: Forged, hop: Hop) -> None:
    """Each block divides by and sends the scale of the next one."""
    instead(
        sending(made, hop, aten.amax.default)[0], aten.roll.default, sending(made, hop, aten.amax.default)[0], [1], [0]
    )


def scale_of_something_else(made: Forged, hop: Hop) -> None:
    absolute = sending(made, hop, aten.abs.default)[0]
    absolute.update_arg(0, behind(absolute.args[0], aten.mul.Tensor, absolute.args[0], 2.0))  # type: ignore[arg-type]


def scale_without_infinity(made: Forged, hop: Hop) -> None:
    (infinite,) = [n for n in sending(made, hop, aten.full.default) if n.args[1] == math.inf]
    infinite.update_arg(1, 1.0)


def scale_rounded_down(made: Forged, hop: Hop) -> None:
    (up,) = [n for n in sending(made, hop, aten.add.Tensor) if n.args[1] == 0xFFFF]
    up.update_arg(1, 0)


def scale_read_wider(made: Forged, hop: Hop) -> None:
    (shift,) = [n for n in reading(made, hop, aten.bitwise_left_shift.Tensor_Scalar) if n.args[1] == 16]
    shift.update_arg(1, 15)


def scale_read_to_another_base(made: Forged, hop: Hop) -> None:
    (shift,) = [n for n in reading(made, hop, aten.bitwise_left_shift.Tensor_Scalar) if n.args[1] == 8]
    shift.update_arg(1, 7)


def digits_swapped(made: Forged, hop: Hop) -> None:
    codes, low, high = sending(made, hop, aten.cat.default)[0].args[0]  # type: ignore[misc]
    hop.message.update_arg(0, [codes, high, low])


def scaled_behind(made: Forged, hop: Hop) -> None:
    instead(hop.wide, aten.mul.Tensor, hop.wide, 1.0078125)


# -- codes -------------------------------------------------------------------------------------------------------


def codes_shifted(made: Forged, hop: Hop) -> None:
    (codes,) = [n for n in reading(made, hop, aten.slice.Tensor) if n.args[2:] == (0, 64)]
    codes.args = (*codes.args[:2], 1, 65)


def codes_of_another_block(made: Forged, hop: Hop) -> None:
    """With the scale of this one."""
    codes, low, high = sending(made, hop, aten.cat.default)[0].args[0]  # type: ignore[misc]
    hop.message.update_arg(0, [behind(codes, aten.roll.default, codes, [1], [0]), low, high])


def codes_of_another_rank(made: Forged, hop: Hop) -> None:
    """What arrives of each rank is read with the scale of the one before it."""
    (codes,) = [n for n in reading(made, hop, aten.slice.Tensor) if n.args[2:] == (0, 64)]
    each = codes.meta["val"].shape[0] // hop.ranks
    instead(codes, aten.roll.default, codes, [each], [0])


def codes_of_another_element(made: Forged, hop: Hop) -> None:
    source = sent_rows(made, hop)
    quotient = sending(made, hop, aten.div.Tensor)[0]
    quotient.update_arg(0, behind(source, aten.roll.default, source, [1], [1]))


def codes_rounded_down(made: Forged, hop: Hop) -> None:
    int8_only(made)
    sending(made, hop, aten.round.default)[0].target = aten.floor.default


def codes_from_another_zero(made: Forged, hop: Hop) -> None:
    int8_only(made)
    reading(made, hop, aten.sub.Tensor)[0].update_arg(1, 127.0)


def codes_read_as_another_type(made: Forged, hop: Hop) -> None:
    """The bits are those of another type of the same size."""
    other = {torch.bfloat16: torch.float16, torch.uint8: torch.int8, torch.float8_e4m3fn: torch.float8_e5m2}
    other[torch.float8_e5m2] = torch.float8_e4m3fn
    form = made.form
    if form.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        (view,) = [n for n in reading(made, hop, aten.view.dtype) if n.args[1] is form.dtype]
        view.update_arg(1, other[form.dtype])
        view.meta["val"] = view.args[0].meta["val"].view(other[form.dtype])  # type: ignore[union-attr]
        return
    codes = hop.arrived if not form.share else reading(made, hop, aten.sub.Tensor)[0].args[0].args[0]  # type: ignore[union-attr]
    (widening,) = [n for n in codes.users if n.target is cast]  # type: ignore[union-attr]
    widening.update_arg(0, behind(codes, aten.view.dtype, codes, other[form.dtype]))  # type: ignore[arg-type]


def codes_of_another_type_sent(made: Forged, hop: Hop) -> None:
    """Rounded to the other 8-bit type, and read as this one."""
    other = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}.get(made.form.dtype)
    if other is None:
        raise DoesNotApply
    (rounding,) = [n for n in sending(made, hop, cast) if n.args[1] is made.form.dtype]
    rounding.update_arg(1, other)
    rounding.meta["val"] = rounding.meta["val"].float().to(other)


# -- blocks and ranks --------------------------------------------------------------------------------------------


def blocks_swapped(made: Forged, hop: Hop) -> None:
    """Whole blocks, scales and all, at another place."""
    instead(hop.message, aten.roll.default, hop.message, [1], [0])


def ranks_swapped_where_sent(made: Forged, hop: Hop) -> None:
    """Each rank gets the piece of another one."""
    if "all_to_all" not in hop.arrived.args[0].name:  # type: ignore[union-attr]
        raise DoesNotApply
    each = hop.message.meta["val"].shape[0] // hop.ranks
    instead(hop.message, aten.roll.default, hop.message, [each], [0])


def ranks_swapped_where_read(made: Forged, hop: Hop) -> None:
    """What ranks sent is read in another order; a sum has none."""
    if hop.added:
        raise DoesNotApply
    each = hop.wide.meta["val"].shape[0] // hop.ranks
    instead(hop.wide, aten.roll.default, hop.wide, [each], [0])


# -- sums --------------------------------------------------------------------------------------------------------


def term_left_out(made: Forged, hop: Hop) -> None:
    is_sum(hop)
    last = hop.added[-1]
    last.replace_all_uses_with(last.args[0])  # type: ignore[arg-type]


def term_added_twice(made: Forged, hop: Hop) -> None:
    is_sum(hop)
    instead(hop.added[-1], aten.add.Tensor, hop.added[-1], hop.added[-1].args[1])


def term_in_the_place_of_another(made: Forged, hop: Hop) -> None:
    is_sum(hop)
    hop.added[-1].update_arg(1, hop.added[0].args[0])


def term_taken_off(made: Forged, hop: Hop) -> None:
    is_sum(hop)
    hop.added[-1].target = aten.sub.Tensor


def mean_for_the_sum(made: Forged, hop: Hop) -> None:
    is_sum(hop)
    instead(hop.added[-1], aten.div.Tensor, hop.added[-1], hop.ranks)


def sum_of_codes(made: Forged, hop: Hop) -> None:
    """What arrives is added up in the type in which it arrives, and widened then."""
    is_sum(hop)
    each = hop.arrived.meta["val"].shape[0] // hop.ranks
    emitter = Emitter(made.gm.graph, hop.arrived)
    terms = [emitter.call(aten.slice.Tensor, hop.arrived, 0, r * each, (r + 1) * each) for r in range(hop.ranks)]
    total = terms[0]
    for term in terms[1:]:
        total = emitter.call(aten.add.Tensor, total, term)
    wide = made.form.widened(emitter, total)
    hop.added[-1].replace_all_uses_with(wide)
    named = tuple(replace(n, read=wide.name) if n.read == hop.wide.name else n for n in made.certificate.narrowed)
    made.certificate = replace(made.certificate, narrowed=named)
    made.gm.graph.eliminate_dead_code()


def sum_in_bfloat16(made: Forged, hop: Hop) -> None:
    """What was widened is rounded again to be added."""
    is_sum(hop)
    emitter = Emitter(made.gm.graph, hop.added[-1])
    terms = [hop.added[0].args[0], *(n.args[1] for n in hop.added)]
    total, *others = [emitter.call(cast, term, torch.bfloat16) for term in terms]
    for term in others:
        total = emitter.call(aten.add.Tensor, total, term)
    wide = emitter.call(cast, total, torch.float32)
    for user in [u for u in hop.added[-1].users if u is not wide]:
        user.replace_input_with(hop.added[-1], wide)


# -- what is stated ----------------------------------------------------------------------------------------------


def error_understated(made: Forged, hop: Hop) -> None:
    said = made.certificate.narrowed
    named = tuple(replace(n, error=Fraction(1, 1000)) if n.read == hop.wide.name else n for n in said)
    made.certificate = replace(made.certificate, narrowed=named)


def not_stated(made: Forged, hop: Hop) -> None:
    said = made.certificate.narrowed
    made.certificate = replace(made.certificate, narrowed=tuple(n for n in said if n.read != hop.wide.name))


def stated_too_often(made: Forged, hop: Hop) -> None:
    said = made.certificate.narrowed
    made.certificate = replace(made.certificate, narrowed=(*said, *[n for n in said if n.read == hop.wide.name] * 2))


def another_node_stated(made: Forged, hop: Hop) -> None:
    said = made.certificate.narrowed
    other = sent_rows(made, hop).name
    named = tuple(replace(n, read=other) if n.read == hop.wide.name else n for n in said)
    made.certificate = replace(made.certificate, narrowed=named)


def a_second_rounding(made: Forged, hop: Hop) -> None:
    """Rounded once more before it is sent; nobody says so."""
    rows = sent_rows(made, hop)
    users = list(rows.users)
    other = torch.float16 if made.form.dtype is torch.bfloat16 else torch.bfloat16
    emitter = Emitter(made.gm.graph, rows)
    back = emitter.call(cast, emitter.call(cast, rows, other), torch.float32)
    for user in users:
        user.replace_input_with(rows, back)


def narrowed_twice(made: Forged, hop: Hop) -> None:
    """What was widened is narrowed again, and widened again, in the same form; both are stated."""
    users = list(hop.wide.users)
    emitter = Emitter(made.gm.graph, hop.wide)
    with emitter.standing_for(hop.wide):
        again = made.form.widened(emitter, made.form.narrowed(emitter, hop.wide))
    for user in users:
        user.replace_input_with(hop.wide, again)
    over = next(n.over for n in made.certificate.narrowed if n.read == hop.wide.name)
    named = (*made.certificate.narrowed, verify.Narrowed(again.name, made.form.error, over=over))
    made.certificate = replace(made.certificate, narrowed=named)


FORGERIES: list[Callable[[Forged, Hop], None]] = [
    *(another_scale, scale_of_half, scale_of_a_part, scale_of_another_block, scale_of_something_else),
    *(scale_without_infinity, scale_rounded_down, scale_read_wider, scale_read_to_another_base, digits_swapped),
    *(scaled_behind, codes_shifted, codes_of_another_block, codes_of_another_rank, codes_of_another_element),
    *(codes_rounded_down, codes_from_another_zero, codes_read_as_another_type, codes_of_another_type_sent),
    *(blocks_swapped, ranks_swapped_where_sent, ranks_swapped_where_read, term_left_out, term_added_twice),
    *(term_in_the_place_of_another, term_taken_off, mean_for_the_sum, sum_of_codes, sum_in_bfloat16),
    *(error_understated, not_stated, stated_too_often, another_node_stated, a_second_rounding, narrowed_twice),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_forgeries_are_found_out(kind: str, name: str) -> None:
    """By what values are: a graph that is refused for anything else shows nothing."""
    accepted, forged = [], set()
    with fake_world(4, 1) as group:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "devices"))
        made = Forged(kind, name, group)
        assert made.findings() == []
        hops = len(made.hops())
        for forge, number in itertools.product(FORGERIES, range(hops)):
            try:
                forge(made, made.hops()[number])
            except DoesNotApply:
                continue
            forged.add(forge)
            found = made.findings()
            if not found or any(f.rule not in ("narrowed", "value-changed", "value-unproven") for f in found):
                accepted.append((forge.__name__, number, [f.rule for f in found]))
            made = Forged(kind, name, group)
    assert accepted == []
    # What applies to casts without a scale and without a sum.
    assert len(forged) >= 8
