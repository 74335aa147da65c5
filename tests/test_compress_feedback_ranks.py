"""Error feedback on real ranks: what a message loses comes later, is saved, and can be forgotten."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

WIDTH = 128
#: Elements of a gradient: the largest of each block, and one that is less than half a step of its code.
LARGE, SMALL = 1.0, 0.001
NARROW = {"compress": "*=int8", "codegen": "aot_eager", "verify": "strict", "memory_budget": "unlimited"}


class Constant(nn.Module):
    """The gradient of ``w`` is the input, the same at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def wrapped(kind: str, world_size: int, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    if kind == "ddp":
        return inductor_passes.adopt(DistributedDataParallel(model))
    if kind == "fsdp2":
        return inductor_passes.adopt(fully_shard(model, mesh=mesh))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        return simple_fsdp(model, mesh, mode="hybrid_shard")
    return simple_fsdp(model, mesh, mode="replicate" if kind == "replicate" else "fully_shard")


def compiled(model: nn.Module, feedback: str = "on", **settings: str) -> Any:
    given = {**NARROW, "compress_feedback": feedback, **settings}
    options = {f"inductor_passes.{k}": v for k, v in given.items()}
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="inductor_passes", options=options)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter(model: nn.Module) -> nn.Parameter:
    (found,) = model.parameters()
    return found


def gradient(model: nn.Module, step: Any, x: torch.Tensor) -> torch.Tensor:
    """Of one step, this rank's part."""
    parameter(model).grad = None
    step(x).backward()
    found = parameter(model).grad
    assert found is not None
    return local(found).clone()


def residuals(model: nn.Module) -> list[torch.Tensor]:
    return [local(b) for name, b in model.named_buffers() if "residual" in name]


def constant(rank: int, world_size: int, kind: str, feedback: bool, steps: int) -> list[torch.Tensor]:
    """The sum of the gradients of some steps, divided by their number."""
    model = wrapped(kind, world_size, Constant())
    if feedback:
        inductor_passes.add_feedback(model)
    step = compiled(model)
    x = torch.full((4, WIDTH), SMALL * (1 + rank))
    x[:, 0] = LARGE
    total = sum((gradient(model, step, x) for _ in range(steps)), torch.zeros_like(local(parameter(model))))
    return [total / steps, *residuals(model)]


@pytest.mark.parametrize(("world", "kind"), [(2, "fsdp"), (2, "fsdp2"), (2, "ddp"), (2, "replicate"), (4, "hybrid")])
def test_what_is_less_than_half_a_step_comes_later(
    two_ranks: Ranks, four_ranks: Ranks, world: int, kind: str
) -> None:
    pool = {2: two_ranks, 4: four_ranks}[world]
    steps = 32
    lost = pool.run(constant, kind, False, steps)
    kept = pool.run(constant, kind, True, steps)
    mean = SMALL * sum(range(1, world + 1)) / world
    for without, (found, *left) in zip(lost, kept, strict=True):
        assert torch.count_nonzero(without[0][:, 1:]) == 0
        assert found[:, 0] == pytest.approx(torch.full((found.shape[0],), LARGE), rel=0.01)
        # What is still to come is less than a step of the code.
        assert float((found[:, 1:] - mean).abs().max()) <= 2 * LARGE / 127 / steps
        assert left and all(float(one.abs().max()) <= LARGE / 127 for one in left)
        assert any(float(one.abs().max()) > 0 for one in left)


class Twice(nn.Module):
    """Two matrices, of which the first is read twice; a part that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.w1(x))
        x = checkpoint(lambda y: torch.tanh(self.w2(torch.tanh(self.w1(y)))), x, use_reentrant=False)
        return x.square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def made(kind: str, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    return inductor_passes.add_feedback(wrapped(kind, world_size, Twice()))


def trained(model: nn.Module, rank: int, steps: range, feedback: str = "on", **settings: str) -> list[torch.Tensor]:
    """Parameters and residuals after some steps of SGD, each on a batch of its own."""
    return went_on(model, compiled(model, feedback, **settings), rank, steps)


def went_on(model: nn.Module, step: Any, rank: int, steps: range) -> list[torch.Tensor]:
    """As ``trained``, with what is compiled already."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in steps:
        optimizer.zero_grad()
        step(batch(rank, number)).backward()
        optimizer.step()
    return state(model)


