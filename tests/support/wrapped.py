"""Models as users of FSDP2 and DDP wrap them, and a comparison of a wrapped model with its adopted copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import inductor_passes
from inductor_passes.trace.collector import collect
from tests.support.device import DEVICE, ON_CPU, on_device

WIDTH, OUT = 7, 3


class Block(nn.Module):
    """Sizes that two and four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Tied(Net):
    """One weight that two modules read."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.again(x))


class Norms(Net):
    """Statistics that DDP keeps equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x))


class Shared(Net):
    """A block that runs twice: its parameters are read twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        return self.out(self.blocks[0](self.blocks[1](self.blocks[0](x))))


class Experts(nn.Module):
    """Weights of four experts; each rank of the expert dimension computes with those that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        local = weights.to_local(grad_placements=weights.placements) if isinstance(weights, DTensor) else weights
        return torch.einsum("bi,eij->bj", x, local)


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.experts(x))


class Gated(Net):
    """Parameters of one element: most ranks have an empty shard."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList([nn.Parameter(torch.full((1,), 0.5)) for _ in self.blocks])
        self.blocks.append(Gate())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for gate, block in zip(self.gates, self.blocks):
            x = self.blocks[-1](block(x) * gate)
        return self.out(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(self.narrow(x)) * self.scale


def mesh_of(*sizes: int) -> DeviceMesh:
    names = {1: ("dp",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tp")}[len(sizes)]
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each block and the rest, as FSDP2's own examples do it."""
    options.setdefault("mesh", mesh_of(dist.get_world_size()))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def flat(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh_of(dist.get_world_size()))


def kept(model: nn.Module) -> nn.Module:
    return sharded(model, reshard_after_forward=False)


def half(model: nn.Module) -> nn.Module:
    """Sums in float32, results in float32, everything between in bfloat16."""
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fp16(model: nn.Module) -> nn.Module:
    return sharded(model, mp_policy=MixedPrecisionPolicy(torch.float16))


def narrow(model: nn.Module) -> nn.Module:
    """Sums are rounded to less than what backward computes in."""
    return sharded(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def listed(model: nn.Module) -> nn.Module:
    fully_shard([model.into, model.out], mesh=mesh_of(dist.get_world_size()))
    return sharded(model)


def ignoring(model: nn.Module) -> nn.Module:
    return sharded(model, ignored_params={model.out.bias})


def frozen(model: nn.Module) -> nn.Module:
    model.into.requires_grad_(False)
    return sharded(model)


def second_dim(model: nn.Module) -> nn.Module:
    return sharded(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None)


def hybrid(model: nn.Module) -> nn.Module:
    return sharded(model, mesh=mesh_of(2, dist.get_world_size() // 2))


def fewer_ranks(model: nn.Module) -> nn.Module:
    return sharded(model, reshard_after_forward=2)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"])


def expert_parallel(model: nn.Module) -> nn.Module:
    """Experts lie on another mesh than the rest, as torchtitan wraps them."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("expert_dp", "ep"))
    experts: Any = model.experts
    experts.weights = nn.Parameter(distribute_tensor(experts.weights.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["expert_dp"])
    experts.set_force_sum_reduction_for_comms(True)
    experts.set_gradient_divide_factor(float(dist.get_world_size()))
    return sharded(model)


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for block in model.blocks:
        replicate(block, mesh=mesh_of(dist.get_world_size()))
    return replicate(model, mesh=mesh_of(dist.get_world_size()))


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def divided(model: nn.Module) -> nn.Module:
    model = sharded(model)
    for part in model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(3.0)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def batch(step: int, part: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    x, y = torch.randn(5, WIDTH, generator=drawn).to(dtype), torch.randn(5, OUT, generator=drawn).to(dtype)
    return on_device(x), on_device(y)


def train(
    wrapped: nn.Module, called: Callable[..., Any], optimizer: torch.optim.Optimizer, step: int, parts: int = 1
) -> list[float]:
    """One step of ``parts`` batches, of which only the last reduces gradients; the losses."""
    losses = []
    for part in range(parts):
        last = part == parts - 1
        waiting: Any = contextlib.nullcontext()
        if parts > 1 and hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(last)
        elif not last:
            waiting = wrapped.no_sync()  # type: ignore[operator]
        x, y = batch(step, part)
        with waiting:
            loss = ((called(x).float() - y) ** 2).mean()
            loss.backward()
        losses.append(loss.item())
    meshes = {getattr(parameter, "device_mesh", None) for parameter in wrapped.parameters()}
    if len(meshes) == 1:
        # torch clips no mixture.
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def losses_on(model: nn.Module, called: Callable[..., Any], batches: Iterable[torch.Tensor]) -> list[float]:
    """One step of plain descent per batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = called(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_planned(
    rank: int, world_size: int, wrap: Callable[[Any], nn.Module], parts: int, make: type[nn.Module] = Net
) -> tuple[tuple[float, float], list[str], int]:
    """:func:`compare` behind our passes.

    Returns:
        the differences, what ranks did not agree on, by phase of each graph, and how many merges there were.
    """
    options = {"verify": "strict", "memory_budget": "unlimited", "rank_agreement": "120s"}
    if ON_CPU:
        # Here torch's own tests show what the C++ compiler would add: minutes.
        options["codegen"] = "aot_eager"
    dotted = {f"inductor_passes.{key}": value for key, value in options.items()}
    with collect(what_if=False) as reports:
        found = compare(rank, world_size, wrap, make, "inductor_passes", parts, options=dotted)
    passes = [(r.phase, p) for r in reports for p in r.passes]
    said = [f"{phase}: {p.detail}" for phase, p in passes if p.name == "agreement" and "ranks agree" not in p.detail]
    applied = [d for _, p in passes if p.name == "bucket" for d in p.decisions if d.verdict.value == "applied"]
    return found, said, len(applied)


def compare(
    rank: int,
    world_size: int,
    wrap: Callable[[Any], nn.Module],
    make: type[nn.Module] = Net,
    backend: str | None = None,
    parts: int = 1,
    steps: int = 3,
    options: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """Train a wrapped model and an adopted copy of it; the largest differences of (losses, parameters and buffers).

    Both take a step before the copy is adopted, and the copy keeps its optimizer.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = on_device(make())
    reference, adopted = wrap(copy.deepcopy(plain)), wrap(copy.deepcopy(plain))
    # The form for many tensors at once, torch's choice on GPUs, refuses sharded and ignored parameters side by side.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (reference, adopted)]
    first = [train(m, m, o, 0, parts) for m, o in zip((reference, adopted), optimizers)]
    assert first[0] == first[1]
    before = {name: id(p) for name, p in adopted.named_parameters()}
    assert inductor_passes.adopt(adopted) is adopted
    assert {name: id(p) for name, p in adopted.named_parameters()} == before
    called = adopted if backend is None else torch.compile(adopted, backend=backend, fullgraph=True, options=options)
    off = 0.0
    for step in range(1, steps + 1):
        one = train(reference, reference, optimizers[0], step, parts)
        other = train(adopted, called, optimizers[1], step, parts)
        off = max(off, *(abs(a - b) for a, b in zip(one, other)))
    states = reference.state_dict(), adopted.state_dict()
    assert list(states[0]) == list(states[1])
    worst = max((whole(states[0][k]).double() - whole(states[1][k]).double()).abs().max().item() for k in states[0])
    return off, worst
