"""Data parallelism on two real ranks trains like one process: modes, precisions, odd parameters."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from inductor_passes.simple_fsdp import MixedPrecisionPolicy, simple_fsdp
from tests.support.models import (
    LlamaConfig,
    MLPConfig,
    MoEConfig,
    cross_entropy,
    llama,
    llama_batch,
    mlp,
    mlp_batch,
    moe,
    moe_batch,
)
from tests.support.parity import assert_same_gradients, assert_trains_alike, share, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

LLAMA = LlamaConfig(layers=1, dtype=torch.float64)
MLP = MLPConfig(width=7, hidden=5, dtype=torch.float64)


@pytest.fixture
def pool(two_ranks: Ranks) -> Ranks:
    return two_ranks


def data_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


# -- whole models ---------------------------------------------------------------------------------------


def train_llama(rank: int, world_size: int, config: LlamaConfig, backend: str | None, options: dict) -> None:
    reference = llama(config)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size), **options)
    batches = [llama_batch(config, seed) for seed in (1, 2)]
    assert_trains_alike(
        model, reference, batches, cross_entropy, index=rank, count=world_size, backend=backend
    )


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"mode": "replicate"}],
    ids=["reshard", "keep", "replicate"],
)
def test_llama_trains_as_in_one_process(pool: Ranks, backend: str | None, options: dict) -> None:
    pool.run(train_llama, LLAMA, backend, options)


def train_tied(rank: int, world_size: int, backend: str | None) -> None:
    config = LlamaConfig(layers=1, tied=True, dtype=torch.float64)
    model = simple_fsdp(llama(config), data_mesh(world_size))
    stored = dict(model.named_parameters(remove_duplicate=False))
    assert stored["output.weight"] is stored["embed.weight"]
    train_llama(rank, world_size, config, backend, {})


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_shared_parameters_stay_shared(pool: Ranks, backend: str | None) -> None:
    pool.run(train_tied, backend)


# -- parameters of every kind ---------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that do not divide, a scalar, a single element, no element, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = {"dtype": torch.float64}
        self.uneven = nn.Parameter(torch.randn(5, 7, **make))
        self.cube = nn.Parameter(torch.randn(3, 5, 7, **make))
        self.scalar = nn.Parameter(torch.tensor(1.5, **make))
        self.single = nn.Parameter(torch.randn(1, **make))
        self.empty = nn.Parameter(torch.randn(0, 7, **make))
        self.frozen = nn.Parameter(torch.randn(7, 7, **make), requires_grad=False)
        self.register_buffer("shift", torch.randn(7, **make))
        self.uneven.marked = "yes"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, self.empty]) @ self.frozen + self.shift
        y = torch.einsum("bi,oki->bok", x, self.cube).sum(1) + self.single
        return (torch.tanh(y) @ self.uneven) * self.scalar


def train_odd(rank: int, world_size: int, backend: str | None, options: dict) -> None:
    reference, model = Odd(), Odd()
    simple_fsdp(model, data_mesh(world_size), **options)
    assert not isinstance(model.shift, DTensor)
    stored = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in stored.values())
    assert stored["frozen"].requires_grad is False
    assert stored["uneven"].marked == "yes"
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        batches.append((torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)))
    assert_trains_alike(
        model, reference, batches, mse_loss, index=rank, count=world_size, backend=backend
    )


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    "options", [{}, {"shard_dim": 1}, {"mode": "replicate"}], ids=["dim0", "dim1", "replicate"]
)
def test_odd_parameters(pool: Ranks, backend: str | None, options: dict) -> None:
    pool.run(train_odd, backend, options)


def train_uneven_mlp(rank: int, world_size: int) -> None:
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size))
    batches = [mlp_batch(MLP, seed) for seed in (1, 2)]
    assert_trains_alike(
        model, reference, batches, mse_loss, index=rank, count=world_size, backend="inductor"
    )


def test_uneven_sizes_under_inductor_cold_and_warm(tmp_path: Path) -> None:
    """The ranks share a cache folder: neither takes the other's graph, whose shapes are different ones."""
    with Ranks(2, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) as ranks:
        ranks.run(train_uneven_mlp)
        ranks.run(train_uneven_mlp)


# -- precision ------------------------------------------------------------------------------------------


