"""One rank of ``tools/namespaces``: hybrid-sharded training, ours against plain Inductor, losses compared."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.models import DEMO, language_batch, language_model
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tools.shared.leave import leave

RATE = 0.5
#: Buckets change the order in which a ring adds, nothing else does.
TOLERANCE = 1e-5


def train(options: dict[str, Any], layers: int, steps: int) -> list[float]:
    """Losses of this rank."""
    torch._dynamo.reset()
    config = replace(DEMO, layers=layers, dim=64, hidden=176, batch=2, seq=32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "rank"))
    model = simple_fsdp(language_model(config), mesh, mode="hybrid_shard")
    compiled = torch.compile(model, options=options, fullgraph=True)
    losses = []
    for step in range(steps):
        loss = compiled(*language_batch(config, 1_000 * dist.get_rank() + step))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().sub_(RATE * parameter.grad.to_local())  # type: ignore[operator, union-attr]
                parameter.grad = None
        losses.append(float(loss.detach()))
    return losses


def main(layers: Annotated[int, typer.Option(min=1)] = 1, steps: Annotated[int, typer.Option(min=1)] = 4) -> None:
    """Train twice, compare, say what the planner saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    plain = train({}, layers, steps)
    with collect(what_if=False) as reports:
        ours = train(inductor_passes.options(rank_check="error", verify="strict"), layers, steps)
    apart = max(abs(x - y) / abs(y) for x, y in zip(ours, plain))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, apart)
    apart = max(everyone)
    if dist.get_rank() == 0:
        moved = sum(len(report.collectives) for report in reports)
        print(f"{dist.get_world_size()} ranks on 2 hosts, {len(reports)} graphs, {moved} collectives planned")
        print("losses", " ".join(f"{x:.4f}" for x in ours), f"largest relative difference on any rank {apart:.1e}")
    leave(0 if apart <= TOLERANCE else 1)


if __name__ == "__main__":
    typer.run(main)
