"""Gradients of several backward passes that are reduced once: ``no_sync``, ``set_requires_gradient_sync(False)``.

Reads have two forms, and a flag that dynamo guards on chooses between them:

- ``direct``: backward reduces the gradient inside of the compiled graph. This is the form of all steps without
  accumulation.
- held: backward gives the whole gradient to a leaf tensor, where autograd adds it to those of earlier passes. When a
  backward pass ends that is to be reduced, everything that is held is reduced together and goes to the parameters.

So each gradient is counted once, however often a parameter is read or a region is recomputed, and the sum is built as
FSDP2 and DDP build it: first over the passes, then over the ranks.

A held tensor of an FSDP parameter costs one element until it has a gradient. A DDP parameter holds its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes import _torch
from inductor_passes.simple_fsdp.arrival import meet
from inductor_passes.simple_fsdp.unshard import ShardLayout, cut, pad, swap

#: The largest message of a reduction, bytes; DDP's default size of a bucket.
MESSAGE_BYTES = 25 * 2**20
#: Up to so many ranks a reduction first makes sure that all have come: every rank looks for every other one.
MEETING_RANKS = 64


@dataclass(eq=False)
class Entry:
    """A parameter whose gradients can be held.

    Attributes:
        parameter: what is registered.
        owners: the modules that read it, each with its name for it.
        layout: how it is sharded; None for a whole parameter of DDP.
        group: of DDP, (name, ranks).
        dtype: of held gradients.
        rounded: what FSDP2 rounds the sum of the passes to after each of them, because it reduces in it; None where
            that is not less than :attr:`dtype`.
        held: where whole gradients go; the parameter itself for DDP; None before any is held.
        total: the sum of earlier passes where it is rounded.
    """

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    layout: ShardLayout | None
    group: tuple[str, int] | None
    dtype: torch.dtype
    rounded: torch.dtype | None = None
    held: torch.Tensor | None = None
    total: torch.Tensor | None = None

    @property
    def steps(self) -> tuple[tuple[str, str, int], ...]:
        """The collectives that reduce a gradient: (kind, group, ranks)."""
        if self.layout is None:
            assert self.group is not None
            return (("all_reduce", *self.group),)
        return self.layout.steps

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """The process groups that the collectives run in: (name, ranks)."""
        return tuple((name, ranks) for _, name, ranks in self.steps)

    def hold(self, arrived: Any) -> None:
        """Have gradients held from now on.

        Args:
            arrived: called without arguments whenever one has come.
        """
        if self.held is not None or not self.parameter.requires_grad:
            return
        if self.layout is None:
            self.held = self.parameter
        else:
            local = self.parameter.to_local()  # type: ignore[attr-defined]
            shape = self.layout.whole_shape(local.shape)
            # Autograd looks at shape, dtype and device only; values are never read.
            empty = torch.zeros(1, dtype=self.dtype, device=local.device).expand(shape) if shape else None
            self.held = (torch.zeros((), dtype=self.dtype, device=local.device) if empty is None else empty).detach()
            self.held.requires_grad_()
        self.held.register_post_accumulate_grad_hook(lambda _: arrived())
        for module, name in self.owners:
            _owner_of(module).held[name] = self.held

    @property
    def holding(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return self.total is not None or (self.held is not None and self.held.grad is not None)

    def take(self) -> torch.Tensor | None:
        """The gradient that is held, whose place is free afterwards."""
        if not self.holding:
            return None
        assert self.held is not None
        self.round()
        gradient, self.held.grad = self.held.grad, None
        if self.total is not None:
            gradient, self.total = self.total, None
        return gradient

    def round(self) -> None:
        """A backward pass has ended: add what it gave to the rounded sum, where there is one."""
        if self.rounded is None or self.held is None or self.held.grad is None:
            return
        gradient, self.held.grad = self.held.grad, None
        if self.total is None:
            self.total = gradient.to(self.rounded)
        else:
            self.total += gradient

    def whole_zeros(self) -> torch.Tensor:
        """For a rank without a gradient, where others have one."""
        assert self.held is not None
        return torch.zeros(self.held.shape, dtype=self.dtype, device=self.held.device)

    def deliver(self, reduced: torch.Tensor) -> None:
        """Add this rank's part of the reduced gradient to the parameter's."""
        parameter = self.parameter
        reduced = reduced.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            reduced = DTensor.from_local(
                reduced, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = reduced if parameter.grad is None else parameter.grad + reduced
        if self.layout is not None:
            # A DDP parameter's own hooks ran when autograd gave it the gradient.
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)


@dataclass(eq=False)
class Unit:
    """The parameters of one call of ``fully_shard``, or of a DDP wrapper.

    Attributes:
        ledger: of the adopted module.
        entries: its parameters.
        direct: whether reads reduce inside of the graph.
        reduces: what ``set_requires_gradient_sync`` last said.
        all_reduces: what ``set_requires_all_reduce`` last said.
        called: whether a DDP wrapper's forward runs.
    """

    ledger: Ledger
    entries: list[Entry] = field(default_factory=list)
    direct: bool = True
    reduces: bool = True
    all_reduces: bool = True
    called: bool = False

    @property
    def due(self) -> bool:
        """Whether a backward pass that ends now is to be followed by a reduction of what is held."""
        return not self.direct and self.reduces and self.all_reduces

    def set_reduces(self, reduces: bool | None = None, all_reduces: bool | None = None) -> None:
        """Whether the following backward passes reduce; None leaves the setting."""
        self.reduces = self.reduces if reduces is None else reduces
        self.all_reduces = self.all_reduces if all_reduces is None else all_reduces
        if not (self.reduces and self.all_reduces):
            for entry in self.entries:
                entry.hold(self.ledger.arrived)
            # Until the next reduction, whatever this rank holds: all ranks have to take the same form.
            self.direct = False

    def __reduce__(self) -> Any:
        return (_new_unit, ())


def _new_unit() -> Unit:
    return Unit(Ledger())


class Ledger:
    """The units of one adopted module, in the same order on all ranks.

    Attributes:
        ranks: the global ranks that reduce together.
        units: see :class:`Unit`.
    """

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        self.units: list[Unit] = []
        self._backward = -1

    def arrived(self) -> None:
        """A gradient was held: when backward ends, reduce if it is time."""
        # A backward pass that fails calls nothing, so what is remembered is which one it was.
        number = _torch.backward_number()
        if number == self._backward:
            return
        if any(unit.due or any(entry.rounded for entry in unit.entries) for unit in self.units):
            self._backward = number
            _torch.after_backward(self.ended)

    @torch.no_grad()
    def ended(self) -> None:
        """A backward pass has ended whose gradients are held."""
        for entry in (entry for unit in self.units for entry in unit.entries):
            entry.round()
        if any(unit.due for unit in self.units):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what the units that are due hold; all ranks have to call it."""
        due = [unit for unit in self.units if unit.due]
        if len(self.ranks) <= MEETING_RANKS:
            meet(self.ranks, "the reduction of gradients that were held")
        entries = [entry for unit in due for entry in unit.entries if entry.held is not None]
        for key, alike in _by_key(entries):
            wanted = _held_anywhere(alike)
            for message in _messages([entry for entry, used in zip(alike, wanted) if used]):
                _reduce_together(message, key)
        for unit in due:
            unit.direct = True


