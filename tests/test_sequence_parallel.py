"""R16: row by row work behind all_reduces, on each rank's rows: graphs, all ranks, forgeries, async TP, memory."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.fx
from expecttest import TestCase
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import verify
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewriting.contract import Look
from inductor_passes.settings.errors import ConfigError
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.messages import OWN_KEY
from inductor_passes.verify.values import Program as Values
from inductor_passes.verify.values.affine import Space
from inductor_passes.verify.values.communication import Groups
from inductor_passes.verify.values.implied import computed, implied
from tests.support.redistribute_graphs import duplicate, group_ranks, ops_of, run_in_lockstep
from tests.support.redistribute_programs import Program
from tests.support.sequence_programs import Sizes, Transformer
from tests.support.world import fake_world, mesh_world

aten = torch.ops.aten
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
#: Rounding of float64: sums over ranks and rows in another order.
ATOL = 1e-13


def fast_link(ranks: int, alpha_ns: float = 0.0, issue_ns: float = 10.0, per_byte: float = 0.0) -> CostProfile:
    """A link without latency, and memory that is slow beside it; what a host loses to issue a collective."""
    costs = tuple(CollectiveCost(kind, alpha_ns, 1.0, issue_ns, per_byte) for kind in KINDS)
    group = GroupCost(GroupLayout(ranks, 1, ranks), "test", "wire", costs)
    return CostProfile("test", "cpu", True, ranks, memory_bytes_per_s=1e9, kernel_ns=10.0, groups=(group,))


def settings(replicas: str = "implied", **more: str) -> PassConfig:
    return PassConfig(memory_budget="unlimited", verify="strict", replicas=replicas, **more)


def rewritten(
    gm: torch.fx.GraphModule,
    ranks: int,
    tier: str = "reassociate",
    config: PassConfig | None = None,
    profile: CostProfile | None = None,
) -> PassReport:
    """R16 through the pipeline, verified by value; the graph is changed in place."""
    config, profile = config or settings(), profile or fast_link(ranks)
    report = run_passes(gm.graph, [RewriteCollectives(tier, ("R16",))], config, profile).report.passes[0]
    gm.graph.lint()
    gm.recompile()
    return report


def counts(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """How many all_reduces, reduce_scatters and all_gathers."""
    found = Counter(ops_of(gm))
    return tuple(found[name] for name in COLLECTIVES)


def cut(gm: torch.fx.GraphModule, ranks: int) -> int:
    """How many collectives async TP cuts into parts."""
    done = run_passes(duplicate(gm).graph, [AsyncTpPass(mode="force")], settings(), fast_link(ranks))
    return sum(d.verdict is Verdict.APPLIED for d in done.report.passes[0].decisions)


def peak_bytes(gm: torch.fx.GraphModule, ranks: int) -> int:
    """The planned peak of the graph in the order of least memory that is known."""
    return Look(GraphView(gm.graph), PassConfig(), fast_link(ranks), "forward", True).least_peak_bytes


@dataclass(frozen=True)
class Pair:
    """The graphs of all ranks before and after, and the report of rank 0."""

    before: dict[int, torch.fx.GraphModule]
    after: dict[int, torch.fx.GraphModule]
    groups: dict[int, dict[str, tuple[int, ...]]]
    report: PassReport


@functools.cache
def pair(model: Transformer, mode: str) -> Pair:
    made = Pair({}, {}, {}, PassReport(""))
    ranks = model.sizes.ranks
    for rank in reversed(range(ranks)):
        with fake_world(ranks, rank):
            made.before[rank] = model.traced(mode, rank)
            made.after[rank] = duplicate(made.before[rank])
            made.groups[rank] = group_ranks()
            made = dataclasses.replace(made, report=rewritten(made.after[rank], ranks))
    return made


def differs(model: Transformer, made: Pair) -> float:
    """The largest difference between results before and after, on any rank."""
    inputs = {rank: model.inputs(rank) for rank in made.before}
    wanted, got = (run_in_lockstep(graphs, inputs, made.groups) for graphs in (made.before, made.after))
    return max(float((a - b).abs().max()) for r in wanted for a, b in zip(wanted[r], got[r], strict=True))


SMALL = Sizes()
FOUR_LAYERS = Sizes(layers=4, ranks=2)
TWO_RANKS = Sizes(ranks=2)
#: Drawn once, never tuned on: another rank count, one sequence, odd widths.
UNSEEN = Sizes(batch=1, seq=15, dim=21, heads=3, head=2, hidden=10, vocab=9, layers=3, ranks=3)


@pytest.mark.parametrize(
    "model, mode, before, after",
    [
        (Transformer(SMALL), "forward", (4, 0, 0), (0, 4, 4)),
        (Transformer(SMALL, "layer"), "forward", (4, 0, 0), (0, 4, 4)),
        (Transformer(FOUR_LAYERS), "forward", (8, 0, 0), (0, 8, 8)),
        # Two all_reduces of gradients are followed by one read of the whole each; five norms have a weight.
        (Transformer(TWO_RANKS), "train", (9, 0, 0), (5, 9, 11)),
        (Transformer(TWO_RANKS, "layer"), "train", (9, 0, 0), (14, 9, 10)),
        (Transformer(UNSEEN, "layer"), "forward", (6, 0, 0), (0, 6, 6)),
    ],
    ids=["llama", "gpt", "llama-4", "llama-train", "gpt-train", "unseen"],
)
def test_models(model: Transformer, mode: str, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    made = pair(model, mode)
    assert made.report.rolled_back is None
    assert (counts(made.before[0]), counts(made.after[0])) == (before, after)
    assert differs(model, made) < ATOL


def test_training_saves_memory() -> None:
    for norm in ("rms", "layer"):
        made = pair(Transformer(TWO_RANKS, norm), "train")
        assert peak_bytes(made.after[0], 2) < peak_bytes(made.before[0], 2)


def test_async_tp_cuts_both_sides() -> None:
    for norm in ("rms", "layer"):
        made = pair(Transformer(SMALL, norm), "forward")
        with fake_world(4):
            assert (cut(made.before[0], 4), cut(made.after[0], 4)) == (4, 8)


def block(rows: int = 8, tokens: bool = False) -> torch.fx.GraphModule:
    """One all_reduce, a residual, a norm without a weight and the product behind it, on four ranks."""
    program = Program((2, rows // 2, 6), (2, rows // 2, 6), (6, 5), dtype=torch.float32)
    x, residual, weight = program.inputs
    h = program.call(aten.add.Tensor, residual, program.collective("all_reduce", x, "sum", "0"))
    if tokens:
        h = program.call(aten.cumsum.default, h, 1)
    square = program.call(aten.mean.dim, program.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    normed = program.call(aten.mul.Tensor, h, program.call(aten.rsqrt.default, square))
    product = program.call(aten.mm.default, program.call(aten.view.default, normed, [rows, 6]), weight)
    return torch.fx.GraphModule(torch.nn.Module(), program.output(product))


def text(gm: torch.fx.GraphModule) -> str:
    """Operators with the shapes of their results."""
    shown = []
    for node in gm.graph.nodes:
        name = str(node.target).split(".")
        if node.op == "call_function" and "wait_tensor" not in name:
            value = node.meta["val"]
            shape = list(value.shape) if isinstance(value, torch.Tensor) else f"{len(value)} pieces"
            shown.append(f"{name[1] if len(name) > 1 else 'getitem'} {shape}")
    return "\n".join(shown)


class Graphs(TestCase):
    def test_before_and_after(self) -> None:
        with fake_world(4, 1):
            gm = block()
            before = text(gm)
            rewritten(gm, 4)
            self.assertExpectedInline(f"{before}\n->\n{text(gm)}", """\