def train_mixed(rank: int, world_size: int, backend: str | None) -> None:
    """The reference does by hand what the policy says: compute in bfloat16, average in float32."""
    config = MLPConfig(width=8, hidden=6)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    reference = mlp(config)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size), mp_policy=policy)
    step = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    inputs, targets = mlp_batch(config)
    for part in range(world_size):
        replica = copy.deepcopy(reference).bfloat16()
        x, y = share((inputs, targets), part, world_size)
        mse_loss(replica(x.bfloat16()).double(), y.double()).backward()
        for p, q in zip(reference.parameters(), replica.parameters()):
            p.grad = q.grad.float() / world_size + (0 if p.grad is None else p.grad)
    x, y = share((inputs, targets), rank, world_size)
    output = step(x)
    assert output.dtype is torch.float64
    mse_loss(output, y.double()).backward()
    assert_same_gradients(model, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_mixed_precision_casts_before_the_gather_and_reduces_in_the_reduce_dtype(
    pool: Ranks, backend: str | None
) -> None:
    pool.run(train_mixed, backend)


def average_near_the_half_limit(rank: int, world_size: int) -> float:
    weight = nn.Linear(4, 4, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = simple_fsdp(weight, data_mesh(world_size), mp_policy=policy)
    model(torch.full((1, 4), 40000.0)).sum().backward()
    return whole(dict(model.named_parameters())["weight"].grad).max().item()


def test_a_mean_in_half_precision_does_not_overflow(pool: Ranks) -> None:
    assert pool.run(average_near_the_half_limit) == [40000.0, 40000.0]


# -- use ------------------------------------------------------------------------------------------------


def accumulate(rank: int, world_size: int, backend: str | None) -> None:
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size))
    step = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for seed in (1, 2, 3):
        batch = mlp_batch(MLP, seed)
        mse_loss(reference(batch[0]), batch[1]).backward()
        x, y = share(batch, rank, world_size)
        mse_loss(step(x), y).backward()
    assert_same_gradients(model, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_accumulate(pool: Ranks, backend: str | None) -> None:
    pool.run(accumulate, backend)


def infer(rank: int, world_size: int) -> None:
    reference = mlp(MLP)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh(world_size))
    twin = copy.deepcopy(model)
    inputs, _ = mlp_batch(MLP)
    with torch.no_grad():
        expected = reference(inputs)
        torch.testing.assert_close(model(inputs), expected)
        torch.testing.assert_close(twin(inputs), expected)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(inputs), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), expected)
        torch.testing.assert_close(compiled(inputs), expected)


def test_inference_and_deepcopy(pool: Ranks) -> None:
    pool.run(infer)


def differ(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    model = simple_fsdp(nn.Linear(3, 2), data_mesh(world_size), mode="replicate")
    return next(model.parameters()).to_local().flatten().tolist()


def test_every_rank_gets_the_first_ranks_values(pool: Ranks) -> None:
    first, second = pool.run(differ)
    assert first == second


# -- with other parallelism -----------------------------------------------------------------------------


def train_context_parallel(rank: int, world_size: int, backend: str | None) -> None:
    """Every rank has a slice of each sequence; the same ranks shard the parameters."""
    reference = llama(LLAMA)
    mesh = data_mesh(world_size)
    model = simple_fsdp(llama(LLAMA, mesh.get_group("dp")), mesh)
    step = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    tokens, targets = llama_batch(LLAMA)
    expected = cross_entropy(reference(tokens), targets)
    expected.backward()
    actual = cross_entropy(step(tokens.chunk(world_size, 1)[rank]), targets.chunk(world_size, 1)[rank])
    actual.backward()
    assert_same_gradients(model, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_context_parallel_attention(pool: Ranks, backend: str | None) -> None:
    pool.run(train_context_parallel, backend)


def train_experts(rank: int, world_size: int, backend: str | None) -> None:
    """Experts stay where they are; everything else is data-parallel over the ranks that own them."""
    config = MoEConfig(dtype=torch.float64)
    mesh = data_mesh(world_size)
    model = moe(config, mesh.get_group("dp"))
    simple_fsdp(model.norm, mesh)
    simple_fsdp(model.gate, mesh, mode="replicate")
    step = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    reference = moe(config)
    for part in range(world_size):
        x, y = moe_batch(config, seed=part)
        (mse_loss(reference(x), y) / world_size).backward()
    x, y = moe_batch(config, seed=rank)
    mse_loss(step(x), y).backward()
    stored, expected = dict(model.named_parameters()), dict(reference.named_parameters())
    for name in ("norm.weight", "gate.weight"):
        torch.testing.assert_close(whole(stored[name].grad), expected[name].grad)
    for name in ("w1", "w2"):
        # The all_to_all brought the sum over the ranks' losses; the reference has their mean.
        mine = expected[name].grad.chunk(world_size)[rank] * world_size
        torch.testing.assert_close(stored[name].grad, mine)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_experts_with_data_parallel_gate(pool: Ranks, backend: str | None) -> None:
    pool.run(train_experts, backend)