class Owner:
    """What an adopted module that owns parameters has as ``_adoption``; dynamo guards on its attributes.

    A copy of a module has a unit without entries: it reduces in each backward pass.

    Attributes:
        unit: that its parameters belong to.
        held: where gradients go that are not reduced in the graph, by the parameter's name.
        whole: what ``unshard()`` gathered, by the parameter's name.
    """

    def __init__(self, unit: Unit | None = None) -> None:
        self.unit = unit or Unit(Ledger())
        self.held: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        # What shared a unit shares the copy's.
        unit = memo.setdefault(id(self.unit), Unit(Ledger()))
        return Owner(unit)

    def __reduce__(self) -> Any:
        return (Owner, (self.unit,))


def _owner_of(module: nn.Module) -> Owner:
    owner = module._adoption
    assert isinstance(owner, Owner)
    return owner


_Key = tuple[tuple[tuple[str, str, int], ...], torch.dtype, tuple[float, float]]


def _key(entry: Entry) -> _Key:
    layout = entry.layout
    reduced_in = entry.dtype if layout is None else layout.reduce_dtype or entry.dtype
    # DDP divides before it sums.
    factors = (float(entry.steps[0][2]), 1.0) if layout is None else layout.factors(reduced_in)
    return entry.steps, reduced_in, factors