all_reduce [2, 4, 6]
add [2, 4, 6]
pow [2, 4, 6]
mean [2, 4, 1]
rsqrt [2, 4, 1]
mul [2, 4, 6]
view [8, 6]
mm [8, 5]
->
view [8, 6]
reduce_scatter_tensor [2, 6]
view [8, 6]
split_with_sizes 4 pieces
getitem [2, 6]
add [2, 6]
pow [2, 6]
mean [2, 1]
rsqrt [2, 1]
mul [2, 6]
all_gather_into_tensor [8, 6]
view [2, 4, 6]
view [8, 6]
mm [8, 5]""")


def unit(h: torch.Tensor) -> torch.Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)


def sequence_first(h: torch.Tensor) -> torch.Tensor:
    return unit(h.transpose(0, 1).contiguous()).transpose(0, 1)


def columns_first(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(h.shape[0], h.shape[2], h.shape[1]).tanh().reshape(h.shape)


@pytest.mark.parametrize("mixed", [sequence_first, columns_first])
def test_what_every_rank_computes_whole_is_read_in_rows(mixed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A mean of a value that all ranks compute alike is proven where a rank reads its own rows of it."""
    slow_sum = [CollectiveCost(k, 1.0, 1000.0 if k == "all_reduce" else 1.0, 1.0, 0.0) for k in KINDS]
    group = GroupCost(GroupLayout(2, 1, 2), "test", "wire", tuple(slow_sum))
    profile = CostProfile("test", "cpu", True, 2, memory_bytes_per_s=1e9, kernel_ns=1.0, groups=(group,))

    def model(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        h = mixed(funcol.all_reduce(x @ wide, "sum", world))
        h = h + funcol.all_reduce(torch.tanh(unit(h) @ narrow) @ wide, "sum", world)
        return unit(h) @ narrow

    with fake_world(2) as world:
        gm = make_fx(model, tracing_mode="fake", decomposition_table=core_aten_decompositions())(
            torch.randn(2, 12, 16), torch.randn(16, 32), torch.randn(32, 16)
        )
        assert rewritten(gm, 2, config=settings("proven"), profile=profile).changed
        assert counts(gm)[0] == 1


def refusal(gm: torch.fx.GraphModule, **how: object) -> tuple[Reason, str]:
    report = rewritten(gm, 4, **how)  # type: ignore[arg-type]
    assert not report.changed
    (decision,) = report.decisions
    return decision.reason, decision.setting


def test_what_is_left_alone() -> None:
    with fake_world(4):
        assert refusal(block(), tier="exact") == (Reason.NUMERICS, 'redistribute="reassociate"')
        assert refusal(block(), config=settings("proven")) == (Reason.DATA_DEPENDENCY, 'replicas="implied"')
        assert refusal(block(rows=6)) == (Reason.UNSUPPORTED, "")
        assert refusal(block(), profile=fast_link(4, alpha_ns=1e6)) == (Reason.NOT_PROFITABLE, "")
        # Found on gloo: the link was no busier, and the host issued twice as many messages.
        assert refusal(block(), profile=fast_link(4, issue_ns=1e6)) == (Reason.NOT_PROFITABLE, "")
        assert refusal(block(), profile=fast_link(4, per_byte=10.0)) == (Reason.NOT_PROFITABLE, "")
        # The norm is behind an operator that mixes tokens: nothing reduces a row before that.
        assert rewritten(block(tokens=True), 4).decisions == []


def test_a_weight_that_may_differ_ends_the_region() -> None:
    """Without the residual the norm is of proven replicas; the weight is applied to the whole."""
    with fake_world(4):
        program = Program((8, 6), (6,), (6, 5))
        x, scale, weight = program.inputs
        h = program.collective("all_reduce", x, "sum", "0")
        square = program.call(aten.mean.dim, program.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
        normed = program.call(aten.mul.Tensor, h, program.call(aten.rsqrt.default, square))
        product = program.call(aten.mm.default, program.call(aten.mul.Tensor, normed, scale), weight)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(product))
        assert rewritten(gm, 4, config=settings("proven")).changed
        assert ops_of(gm)[-3:] == ["all_gather_into_tensor", "mul", "mm"]


def test_numbers_that_were_not_compared_end_a_region() -> None:
    """A variant that one rank alone may have sends what the others send, and may norm with another epsilon.

    Found: a second graph of a function, in which ranks differed in a factor, computed rows for each other.
    """
    with fake_world(4):
        for compared in (True, False):
            gm, known = block(), Known("inference", compared=compared)
            passes = [RewriteCollectives("reassociate", ("R16",))]
            done = run_passes(gm.graph, passes, settings(), fast_link(4), known=known)
            assert done.report.passes[0].changed == compared


def mask(columns: torch.Tensor) -> torch.Tensor:
    """Every other column, of another remainder on every rank."""
    return torch.where(columns % 2 == 1, 1.0, 0.5)


@pytest.mark.parametrize(
    "made",
    [
        lambda h: mask(torch.arange(6)),
        lambda h: mask(torch.full((6,), 1)),
        lambda h: torch.arange(6).add(1) * 0.25,
        lambda h: torch.ones(8)[2:],
        lambda h: torch.ones(4, 6)[1],
        lambda h: torch.ones(4, 6).split(1)[1].squeeze(0),
        lambda h: funcol.reduce_scatter_tensor(h.sum(0).repeat(4, 1), "sum", 0, "0").squeeze(0),
    ],
    ids=["arange", "full", "offset", "slice", "select", "piece", "scattered"],
)
def test_a_factor_of_own_numbers_is_no_input(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Found: with ``replicas="implied"`` a mask of the columns that a rank owns counted as equal on the ranks.

    The pass and the verifier find out each for itself.
    """

    def run(x: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = funcol.all_reduce(x, "sum", "0") * (factor if made is None else made(x))
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True))) @ weight

    def traced() -> torch.fx.GraphModule:
        inputs = torch.randn(8, 6), torch.randn(6), torch.randn(6, 5)
        return make_fx(run, tracing_mode="fake", decomposition_table=core_aten_decompositions())(*inputs)

    with fake_world(4):
        gm = traced()
        assert not rewritten(gm, 4).changed
        assert not implied(Values(View(gm.graph)), Groups(Space()))
        # An input, and positions: numbers that a graph makes are compared where something is implied.
        made = None  # type: ignore[assignment]
        assert accepted(traced()) == ["factor_1"]
        made = positions
        assert accepted(traced()) == ["mul"]


def test_weights_that_data_parallelism_gathers_are_inputs() -> None:
    """Found: with FSDP around tensor parallelism the verifier missed that shards of a norm's weight are equal."""
    with mesh_world((2, 2)) as mesh:
        rows, columns = (mesh.get_group(dim).group_name for dim in ("a", "b"))

        def run(x: torch.Tensor, shard: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            h = funcol.all_reduce(x, "sum", columns)
            normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True))
            return (normed * funcol.all_gather_tensor(shard, 0, rows)) @ weight

        inputs = torch.randn(8, 6), torch.randn(3), torch.randn(6, 5)
        gm = make_fx(run, tracing_mode="fake", decomposition_table=core_aten_decompositions())(*inputs)
        assert rewritten(gm, 2).changed
        # The weight is applied to shares of the rows.
        assert "mul [4, 6]" in text(gm).partition("all_gather_into_tensor [8, 6]")[0]


def test_a_view_of_symbolic_size_keeps_ranks_equal() -> None:
    """Found by an outsider: with the batch in the views between a sum and a norm the verifier lost what ranks share."""

    def run(x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] % 2 == 0)
        reduced = funcol.all_reduce(x.reshape(-1, 6), "sum", world).reshape(x.shape[0], 4, 6)
        return (unit(residual + reduced) * scale).reshape(-1, 6) @ weight

    with fake_world(2) as world:
        inputs = torch.randn(8, 4, 6), torch.randn(8, 4, 6), torch.randn(6), torch.randn(6, 5)
        gm = make_fx(run, tracing_mode="symbolic", decomposition_table=core_aten_decompositions())(*inputs)
        views = gm.graph.find_nodes(op="call_function", target=aten.view.default)
        assert any(isinstance(size, torch.fx.Node) for view in views for size in view.args[1])
        assert rewritten(gm, 2).changed


