"""Data parallelism (FSDP, hybrid FSDP, DDP) whose collectives the compiler sees.

The collectives of ``torch.distributed.fsdp.fully_shard`` run in hooks that never enter a compiled graph, so no
compiler pass can schedule them. Here they are part of reading a parameter.

Limits:

- Each read of a parameter is a gather of its own. Compilation merges equal gathers and drops unused ones; eager
  execution does not, and keeps what it gathered until backward.
- Inside an activation-checkpointed region backward gathers again, also with ``reshard_after_forward=False``.
- torch 2.12 and 2.13 fail on a checkpointed region that runs attention (on a CPU) or dropout again while any parameter
  is a DTensor, also under tensor parallelism: "expected all tensors_saved_with_vc_check to be Tensors". Our compiler
  passes mend that in every way to switch them on. Without them, compiled by torch alone, the region fails.
- Where data and tensor parallelism split the same dimension, the product of the mesh sizes must divide it.
"""

import sys
import types
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.simple_fsdp.access import gathered_parameters, sharded_parameters
from inductor_passes.simple_fsdp.apply import simple_fsdp
from inductor_passes.simple_fsdp.arrival import MissingRanksError
from inductor_passes.simple_fsdp.feedback import add_feedback, reset_feedback
from inductor_passes.simple_fsdp.handle import ParameterHandle, ShardedValueError
from inductor_passes.simple_fsdp.settings import Mode, SimpleFSDPError

__all__ = [
    "MissingRanksError",
    "MixedPrecisionPolicy",
    "Mode",
    "ParameterHandle",
    "ShardedValueError",
    "SimpleFSDPError",
    "add_feedback",
    "gathered_parameters",
    "reset_feedback",
    "sharded_parameters",
    "simple_fsdp",
]


class _Callable(types.ModuleType):
    """``inductor_passes.simple_fsdp`` is this package and, called, the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        return simple_fsdp(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
