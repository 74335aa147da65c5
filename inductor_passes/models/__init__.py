"""Small real models: what the tests, the demo and the benchmarks train.

Deterministic (seeded), quick on a CPU, sized by a frozen config. One Llama-shaped transformer covers data, tensor,
sequence, context and expert parallelism:

- ``llama(config)`` gives logits, ``language_model(config)`` the loss, as a training step compiles it;
- a ``sequence_group`` splits the sequence and exchanges heads for it around attention (DeepSpeed Ulysses);
- ``experts`` replace the feed-forward, an ``expert_group`` spreads them over ranks;
- ``tensor_parallel`` lays it out for tensor (and sequence) parallelism; ``simple_fsdp`` goes on top.

They are examples: nothing in the passes knows them.
"""

from inductor_passes.models.experts import MoE, MoEConfig, moe, moe_batch
from inductor_passes.models.layers import RMSNorm, seeded
from inductor_passes.models.llama import (
    LanguageModel,
    Llama,
    LlamaConfig,
    cross_entropy,
    language_batch,
    language_model,
    llama,
    llama_batch,
)
from inductor_passes.models.mlp import MLPConfig, mlp, mlp_batch
from inductor_passes.models.parallel import tensor_parallel

#: Small enough to train on two CPU cores, large enough that compute and communication can be told apart.
DEMO = LlamaConfig(vocab=1024, dim=256, layers=4, heads=4, kv_heads=4, hidden=704, batch=8, seq=256, std=0.06)

__all__ = [
    "DEMO",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "RMSNorm",
    "cross_entropy",
    "language_batch",
    "language_model",
    "llama",
    "llama_batch",
    "mlp",
    "mlp_batch",
    "moe",
    "moe_batch",
    "seeded",
    "tensor_parallel",
]
