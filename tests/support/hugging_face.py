"""A Llama of ``transformers``, small enough to compile in a test."""

from __future__ import annotations

from typing import Any

import torch


def tiny_llama(**settings: Any) -> Any:
    """Randomly initialised, with the same weights on every rank; ``settings`` are more fields of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**usual, **settings}))