def test_a_number_that_no_collective_shows_ends_equality() -> None:
    def run(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        h = funcol.all_reduce(x, "sum", world)
        return h * 2 + h * x.shape[0], h * other.shape[0]

    with fake_world(2) as world:
        gm = make_fx(run, tracing_mode="symbolic")(torch.randn(8), torch.randn(5))
        products = [n.name for n in gm.graph.nodes if n.op == "call_function" and n.target is aten.mul.Tensor]
        values = Values(View(gm.graph))
        for with_implied in (False, True):
            found = computed(values, Groups(Space()), with_implied)
            assert [name in found for name in products] == [True, True, False]


def positions(h: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 7) * 0.25


def accepted(gm: torch.fx.GraphModule) -> list[str]:
    """What the verifier takes to be implied in a graph that the pass rewrites."""
    found = list(implied(Values(View(gm.graph)), Groups(Space())))
    assert rewritten(gm, 4).changed
    return found


def test_setting() -> None:
    with pytest.raises(ConfigError, match=r"replicas.*proven.*implied"):
        PassConfig(replicas="all")


# -- forgeries ----------------------------------------------------------------------------------------------------


def another_piece(gm: torch.fx.GraphModule) -> None:
    """The residual's rows of another rank."""
    split = next(n for n in gm.graph.nodes if OWN_KEY in n.meta)
    (piece,) = split.users
    piece.args = (split, (piece.args[1] + 1) % 4)


def another_dimension(gm: torch.fx.GraphModule) -> None:
    """Reduced rows are columns."""
    start = next(n for n in gm.graph.nodes if "reduce_scatter" in str(n.target))
    whole = start.args[0]
    with gm.graph.inserting_before(start):
        turned = gm.graph.call_function(aten.view.default, (whole, [6, 8]))
        turned = gm.graph.call_function(aten.permute.default, (turned, [1, 0]))
        turned = gm.graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    value = whole.meta["val"]
    values = (value.view(6, 8), value.view(6, 8).t(), value.view(6, 8).t().contiguous())
    for node, fake in zip((turned.args[0].args[0], turned.args[0], turned), values, strict=True):
        node.meta["val"] = fake
    start.replace_input_with(whole, turned)


def missing_gather(gm: torch.fx.GraphModule) -> None:
    """The own rows in the place of everybody's."""
    start = next(n for n in gm.graph.nodes if "all_gather" in str(n.target))
    (wait,) = start.users
    with gm.graph.inserting_before(start):
        copies = gm.graph.call_function(aten.cat.default, ([start.args[0]] * 4,))
    copies.meta["val"] = wait.meta["val"].new_empty(wait.meta["val"].shape)
    wait.replace_all_uses_with(copies)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


def mixed_tokens(gm: torch.fx.GraphModule) -> None:
    """Rows are added up within a share."""
    power = next(n for n in gm.graph.nodes if n.target is aten.pow.Tensor_Scalar)
    with gm.graph.inserting_before(power):
        mixed = gm.graph.call_function(aten.cumsum.default, (power.args[0], 0))
    mixed.meta["val"] = power.args[0].meta["val"].clone()
    power.replace_input_with(power.args[0], mixed)


@pytest.mark.parametrize("forge", [another_piece, another_dimension, missing_gather, mixed_tokens])
def test_forgeries_are_found(forge: object) -> None:
    with fake_world(4, 1):
        gm = block()
        before = verify.snapshot(gm.graph)
        rewritten(gm, 4)
        check = functools.partial(verify.check, reference=before, numerics="reassociate", group_order="any")
        certificates = (verify.Certificate("R16", tuple(before.nodes), tuple(n.name for n in gm.graph.nodes), ()),)
        values = {"value-changed", "value-unproven"}
        found = check(gm.graph, certificates=certificates, replicas="implied")
        assert not values & {f.rule for f in found}
        # What is implied to be equal is not proven to be.
        assert values & {f.rule for f in check(gm.graph, certificates=certificates)}
        forge(gm)  # type: ignore[operator]
        gm.graph.lint()
        found = check(gm.graph, certificates=certificates, replicas="implied")
        assert values & {f.rule for f in found}, found


def forged(gm: torch.fx.GraphModule, before: verify.ReferenceSnapshot, kept: tuple[str, ...] = ()) -> set[str]:
    """Findings about values where a certificate covers everything that was and is called, but what is ``kept``."""
    old = tuple(n for n, record in before.nodes.items() if record.op == "call_function" and n not in kept)
    new = tuple(n.name for n in gm.graph.nodes if n.op == "call_function" and n.name not in kept)
    found = verify.check(gm.graph, reference=before, certificates=(verify.Certificate("forged", old, new),))
    return {f.rule for f in found if f.rule.startswith("value-")}


def test_a_mark_does_not_change_what_the_graph_was() -> None:
    """All ranks read the first half of a common value; a pass writes at that split that it is each rank's own."""
    with fake_world(2):
        program = Program((8, 4))
        whole = program.collective("all_reduce", program.inputs[0], "sum", "0")
        split = program.call(aten.split.Tensor, whole, 4)
        piece = program.call(aten.neg.default, program.call(operator.getitem, split, 0))
        read = program.call(aten.mul.Tensor, program.collective("all_gather_into_tensor", piece, 2, "0"), 2.0)
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(read))
        before = verify.snapshot(gm.graph)
        split.meta[OWN_KEY] = (0, 1)
        with gm.graph.inserting_before(read):
            read.args = (program.call(aten.neg.default, whole), 2.0)
        assert forged(gm, before, (split.name,)) == {"value-changed"}