def state(model: nn.Module) -> list[torch.Tensor]:
    return [local(one).detach().clone() for one in (*model.parameters(), *model.buffers())]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


def continued(rank: int, world_size: int, kind: str) -> dict[str, bool]:
    """Two steps, a checkpoint, two more; the latter also in a new model, once with residuals that were reset."""
    whole = made(kind, world_size)
    step = compiled(whole)
    went_on(whole, step, rank, range(2))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    expected = went_on(whole, step, rank, range(2, 4))
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    loaded = made(kind, world_size)
    loaded.load_state_dict(saved)
    kept = any(torch.count_nonzero(one) > 0 for one in residuals(loaded))
    step = compiled(loaded)
    continues = same(went_on(loaded, step, rank, range(2, 4)), expected)
    loaded.load_state_dict(saved)
    inductor_passes.reset_feedback(loaded)
    cleared = all(torch.count_nonzero(one) == 0 for one in residuals(loaded))
    return {
        "kept": kept,
        "cleared": cleared,
        "continues": continues,
        "differs without": not same(went_on(loaded, step, rank, range(2, 4)), expected),
    }


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2", "ddp"])
def test_checkpoints_and_reset(two_ranks: Ranks, kind: str) -> None:
    """Bit for bit as if training had not been interrupted; with residuals that were reset it is not."""
    for found in two_ranks.run(continued, kind):
        assert all(found.values()), found


def distributed_checkpoint(rank: int, world_size: int, folder: str) -> bool:
    """Each rank gets its own residuals back, from files that all wrote together."""
    model = made("fsdp", world_size)
    expected = trained(model, rank, range(2))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = made("fsdp", world_size)
    found = other.state_dict()
    dcp.load(found, checkpoint_id=folder)
    other.load_state_dict(found)
    return same(state(other), expected)


def test_distributed_checkpoints(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(distributed_checkpoint, str(tmp_path)) == [True, True]


def held(rank: int, world_size: int) -> list[bool]:
    """Two steps; an accumulation over three batches, which is reduced as it is; another step."""
    model = made("fsdp2", world_size)
    step = compiled(model)
    for one in model.parameters():
        one.grad = None
    step(batch(rank, 0)).backward()
    before = [one.clone() for one in residuals(model)]
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)  # type: ignore[operator]
        step(batch(rank, 1 + number)).backward()
    waited = same(residuals(model), before)
    step(batch(rank, 4)).backward()
    return [any(torch.count_nonzero(one) > 0 for one in before), waited, not same(residuals(model), before)]


def test_gradients_that_are_held_leave_residuals_alone(two_ranks: Ranks) -> None:
    assert two_ranks.run(held) == [[True] * 3] * 2


def late(rank: int, world_size: int, codegen: str) -> str:
    """Two forward passes, and then their backward passes: the second adds what the first has left, or is refused."""
    x = torch.full((4, WIDTH), SMALL)
    x[:, 0] = LARGE
    models = [inductor_passes.add_feedback(wrapped("fsdp", world_size, Constant())) for _ in range(2)]
    step = compiled(models[0], codegen=codegen)
    for _ in range(2):
        step(x).backward()
    step = compiled(models[1], codegen=codegen)
    losses = [step(x), step(x)]
    losses[0].backward()
    try:
        losses[1].backward()
    except RuntimeError as error:
        return str(error)
    assert float(residuals(models[1])[0][0, 1]) == pytest.approx(2 * SMALL)
    return "equal" if same(state(models[1]), state(models[0])) else "different"


@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_backward_passes_that_come_later(two_ranks: Ranks, codegen: str) -> None:
    for said in two_ranks.run(late, codegen):
        assert said == "equal" or "modified by an inplace operation" in said


