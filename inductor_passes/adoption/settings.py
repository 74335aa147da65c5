"""Errors of adoption, and how adopted parameters are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from inductor_passes import _torch
from inductor_passes.simple_fsdp.access import Unsharding
from inductor_passes.simple_fsdp.layout import problem_of
from inductor_passes.simple_fsdp.residuals import Losses, buffers, local_residuals, summed, summed_shapes
from inductor_passes.simple_fsdp.unshard import unshard


class AdoptError(ValueError):
    """A module that cannot be taken over; the message names the setting and the way out."""


class AdoptedShard(Unsharding):
    """Reads gather; backward reduces the gradient or holds it."""

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """The function of (module, stored parameter) that a read inside of forward calls."""
        shape, arguments, residuals = self.shape, self.settings.arguments, self.residuals

        def read(module: Any, stored: torch.Tensor) -> torch.Tensor:
            owner = module._adoption
            if owner.unit.direct:
                return unshard(stored, shape, *arguments, residuals=buffers(module, residuals))  # type: ignore[misc]
            # What was frozen since the last accumulation still has the place for its gradients.
            held = owner.held.get(name) if stored.requires_grad else None
            return unshard(stored, shape, *arguments, held=held)  # type: ignore[misc]

        return read

    def outside(self, module: Any, name: str) -> Any:
        """What ``unshard()`` gathered."""
        return module._adoption.whole.get(name)


@dataclass(frozen=True)
class AdoptedCopy:
    """A whole parameter of DDP: a read is the parameter, backward reduces its gradient or leaves it to the rank.

    As in DDP only reads in the wrapper's own forward do: the wrapped module alone is a module of this rank.

    Attributes:
        group: name of the process group.
        ranks: its global ranks.
        residuals: see :class:`~inductor_passes.simple_fsdp.access.Reader`.
    """

    group: str
    ranks: tuple[int, ...]
    residuals: tuple[str, ...] = ()

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """The function of (module, stored parameter) that a read inside of forward calls."""
        del name
        group, ranks, residuals = self.group, len(self.ranks), self.residuals

        def read(module: Any, stored: torch.Tensor) -> torch.Tensor:
            unit = module._adoption.unit
            if unit.direct and torch.is_grad_enabled() and stored.requires_grad and (unit.called or _is_recomputing()):
                return torch.ops.inductor_passes.replicated.default(stored, group, ranks, buffers(module, residuals))
            return stored

        return read

    def outside(self, module: nn.Module, name: str) -> None:
        """Nothing: reads outside of forward give the parameter itself."""

    def losses(self, stored: torch.Tensor) -> Losses:
        """What a parameter needs residuals for."""
        mesh = _torch.mesh_of(self.group, stored.device.type)
        shapes = summed_shapes(stored.numel(), len(self.ranks)) if stored.numel() and len(self.ranks) > 1 else []
        return Losses(mesh, tuple(shapes), problem_of(stored, stored.dtype) if shapes else "")

    def keeping(self, residuals: tuple[str, ...]) -> AdoptedCopy:
        """The same reader with these buffers."""
        return replace(self, residuals=residuals)


def _is_recomputing() -> bool:
    return not torch.compiler.is_compiling() and _torch.is_recomputing()


_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define("replace_unseen(Tensor(a!) buffer, Tensor value) -> ()")
# An operator, as Dynamo would trace into it before AOTAutograd has something to mark.
_LIBRARY.impl("replace_unseen", _torch.write_unseen, "CompositeImplicitAutograd")
_LIBRARY.define("replicated(Tensor parameter, str group, int ranks, Tensor[] residuals) -> Tensor")


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, group: str, ranks: int, residuals: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        ctx.group, ctx.ranks, ctx.residuals = group, ranks, residuals
        # Shares memory and versions with the parameter, and is no view to autograd: forward may write to it.
        return parameter.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # As DDP: multiplied by the reciprocal before the sum.
        gradient = gradient * (1 / ctx.ranks)
        if ctx.residuals:
            return summed(gradient, ctx.group, ctx.ranks, *ctx.residuals), None, None, None
        return _torch.all_reduce_in(gradient, ctx.group, "sum"), None, None, None


def _replicated(parameter: torch.Tensor, group: str, ranks: int, residuals: Sequence[torch.Tensor]) -> torch.Tensor:
    return _Replicated.apply(parameter, group, ranks, local_residuals(residuals))


_LIBRARY.impl("replicated", _replicated, "CompositeImplicitAutograd")
