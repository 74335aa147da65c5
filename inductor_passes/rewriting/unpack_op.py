"""``inductor_passes::unpack``: the columns of a message as dense tensors, all at once.

On a GPU one Triton launch (``kernels.unpack``); anywhere else a copy per tensor, as the operator that it stands for.
Inductor's code for a CPU does not call the operator, but one C++ function where a tensor is needed
(``_torch.lower_as_calls``).
"""

from __future__ import annotations

import torch


@torch.library.custom_op("inductor_passes::unpack", mutates_args=())
def unpack(message: torch.Tensor, firsts: list[int], widths: list[int]) -> list[torch.Tensor]:
    """Ranges of columns of a matrix, each dense.

    Args:
        message: [rows, columns], contiguous.
        firsts: first column of each result.
        widths: columns of each result.

    Returns:
        One [rows, width] tensor per width, in memory of its own.
    """
    if message.device.type == "cuda":
        from inductor_passes.kernels import unpack as kernel

        return kernel.unpacked(message, firsts, widths)
    return [message[:, a : a + width].clone(memory_format=torch.contiguous_format) for a, width in zip(firsts, widths)]


@unpack.register_fake
def unfilled(message: torch.Tensor, firsts: list[int], widths: list[int]) -> list[torch.Tensor]:
    """What :func:`unpack` returns, nothing copied."""
    return [message.new_empty(message.shape[0], width) for width in widths]