def in_other_ways(rank: int, world_size: int) -> list[bool]:
    """Residuals after two steps: eager, compiled without our passes, with feedback off, with it, and by Inductor."""
    found = []
    for way in ("eager", "aot_eager", "off", "on", "inductor"):
        model = made("fsdp", world_size)
        if way in ("eager", "aot_eager"):
            torch._dynamo.reset()
            step = model if way == "eager" else torch.compile(model, fullgraph=True, backend="aot_eager")
            for number in range(2):
                step(batch(rank, number)).backward()
        else:
            settings = {"codegen": "inductor"} if way == "inductor" else {}
            trained(model, rank, range(2), "off" if way == "off" else "on", **settings)
        found.append(any(torch.count_nonzero(one) > 0 for one in residuals(model)))
    return found


def test_only_narrow_messages_leave_anything(two_ranks: Ranks) -> None:
    assert two_ranks.run(in_other_ways) == [[False, False, False, True, True]] * 2


class Normed(nn.Module):
    """Statistics, which DDP takes from the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().sum(1).sqrt().mean()


def normed(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = inductor_passes.add_feedback(wrapped("ddp", world_size, Normed()))
    trained(model, rank, range(3))
    return {name: local(one).clone() for name, one in model.named_buffers()}


def test_ddp_leaves_each_rank_its_own(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(normed)
    assert not torch.equal(first["module.linear.weight_residual"], second["module.linear.weight_residual"])
    assert all(torch.count_nonzero(one["module.linear.weight_residual"]) > 0 for one in (first, second))


def odd_classes(rank: int, world_size: int, kind: str) -> tuple[list[int], dict[str, float], float]:
    """Narrowed messages of backward without and with feedback; of each residual the largest element; with DDP
    how far what arrived and what is kept is from the sum of the gradients."""
    counts = []
    for feedback in ("off", "on"):
        torch.manual_seed(0)
        model = wrapped(kind, world_size, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 11)))
        if feedback == "on":
            inductor_passes.add_feedback(model)
        step = compiled(model, feedback)
        sums: dict[str, torch.Tensor] = {}
        with collect(what_if=False) as reports:
            for number in range(3):
                drawn = torch.Generator().manual_seed(10 * number + rank)
                step(torch.randn(8, WIDTH, generator=drawn)).square().mean().backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    sums[name] = sums.get(name, 0) + local(parameter.grad).clone()
                    parameter.grad = None
        counts.append(sum(len(r.narrowed) for r in reports if r.phase == "backward"))
    kept = {name: float(local(one).abs().max()) for name, one in model.named_buffers()}
    if kind != "ddp":
        # Parameters are narrowed as well, so gradients are not those of the plain model.
        return counts, kept, 0.0
    weight = "module.2.weight"
    terms, piece = (local(model.get_buffer(f"{weight}_residual{n}")).clone() for n in ("", "2"))
    torch.distributed.all_reduce(terms)
    pieces = [torch.empty_like(piece) for _ in range(world_size)]
    torch.distributed.all_gather(pieces, piece)
    lost = (terms + torch.cat(pieces))[: 11 * WIDTH].view(11, WIDTH)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 11))
    for number in range(3):
        for other in range(world_size):
            drawn = torch.Generator().manual_seed(10 * number + other)
            (plain(torch.randn(8, WIDTH, generator=drawn)).square().mean() / world_size).backward()
    found = plain[2].weight.grad
    return counts, kept, float((sums[weight] + lost - found).abs().max() / found.abs().max())


@pytest.mark.parametrize("kind", ["fully_shard", "fsdp2", "ddp"])
def test_sizes_that_do_not_divide_keep_nothing_else_from_being_narrowed(two_ranks: Ranks, kind: str) -> None:
    for (without, narrowed), kept, off in two_ranks.run(odd_classes, kind):
        assert narrowed >= without > 0
        if kind == "ddp":
            assert kept["module.2.weight_residual"] > 0 and kept["module.2.weight_residual2"] > 0
        else:
            assert set(kept) == {"0.weight_residual", "0.bias_residual"} and min(kept.values()) > 0
        assert off <= 1e-5
