"""Lightning Fabric with our strategies trains as with its own. FSDP2, DDP and tensor parallelism, two gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inductor_passes
from inductor_passes import AdoptError
from inductor_passes.adoption import AdoptedDDP, AdoptedModule
from tests.support import frameworks
from tests.support.ranks import Ranks
from tests.support.wrapped import Net

pytest.importorskip("lightning_fabric", "2.5")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Ranks of their own: Fabric reads the environment, and wraps ``torch.compile`` when it is imported."""
    with Ranks(2) as ranks:
        yield ranks


def shard(model: Any, mesh: Any) -> Any:
    """Fabric's ``parallelize_fn`` of FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def split(model: Any, mesh: Any) -> Any:
    """Fabric's ``parallelize_fn`` of tensor parallelism."""
    for block in model.blocks:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fabric_of(kind: str, adopted: bool) -> Any:
    """A launched Fabric."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    from inductor_passes.integrations.fabric import AdoptDDPStrategy, AdoptModelParallelStrategy

    if kind == "ddp":
        strategy: Any = AdoptDDPStrategy() if adopted else DDPStrategy()
    else:
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        if kind == "tp":
            sizes = {"data_parallel_size": 1, "tensor_parallel_size": 2}
        made = AdoptModelParallelStrategy if adopted else ModelParallelStrategy
        strategy = made(parallelize_fn=split if kind == "tp" else shard, **sizes)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def set_up(kind: str, mode: str | None) -> tuple[Any, Any, Any, Any]:
    """(fabric, model, optimizer, batches); Fabric's own strategy, not compiled, if ``mode`` is None."""
    fabric = fabric_of(kind, mode is not None)
    torch.manual_seed(0)
    model: Any = Net()
    if mode is not None:
        model = torch.compile(model, **(frameworks.how(mode) or {"options": inductor_passes.options()}))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(frameworks.pairs(32), batch_size=4))  # type: ignore[arg-type]
    return fabric, model, optimizer, loader


def steps(fabric: Any, model: Any, optimizer: Any, loader: Any, accumulate: int = 1) -> list[float]:
    """The loop of Fabric's documentation on accumulation; the losses."""
    losses = []
    for number, (x, y) in enumerate(loader):
        waiting = (number + 1) % accumulate != 0
        with fabric.no_backward_sync(model, enabled=waiting):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
        if not waiting:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(rank: int, world_size: int, kind: str, mode: str, accumulate: int) -> tuple[float, float]:
    """The largest differences of (losses, parameters) between Fabric alone and with our strategy."""
    frameworks.as_launched(rank, world_size)
    plain = set_up(kind, None)
    expected = steps(*plain, accumulate)
    fabric, model, optimizer, loader = set_up(kind, mode)
    inner = model._forward_module._orig_mod
    assert isinstance(inner, {"ddp": AdoptedDDP, "fsdp2": AdoptedModule, "tp": Net}[kind])
    with frameworks.planned(mode):
        losses = steps(fabric, model, optimizer, loader, accumulate)
    if kind == "fsdp2" and accumulate == 1:
        # Fabric's own way would leave every gradient to a reduction after backward.
        assert inner._adoption.unit.direct
    return frameworks.differences(expected, losses, plain[1], model)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_bit_for_bit_as_fabric_alone(pool: Ranks, kind: str, accumulate: int) -> None:
    frameworks.near(pool.run(compare, kind, "aot_eager", accumulate), "aot_eager")


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "tp"])
def test_with_planned_collectives(pool: Ranks, kind: str) -> None:
    frameworks.near(pool.run(compare, kind, "planned", 1), "planned")


def resume(rank: int, world_size: int, kind: str, folder: str) -> None:
    """``fabric.save`` of an adopted model loads into an adopted and into a plain one, which go on as the first."""
    frameworks.as_launched(rank, world_size)
    fabric, model, optimizer, loader = set_up(kind, "off")
    steps(fabric, model, optimizer, loader)
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": 4})
    expected = steps(fabric, model, optimizer, loader)
    for mode in ("off", None):
        again, other, its_optimizer, its_loader = set_up(kind, mode)
        state = {"model": other, "optimizer": its_optimizer, "step": 0}
        again.load(folder, state)
        assert state["step"] == 4
        assert steps(again, other, its_optimizer, its_loader) == expected


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_checkpoints(pool: Ranks, tmp_path: Path, kind: str) -> None:
    pool.run(resume, kind, str(tmp_path / "state"))


def refused(rank: int, world_size: int) -> None:
    frameworks.as_launched(rank, world_size)
    model = Net()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(AdoptError, match=r"blocks.0 was compiled before .* before fabric.setup"):
        fabric_of("ddp", True).setup_module(model)
    with pytest.raises(AdoptError, match="nothing to adopt"):
        from lightning_fabric import Fabric

        from inductor_passes.integrations.fabric import AdoptModelParallelStrategy

        strategy = AdoptModelParallelStrategy(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=1)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        fabric.setup_module(Net())


def test_misuse_is_named(pool: Ranks) -> None:
    pool.run(refused)


def meta(rank: int, world_size: int) -> None:
    """A model made without memory gets it from Fabric, before it is adopted."""
    frameworks.as_launched(rank, world_size)
    fabric = fabric_of("fsdp2", True)
    with fabric.init_module(empty_init=True):
        model = Net()
    made = fabric.setup_module(model)
    assert made(torch.ones(5, 7)).isfinite().all()


def test_meta_init(pool: Ranks) -> None:
    pool.run(meta)
