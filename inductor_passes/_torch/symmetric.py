"""Symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from inductor_passes._torch.operators import registered_op


def enable_symmetric_memory(name: str) -> None:
    """Make torch's symmetric memory know a group; nothing to do from 2.15 on."""
    import warnings

    import torch.distributed._symmetric_memory as symmetric

    known = getattr(symmetric, "is_symm_mem_enabled_for_group", None)
    enable = getattr(symmetric, "enable_symm_mem_for_group", None)
    if enable is not None and not (known is not None and known(name)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable(name)


def symmetric_buffer(size_bytes: int, name: str, device: torch.device) -> tuple[torch.Tensor, list[int], Any]:
    """(own bytes, address of every rank's bytes as this rank sees them, handle that keeps them mapped). Collective."""
    from torch._C._distributed_c10d import _SymmetricMemory

    enable_symmetric_memory(name)
    # An allocation of its own: within a pool's block the addresses would be those of the block.
    own = _SymmetricMemory.empty_strided_p2p((size_bytes,), [1], torch.uint8, device, name)
    handle = _SymmetricMemory.rendezvous(own)
    return own, [int(pointer) for pointer in handle.buffer_ptrs], handle


def symmetric_op(name: str) -> Any:
    """``torch.ops.symm_mem.<name>`` as an operator overload, None where this torch lacks it."""
    if torch.distributed.is_available():
        from torch.distributed import _symmetric_memory  # noqa: F401  registers the operators

    return registered_op("symm_mem", name, "default")
