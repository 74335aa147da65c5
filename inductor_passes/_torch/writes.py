"""What has been written to a tensor in place, while it is traced and while it is not."""

from __future__ import annotations

from typing import Any

import torch


def tracing_context() -> Any:
    """What torch keeps for as long as it compiles a graph; None outside of a compilation."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def traced_writes(tensor: torch.Tensor) -> int | None:
    """How often a traced program has written to a tensor; None where that is not known."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    count = getattr(torch, "_functionalize_mutation_counter", None)
    return int(count(tensor.elem)) if count is not None and isinstance(tensor, FunctionalTensor) else None


def counts_writes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, with memory and a counter of writes: not traced, and not of inference mode."""
    return type(tensor) is torch.Tensor and not tensor.is_inference() and not _is_wrapped(tensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class Writes:
    """Whether a tensor is written to in place after this was made; keeps nothing of it alive but the counter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._before = tensor._version
        # It shares the counter, also when it has let go of the memory, which counts as a write. A view would keep what
        # it is a view of.
        self._alias = tensor.detach()
        with torch.no_grad():
            self._alias.set_()
        torch._C._autograd._unsafe_set_version_counter((self._alias,), (self._before,))

    @property
    def any(self) -> bool:
        """See the class. Writes through ``.data`` do not count."""
        return self._alias._version != self._before
