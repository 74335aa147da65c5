"""Optimizers, clipping, checkpoints and meta-device initialisation of data-parallel modules on two real ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.models import LlamaConfig, MLPConfig, cross_entropy, llama, llama_batch, mlp, mlp_batch
from tests.support.parity import share, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

#: Uneven on two ranks.
MLP = MLPConfig(width=7, hidden=5, dtype=torch.float64)


@pytest.fixture
def pool(two_ranks: Ranks) -> Ranks:
    return two_ranks


def data_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def clip(rank: int, world_size: int, options: dict) -> None:
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size), **options)
    batch = mlp_batch(MLP)
    mse_loss(reference(batch[0]), batch[1]).backward()
    x, y = share(batch, rank, world_size)
    mse_loss(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    actual = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert expected > 0.1
    torch.testing.assert_close(whole(actual), expected)
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(p.grad), q.grad)


@pytest.mark.parametrize("options", [{}, {"mode": "replicate"}], ids=["shard", "replicate"])
def test_clipping_sees_the_whole_norm(pool: Ranks, options: dict) -> None:
    pool.run(clip, options)


def round_trip(rank: int, world_size: int, folder: str) -> None:
    """Train, save weights and optimizer, load into another mode and into one process' model, go on alike."""
    mesh = data_mesh(world_size)
    model = simple_fsdp(mlp(MLP), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [share(mlp_batch(MLP, seed), rank, world_size) for seed in (1, 2)]
    train_step(model, optimizer, batches[0])
    weights, moments = get_state_dict(model, optimizer)
    assert list(weights) == list(mlp(MLP).state_dict())
    assert all(isinstance(value, DTensor) for value in weights.values())
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    other = simple_fsdp(mlp(MLPConfig(width=7, hidden=5, dtype=torch.float64, seed=9)), mesh, mode="replicate")
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)

    alone = mlp(MLPConfig(width=7, hidden=5, dtype=torch.float64, seed=9))
    weights = alone.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    alone.load_state_dict(weights)
    for p, q, r in zip(model.parameters(), other.parameters(), alone.parameters()):
        assert torch.equal(whole(p), whole(q)) and torch.equal(whole(p), r)

    train_step(model, optimizer, batches[1])
    train_step(other, other_optimizer, batches[1])
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(whole(p), whole(q), rtol=1e-12, atol=1e-14)


def test_checkpoints_move_between_layouts(pool: Ranks, tmp_path: Path) -> None:
    pool.run(round_trip, str(tmp_path))


def load_plain(rank: int, world_size: int) -> None:
    """``state_dict`` / ``load_state_dict`` of the module itself, in place and by assignment, and full state dicts."""
    config = LlamaConfig(layers=1)
    source = simple_fsdp(llama(config), data_mesh(world_size))
    target = simple_fsdp(llama(LlamaConfig(layers=1, seed=5)), data_mesh(world_size))
    tokens, _ = llama_batch(config)
    expected = llama(config)(tokens)
    assert not torch.allclose(target(tokens), expected)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(tokens), expected)

    with torch.device("meta"):
        empty = llama(config)
    simple_fsdp(empty, data_mesh(world_size))
    empty.load_state_dict(source.state_dict(), assign=True)
    assert not any(p.is_meta for p in empty.parameters())

    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(dict(full), dict(llama(config).state_dict()))
    fresh = simple_fsdp(llama(LlamaConfig(layers=1, seed=6)), data_mesh(world_size))
    set_model_state_dict(fresh, full, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(fresh(tokens), expected)


def test_state_dicts_of_the_module(pool: Ranks) -> None:
    pool.run(load_plain)


def from_meta(rank: int, world_size: int) -> None:
    """A model made without memory trains from loaded weights as one that was made with them."""
    config = LlamaConfig(layers=1, dtype=torch.float64, tied=True)
    source = llama(config)
    with torch.device("meta"):
        model = llama(config)
    simple_fsdp(model, data_mesh(world_size))
    assert model.state_dict()["output.weight"].is_meta
    model.to_empty(device="cpu")
    assert dict(model.named_parameters(remove_duplicate=False))["output.weight"] is next(model.embed.parameters())
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    model.cos.copy_(source.cos)
    model.sin.copy_(source.sin)
    tokens, targets = llama_batch(config)
    expected = cross_entropy(source(tokens), targets)
    expected.backward()
    actual = cross_entropy(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens), targets)
    actual.backward()
    torch.testing.assert_close(actual, expected)
    stored = dict(model.named_parameters())
    for name, parameter in source.named_parameters():
        torch.testing.assert_close(whole(stored[name].grad), parameter.grad)


def test_meta_device_initialisation(pool: Ranks) -> None:
    pool.run(from_meta)


def reset_from_meta(rank: int, world_size: int) -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    simple_fsdp(model, data_mesh(world_size))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    output = model(torch.ones(1, 6))
    output.sum().backward()
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())
    return output.flatten().tolist()


def test_reset_parameters_after_to_empty(pool: Ranks) -> None:
    first, second = pool.run(reset_from_meta)
    assert first == second and any(first)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_foreach_optimizers_step_like_one_process(pool: Ranks, optimizer: str) -> None:
    pool.run(step_foreach, optimizer)


def step_foreach(rank: int, world_size: int, name: str) -> None:
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size))
    make = getattr(torch.optim, name)
    for m, batch in ((reference, mlp_batch(MLP)), (model, share(mlp_batch(MLP), rank, world_size))):
        train_step(m, make(m.parameters(), lr=0.1, foreach=True), batch)
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(whole(p), q)
