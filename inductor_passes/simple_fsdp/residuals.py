"""Error feedback: what a narrow message loses of a gradient is added to the next one.

A message carries ``x = gradient + residual``. What arrives of it is ``sent(x)``, which the rank that sends it knows::

    residual := x - sent(x)

So nothing of a gradient is lost, some of it comes later (Seide et al., 2014, "1-Bit Stochastic Gradient Descent";
Karimireddy et al., 2019, arXiv:1901.09847). ``torch.ops.inductor_passes.sent`` gives its operand back: as long as
messages are exact, the residual stays zero. Where the pass ``compress`` narrows the message that carries ``x``, it
puts in the place of ``sent(x)`` what the rank itself widens from the codes that it sends.

An all_reduce rounds twice, each rank its terms and one rank their sum. So it becomes a reduce_scatter and an
all_gather here, each with a residual of its own.

What is not finite is not kept: the step that is skipped for it must not spoil those that come after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from inductor_passes import _torch
from inductor_passes.operators import SENT

#: What residuals are kept in.
DTYPE = torch.float32

_NAME = SENT.partition("::")[2]
_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define(f"{_NAME}(Tensor value) -> Tensor")
_LIBRARY.impl(_NAME, lambda value: value.clone(), "CompositeExplicitAutograd")


def compensated(
    value: torch.Tensor, residual: torch.Tensor, send: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What a message brings of ``value`` and of what earlier ones lost.

    Args:
        value: in :data:`DTYPE`.
        residual: of its shape; becomes what this message loses.
        send: the message.
    """
    # Dense, so that what is sent and what is compared with it are one value.
    value = (residual + value).contiguous()
    brought = send(value)
    # Behind the message: nothing that waits for it waits for this.
    lost = value - torch.ops.inductor_passes.sent.default(value)
    residual.copy_(torch.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0))
    return brought


def summed(
    value: torch.Tensor, group: str, ranks: int, terms: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """The sum of the ranks' values, each message compensated.

    Args:
        value: any shape.
        group: name of the process group.
        ranks: how many it has.
        terms: residual of what this rank adds.
        total: residual of this rank's piece of the sum; shapes of both: see :func:`summed_shapes`.
    """
    flat = value.reshape(-1)
    if missing := terms.shape[0] - flat.shape[0]:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    piece = compensated(flat, terms, lambda x: _torch.reduce_scatter_in(x, group, ranks))
    whole = compensated(piece, total, lambda x: _torch.all_gather_in(x, group, ranks))
    return whole[: value.numel()].view(value.shape)


def summed_shapes(elements: int, ranks: int) -> list[tuple[int, ...]]:
    """Shapes of the residuals of :func:`summed`.

    Ranks have equal pieces. What does not divide gets one element more per rank: only as much as makes it divide is
    what a graph shows where ranks have unequal ones.
    """
    each = elements // ranks + (2 if elements % ranks else 0)
    return [(each * ranks,), (each,)]


def local_residuals(residuals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts.

    Raises:
        RuntimeError: their type was changed.
    """
    found = [one.to_local() if isinstance(one, DTensor) else one for one in residuals]
    for one in found:
        if one.dtype is not DTYPE:
            raise RuntimeError(
                f"a residual of error feedback is {one.dtype}; expected {DTYPE}: call inductor_passes.add_feedback "
                "after the model has the type that it is trained in"
            )
    return found


class Losses(NamedTuple):
    """What a parameter needs residuals for.

    Attributes:
        mesh: of the ranks; each has residuals of its own.
        shapes: of one rank's residuals; none where its gradient is not reduced, or into unequal shards, which travel as
            they are.
        problem: why messages of its gradient cannot be compensated, or nothing.
    """

    mesh: DeviceMesh
    shapes: tuple[tuple[int, ...], ...]
    problem: str = ""

    def zeros(self, device: torch.device) -> list[DTensor]:
        """Residuals of nothing: for checkpoints, pieces of a tensor that all ranks share."""
        found = []
        for shape in self.shapes:
            whole = torch.Size((shape[0] * self.mesh.size(), *shape[1:]))
            own = torch.zeros(shape, dtype=DTYPE, device=device)
            pieces = [Shard(0)] * self.mesh.ndim
            found.append(
                DTensor.from_local(own, self.mesh, pieces, run_check=False, shape=whole, stride=own.stride())
            )
        return found


def buffers(module: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """A module's buffers with these names."""
    return [getattr(module, name) for name in names]


#: Attribute of a module: names of its buffers that are residuals.
NAMES = "_residuals"


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's own buffers that are residuals."""
    return tuple(getattr(module, NAMES, ()))


@contextlib.contextmanager
def left_out(module: nn.Module) -> Iterator[None]:
    """Inside, residuals are not part of state dictionaries: for files that others read."""
    parts = [(part, set(names_of(part)) - part._non_persistent_buffers_set) for part in module.modules()]
    for part, names in parts:
        part._non_persistent_buffers_set |= names
    try:
        yield
    finally:
        for part, names in parts:
            part._non_persistent_buffers_set -= names
