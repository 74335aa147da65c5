"""Size and dtype of the (nested, fake) values of nodes."""

from __future__ import annotations

import torch

from inductor_passes import _torch


def value_bytes(value: object) -> int:
    """Bytes of a (nested) tensor value by hint; 0 for anything without a size."""
    if isinstance(value, torch.Tensor):
        return _torch.tensor_bytes(value) or 0
    if isinstance(value, (list, tuple)):
        return sum(value_bytes(v) for v in value)
    return 0


def dtype_name(value: object) -> str:
    """``float32``, ``bfloat16`` ... of a tensor or of the first tensor in a list; ``float32`` for anything else."""
    if isinstance(value, (list, tuple)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "float32"
