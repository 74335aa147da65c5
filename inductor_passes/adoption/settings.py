"""Errors of adoption, and how adopted parameters are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from inductor_passes import _torch
from inductor_passes.simple_fsdp.access import Unsharding
from inductor_passes.simple_fsdp.unshard import unshard


class AdoptError(ValueError):
    """A module that cannot be taken over; the message names the setting and the way out."""


class AdoptedShard(Unsharding):
    """Reads gather; backward reduces the gradient or holds it."""

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """The function of (module, stored parameter) that a read inside of forward calls."""
        shape, arguments = self.shape, self.settings.arguments

        def read(module: Any, stored: torch.Tensor) -> torch.Tensor:
            owner = module._adoption
            if owner.unit.direct:
                return unshard(stored, shape, *arguments)
            return unshard(stored, shape, *arguments, held=owner.held.get(name))  # type: ignore[misc]

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
    """

    group: str
    ranks: tuple[int, ...]

    def reading(self, name: str) -> Callable[[nn.Module, Any], Any]:
        """The function of (module, stored parameter) that a read inside of forward calls."""
        del name
        group, ranks = self.group, len(self.ranks)

        def read(module: Any, stored: torch.Tensor) -> torch.Tensor:
            unit = module._adoption.unit
            if unit.direct and torch.is_grad_enabled() and stored.requires_grad and (unit.called or _is_recomputing()):
                return torch.ops.inductor_passes.replicated.default(stored, group, ranks)
            return stored

        return read

    def outside(self, module: nn.Module, name: str) -> None:
        """Nothing: reads outside of forward give the parameter itself."""


def _is_recomputing() -> bool:
    return not torch.compiler.is_compiling() and _torch.is_recomputing()


_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define("replicated(Tensor parameter, str group, int ranks) -> Tensor")


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # As DDP: multiplied by the reciprocal before the sum.
        return _torch.all_reduce_in(gradient * (1 / ctx.ranks), ctx.group, "sum"), None, None


def _replicated(parameter: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    return _Replicated.apply(parameter, group, ranks)


_LIBRARY.impl("replicated", _replicated, "CompositeImplicitAutograd")
