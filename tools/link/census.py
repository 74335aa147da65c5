"""How many bytes a training step sends for each parameter, whatever collective carries it.

Passes merge, split and replace collectives, so neither their kinds nor their number say what travelled. Here the values
decide: a parameter was sent as often as the values of its shard occur in what went out, and its gradient as often as
the values of the gradient's shard occur in what a reduction brought (the result of a reduce_scatter or all_reduce, or
the sum of the pieces of an all_to_all). Nothing is asked of the passes.

Values are compared bit by bit, which identifies a tensor of 32-bit values by its median element: a single value may
occur elsewhere by chance. Tensors that are equal (norms before the first update), or hold few values, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.link_model import Message

#: At least this share of a shard's values must be distinct; else values do not identify it.
_DISTINCT = 0.5
#: So many parameters with wrong traffic are named, the others are counted.
_NAMED = 3


@dataclass(frozen=True)
class Tally:
    """What this rank sent for one parameter in one step, in bytes.

    Attributes:
        name: of the parameter.
        once: bytes that sending its shard to all others takes, or reducing its gradient to shards.
        gathered / reduced: bytes that were sent; None where the values do not identify the tensor.
    """

    name: str
    once: int
    gathered: int | None
    reduced: int | None


def census(model: nn.Module, step: Callable[[], torch.Tensor]) -> list[Tally]:
    """Take ``step`` (it returns the loss) and its backward on all ranks together; parameters stay as they are.

    Every parameter must be sharded over all ranks and be of 32-bit floating point.

    Raises:
        ValueError: a parameter of another type.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise ValueError(f"{name} is of {parameter.dtype}; values identify tensors of torch.float32 only")
    shards = {name: _values(parameter) for name, parameter in model.named_parameters()}
    with emulated_link.watch() as messages:
        step().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = _values(parameter.grad)
        parameter.grad = None
    return tally(messages, shards, gradients, dist.get_world_size())


def judged(of_ranks: Sequence[Sequence[Tally]]) -> dict[str, Any]:
    """Every rank's tallies against what a step of sharded data parallelism needs: each parameter gathered for forward,
    again for backward or not, and each gradient reduced once.

    Returns:
        ``wrong``: sentences; ``known_bytes``: what the first rank sent for all parameters, None when not all of them
        could be told.
    """
    wrong = [text for tallies in of_ranks for one in tallies for text in _wrong(one)]
    if len(wrong) > _NAMED:
        wrong[_NAMED:] = [f"and {len(wrong) - _NAMED} more of this kind"]
    parts = [part for one in of_ranks[0] for part in (one.gathered, one.reduced)]
    known = [part for part in parts if part is not None]
    return {"wrong": wrong, "known_bytes": sum(known) if len(known) == len(parts) else None}


def _wrong(one: Tally) -> Iterable[str]:
    if one.gathered is not None and not one.once <= one.gathered <= 2 * one.once:
        yield f"sent {one.gathered} bytes of {one.name} per step; expected {one.once} to {2 * one.once}"
    if one.reduced is not None and one.reduced != one.once:
        yield f"sent {one.reduced} bytes of the gradient of {one.name} per step; expected {one.once}"


def tally(
    messages: Sequence[Message], shards: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], ranks: int
) -> list[Tally]:
    """Look up this rank's ``shards`` in what went out, and the shards of the mean ``gradients`` in what was reduced."""
    sent = _Weights((one, m.record.wire_bytes / m.record.input_bytes) for m in messages for one in m.inputs)
    # The graph divides the sum that arrives, or the library has: then the mean arrives.
    reduced, by_library = (_Weights(p for m in messages for p in _reductions(m, by)) for by in (ranks, 1))
    told = [_told_apart(shards), _told_apart(gradients)]
    result = []
    for name, shard in shards.items():
        once = (ranks - 1) * shard.numel() * shard.element_size()
        arrived: int | None = 0
        if name in gradients:
            arrived = max(found.bytes_of(gradients[name]) for found in (reduced, by_library))
        went = sent.bytes_of(shard)
        result.append(Tally(name, once, went if name in told[0] else None, arrived if name in told[1] else None))
    return result


def _told_apart(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Those that their values identify: mostly distinct ones, which mostly no other tensor has."""
    all_of_them = _Weights((one, 1.0) for one in tensors.values())
    return {
        name
        for name, one in tensors.items()
        if one.numel() == 0
        or (
            len(np.unique(_bits(one))) >= _DISTINCT * one.numel()
            and all_of_them.bytes_of(one) < 2 * one.numel() * one.element_size()
        )
    }


def _values(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone().flatten()


def _reductions(message: Message, divisor: int) -> Iterable[tuple[torch.Tensor, float]]:
    """(sums over ranks divided by ``divisor``, bytes sent per byte of this rank's share of them)."""
    record = message.record
    if record.kind in ("reduce_scatter", "all_reduce"):
        # Of what all_reduce brings, the others' shares are not looked up: mine stands for them.
        shares = record.ranks if record.kind == "all_reduce" else 1
        for one in message.outputs:
            yield one / divisor, shares * record.wire_bytes / record.output_bytes
    elif record.kind == "all_to_all":
        for one in message.outputs:
            if one.is_floating_point() and one.numel() % record.ranks == 0:
                # In rank order, as gloo's own reduction of two.
                total = one.view(record.ranks, -1).sum(0)
                yield total / divisor, record.ranks * record.wire_bytes / record.output_bytes


class _Weights:
    """32-bit values that were seen, and the sum of the weights of their occurrences."""

    def __init__(self, seen: Iterable[tuple[torch.Tensor, float]]) -> None:
        parts = [(_bits(one), weight) for one, weight in seen if one.element_size() == 4 and one.numel()]
        keys = np.concatenate([bits for bits, _ in parts]) if parts else np.zeros(0, np.int32)
        weights = np.concatenate([np.full(len(bits), weight) for bits, weight in parts]) if parts else np.zeros(0)
        self._keys, places = np.unique(keys, return_inverse=True)
        self._weights = np.bincount(places.ravel(), weights, len(self._keys))

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """The weight of the tensor's median element, in bytes of the whole tensor."""
        bits = _bits(tensor)
        if len(bits) == 0 or len(self._keys) == 0:
            return 0
        places = np.minimum(np.searchsorted(self._keys, bits), len(self._keys) - 1)
        found = np.where(self._keys[places] == bits, self._weights[places], 0.0)
        return round(float(np.median(found)) * len(bits) * tensor.element_size())


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32).numpy()
