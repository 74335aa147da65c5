"""Ring attention: keys and values go from rank to rank (``permute_tensor``), and everything else is planned.

To whom a rank hands its rows is its own number. All ranks send and get one message of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from inductor_passes.report import Reason
from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

BATCH, HEADS, ROWS, WIDTH, LAYERS = 2, 3, 7, 8, 2
COLUMNS = HEADS * WIDTH


class Handed(torch.autograd.Function):
    """To the next rank; gradients to the one before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _handed_on(x, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _handed_on(grads[0], -1)


def _handed_on(x: torch.Tensor, by: int) -> torch.Tensor:
    size = dist.get_world_size()
    to = [(rank + by) % size for rank in range(size)]
    return funcol.wait_tensor(funcol.permute_tensor(x.reshape(-1), to, dist.group.WORLD)).view(x.shape)


class Gathered(torch.autograd.Function):
    """A parameter of which every rank holds some rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return funcol.reduce_scatter_tensor(grads[0], "sum", 0, dist.group.WORLD)


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention over all ranks' rows, a rank's after the other; merged by their logsumexp."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out, total = torch.zeros_like(q), torch.full_like(q[..., :1], -1e30)
    for step in range(size):
        if step:
            k, v = Handed.apply(torch.stack([k, v])).unbind()
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        # So the graphs of ranks are other ones.
        if causal and (rank - step) % size == rank:
            rows = q.shape[-2]
            scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), -1e30)
        elif causal and (rank - step) % size > rank:
            scores = scores - 1e30
        here = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(total, here)
        out = out * (total - both).exp() + (scores - here).exp() @ v * (here - both).exp()
        total = both
    return out


def model(x: torch.Tensor, weights: list[torch.Tensor], causal: bool) -> torch.Tensor:
    for weight, bias in zip(weights[::2], weights[1::2]):
        made = (x @ Gathered.apply(weight) + Gathered.apply(bias)).view(BATCH, x.shape[1], 3, HEADS, WIDTH)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind()
        x = x + ring(q, k, v, causal).transpose(1, 2).reshape(x.shape)
    return x.square().mean()


def step(
    rank: int, world_size: int, causal: bool, settings: dict[str, Any], lengths: tuple[int, ...] = (ROWS,)
) -> tuple[float, list[list[str]], list[str], set[tuple[str, int]]]:
    """How far loss and gradients are off, of the largest; the kinds of collectives per graph; what was rewritten; for
    each pass how often it said that ranks differ."""
    draw = torch.Generator().manual_seed(rank)
    shapes = [(COLUMNS // world_size, 3 * COLUMNS), (3 * COLUMNS // world_size,)] * LAYERS
    found = []
    with collect(what_if=False) as reports:
        for options in (None, dotted(codegen="aot_eager", verify="strict", **settings)):
            torch._dynamo.reset()
            name = "aot_eager_decomp_partition" if options is None else "inductor_passes"
            dynamic = len(lengths) > 1
            compiled = torch.compile(model, fullgraph=True, backend=name, options=options, dynamic=dynamic)
            draw.manual_seed(rank)
            made = []
            for rows in lengths:
                given = [(torch.randn(*shape, generator=draw) * 0.2).requires_grad_() for shape in shapes]
                x = torch.randn(BATCH, rows, COLUMNS, generator=draw, requires_grad=True)
                loss = compiled(x, given, causal)
                loss.backward()
                made += [loss.detach(), *(one.grad for one in (x, *given))]
            found.append(made)
    # A bias of keys has no gradient: what is not there is as small as what is beside it lets it be.
    largest = max(one.abs().max().item() for one in found[0])
    off = max((a - b).abs().max().item() for a, b in zip(*found)) / largest
    assert not [p.name for r in reports for p in r.passes if p.rolled_back is not None]
    sent = [[str(c.kind) for c in r.collectives] for r in reports]
    differ = {(p.name, sum(d.reason is Reason.RANKS_DIFFER for d in p.decisions)) for r in reports for p in r.passes}
    return off, sent, sorted({p.name for r in reports for p in r.passes if p.changed}), differ


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as pool:
        yield pool


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_beside_a_ring_is_planned(three: Ranks, causal: bool) -> None:
    results = three.run(step, causal, {})
    for off, sent, changed, _ in results:
        assert off == 0
        assert {"bucket", "reorder"} <= {*changed}
        for kinds in sent:
            # Of two gathers or reductions per layer one each is left, or less, and every exchange.
            assert kinds.count("all_to_all") == LAYERS * 2
            assert len(kinds) <= LAYERS * 3
    assert results[0][1:] == results[1][1:] == results[2][1:]


def test_what_is_beside_a_ring_of_any_length_is_planned(three: Ranks) -> None:
    for off, sent, changed, differ in three.run(step, False, {"memory_budget": "unlimited"}, (7, 9, 12)):
        assert off == 0
        assert len(sent) == 2, "one graph for all lengths"
        assert {"bucket", "reorder"} <= {*changed}
        assert not any(count for _, count in differ)


def test_what_is_beside_a_ring_is_narrowed(three: Ranks) -> None:
    for off, _, changed, _ in three.run(step, False, {"compress": {"*": "bf16"}, "memory_budget": "unlimited"}):
        assert 0 < off < 0.05
        assert "compress" in changed


def test_what_differing_graphs_keep_from_being_narrowed_is_told(three: Ranks) -> None:
    """Each message has its line among the decisions, also where ranks only send the same."""
    for _, _, changed, differ in three.run(step, True, {"compress": {"*": "bf16"}, "async_tp": "force"}):
        assert {("compress", LAYERS * 4), ("async_tp", LAYERS * 4)} <= differ
        assert "bucket" in changed


def exchange(rank: int, world_size: int) -> tuple[bool, set[str], str]:
    """Rank 1 keeps rows besides what it hands on, which its peers cannot see: is it right, what changed, why not?"""
    splits = ([0, 8, 0], [8, 3, 0], [0, 0, 8])[rank]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = funcol.all_to_all_single(x.relu(), splits, splits, dist.group.WORLD)
        sums = [funcol.all_reduce(got[:8].sum(0) * k, "sum", dist.group.WORLD) for k in (1, 2)]
        return got * 2, sums[0], sums[1]

    x = torch.arange(sum(splits) * 4.0).view(-1, 4) - rank
    torch._dynamo.reset()
    options = dotted(codegen="aot_eager", verify="strict", rank_agreement="200s")
    with collect(what_if=False) as reports:
        found = torch.compile(program, fullgraph=True, backend="inductor_passes", options=options)(x)
    right = all(torch.equal(a, b) for a, b in zip(program(x), found))
    (said,) = {p.detail for r in reports for p in r.passes if p.name == "agreement"}
    return right, {p.name for r in reports for p in r.passes if p.changed}, said


def test_where_only_some_ranks_hand_all_their_rows_on_nothing_is_done(three: Ranks) -> None:
    results = three.run(exchange)
    for right, changed, said in results:
        assert right
        assert "bucket" not in changed
        assert "pieces of unequal size" in said
    # Nobody waits for a rank that has nothing to vote for.
    assert "rank 1 cannot describe its graph to others" in results[0][2]
