"""Lightning Fabric: strategies that adopt what they wrap.

    fabric = Fabric(strategy=AdoptDDPStrategy(), devices=8)
    model = torch.compile(model, options=inductor_passes.options())
    model, optimizer = fabric.setup(model, optimizer)

``fabric.setup`` takes the compiled wrapper off, has the strategy wrap the module and compiles the result with the same
arguments: what is compiled is the adopted module.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes import _torch
from inductor_passes.adoption import AdoptedModule, adopt
from inductor_passes.integrations.compiling import refuse_compiled

_WAY_OUT = "compile the whole model before fabric.setup, which compiles again after the strategy has wrapped it"


class AdoptDDPStrategy(DDPStrategy):
    """DDP whose all-reduces are in the compiled graph. Arguments: those of Fabric's ``DDPStrategy``."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap and adopt.

        Raises:
            AdoptError: a setting that only hooks can serve.
        """
        refuse_compiled(module, _WAY_OUT)
        return adopt(super().setup_module(module))


class AdoptModelParallelStrategy(ModelParallelStrategy):
    """FSDP2, alone or over tensor parallelism, whose collectives are in the compiled graph.

    Arguments are those of Fabric's ``ModelParallelStrategy``; ``parallelize_fn`` calls ``fully_shard`` as always. A
    model with tensor parallelism alone stays as it is: its collectives are in the graph already.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Parallelize, give parameters on the meta device memory, and adopt.

        Raises:
            AdoptError: ``parallelize_fn`` did nothing, or a setting that only hooks can serve.
        """
        wrapped = super().setup_module(module)
        refuse_compiled(wrapped, _WAY_OUT)
        if _torch.wrapper_of(wrapped) == "" and any(isinstance(one, DTensor) for one in wrapped.parameters()):
            return wrapped
        return adopt(wrapped)


class _SyncControl:
    """``fabric.no_backward_sync``.

    Fabric's own one leaves the model without synchronisation after ``enabled=False``, so that every gradient of a loop
    that accumulates nothing would be held and reduced after backward.
    """

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Inside, gradients are added up on each rank if ``enabled``."""
        return _without_sync(module) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _without_sync(module: nn.Module) -> Any:
    adopted = [part for part in module.modules() if isinstance(part, AdoptedModule)]
    for part in adopted:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in adopted:
            part.set_requires_gradient_sync(True, recurse=False)
