"""Plans on real gloo ranks: the collectives that the simulation stands in for, with uneven splits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from inductor_passes.redistribute import Mesh, Spec, plan_redistribution, prepare_groups, redistribute
from inductor_passes.redistribute.execute import torch_placement
from tests.support.ranks import Ranks

WORLD = 4


def plans(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    prepare_groups(mesh)
    value = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    options = ("S(0)", "S(1)", "R", "_S(0, 2)")
    for source, target in itertools.product(itertools.product(options, repeat=2), repeat=2):
        a, b = (Spec(Mesh((2, 2)), p, (7, 5)) for p in (source, target))
        tensor = distribute_tensor(value, mesh, [torch_placement(p) for p in a.placements], src_data_rank=None)
        wanted = distribute_tensor(value, mesh, [torch_placement(p) for p in b.placements], src_data_rank=None)
        got = redistribute(tensor, plan_redistribution(a, b))
        assert torch.equal(got.to_local(), wanted.to_local()), (source, target)
    sums = [torch_placement(p) for p in Spec(Mesh((2, 2)), ("P", "P"), (7, 5)).placements]
    partial = DTensor.from_local(value * (rank + 1), mesh, sums, run_check=False)
    for exactness in ("exact", "reassociate"):
        target = Spec(Mesh((2, 2)), ("R", "S(0)"), (7, 5))
        got = redistribute(partial, plan_redistribution(partial, target, exactness=exactness)).to_local()
        rows = slice(0, 4) if mesh.get_local_rank(1) == 0 else slice(4, 7)
        assert torch.equal(got, value[rows] * 10), exactness


@pytest.mark.ranks
def test_plans_on_gloo() -> None:
    with Ranks(WORLD) as ranks:
        ranks.run(plans)
