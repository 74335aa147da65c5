"""R17 on four real gloo ranks, a 2 x 2 mesh: losses and gradients are those of eager DTensor, whatever compiles.

A model exchanges its activations between a layout by rows and one by columns, as Ulysses' attention does, on both mesh
dimensions at once: DTensor gathers them whole.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import inductor_passes
from inductor_passes.redistribute import prepare_groups
from inductor_passes.report import Verdict
from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted
from tests.support.ranks import Ranks

ROWS, COLUMNS = 16, 24


class Exchanged(torch.nn.Module):
    """Columns are mixed where a rank has whole rows, rows where it has whole columns."""

    def __init__(self, mesh: torch.distributed.device_mesh.DeviceMesh, rows: int, columns: int, read: bool) -> None:
        super().__init__()
        self.mesh, self.shape, self.read = mesh, torch.Size((rows, columns)), read
        self.across = torch.nn.Parameter(torch.randn(columns, columns) / columns)
        self.along = torch.nn.Parameter(torch.randn(rows, rows) / rows)

    def dtensor(self, local: torch.Tensor, placements: list[object]) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=self.shape, stride=(self.shape[1], 1)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        d = self.dtensor(rows @ self.across, [Shard(0), Shard(0)]).redistribute(placements=[Shard(1), Shard(1)])
        d = self.dtensor(self.along @ d.to_local(), [Shard(1), Shard(1)])
        d = d.redistribute(placements=[Shard(0), Shard(1)])
        more = d.to_local().detach().sum() if self.read else 0.0
        back = d.redistribute(placements=[Shard(0), Shard(0)]).to_local()
        whole = self.dtensor(back.sin(), [Shard(0), Shard(0)]).full_tensor()
        return (back * rows).sum() + whole.square().mean() + more


def steps(model: torch.nn.Module, run: object, rows: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        model.zero_grad()
        x = rows.clone().requires_grad_()
        loss = run(x)  # type: ignore[operator]
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return found


def trained(
    rank: int, world: int, sizes: tuple[int, int], read: bool, settings: dict[str, str]
) -> tuple[Counter[str], list[str]]:
    """What R17 applied by phase, and what was undone; twice, the second time from what was compiled before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    prepare_groups(mesh)
    torch.manual_seed(3)
    whole = torch.randn(sizes)
    rows = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None).to_local()
    done: Counter[str] = Counter()
    undone: list[str] = []
    for again in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(4)
        eager = Exchanged(mesh, *sizes, read)
        model = Exchanged(mesh, *sizes, read)
        model.load_state_dict(eager.state_dict())
        wanted = steps(eager, eager, rows)
        options = dotted(**settings, verify="strict", memory_budget="unlimited")
        with collect(what_if=False) as reports:
            run = torch.compile(model, backend="inductor_passes", options=options, fullgraph=True)
            got = steps(model, run, rows)
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        for report in reports:
            undone += [f"{p.name}: {p.detail}" for p in report.passes if p.rolled_back is not None]
            for decision in (d for p in report.passes for d in p.decisions):
                if decision.subject == "R17" and decision.verdict is Verdict.APPLIED and not again:
                    done[report.phase] += 1
    return done, undone


@pytest.mark.ranks
@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
@pytest.mark.parametrize("read", [False, True], ids=["", "read"])
def test_exchanges_are_planned_forward_and_backward(four_ranks: Ranks, read: bool, codegen: str) -> None:
    found = four_ranks.run(trained, (ROWS, COLUMNS), read, {"codegen": codegen})
    assert len({str(one) for one in found}) == 1
    done, undone = found[0]
    assert done["forward"] >= 2 and done["backward"] >= 1 and undone == []


@pytest.mark.ranks
def test_sizes_that_do_not_divide_stay_as_they_are(four_ranks: Ranks) -> None:
    for done, undone in four_ranks.run(trained, (18, 21), False, {"codegen": "aot_eager"}):
        assert not done and undone == []


def summed(rank: int, world: int) -> list[str]:
    """Pending sums over one dimension of the mesh, exact and in another order, with settings for the process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    prepare_groups(mesh)
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) % 7 + rank

    def run(x: torch.Tensor) -> torch.Tensor:
        d = DTensor.from_local(x, mesh, [Partial(), Replicate()], run_check=False)
        d = d.redistribute(placements=[Shard(0), Shard(1)]).redistribute(placements=[Shard(1), Shard(0)])
        return d.to_local() * 2.0

    # Replicated along the second dimension: what differs between ranks has to be the same there.
    values = values - rank % 2
    wanted = run(values)
    for numerics in ("exact", "reassociate"):
        torch._dynamo.reset()
        got = torch.compile(run, options=inductor_passes.options(numerics=numerics, verify="strict"))(values)
        assert torch.equal(got, wanted), numerics
    return []


@pytest.mark.ranks
def test_sums_on_the_way(four_ranks: Ranks) -> None:
    four_ranks.run(summed)


def multiplied(rank: int, world: int) -> list[str]:
    """A matmul between redistributions, which async TP cuts: slices that it copies stay each rank's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    prepare_groups(mesh)

    def run(x: DTensor, w: DTensor) -> DTensor:
        y = x.redistribute(placements=[Shard(0), Replicate()]) @ w.redistribute(placements=[Replicate(), Shard(1)])
        return y.redistribute(placements=[Shard(0), Shard(0)])

    def made(seed: int, placements: list[object]) -> DTensor:
        whole = torch.randint(-3, 4, (8, 8), generator=torch.Generator().manual_seed(seed)).float()
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).detach().requires_grad_()

    def results(function: object) -> list[torch.Tensor]:
        x, w = made(0, [Shard(0), Shard(0)]), made(1, [Shard(0), Shard(1)])
        y = function(x, w)  # type: ignore[operator]
        y.backward(made(2, [Shard(0), Shard(0)]).detach())
        return [one.full_tensor() for one in (y, x.grad, w.grad)]

    wanted, found = results(run), []
    for redistribute in ("numerics", "off"):
        torch._dynamo.reset()
        settings = dotted(
            numerics="reassociate", async_tp="force", redistribute=redistribute, verify="strict", codegen="aot_eager",
            memory_budget="unlimited",
        )  # fmt: skip
        with collect(what_if=False) as reports:
            got = results(torch.compile(run, backend="inductor_passes", options=settings))
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True)), redistribute
        cut = [
            d for r in reports for p in r.passes if p.name == "async_tp"
            for d in p.decisions if d.verdict is Verdict.APPLIED
        ]  # fmt: skip
        found.append(f"{redistribute}: {len(cut) > 0}")
    return found


@pytest.mark.ranks
def test_async_tp_beside_exchanges(four_ranks: Ranks) -> None:
    assert four_ranks.run(multiplied)[0][1] == "off: True"


def sliced(rank: int, world: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every rank prepares the groups of another slice of one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    made = [prepare_groups(mesh["a"]), prepare_groups(mesh["b"]), prepare_groups(mesh), prepare_groups(mesh["a", "b"])]
    x = distribute_tensor(torch.arange(8.0), mesh["a"], [Shard(0)], src_data_rank=None)
    assert torch.equal(x.full_tensor(), torch.arange(8.0))
    return made


@pytest.mark.ranks
def test_groups_of_a_slice_of_a_mesh() -> None:
    """Found from outside: it hung, since each rank created groups that the others did not."""
    with Ranks(4) as ranks:
        assert {str(made) for made in ranks.run(sliced)} == {str([(), (), (), ()])}
