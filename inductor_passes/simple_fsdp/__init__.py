"""Data parallelism (FSDP, hybrid FSDP, DDP) whose collectives the compiler sees.

The collectives of ``torch.distributed.fsdp.fully_shard`` run in hooks that never enter a compiled graph, so no
compiler pass can schedule them. Here they are part of reading a parameter.
"""

from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.simple_fsdp.access import sharded_parameters
from inductor_passes.simple_fsdp.apply import simple_fsdp
from inductor_passes.simple_fsdp.settings import Mode, SimpleFSDPError

__all__ = ["MixedPrecisionPolicy", "Mode", "SimpleFSDPError", "sharded_parameters", "simple_fsdp"]
