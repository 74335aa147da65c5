"""The device on which tests of real ranks compute: ``PASSES_TEST_DEVICE=cuda`` for those that can run on GPUs.

Ranks that outnumber the GPUs share them. NCCL refuses that for ranks of one host: each rank then gets a host id of its
own, so that NCCL sends through sockets. Torch's symmetric memory is told to allow it.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import nn

DEVICE = os.environ.get("PASSES_TEST_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
#: Of the default process group of ranks. ``PASSES_TEST_BACKEND=cpu:gloo,cuda:gloo`` does without NCCL.
BACKEND = os.environ.get("PASSES_TEST_BACKEND", "gloo" if ON_CPU else "cpu:gloo,cuda:nccl")
#: Variables of ranks whose Triton kernels run: in the interpreter, where there is no GPU.
KERNEL_VARIABLES = {"TRITON_INTERPRET": "1"} if ON_CPU else {}
#: What ranks on GPUs need on top; with these they are never forked, for a forked process cannot use CUDA.
VARIABLES = (
    {}
    if ON_CPU
    else {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        # Ranks of tests compile alone, for two cores; a machine with a GPU has more.
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
)
#: Parameters whose gradients differ from run to run: on a GPU rows of an embedding are added by whoever comes first.
#: (Torch's deterministic algorithms would not do that, but then Inductor calls no hook that orders kernels.)
ATOMIC = () if ON_CPU else ("embed.weight",)

Value = TypeVar("Value", torch.Tensor, nn.Module)


def on_device(value: Value) -> Value:
    """A tensor or a module on the device."""
    return value.to(DEVICE)


def take_device(rank: int, world_size: int) -> None:
    """Give this rank its GPU, before the process group is made; nothing to do on a CPU."""
    if ON_CPU:
        return
    count = torch.cuda.device_count()
    if count < world_size:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(rank % count)
