"""Tensor and sequence parallelism for the transformer, through ``parallelize_module``."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from inductor_passes.models.llama import LlamaT


def tensor_parallel(model: LlamaT, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> LlamaT:
    """Megatron's plan on a one-dimensional mesh, in place; the caller still sees whole tokens and whole logits."""
    if model.output.weight is model.embed.weight:
        raise ValueError("the plan would give the shared embedding two different copies; expected tied=False")
    if not sequence_parallel:
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
        block: dict[str, Any] = {}
        row = RowwiseParallel()
    else:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        block = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        row = RowwiseParallel(output_layouts=Shard(1))
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        block[name] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        block[name] = row
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return model
