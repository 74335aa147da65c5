"""Narrowed messages on real ranks: what is computed is what rounded weights give, and ranks stay equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import inductor_passes
from inductor_passes.compress.form import form_of
from inductor_passes.models import LlamaConfig, MLPConfig, cross_entropy, llama, llama_batch, mlp, mlp_batch
from inductor_passes.report import GraphReport, Verdict
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks
from tests.test_compress import blocks, round_trip

pytestmark = pytest.mark.ranks

LLAMA = LlamaConfig(layers=1)
MLP = MLPConfig(width=32, hidden=48)
#: Losses, local gradients of the first step, and what was narrowed.
Trained = tuple[list[float], list[torch.Tensor], list[str]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rounded(shard: torch.Tensor) -> torch.Tensor:
    """A shard as it arrives at other ranks, where its message gets smaller."""
    form, count = form_of("int8", 128), shard.numel()
    if form.message_bytes(count) >= 4 * count:
        return shard
    return round_trip(form, blocks(form, shard.flatten().tolist())).flatten()[:count].view_as(shard)


def narrowed(reports: list[GraphReport]) -> list[str]:
    return [
        f"{report.phase} {d.detail.split(':')[0]}"
        for report in reports
        for one in report.passes
        if one.name == "compress"
        for d in one.decisions
        if d.verdict is Verdict.APPLIED
    ]


def train(model: nn.Module, step: Any, batch: tuple[torch.Tensor, torch.Tensor], loss_of: Any, steps: int) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    grads: list[torch.Tensor] = []
    with collect(what_if=False) as reports:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(step(batch[0]), batch[1])
            loss.backward()
            losses.append(float(loss.detach()))
            grads = grads or [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
    return losses, grads, narrowed(reports)


def trained(rank: int, world_size: int, name: str, mode: str, backend: str, settings: dict[str, Any]) -> list[Trained]:
    """On one batch: three steps eagerly, one step eagerly with weights that are rounded as messages are, and three
    steps with narrowed messages."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    reference, batch, loss_of = {
        "llama": lambda: (llama(LLAMA), llama_batch(LLAMA, 1), cross_entropy),
        "mlp": lambda: (mlp(MLP), mlp_batch(MLP, 1), mse_loss),
    }[name]()
    eager, other, compiled = (simple_fsdp(copy.deepcopy(reference), mesh, mode=mode) for _ in range(3))
    if mode != "replicate":
        with torch.no_grad():
            for parameter in other.parameters():
                local(parameter).copy_(rounded(local(parameter)))
    torch._dynamo.reset()
    whole = {"verify": "strict", "memory_budget": "unlimited", **settings}
    keyed = {f"inductor_passes.{key}": value for key, value in whole.items()}
    options = keyed if backend == "inductor_passes" else inductor_passes.options(**whole)
    step = torch.compile(compiled, fullgraph=True, backend=backend, options=options)
    return [
        train(eager, eager, batch, loss_of, 3),
        train(other, other, batch, loss_of, 1),
        train(compiled, step, batch, loss_of, 3),
    ]


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """How far gradients are from others, relative to their norm."""
    a, b = (torch.cat([g.flatten() for g in grads]) for grads in (found, expected))
    return float((a - b).norm() / b.norm())


NARROW: dict[str, Any] = {"compress": {"*": "int8"}}
EAGER = {**NARROW, "codegen": "aot_eager"}


@pytest.mark.parametrize(
    ("world", "name", "mode", "backend", "settings"),
    [
        (2, "llama", "fully_shard", "inductor_passes", EAGER),
        (4, "llama", "fully_shard", "inductor_passes", EAGER),
        (2, "llama", "replicate", "inductor_passes", EAGER),
        (2, "mlp", "fully_shard", "inductor", NARROW),
    ],
)
def test_training_with_narrow_messages(
    two_ranks: Ranks, four_ranks: Ranks, world: int, name: str, mode: str, backend: str, settings: dict[str, Any]
) -> None:
    pool = {2: two_ranks, 4: four_ranks}[world]
    by_rank: list[list[Trained]] = pool.run(trained, name, mode, backend, settings)
    for eager, rounds, narrow in by_rank:
        phases = {line.split()[0] for line in narrow[2]}
        assert phases == ({"backward"} if mode == "replicate" else {"forward", "backward"})
        assert all(" int8 in blocks of 128" in line for line in narrow[2])
        # Weights are rounded and nothing else is, up to here; then gradients are, too.
        assert narrow[0][0] == pytest.approx(rounds[0][0], rel=1e-5)
        assert 0 < apart(narrow[1], rounds[1]) < 0.02
        assert narrow[0] == pytest.approx(eager[0], rel=2e-2)
        assert narrow[0] != eager[0]
    losses = [narrow[0] for *_, narrow in by_rank]
    assert all(one == losses[0] for one in losses), "ranks read different weights"
    if mode == "replicate":
        for grads in zip(*(narrow[1] for *_, narrow in by_rank), strict=True):
            assert all(torch.equal(g, grads[0]) for g in grads), "ranks hold different sums"
