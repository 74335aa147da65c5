"""Models of training frameworks for the link benchmark, each with its loss: (tokens, targets) -> mean loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from inductor_passes.models import LlamaConfig


class HuggingFace(nn.Module):
    """A Llama of ``transformers`` with its loss."""

    def __init__(self, config: LlamaConfig) -> None:
        from transformers import LlamaConfig as Theirs
        from transformers import LlamaForCausalLM

        super().__init__()
        torch.manual_seed(config.seed)
        theirs = Theirs(
            vocab_size=config.vocab,
            hidden_size=config.dim,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.seq,
            initializer_range=config.std,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(theirs)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's."""
        found: nn.ModuleList = self.model.model.layers
        return found

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchTitan(nn.Module):
    """torchtitan's smallest Llama (``debugmodel``: width 256, 16 heads, vocabulary 2,048); needs ``torchtitan``.

    Args:
        config: of it only ``layers`` and ``seed`` are taken; the sizes are torchtitan's.
    """

    def __init__(self, config: LlamaConfig) -> None:
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3 import model_registry

        super().__init__()
        self._spec = model_registry("debugmodel")
        described = self._spec.model
        described.layers = described.layers[: config.layers]
        for layer in described.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        torch.manual_seed(config.seed)
        self.model = described.build()
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)

    @property
    def layers(self) -> Iterable[nn.Module]:
        """The decoder's."""
        found: Any = self.model.layers
        return tuple(found.values())

    def shard(self) -> None:
        """Shard the model over all ranks as torchtitan does it (``parallelize_llama``)."""
        from torch.distributed.fsdp import FSDPModule
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, parallel_dims

        parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            self._spec.parallelize_fn(
                self.model,
                parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
                training=TrainingConfig(mixed_precision_param="float32"),
                parallelism=parallelism,
                compile_config=CompileConfig(),
                ac_config=None,
                dump_folder="",
            )
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                # Its loss is a sum over all tokens, ours a mean; and gloo has no sum that multiplies before.
                part.set_gradient_divide_factor(float(dist.get_world_size()))
                part.set_force_sum_reduction_for_comms(True)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        logits = self.model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
