"""What forward writes to a parameter in place is what the rest of it reads, as under FSDP2."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from inductor_passes import _torch, adopt
from inductor_passes.simple_fsdp import simple_fsdp, written
from tests.support.ranks import Ranks
from tests.support.world import fake_world


def clamp(module: Writing) -> None:
    module.scale.clamp_(max=1.5)


def through_data(module: Writing) -> None:
    module.scale.data.clamp_(max=1.5)


def twice(module: Writing) -> None:
    module.scale.mul_(0.5)
    module.scale.add_(0.25)


def a_row(module: Writing) -> None:
    module.linear.weight[0].zero_()


def held(module: Writing) -> None:
    weight = module.linear.weight
    weight.mul_(0.5)
    weight.sub_(0.01)


def by_itself(module: Writing) -> None:
    """The read that is written to is not the last one before the write."""
    module.scale.mul_(module.scale)


def by_its_norm(module: Writing) -> None:
    module.linear.weight.div_(module.linear.weight.norm(dim=1, keepdim=True))


def copied(module: Writing) -> None:
    module.scale.copy_(module.scale * 0.5)


def held_meanwhile(module: Writing) -> None:
    """What is written to was read before other reads, and is written to again after them."""
    weight = module.linear.weight
    weight.mul_(0.5)
    module.scale.add_(module.linear.weight.sum())
    weight.sub_(0.01)


def of_an_uneven_one(module: Writing) -> None:
    module.linear.bias.fill_(0.5)


WRITES = (
    *(clamp, through_data, twice, a_row, held, of_an_uneven_one),
    *(by_itself, by_its_norm, copied, held_meanwhile),
)


class Writing(nn.Module):
    """Writes, then computes."""

    def __init__(self, write: Callable[[Writing], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.tensor([3.0]))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        # Read more than once: what is read again is what was written, too.
        return self.linear(x) * self.scale + self.scale + self.linear(x + 1)


def train(model: nn.Module, call: Any, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(5 + rank)
    found = []
    for _ in range(2):
        loss = call(torch.randn(4, 6, generator=drawn)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.full_tensor().detach() for p in model.parameters())]  # type: ignore[attr-defined]


def compared(rank: int, world_size: int, write: Callable[[Writing], None], codegen: str) -> list[float]:
    """How far adopted and simple_fsdp's, both compiled, are off FSDP2 in eager execution, in parts of the largest."""
    torch.manual_seed(0)
    plain = Writing(write)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    expected = train(model := fully_shard(copy.deepcopy(plain), mesh=mesh), model, rank)
    off = []
    for model in (adopt(fully_shard(copy.deepcopy(plain), mesh=mesh)), simple_fsdp(copy.deepcopy(plain), mesh)):
        torch._dynamo.reset()
        options = {"inductor_passes.codegen": codegen, "inductor_passes.verify": "strict"}
        compiled = torch.compile(model, fullgraph=True, backend="inductor_passes", options=options)
        found = train(model, compiled, rank)
        pairs = zip(expected, found, strict=True)
        off.append(max(((a - b).abs().max() / a.abs().max().clamp(min=1)).item() for a, b in pairs))
    return off


@pytest.mark.ranks
@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_what_forward_writes_is_read_by_the_rest_of_it(two_ranks: Ranks, write: Callable[[Writing], None]) -> None:
    for off in two_ranks.run(compared, write, "aot_eager"):
        assert max(off) <= 1e-6, off


@pytest.mark.ranks
def test_generated_code_does_so_too(two_ranks: Ranks) -> None:
    for off in two_ranks.run(compared, clamp, "inductor"):
        assert max(off) <= 1e-6, off


@contextmanager
def managed(write: Callable[[Writing], None]) -> Iterator[nn.Module]:
    with fake_world(2):
        yield simple_fsdp(Writing(write), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


@pytest.mark.parametrize("write", [clamp, twice, a_row, by_itself, by_its_norm], ids=lambda one: one.__name__)
def test_where_it_is_lost_a_warning_says_so(caplog: pytest.LogCaptureFixture, write: Any) -> None:
    written._warn.cache_clear()
    with managed(write) as model, caplog.at_level(logging.WARNING, logger="inductor_passes"):
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
    (said,) = [r.getMessage() for r in caplog.records if "in place" in r.getMessage()]
    assert "forward wrote in place to a parameter of shape" in said and "sharded_parameters" in said


def test_writes_to_two_reads_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """No read has what both writes make."""

    def apart(module: Writing) -> None:
        one, other = module.scale, module.scale
        one.mul_(0.5)
        other.add_(0.25)

    written._warn.cache_clear()
    torch._dynamo.reset()
    with managed(apart) as model, caplog.at_level(logging.WARNING, logger="inductor_passes"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(4, 6)).sum().backward()
    (said,) = [r.getMessage() for r in caplog.records if "in place" in r.getMessage()]
    assert "two reads" in said and "Read the parameter once" in said


def test_nothing_is_said_where_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    written._warn.cache_clear()
    with managed(lambda _: None) as model, caplog.at_level(logging.WARNING, logger="inductor_passes"):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
    assert not [r for r in caplog.records if "in place" in r.getMessage()]


def test_only_a_counter_is_kept_of_what_was_gathered() -> None:
    parameter = torch.ones(1000, requires_grad=True)
    for make in (lambda: torch.ones(1000), lambda: parameter * 1, lambda: torch.ones(2000)[:1000]):
        tensor = make()
        writes, storage = _torch.Writes(tensor), tensor.untyped_storage()
        assert writes._alias.untyped_storage().nbytes() == 0 and writes._alias._base is None
        assert storage.nbytes() >= 4000 and not writes.any and tensor._version == 0
        with torch.no_grad():
            tensor.view(10, 100)[3].add_(1)
        assert writes.any
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_evaluation_runs_as_before(mode: Any) -> None:
    """Tensors of inference mode count no writes."""
    with managed(lambda _: None) as model, mode():
        assert model(torch.randn(4, 6)).shape == (4, 7)
