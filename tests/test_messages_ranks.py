"""How many messages small programs send on real ranks at the default settings, with results compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from inductor_passes.models.llama import Attention, LlamaConfig, rope_table
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks

WORLD = 2
#: (kind, bytes) of all collectives of a graph.
Sent = list[tuple[str, int]]
Step = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]


def ulysses() -> Step:
    """Attention that exchanges heads for sequence around it: q, k and v there, the result back."""
    config = LlamaConfig(heads=4, kv_heads=4)
    attention = Attention(config, dist.group.WORLD)
    cos, sin = rope_table(config.head_dim, config.seq, torch.float32)
    x = torch.randn(2, config.seq // WORLD, config.dim)
    rows = slice(dist.get_rank() * x.shape[1], (dist.get_rank() + 1) * x.shape[1])
    return lambda: attention(x, cos[rows], sin[rows]).square().sum(), list(attention.parameters())


def sharded_classes() -> Step:
    """Cross entropy over classes that the ranks share out (``loss_parallel``)."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 64, bias=False))
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 32), torch.randint(0, 64, (2, 8))
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    return lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten(0, 1)), list(model.parameters())


def widened() -> Step:
    """Three bfloat16 all_reduces, of which the first rows are widened and added. Of small whole numbers, so exactly."""
    inputs = [torch.randint(-8, 9, (16, 8)).to(torch.bfloat16) for _ in range(3)]

    def step() -> torch.Tensor:
        done = [funcol.all_reduce(x * 2, "sum", dist.group.WORLD) for x in inputs]
        a, b, c = (x.float()[:4] for x in done)
        return a + b + c

    return step, []


STEPS: dict[str, Callable[[], Step]] = {f.__name__: f for f in (ulysses, sharded_classes, widened)}


def _results(run: Callable[[], torch.Tensor], parameters: list[torch.Tensor], under: Any) -> list[torch.Tensor]:
    with under:
        value = run()
        if not parameters:
            return [value]
        value.backward()
    found = [value.detach(), *(p.grad for p in parameters if p.grad is not None)]
    for p in parameters:
        p.grad = None
    return [getattr(t, "_local_tensor", t) for t in found]


def _sent(rank: int, world: int, name: str, settings: dict[str, str]) -> list[Sent]:
    """What each graph sends; raises where results differ from those without passes."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    step, parameters = STEPS[name]()
    under = loss_parallel if name == "sharded_classes" else contextlib.nullcontext
    expected = _results(torch.compile(step, fullgraph=True, backend="aot_eager"), parameters, under())
    torch._dynamo.reset()
    options = {f"inductor_passes.{k}": v for k, v in {"verify": "strict", "codegen": "aot_eager", **settings}.items()}
    with collect(what_if=False) as reports:
        compiled = torch.compile(step, fullgraph=True, backend="inductor_passes", options=options)
        found = _results(compiled, parameters, under())
    assert len(found) == len(expected)
    for a, b in zip(expected, found):
        assert a.dtype == b.dtype and torch.equal(a, b)
    return [[(str(c.kind), c.size_bytes) for c in r.collectives] for r in reports]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as pool:
        yield pool


@pytest.mark.ranks
def test_exchanges_of_queries_keys_and_values_are_one(ranks: Ranks) -> None:
    """Two exchanges each way where the program has four, with little memory too: the peak is elsewhere."""
    default, tight, off = (ranks.run(_sent, "ulysses", s) for s in ({}, {"memory_budget": "+5%"}, {"bucket": "off"}))
    bytes_each = 2 * 8 * 32 * 4
    assert tight == default
    for forward, backward in off:
        assert len(forward) == len(backward) == 4
        assert sum(sent for _, sent in forward) == sum(sent for _, sent in backward) == 4 * bytes_each
    for forward, backward in default:
        assert sorted(forward) == sorted(backward) == [("all_to_all", bytes_each), ("all_to_all", 3 * bytes_each)]


@pytest.mark.ranks
def test_a_loss_over_shared_classes_reduces_one_after_the_other(ranks: Ranks) -> None:
    """Maximum, sum of exponentials, the chosen class: each needs the one before, so none can travel with another."""
    for forward, _ in ranks.run(_sent, "sharded_classes", {}):
        assert [kind for kind, _ in forward].count("all_reduce") == 3


@pytest.mark.ranks
def test_a_widened_piece_of_a_sum_is_reduced_once(ranks: Ranks) -> None:
    """Three messages in bfloat16 become one in float32: two thirds of the bytes."""
    exact = ranks.run(_sent, "widened", {"bucket": "off"})
    free = ranks.run(_sent, "widened", {"bucket": "off", "numerics": "reassociate"})
    assert exact == [[[("all_reduce", 16 * 8 * 2)] * 3]] * WORLD
    assert free == [[[("all_reduce", 16 * 8 * 4)]]] * WORLD
