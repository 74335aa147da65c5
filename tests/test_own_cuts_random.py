"""Programs drawn at random in which every rank takes rows of its own, or hands them on: it gets what it got.

Ranks take such programs for one graph, and one rank's graph does not say which numbers are its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.config import PassConfig
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from tests.support.redistribute_graphs import LockstepError, duplicate, group_ranks, run_in_lockstep
from tests.support.world import fake_world
from tests.test_sequence_parallel import fast_link

ROWS = COLUMNS = 12
POINTWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.exp,
    lambda x: x * 0.5,
    lambda x: x.float().double(),
)


def own_cut(x: torch.Tensor, ranks: int, which: float, length: float) -> torch.Tensor:
    """The rank's own stretch along a dimension, a row or a piece of its own, or the first piece on all ranks."""
    rank, dim = dist.get_rank(), int(which * x.dim())
    longest = x.shape[dim] // ranks
    if longest < 1:
        return x
    if x.shape[dim] % ranks == 0 and (kind := int(length * 100) % 6) < 3:
        return x.split(longest, dim)[rank if kind else 0]
    taken = 1 + int(length * longest)
    if taken > longest:
        return x.select(dim, rank)
    return torch.ops.aten.slice.Tensor(x, dim, rank * taken, (rank + 1) * taken)


def program(seed: int, ranks: int, group: str) -> Callable[..., list[torch.Tensor]]:
    draw = random.Random(seed)
    steps = [[draw.random() for _ in range(5)] for _ in range(draw.randint(3, 8))]

    def run(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for kind, a, b, c, d in steps:
            v = values[int(a * len(values))]
            if kind < 0.2:
                values.append(funcol.all_reduce(v, "max" if d < 0.2 else "sum", group))
            elif kind < 0.4 and v.dim():
                dim = 0 if c < 0.6 else v.dim() - 1
                values.append(funcol.all_gather_tensor(v, dim, group))
            elif kind < 0.5 and v.dim() and v.shape[0] and v.shape[0] % ranks == 0:
                values.append(funcol.reduce_scatter_tensor(v, "sum", 0, group))
            elif kind < 0.57 and v.numel():
                to = random.Random(c).sample(range(ranks), ranks)
                values.append(funcol.permute_tensor(v.reshape(-1), to, dist.group.WORLD).view(v.shape))
            elif kind < 0.76 and v.dim():
                values.append(own_cut(v, ranks, b, c * 1.1))
            elif kind < 0.85:
                values.append(POINTWISE[int(b * len(POINTWISE))](v))
            elif kind < 0.92 and v.dim():
                values.append(v.sum(-1, keepdim=True) if b < 0.5 else v.logsumexp(-1, keepdim=True))
            elif kind < 0.96:
                other = values[int(c * len(values))]
                values.append(v + other if other.shape == v.shape else v * 2)
            elif v.dim() == 2 and v.shape[1] == COLUMNS:
                values.append(v @ weight)
        return values[-2:]

    return run


def inputs(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5 + rank)
    return [torch.randn(n, COLUMNS, generator=draw, dtype=torch.float64) * 0.3 for n in (ROWS, COLUMNS)]


def sent(graph: torch.fx.Graph) -> list[tuple[str, ...]]:
    """What a graph asks of other ranks, in order."""
    found = GraphView(graph).collectives
    return [(c.kind.name, str(c.reduce_op), str(c.input_bytes), str(c.group.ranks)) for c in found]


@pytest.mark.parametrize("tier", ["exact", "reassociate"])
def test_every_rank_gets_what_it_got_and_sends_what_the_others_do(tier: str) -> None:
    changed = 0
    for seed in range(120):
        ranks = 2 + seed % 2
        before, after, groups, done = {}, {}, {}, False
        config = PassConfig.from_mapping({"memory_budget": "unlimited", "numerics": tier, "async_tp": "force"})
        for rank in range(ranks):
            with fake_world(ranks, rank) as group:
                run = program(seed, ranks, group)
                before[rank] = make_fx(run, tracing_mode="fake", decomposition_table=select_decomp_table())(
                    *inputs(rank)
                )
                if seed % 4:
                    # Many rewrites leave alone what is next to something that nobody reads.
                    before[rank].graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "call_function")
                after[rank] = duplicate(before[rank])
                groups[rank] = group_ranks()
                report = run_passes(after[rank].graph, passes_of(config), config, fast_link(ranks, 0.0)).report
                after[rank].recompile()
                done |= any(one.changed for one in report.passes)
        if not done or len({str(sent(gm.graph)) for gm in before.values()}) > 1:
            continue
        assert len({str(sent(gm.graph)) for gm in after.values()}) == 1, seed
        values = {rank: inputs(rank) for rank in before}
        try:
            wanted = run_in_lockstep(before, values, groups)
        except LockstepError:
            continue
        changed += 1
        got = run_in_lockstep(after, values, groups)
        for rank in wanted:
            torch.testing.assert_close(got[rank], wanted[rank], rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"{seed}")
    assert changed >= 40, changed
