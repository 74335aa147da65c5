"""R18: losses over classes whose logits are gathered, on each rank's own columns: graphs, all ranks, forgeries."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import verify
from inductor_passes._torch.pick_op import OPERATOR as PICK
from inductor_passes.config import PassConfig
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.complain import VerificationError
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import PassReport, Reason
from inductor_passes.rewrites import column_regions
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.verify.messages import OWN_KEY
from tests.support.redistribute_graphs import duplicate, group_ranks, ops_of, run_in_lockstep
from tests.support.symbolic_graphs import SymbolicProgram
from tests.support.world import fake_world
from tests.test_sequence_parallel import another_piece, fast_link, missing_gather

aten = torch.ops.aten
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COLUMNS = 8


def mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def each(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=2)


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def widened(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What is added up are elements that were widened, and the largest of them: at one place of the logits."""
    return smoothed(logits.float(), targets)


def penalised(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean(logits, targets) + logits.square().sum()


def shifted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As for a language model: the last position of a sequence has no target."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, -2), targets[:, 1:].flatten())


def in_pieces(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rows in pieces of their own, as memory is saved without a compiler, and a position taken out and put back.

    Rows at the first places, or the first stretches, could be the rank's own.
    """
    parts = zip(logits.split(2, 1), targets.split(2, 1), strict=True)
    third = torch.zeros_like(logits).select_scatter(logits[:, 3].tanh(), 1, 2)
    moved = torch.cat([logits[1:], third[2:]]).slice_scatter(logits[:, 1:3], 1, 3, 5)
    return torch.stack([mean(*part) for part in parts]).sum() + moved.logsumexp(-1).sum()


def capped(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """With capped logits and a penalty for the logarithm of the sum."""
    h = 3 * torch.tanh(logits / 3)
    return mean(h, targets) + 1e-2 * h.logsumexp(-1).square().mean()


def guarded(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """With a temperature, as Inductor writes it: where a row is not finite, as without its way to compute it."""
    scaled = logits / 0.5
    stable, plain = (logits - logits.amax(-1, True)) / 0.5, scaled - scaled.amax(-1, True)
    finite = (scaled == scaled) & (scaled.abs() != torch.inf)
    shifted = torch.where((~finite).any(-1, keepdim=True), plain, stable)
    logarithms = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -logarithms.gather(-1, targets.unsqueeze(-1)).mean()


def asked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Truth over the columns of a row, over those of all rows, and over rows."""
    high = logits > 1
    row = torch.where(high.any(-1), 1.0, 2.0) + torch.where((logits < 2).all(-1), 0.5, 0.25)
    some = torch.where(high.any(), 3.0, 4.0) + torch.where(torch.any(high, dim=(0, 2)), 1.0, 0.0)
    return mean(logits, targets) + row.sum() + some.sum() + torch.where(high.any(0), logits, 0.0).sum()


def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    p = torch.log_softmax(logits, -1)
    return -(p.exp() * p).sum(-1)


def distilled(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The divergence from another gathered head."""
    p, q = (torch.log_softmax(h, -1) for h in (logits, others))
    return (q.exp() * (q - p)).sum(-1).mean()


def soft(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """With another head's probabilities as targets: a sum and a mean over everything."""
    p, q = (h.flatten(0, -2) for h in (logits, others))
    q = q.softmax(-1)
    return F.cross_entropy(p, q, reduction="sum") + (q * (q.log() - p.log_softmax(-1))).mean()


def weighted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """With a bias per class: numbers in a row, that are added up so that they are no constant."""
    row = torch.ones(logits.shape[-1], dtype=logits.dtype)
    return mean(logits + row.cumsum(0) / row.sum(), targets)


def masked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Every other class counts half: another one on every rank, for all that the graph shows."""
    own = torch.arange(logits.shape[-1]) % 2 == 1
    return mean(logits * torch.where(own, 1.0, 0.5), targets)


@dataclass(frozen=True)
class Head:
    """Logits of which each rank has ``COLUMNS``, and a loss over all of them."""

    loss: Loss
    ranks: int = 4
    dtype: torch.dtype = torch.float64
    scaled: bool = False
    teacher: bool = False

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """Activations, the rank's weight and targets; nothing is equal on the ranks."""
        draw = torch.Generator().manual_seed(7 + rank)
        x = torch.randn(3, 5, 6, generator=draw, dtype=torch.float64).to(self.dtype)
        weight = torch.randn(6, COLUMNS, generator=draw, dtype=torch.float64).to(self.dtype)
        return [x, weight, torch.randint(0, COLUMNS * self.ranks, (3, 5), generator=draw)]

    def traced(self, rank: int, group: str) -> torch.fx.GraphModule:
        """The rank's graph."""

        def run(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = funcol.all_gather_tensor(x @ weight, 2, group)
            if self.teacher:
                return self.loss(logits, funcol.all_gather_tensor(x.flip(-1) @ weight, 2, group))
            return self.loss(logits * x[..., :1] if self.scaled else logits, targets)

        return make_fx(run, tracing_mode="fake", decomposition_table=select_decomp_table())(*self.inputs(rank))


def rewritten(
    gm: torch.fx.GraphModule, ranks: int, tier: str = "reassociate", replicas: str = "proven", alpha_ns: float = 0.0
) -> PassReport:
    """R18 through the pipeline, verified by value; the graph is changed in place."""
    config = PassConfig(memory_budget="unlimited", verify="strict", replicas=replicas)
    done = run_passes(gm.graph, [RewriteCollectives(tier, ("R18",))], config, fast_link(ranks, alpha_ns))
    gm.graph.lint()
    gm.recompile()
    return done.report.passes[0]


@pytest.mark.parametrize(
    "head, reductions, picks",
    [
        (Head(mean), 2, 1),
        (Head(each, ranks=2), 2, 1),
        (Head(smoothed, ranks=3), 3, 1),
        (Head(widened, ranks=2, dtype=torch.bfloat16), 3, 1),
        (Head(shifted, ranks=2, dtype=torch.bfloat16), 2, 1),
        (Head(mean, ranks=2, dtype=torch.bfloat16), 2, 1),
        (Head(each, ranks=3, dtype=torch.float16), 2, 1),
        (Head(capped), 4, 1),
        (Head(in_pieces, ranks=2), 8, 3),
        (Head(guarded, ranks=2), 4, 1),
        (Head(asked, ranks=3), 7, 1),
        (Head(penalised), 3, 1),
        (Head(entropy), 3, 0),
        (Head(distilled, teacher=True, ranks=3), 5, 0),
        (Head(soft, teacher=True, ranks=2), 8, 0),
    ],
    ids=lambda value: value.loss.__name__ if isinstance(value, Head) else "",
)
def test_losses(head: Head, reductions: int, picks: int) -> None:
    before, after, groups = {}, {}, {}
    for rank in range(head.ranks):
        with fake_world(head.ranks, rank) as group:
            before[rank] = head.traced(rank, group)
            after[rank] = duplicate(before[rank])
            groups[rank] = group_ranks()
            report = rewritten(after[rank], head.ranks)
            assert report.changed, report
    called = ops_of(after[0])
    assert called.count("all_reduce") == reductions and called.count("pick") == picks
    # Targets only.
    assert called.count("all_gather_into_tensor") == called.count("reduce_scatter_tensor") == picks
    inputs = {rank: head.inputs(rank) for rank in before}
    wanted, got = (run_in_lockstep(graphs, inputs, groups) for graphs in (before, after))
    for rank in wanted:
        # Logits in bfloat16 are computed on: the sums are in float32.
        torch.testing.assert_close(got[rank], wanted[rank], rtol=1e-6, atol=1e-6)


def decision(head: Head, **how: object) -> tuple[Reason, str] | None:
    with fake_world(head.ranks) as group:
        gm = head.traced(0, group)
        report = rewritten(gm, head.ranks, **how)  # type: ignore[arg-type]
        assert not report.changed
        return (report.decisions[0].reason, report.decisions[0].setting) if report.decisions else None


def test_what_is_left_alone() -> None:
    assert decision(Head(mean), tier="exact") == (Reason.NUMERICS, 'redistribute="reassociate"')
    assert decision(Head(mean), alpha_ns=1e6) == (Reason.NOT_PROFITABLE, "")
    # What scales the logits is a rank's own: the others' columns are scaled by another, whatever is implied.
    assert decision(Head(mean, scaled=True)) == (Reason.DATA_DEPENDENCY, "")
    assert decision(Head(mean, scaled=True), replicas="implied") == (Reason.DATA_DEPENDENCY, "")
    assert decision(Head(weighted)) == (Reason.DATA_DEPENDENCY, 'replicas="implied"')
    with fake_world(4) as group:
        assert rewritten(Head(weighted).traced(0, group), 4, replicas="implied").changed
    # What is made of numbers that may be a rank's own is no input.
    assert decision(Head(masked)) == decision(Head(masked), replicas="implied") == (Reason.DATA_DEPENDENCY, "")


def test_columns_of_numbers_that_were_not_compared() -> None:
    """Found: in a function's second graph, in which each rank had a temperature of its own, one was taken for all."""
    with fake_world(4) as group:
        gm = Head(capped).traced(0, group)
        config, known = PassConfig(memory_budget="unlimited", verify="strict"), Known("inference", compared=False)
        passes = [RewriteCollectives("reassociate", ("R18",))]
        report = run_passes(gm.graph, passes, config, fast_link(4), known=known).report.passes[0]
        assert not report.changed and [d.reason for d in report.decisions] == [Reason.RANKS_DIFFER]


@pytest.mark.parametrize(
    "loss, reader",
    [
        (lambda logits, targets: logits, ""),
        (lambda logits, targets: mean(logits, targets) + logits.cumsum(-1).sum(), "cumsum"),
        (lambda logits, targets: mean(logits, targets) + logits.argmax(-1).sum(), "argmax"),
        (lambda logits, targets: mean(logits[..., 1:], targets - targets), ""),
        (lambda logits, targets: logits.gather(-1, targets[..., None].expand(-1, -1, 2)), ""),
        (lambda logits, targets: mean(logits, targets) + (logits >= logits.amax(-1, keepdim=True)).sum(-1), "sum_"),
        (lambda logits, targets: mean(logits, targets) + (logits.long() + 2).double().amax(-1), "convert_element"),
    ],
    ids=["returned", "cumulated", "largest", "without one", "two per row", "counted", "whole numbers"],
)
def test_all_columns_are_read(loss: Loss, reader: str) -> None:
    """Where there is a loss over the columns as well, the decision names what keeps the gather."""
    with fake_world(4) as group:
        report = rewritten(Head(loss).traced(0, group), 4)
    details = [d.detail for d in report.decisions]
    assert not report.changed and len(details) == bool(reader)
    assert all(d.startswith(reader) and d.endswith("needs all 32 columns") for d in details), details
    assert decision(Head(loss), tier="exact") is None


def own_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the rank's own rows, which ranks take for one graph."""
    rank = dist.get_rank()
    return mean(logits[:, rank : rank + 1], targets[:, rank : rank + 1])


def own_stretch(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    return logits[:, 2 * rank : 2 * rank + 2].logsumexp(-1).sum()


def own_row(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean(logits[:, dist.get_rank()], targets[:, 0])


def own_part(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits[:, :4].split(2, 1)[dist.get_rank()].logsumexp(-1).sum()


def own_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Everything but the rank's own stretch is nothing."""
    rank = dist.get_rank()
    return logits.slice_scatter(logits[:, :2] * 0, 1, 2 * rank, 2 * rank + 2).logsumexp(-1).sum()


def own_factor(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Every column is as many times as large as the rank says."""
    return (logits * torch.full(logits.shape[-1:], dist.get_rank() + 1)).logsumexp(-1).sum()


OWN_ROWS = [own_rows, own_stretch, own_row, own_part, own_place, own_factor]


@pytest.mark.parametrize(
    ("loss", "noticed"),
    [
        *((loss, "by the rewrite") for loss in OWN_ROWS),
        # A single piece the rewrite never takes, whatever it is.
        *((loss, "by the verifier") for loss in OWN_ROWS if loss is not own_part),
    ],
)
def test_rows_that_are_the_ranks_own(loss: Loss, noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reduces other rows: columns of one rank's are not reduced with those of another's."""
    if noticed == "by the verifier":
        monkeypatch.setattr(column_regions, "may_be_own", lambda node: False)
        monkeypatch.setattr(column_regions, "_has_no_own_number", lambda node: True)
    for rank in range(2):
        with fake_world(2, rank) as group:
            gm = Head(loss, ranks=2).traced(rank, group)
            if noticed == "by the rewrite":
                report = rewritten(gm, 2)
                assert not report.changed, report
                said = "may differ between the ranks" if loss is own_factor else "may take other rows on every rank"
                assert all(d.detail.endswith(said) for d in report.decisions), report
            elif loss is own_factor:
                # Not taken for another value, but not shown to be the same either.
                report = rewritten(gm, 2)
                assert [d.detail.partition(":")[0] for d in report.decisions] == ["value-unproven"], report
                assert "all_reduce" not in ops_of(gm), gm
            else:
                with pytest.raises(VerificationError, match="value-"):
                    rewritten(gm, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_would_be_added_up_in_a_narrow_type(dtype: torch.dtype) -> None:
    """An extreme and an element that one rank has are no sums that round."""
    assert decision(Head(lambda logits, targets: logits.sum(-1), dtype=dtype)) == (Reason.NUMERICS, "")
    assert decision(Head(lambda logits, targets: logits.mean(-1), dtype=dtype)) == (Reason.NUMERICS, "")
    with fake_world(4) as group:
        largest = Head(lambda logits, targets: logits.amax(-1), dtype=dtype)
        assert rewritten(largest.traced(0, group), 4).changed


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets: logits.to(torch.float8_e4m3fn).gather(-1, targets[..., None]),
        lambda logits, targets: logits.to(torch.float8_e4m3fn).amax(-1),
        lambda logits, targets: (logits > 0).gather(-1, targets[..., None]),
    ],
    ids=["picked", "largest", "conditions"],
)
def test_what_not_every_library_reduces(loss: Loss) -> None:
    """Types of a byte."""
    assert decision(Head(loss)) == (Reason.NUMERICS, "")


def test_columns_of_one_number_are_no_element() -> None:
    """In eight bits the 256 columns after the first 256 have their numbers again: two are added.

    What is picked is written as a number with a point: a whole one could be the rank's own.
    """
    with fake_world(2) as group:

        def numbers(dtype: torch.dtype) -> torch.Tensor:
            return torch.ops.prims.iota(512, start=0, step=1, dtype=dtype, device="cpu", requires_grad=False)

        def of_all(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            whole = funcol.all_gather_tensor(x, 1, group)
            here = numbers(dtype) == torch.full((3, 1), 3.0).to(dtype)
            return torch.where(here, whole, torch.scalar_tensor(0, dtype=x.dtype)).sum(-1)

        def of_each(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            own = numbers(dtype).split([256, 256])[0]
            here = own == torch.full((3, 1), 3.0).to(dtype)
            part = torch.where(here, x, torch.scalar_tensor(0, dtype=x.dtype)).sum(-1)
            return funcol.wait_tensor(funcol.all_reduce(part, "sum", group))

        for dtype in (torch.int64, torch.int8):
            x = torch.randn(3, 256, dtype=torch.bfloat16)
            graphs = [make_fx(functools.partial(f, dtype=dtype), tracing_mode="fake")(x) for f in (of_all, of_each)]
            split = next(n for n in graphs[1].graph.nodes if "split" in str(n.target))
            split.meta[OWN_KEY] = (0, 1)
            before = verify.snapshot(graphs[0].graph)
            names = [tuple(n.name for n in gm.graph.nodes if n.op == "call_function") for gm in graphs]
            found = verify.check(
                graphs[1].graph, reference=before, numerics="reassociate", group_order="any",
                certificates=(verify.Certificate("R18", *names),),
            )  # fmt: skip
            assert any(f.rule.startswith("value") for f in found) == (dtype is torch.int8), found


@pytest.mark.parametrize("twice", [False, True])
def test_sums_of_a_narrow_type_are_not_proven(twice: bool) -> None:
    """Of numbers that are picked one is not 0; of two that are picked and added, both are not."""
    with fake_world(2) as group:

        def both(picked: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            return picked + whole.sum(-1, keepdim=True) if twice else whole.sum(-1, keepdim=True)

        def of_all(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            whole = funcol.all_gather_tensor(x, 1, group)
            return both(whole.gather(-1, index), whole)

        def of_each(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            picked = PICK(x, torch.arange(4), index.unsqueeze(0), 8).squeeze(0)
            return funcol.wait_tensor(funcol.all_reduce(both(picked, x), "sum", group))

        x, index = torch.randn(3, 4, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
        was, now = (make_fx(f, tracing_mode="fake")(x, index) for f in (of_all, of_each))
        before = verify.snapshot(was.graph)
        names = [tuple(n.name for n in gm.graph.nodes if n.op == "call_function") for gm in (was, now)]
        found = verify.check(
            now.graph, reference=before, numerics="reassociate", group_order="any",
            certificates=(verify.Certificate("R18", *names),),
        )  # fmt: skip
        assert any(f.rule.startswith("value") for f in found), found


def test_columns_that_do_not_divide() -> None:
    """What is gathered is padded, and cut."""
    assert decision(Head(lambda logits, targets: mean(logits[..., : COLUMNS * 4 - 1], targets % 7))) is None


# -- forgeries ----------------------------------------------------------------------------------------------------


def own_sum(gm: torch.fx.GraphModule) -> None:
    """The sum over the rank's columns in the place of the sum over all."""
    start = [n for n in gm.graph.nodes if "all_reduce" in str(n.target)][1]
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


def smallest(gm: torch.fx.GraphModule) -> None:
    """The smallest of the ranks' largest logits."""
    start = next(n for n in gm.graph.nodes if "all_reduce" in str(n.target))
    start.args = (start.args[0], "min", *start.args[2:])


def own_truth(gm: torch.fx.GraphModule) -> None:
    """Whether any of the rank's own columns is not finite."""
    start = next(n for n in gm.graph.nodes if "all_reduce" in str(n.target) and n.meta["val"].dtype is torch.int32)
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


def all_truth(gm: torch.fx.GraphModule) -> None:
    """Whether any of some rank's columns is not finite on every rank."""
    start = next(n for n in gm.graph.nodes if "all_reduce" in str(n.target) and n.meta["val"].dtype is torch.int32)
    start.args = (start.args[0], "min", *start.args[2:])


def next_column(gm: torch.fx.GraphModule) -> None:
    """Columns are numbered from one."""
    iota = next(n for n in gm.graph.nodes if n.target is torch.ops.prims.iota.default)
    iota.kwargs = {**iota.kwargs, "start": 1}


def not_shifted(gm: torch.fx.GraphModule) -> None:
    """Elements are picked among the logits in the place of their logarithms."""
    pick = next(n for n in gm.graph.nodes if n.target is PICK.default)
    pick.args = (pick.args[0].args[0], *pick.args[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "forge", [another_piece, missing_gather, own_sum, smallest, own_truth, all_truth, next_column, not_shifted]
)
def test_forgeries_are_found(forge: Callable[[torch.fx.GraphModule], None], dtype: torch.dtype) -> None:
    with fake_world(4, 1) as group:
        loss = guarded if forge in (own_truth, all_truth) else mean
        gm = Head(loss, dtype=torch.float32 if loss is guarded else dtype).traced(1, group)
        before = verify.snapshot(gm.graph)
        rewritten(gm, 4)
        inner = [n.name for n in gm.graph.nodes if n.op == "call_function"]
        removed = [name for name in before.nodes if name in inner or not name.startswith(("x", "weight", "targets"))]
        certificates = (verify.Certificate("R18", tuple(removed), tuple(inner)),)
        check = functools.partial(verify.check, reference=before, group_order="any", certificates=certificates)
        values = {"value-changed", "value-unproven"}
        assert not values & {f.rule for f in check(gm.graph, numerics="reassociate")}
        # Sums over columns in another order.
        assert values & {f.rule for f in check(gm.graph)}
        forge(gm)
        gm.graph.lint()
        assert values & {f.rule for f in check(gm.graph, numerics="reassociate")}


def test_the_largest_of_all_is_no_exact_value() -> None:
    """A backend need not say that NaN is the largest."""
    with fake_world(2) as group:

        def largest(x: torch.Tensor) -> torch.Tensor:
            return funcol.all_gather_tensor(x, 1, group).amax(-1)

        def of_each(x: torch.Tensor) -> torch.Tensor:
            return funcol.wait_tensor(funcol.all_reduce(x.amax(-1), "max", group))

        was, now = (make_fx(f, tracing_mode="fake")(torch.randn(3, 4)) for f in (largest, of_each))
        before = verify.snapshot(was.graph)
        names = [tuple(n.name for n in gm.graph.nodes if n.op == "call_function") for gm in (was, now)]
        for numerics in ("exact", "reassociate"):
            found = verify.check(
                now.graph,
                reference=before,
                numerics=numerics,  # type: ignore[arg-type]
                group_order="any",
                certificates=(verify.Certificate("R18", *names),),
            )
            assert any(f.rule.startswith("value") for f in found) == (numerics == "exact"), found


def test_an_element_is_given_by_the_rank_that_has_it() -> None:
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(2, 3, 12, generator=draw)
    values[0, 0, 5] = float("nan")
    index = torch.randint(0, 12, (4, 2, 3, 1), generator=draw)
    parts = [PICK(values[..., a : a + 4], torch.arange(a, a + 4), index, 12) for a in (0, 4, 8)]
    wanted = values.expand(4, 2, 3, 12).gather(-1, index)
    torch.testing.assert_close(sum(parts), wanted, rtol=0, atol=0, equal_nan=True)
    for a, part in zip((0, 4, 8), parts, strict=True):
        here = torch.arange(a, a + 4) == index
        meant = torch.where(here, values[..., a : a + 4], 0.0).sum(-1, keepdim=True)
        torch.testing.assert_close(part, meant, rtol=0, atol=0, equal_nan=True)


# -- sizes that are only known at run time ----------------------------------------------------------------------------


def symbolic_loss(group: str, ranks: int, sequence: int) -> tuple[torch.fx.GraphModule, SymbolicProgram]:
    """Rows of ``sequence`` tokens each; the loss of every token."""
    p = SymbolicProgram()
    x = p.rows(4, sequence, COLUMNS)
    targets = p.input(4, sequence, dtype=torch.int64)
    rows = p.number(aten.sym_size.int, x, 0)
    targets.meta["val"] = x.meta["val"].new_empty((x.meta["val"].shape[0], sequence), dtype=torch.int64)
    whole = p.collective("all_gather", x, group)
    split = p.call(aten.split.Tensor, whole, rows)
    logits = p.call(aten.cat.default, [p.call(operator.getitem, split, k) for k in range(ranks)], 2)
    flat = p.call(aten.view.default, logits, [-1, COLUMNS * ranks])
    shifted = p.call(aten.sub.Tensor, flat, p.call(aten.amax.default, flat, [1], True))
    total = p.call(aten.sum.dim_IntList, p.call(aten.exp.default, shifted), [1], True)
    logs = p.call(aten.sub.Tensor, shifted, p.call(aten.log.default, total))
    # Random numbers are not targets.
    index = p.call(aten.remainder.Scalar, p.call(aten.view.default, targets, [-1, 1]), COLUMNS * ranks)
    return p.done(p.call(aten.neg.default, p.call(aten.gather.default, logs, 1, index))), p


@pytest.mark.parametrize("ranks, sequence", [(2, 1), (3, 5)])
def test_right_at_every_size(ranks: int, sequence: int) -> None:
    before, after, groups = {}, {}, {}
    for rank in range(ranks):
        with fake_world(ranks, rank) as group:
            before[rank], p = symbolic_loss(group, ranks, sequence)
            after[rank], guards = duplicate(before[rank]), len(p.env.guards)
            groups[rank] = group_ranks()
            assert rewritten(after[rank], ranks).changed
            assert ops_of(after[rank]).count("pick") == 1 and len(p.env.guards) == guards
    draw = torch.Generator().manual_seed(1)
    for rows in (1, 4, 7):
        logits = [torch.randn(rows, sequence, COLUMNS, generator=draw) for _ in range(ranks)]
        inputs = {r: [x, torch.randint(0, 99, (rows, sequence), generator=draw)] for r, x in enumerate(logits)}
        wanted, got = (run_in_lockstep(graphs, inputs, groups) for graphs in (before, after))
        torch.testing.assert_close(got, wanted)
