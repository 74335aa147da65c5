"""What torch's partitioner saves on ranks of which some pad their shards: it must be the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.engine import stand_ins
from inductor_passes.ir.canonical import shards
from inductor_passes.ir.view import GraphView
from inductor_passes.report import GraphReport
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.compiled import compiled_reports
from tests.support.graphs import GraphBuilder
from tests.support.ranks import Ranks
from tests.support.world import fake_world

SHAPES: tuple[tuple[int, ...], ...] = ((1,), (2, 1), (3,), (1, 5), (5, 1, 3), (4,))
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


class Chain(nn.Module):
    """One long chain of element-wise operators, with a parameter at each link: more of it than is computed again."""

    def __init__(self, links: int, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.links = nn.ParameterList(
            nn.Parameter((torch.randn(drawn.choice(SHAPES)) * 0.3).to(drawn.choice(DTYPES))) for _ in range(links)
        )
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.means = [drawn.random() < 0.5 for _ in range(links)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mean, link in zip(self.means, self.links, strict=True):
            value = link.float().mean() if mean else link.float().flatten().sum()
            x = torch.sin(x + value) * self.scale
        return x


def reports_of(rank: int, ranks: int, links: int, seed: int, **settings: Any) -> list[GraphReport]:
    with fake_world(ranks, rank):
        model = simple_fsdp(Chain(links, seed), init_device_mesh("cpu", (ranks,)))
        return compiled_reports(model, torch.ones(4, 3), **settings)


def sent(reports: list[GraphReport]) -> list[list[tuple[str, int, tuple[str, ...]]]]:
    """Collectives with the parameters that they carry."""
    return [[(c.kind, c.size_bytes, tuple(c.parameters)) for c in r.collectives] for r in reports]


@pytest.mark.parametrize(("ranks", "links", "seed"), [(2, 30, 3), (3, 45, 0), (4, 60, 1)])
def test_ranks_save_the_same_of_a_long_chain(ranks: int, links: int, seed: int) -> None:
    """Found by an outsider: one rank gathered a parameter in backward that another did not, and both waited."""
    found = [reports_of(rank, ranks, links, seed, codegen="aot_eager", bucket="off") for rank in range(ranks)]
    first = sent(found[0])
    assert [len(one) for one in first] == [links + 1, len(first[1])] and len(first[1]) > links + 1, "gathered again"
    assert all(sent(one) == first for one in found)
    assert len({tuple(r.digest for r in one) for one in found}) == 1


def test_without_it_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above tests nothing."""
    monkeypatch.setattr(stand_ins, "insert", lambda graph: 0)
    found = [reports_of(rank, 2, 30, 3, codegen="aot_eager", bucket="off") for rank in range(2)]
    assert sent(found[0]) != sent(found[1])


class Reads(nn.Module):
    """Parameters of odd sizes that are read several times, in part, or for nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.dim = drawn.choice([5, 6, 7, 9, 11])
        self.table = nn.Embedding(drawn.choice([13, 16, 17]), self.dim)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(self.dim, self.dim)) for _ in range(2))
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(self.dim)) for _ in range(2))
        self.chosen = [(drawn.randrange(8), drawn.randrange(2), drawn.randrange(2)) for _ in range(7)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        for kind, i, j in self.chosen:
            matrix, vector = self.matrices[i], self.vectors[j]
            h = {
                0: lambda h, m, v: h @ m,
                1: lambda h, m, v: torch.tanh(h * v),
                2: lambda h, m, v: h @ torch.tanh(m),
                3: lambda h, m, v: h * m.sum(0),
                4: lambda h, m, v: h * m[0] + v[1],
                5: lambda h, m, v: nn.functional.layer_norm(h, v.shape, v),
                6: lambda h, m, v: h + self.table.weight[:, 0].sum(),
                7: lambda h, m, v: h / (m.norm() + 1),
            }[kind](h, matrix, vector)
        return (h @ self.table.weight.t()).square().mean()


@pytest.mark.parametrize("seed", [0, 2, 3, 8])
def test_ranks_gather_alike_what_is_read_for_nothing(seed: int) -> None:
    """Found: of two gathers of a shard, the first of which nobody reads, torch made one on the rank that pads and none
    on the other: a stand-in was where a slice shows padding, and the results of the first one are not sliced.
    """
    found = []
    for rank in range(2):
        torch._dynamo.reset()
        with fake_world(2, rank):
            model = simple_fsdp(Reads(seed), init_device_mesh("cpu", (2,)))
            found.append(compiled_reports(model, torch.zeros(2, 4, dtype=torch.long), codegen="aot_eager"))
    assert sent(found[0]) == sent(found[1]) and len(sent(found[0])) == 2
    assert [r.digest for r in found[0]] == [r.digest for r in found[1]]
    for report in (*found[0], *found[1]):
        assert not any("differ" in p.detail for p in report.passes)


def _train(rank: int, ranks: int, links: int, seed: int) -> list[float]:
    model = simple_fsdp(Chain(links, seed), init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"inductor_passes.codegen": "aot_eager"}
    step = torch.compile(lambda x: model(x).square().mean(), backend="inductor_passes", options=options)
    losses = []
    for number in range(2):
        loss = step(torch.full((4, 3), 0.1 * (rank + number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks
def test_such_a_chain_trains_on_real_ranks() -> None:
    with Ranks(2) as pool:
        for rank, losses in enumerate(pool.run(_train, 30, 3)):
            reference = Chain(30, 3)
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
            expected = []
            for number in range(2):
                both = [reference(torch.full((4, 3), 0.1 * (one + number))).square().mean() for one in range(2)]
                (sum(both) / 2).backward()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
                expected.append(both[rank].item())
            assert losses == pytest.approx(expected, rel=1e-4)


def _gathered(padded: bool, group: str) -> torch.fx.Graph:
    """A vector of 5 elements on 2 ranks, as the first or the last one has it."""
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    b = GraphBuilder()
    shard = b.placeholder("shard", 2 if padded else 3)
    if padded:
        shard = b.call(aten.constant_pad_nd.default, shard, [0, 1])
    message = b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, shard, 2, group))
    b.graph.output((b.call(aten.slice.Tensor, message, 0, 0, 5), shard))
    return b.graph


def test_a_stand_in_is_where_others_pad_and_goes_again() -> None:
    with fake_world(2) as group:
        whole, padded = _gathered(False, group), _gathered(True, group)
        before = str(whole)
        assert stand_ins.insert(padded) == 0 and stand_ins.insert(whole) == 1
        assert len(whole.nodes) == len(padded.nodes)
        whole.lint()
        view = GraphView(whole)
        assert shards(view).uneven == frozenset(view.collectives) and view.collectives
        stand_ins.erase([whole, padded])
        whole.lint()
        assert str(whole) == before