def test_who_takes_the_list_of_pieces_reads_those_of_other_ranks() -> None:
    """An operator on two copies of the own half gets both halves, which the split says are nobody else's."""
    with fake_world(2):
        program = Program((8, 4))
        (x,) = program.inputs
        half = program.call(aten.slice.Tensor, x, 0, 0, 4)
        halves = program.call(aten.split.Tensor, program.call(aten.cat.default, [half, half]), 4)
        scaled = program.call(aten._foreach_mul.Scalar, halves, 2.0)
        results = [program.call(operator.getitem, scaled, i) for i in range(2)]
        gm = torch.fx.GraphModule(torch.nn.Module(), program.output(*results))
        before = verify.snapshot(gm.graph)
        with gm.graph.inserting_before(scaled):
            other = program.call(aten.split.Tensor, x, 4)
        other.meta[OWN_KEY] = (0, 1)
        scaled.args = (other, 2.0)
        assert forged(gm, before, (scaled.name, *(r.name for r in results))) == {"value-changed"}


@pytest.mark.parametrize("moved", [None, (aten.roll.default, [1], [0]), (aten.constant_pad_nd.default, [0, 0, 1, -1])])
def test_how_far_elements_move_may_be_a_ranks_own(moved: tuple[Any, ...] | None) -> None:
    """What is added to a common value is equal on all ranks; what is added to elements at own places is not."""
    with fake_world(2):
        program = Program((8, 4), (8, 4))
        common = program.collective("all_reduce", program.inputs[0], "sum", "0")
        if moved is not None:
            common = program.call(moved[0], common, *moved[1:])
        program.output(program.call(aten.add.Tensor, common, program.inputs[1]))
        found = implied(Values(View(program.graph)), Groups(Space()))
        assert list(found) == (["x1"] if moved is None else [])
