"""Checkpointed regions with attention beside DTensor parameters: mended wherever the passes are on, and never worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import inductor_passes
from inductor_passes import config
from inductor_passes.engine import checkpointing
from inductor_passes.ir import ops
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.compiled import dotted, without_kernels
from tests.support.world import fake_world


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x)[:, None].chunk(3, -1)
        return x + scaled_dot_product_attention(q, k, v)[:, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Own(CustomPartitionerFn):
    """A partitioner of the user's; remembers what it made."""

    def __init__(self) -> None:
        self.made: list[tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = []

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        self.made.append(min_cut_rematerialization_partition(gm, joint_inputs, **kwargs))
        return self.made[-1]

    def uuid(self) -> Any:
        return None


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    # What comes out of a cache was partitioned before.
    with fake_world(2), without_kernels(), torch._inductor.config.patch(force_disable_caches=True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        yield simple_fsdp(nn.Sequential(Attention(), Attention()), mesh)


def run(model: nn.Module, **how: Any) -> None:
    torch.compile(model, fullgraph=True, **how)(torch.randn(2, 4, 8)).sum().backward()


@pytest.mark.parametrize("fields", [{}, {"schedule": "off", "bucket": "off", "redistribute": "off"}])
def test_options(model: nn.Module, fields: dict[str, Any]) -> None:
    run(model, options=inductor_passes.options(verify="strict", **fields))


def test_a_partitioner_of_the_user(model: nn.Module) -> None:
    own = Own()
    run(model, options=inductor_passes.options(verify="strict", inductor={"custom_partitioner_fn": own}))
    assert len(own.made) == 1


def test_the_whole_process(model: nn.Module) -> None:
    with config.patch(enabled=True, verify="strict"):
        run(model)


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_the_backend(model: nn.Module, codegen: str) -> None:
    run(model, backend="inductor_passes", options=dotted(codegen=codegen))


def split(model: nn.Module) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """What torch's partitioner makes of the model, unmended."""
    own = Own()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inductor_passes.engine.checkpointing.put_right", lambda *_: False)
        try:
            run(model, options=inductor_passes.options(inductor={"custom_partitioner_fn": own}))
        except AssertionError as error:
            assert "tensors_saved_with_vc_check" in str(error)
    return own.made[0]


def saved(both: tuple[torch.fx.GraphModule, ...]) -> list[str]:
    """Kinds of forward's saved values, and of backward's inputs for them."""
    result = next(n for n in reversed(both[0].graph.nodes) if n.op == "output").args[0][1:]
    inputs = both[1].graph.find_nodes(op="placeholder")[: len(result)]
    return [" ".join(checkpointing._torch.saved_kind(n).name for n in nodes) for nodes in (result, inputs)]


def test_right_order_is_left_alone(model: nn.Module) -> None:
    both = split(model)
    wrong = saved(both)[0].rpartition("OPAQUE")[2].count("TENSOR") > 0
    assert checkpointing.put_right(*both, 1) is wrong
    kinds = saved(both)
    assert kinds[0] == kinds[1] and "OPAQUE TENSOR" not in kinds[0]
    code = [module.code for module in both]
    assert not checkpointing.put_right(*both, 1)
    assert [module.code for module in both] == code


def test_wrapped_operators_have_values(model: nn.Module) -> None:
    for module in split(model):
        found = [n for n in module.graph.nodes if ops._torch.op_name(n.target) in ops.RANDOM_HIGHER_ORDER]
        assert all("val" in n.meta for n in found)


@pytest.mark.parametrize("broken", ["_inputs", "_reorder"])
def test_an_error_changes_nothing(model: nn.Module, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    both = split(model)
    before = [module.code for module in both]

    def fail(forward: torch.fx.GraphModule, *_: Any) -> None:
        if broken == "_reorder":
            result = next(n for n in reversed(forward.graph.nodes) if n.op == "output")
            result.args = ((*reversed(result.args[0]),),)
        raise ValueError("in the middle")

    monkeypatch.setattr(checkpointing, broken, fail)
    try:
        checkpointing.put_right(*both, 1)
    except ValueError:
        assert [module.code for module in both] == before
    else:
        assert torch.__version__ >= "2.14" or torch.__version__ < "2.12"