def _by_key(entries: Iterable[Entry]) -> Iterator[tuple[_Key, list[Entry]]]:
    found: dict[_Key, list[Entry]] = {}
    for entry in entries:
        found.setdefault(_key(entry), []).append(entry)
    return iter(found.items())


def _held_anywhere(entries: list[Entry]) -> list[bool]:
    """Which of the entries some rank holds a gradient of: ranks may use different parameters."""
    flags = torch.tensor(
        [entry.holding for entry in entries],
        dtype=torch.int32,
        device=entries[0].parameter.device,
    )
    for group, _ in entries[0].groups:
        flags = _torch.all_reduce_in(flags, group, "max")
    return [bool(flag) for flag in flags.tolist()]


def _messages(entries: list[Entry]) -> Iterator[list[Entry]]:
    message: list[Entry] = []
    total = 0
    for entry in entries:
        assert entry.held is not None
        size = entry.held.numel() * entry.dtype.itemsize
        if message and total + size > MESSAGE_BYTES:
            yield message
            message, total = [], 0
        message.append(entry)
        total += size
    if message:
        yield message


def _reduce_together(entries: list[Entry], key: _Key) -> None:
    """Reduce the gradients of entries whose collectives are the same, in one message for each collective."""
    steps, dtype, (early, late) = key
    parts = 1
    for kind, _, ranks in steps:
        parts = ranks if kind == "reduce_scatter" else parts
    rows, widths = [], []
    for entry in entries:
        gradient = entry.take()
        gradient = (entry.whole_zeros() if gradient is None else gradient).to(dtype)
        if entry.layout is not None and parts > 1:
            gradient = pad(swap(gradient, entry.layout.dim), entry.layout.chunk * parts)
        rows.append(gradient.reshape(parts, -1))
        widths.append(rows[-1].shape[1])
    message = torch.cat(rows, dim=1)
    del rows
    if early != 1:
        message = message * (1 / early)
    for kind, group, ranks in steps:
        if kind == "reduce_scatter":
            message = _torch.reduce_scatter_in(message, group, ranks)
        else:
            message = _torch.all_reduce_in(message, group, "sum")
    if late != 1:
        message = message / late
    for entry, reduced in zip(entries, message.split(widths, dim=1)):
        entry.deliver(_own(entry, reduced.reshape(-1)))


def _own(entry: Entry, flat: torch.Tensor) -> torch.Tensor:
    """This rank's part of a reduced gradient, in the parameter's local shape."""
    if entry.layout is None:
        return flat.view(entry.parameter.shape).clone()
    local = entry.parameter.to_local()  # type: ignore[attr-defined]
    if entry.layout.shard_mesh_dim < 0 or entry.layout.mesh.size(entry.layout.shard_mesh_dim) == 1:
        return flat.view(local.shape).clone()
    dim = entry.layout.dim
    swapped = list(swap(local, dim).shape)
    swapped[0] = entry.layout.chunk
    return swap(cut(flat.view(swapped), local.shape[dim]), dim).contiguous().clone()
