"""A Llama from ``transformers``, tiny and randomly initialised, compiled with data and with tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted
from tests.support.hugging_face import tiny_llama
from tests.support.joint_kernels import kernels_together
from tests.support.parity import whole
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def pool(two_ranks: Ranks) -> Ranks:
    return two_ranks


def tiny() -> nn.Module:
    """The same weights on every rank; (input_ids, labels) -> output with a loss."""
    model: nn.Module = tiny_llama(attn_implementation="sdpa").double()
    return model


def batch(seed: int) -> torch.Tensor:
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """Megatron's plan for the decoder layers; embedding, norms and head stay replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


@kernels_together()
def train(rank: int, world_size: int, kind: str, codegen: str, checkpointed: bool = False) -> list[str]:
    """One step against the same model in one process; what the reports say of their graphs."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, reference = tiny(), tiny()
    if kind == "data":
        simple_fsdp(model, mesh)
        mine, parts = batch(rank), [batch(r) for r in range(world_size)]
    else:
        tensor_parallel(model, mesh)
        mine, parts = batch(0), [batch(0)]
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for part in parts:
        (loss_of(reference, part) / len(parts)).backward()
    if codegen == "inductor":
        how: dict[str, Any] = {"options": inductor_passes.options(verify="strict")}
    else:
        how = {"backend": "inductor_passes", "options": dotted()}
    step = torch.compile(loss_of, fullgraph=True, **how)
    with collect(what_if=False) as reports:
        loss = step(model, mine)
        loss.backward()
    torch.testing.assert_close(loss.detach(), loss_of(tiny(), mine).detach(), rtol=1e-5, atol=1e-7)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        # Norms and rotary positions of transformers compute in float32, whatever the model's dtype.
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, rtol=1e-4, atol=1e-7)
    return [f"{report.phase} {len(report.collectives)} {report.order_check}" for report in reports]


@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_a_hugging_face_llama_trains_as_in_one_process(pool: Ranks, kind: str) -> None:
    for lines in pool.run(train, kind, "inductor"):
        phases = {line.split()[0] for line in lines}
        assert phases == {"forward", "backward"}
        assert all(int(line.split()[1]) > 0 for line in lines)


@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_gradient_checkpointing(pool: Ranks, kind: str) -> None:
    """Attention runs again in backward; torch 2.12 and 2.13 alone fail on it."""
    pool.run(train, kind, "aot_eager", True)
