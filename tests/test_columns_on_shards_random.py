"""R18 on programs drawn at random: whatever is made of gathered columns, every rank gets what it got."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.redistribute_graphs import duplicate, group_ranks, ops_of, run_in_lockstep
from tests.support.world import fake_world
from tests.test_columns_on_shards import rewritten

Values = list[torch.Tensor]
ROWS, COLUMNS = (2, 3), 4
UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.exp,
    torch.relu,
    lambda x: x * 0.5,
    lambda x: x.float().double(),
    lambda x: 1 - x,
    lambda x: x.clamp(-1, 2),
)
BINARY = (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b))
REDUCED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.sum(-1, keepdim=True),
    lambda x: x.amax(-1, keepdim=True),
    lambda x: x.amin(-1, keepdim=True),
    lambda x: x.sum((0, -1), keepdim=True).expand(x.shape[0], *x.shape[1:-1], 1),
    lambda x: x.logsumexp(-1, keepdim=True),
    lambda x: torch.log_softmax(x, -1).exp().sum(-1, keepdim=True),
    lambda x: (x > 0.5).any(-1, keepdim=True).double(),
    # Of a row of the rank's own, which ranks take for one graph.
    lambda x: x[:, (row := min(dist.get_rank(), 2)) : row + 1].logsumexp(-1, keepdim=True).expand(*ROWS, 1),
    lambda x: (x < 1).all(-1, keepdim=True).double(),
)


def program(draw: random.Random, group: str) -> Callable[..., Values]:
    """A few steps; each is decided here, so that every rank's graph has the same ones."""
    steps = [(draw.random(), draw.random(), draw.random(), draw.random()) for _ in range(draw.randint(2, 7))]
    outputs = draw.randint(1, 3)

    def run(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor) -> Values:
        columns = [funcol.all_gather_tensor(x @ weight, 2, group)]
        rows: Values = []

        def one_of(values: Values, at: float) -> torch.Tensor:
            return values[int(at * len(values))]

        for kind, a, b, which in steps:
            source = one_of(columns, a)
            if kind < 0.25:
                columns.append(UNARY[int(which * len(UNARY))](source))
            elif kind < 0.45:
                columns.append(BINARY[int(which * len(BINARY))](source, one_of([*columns, *rows], b)))
            elif kind < 0.75:
                rows.append(REDUCED[int(which * len(REDUCED))](source))
            elif kind < 0.9:
                rows.append(source.gather(-1, targets[..., None]))
            elif kind < 0.95:
                columns.append(source.transpose(0, 1).contiguous().view(-1, source.shape[-1]).view(source.shape))
            else:
                columns.append(source * factor)
        # All of the columns leave the graph now and then, and the gather stays.
        left = [*rows, *(columns[-1:] if not rows or steps[0][1] > 0.95 else [])]
        return left[-outputs:]

    return run


def inputs(rank: int, ranks: int) -> Values:
    draw = torch.Generator().manual_seed(11 + rank)
    x = torch.randn(*ROWS, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(5, COLUMNS, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, COLUMNS * ranks, ROWS, generator=draw)
    return [x, weight, targets, torch.randn(*ROWS, 1, generator=draw, dtype=torch.float64)]


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_every_rank_gets_what_it_got(first: int) -> None:
    applied = 0
    for seed in range(first, first + 30):
        ranks = 2 + seed % 3
        before, after, groups = {}, {}, {}
        for rank in range(ranks):
            with fake_world(ranks, rank) as group:
                run = program(random.Random(seed), group)
                given = inputs(rank, ranks)
                before[rank] = make_fx(run, tracing_mode="fake", decomposition_table=select_decomp_table())(*given)
                after[rank] = duplicate(before[rank])
                groups[rank] = group_ranks()
                # What cannot be proven raises.
                changed = rewritten(after[rank], ranks).changed
        applied += changed
        values = {rank: inputs(rank, ranks) for rank in before}
        wanted, got = (run_in_lockstep(graphs, values, groups) for graphs in (before, after))
        for rank in wanted:
            torch.testing.assert_close(got[rank], wanted[rank], rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"{seed}")
        if changed:
            assert "pick" not in ops_of(before[0])
    assert applied >= 8, applied
