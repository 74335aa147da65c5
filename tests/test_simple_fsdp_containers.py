"""Containers of managed parameters: what slices and copies hold is gathered, and gradients reach the shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inductor_passes
from tests.support.world import fake_world


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.full((8,), 0.1 * i + 0.1)) for i in range(6))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.row = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.vectors[::2], self.vectors[1::2]):
            x = torch.tanh(x * scale + shift)
        for layer in self.layers[1:]:
            x = layer(x)
        out: torch.Tensor = self.row[:2](x) * self.vectors[-1]
        return out


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({k: nn.Parameter(torch.full((8,), 0.1 * i)) for i, k in enumerate("abc")})
        self.more = nn.ParameterDict({"d": nn.Parameter(torch.ones(8))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.named.copy().values():
            x = torch.tanh(x * value)
        for value in (self.named | self.more).values():
            x = torch.tanh(x + value)
        return x


def managed(model: nn.Module) -> nn.Module:
    return inductor_passes.simple_fsdp(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))


def adopted(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found: nn.Module = inductor_passes.adopt(model)
    return found


@pytest.mark.parametrize("wrap", [managed, adopted])
@pytest.mark.parametrize("make", [Sliced, Copied])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_what_slices_hold(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], compiled: bool
) -> None:
    """Found: torch puts what a slice holds into new parameters. Those of a managed list were gathered tensors cut off
    from their shards: no gradient arrived, and Dynamo failed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, x = make(), torch.randn(4, 8)
    model = make()
    model.load_state_dict(expected.state_dict())
    expected(x).square().sum().backward()
    with fake_world(1):
        model = wrap(model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        call(x).square().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        for name, parameter in expected.named_parameters():
            one = found[name]
            if parameter.grad is None:
                assert one is None or not one.to_local().any()  # type: ignore[attr-defined]
            else:
                torch.testing.assert_close(one.to_local(), parameter.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("wrap", [managed, adopted])
def test_outside_of_forward_they_are_containers_of_what_is_stored(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Found: a slice that was kept as a module's attribute registered nothing, and what was removed could not be put
    back: torch asks with ``hasattr``."""
    with fake_world(1):
        lists, dictionary = wrap(Sliced()), wrap(Copied())
        part = lists.vectors[1:3]  # type: ignore[union-attr, index]
        stored = dict(lists.named_parameters())
        assert type(part) is nn.ParameterList
        assert all(a is b for a, b in zip(part.parameters(), [stored["vectors.1"], stored["vectors.2"]], strict=True))
        named = dictionary.named
        assert isinstance(named, nn.ParameterDict) and type(named.copy()) is nn.ParameterDict
        kept = dict(named.named_parameters())
        named.clear()
        named.update(kept)
        assert list(named) == ["a", "b", "c"] and named._parameters["b"] is kept["b"]
        dictionary(torch.ones(2, 8)).sum().backward()
        assert kept["b"].grad is not None


@pytest.mark.parametrize("wrap", [managed, adopted])
def test_a_container_that_forward_makes_of_them_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Found: torch put detached copies into it, so gradients were lost without a word."""

    class Anew(Sliced):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in nn.ParameterList(self.vectors[:2]):
                x = x * one
            return x

    with fake_world(1):
        model = wrap(Anew())
        with pytest.raises(ValueError, match=r"non-leaf Tensor to parameter '0'.*compute the value in the forward"):
            model(torch.ones(2, 8))
        with torch.no_grad():
            assert model(torch.ones(2, 8)).shape == (2, 8)
