"""Taking over modules that FSDP2 or DDP wrapped, so that the compiler sees their collectives.

The collectives of ``fully_shard`` and ``DistributedDataParallel`` run in hooks that never enter a compiled graph. An
adopted module has no hooks: reading a parameter gathers it, backward reduces its gradient, as under ``simple_fsdp``.
Parameters stay the same objects, so that optimizers, checkpoints and names stay what they are.
"""

from inductor_passes.adoption.apply import adopt
from inductor_passes.adoption.methods import AdoptedDDP, AdoptedModule
from inductor_passes.adoption.settings import AdoptError

__all__ = ["AdoptError", "AdoptedDDP", "AdoptedModule", "adopt"]
