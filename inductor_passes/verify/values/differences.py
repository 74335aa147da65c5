"""Why a proof failed, in words for a report."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import Affine
from inductor_passes.verify.values.communication import Reduction
from inductor_passes.verify.values.heads import Cast, Head
from inductor_passes.verify.values.operators import signature
from inductor_passes.verify.values.replicas import FAR


class Unequal(Exception):
    """Two values are not the same, or cannot be shown to be.

    Attributes:
        shown: a difference was found; False: something is not understood.
        point: values of variables at which the difference shows.
        at: index of the first element that is concerned, in the value that was to be proven.
    """

    def __init__(self, message: str, shown: bool = True) -> None:
        super().__init__(message)
        self.message, self.shown = message, shown
        self.at: tuple[int, ...] = ()
        self.point: dict[int, int] = {}


def changed(old: Head, new: Head, why: str = "") -> Unequal:
    """A difference: what is read there, and what was."""
    point = _first(old, new)
    said = f"reads {describe(new, point)} where the reference reads {describe(old, point)}"
    found = Unequal(f"{said}: {why}" if why else said)
    found.point = point
    return found


def _first(old: Head, new: Head) -> dict[int, int]:
    """Values of the variables (0 where not named) at which two reads are at different places."""
    mine, other = functions(old), functions(new)
    if len(mine) != len(other) or any(a.const != b.const for a, b in zip(mine, other)):
        return {}
    for a, b in zip(mine, other):
        for v, _ in (*a.terms, *b.terms):
            if a.coefficient(v) != b.coefficient(v):
                return {v: 1}
    return {}


def functions(head: Head) -> tuple[Affine, ...]:
    """Everything about a head that depends on variables."""
    if isinstance(head, Constant):
        return ()
    if isinstance(head, Cast):
        return head.source.functions()
    return head.term.functions() if isinstance(head, Reduction) else head.functions()


def value(f: Affine, point: Mapping[int, int]) -> int:
    """At a point; variables that it does not name are 0."""
    return f.const + sum(k * point.get(v, 0) for v, k in f.terms)


def describe(head: Head, point: Mapping[int, int] = MappingProxyType({})) -> str:
    """One element of what a head covers."""
    if isinstance(head, Constant):
        return f"{head.value!r} ({_dtype(head.dtype)})"
    if isinstance(head, Cast):
        return f"{describe(head.source, point)} as {_dtype(head.dtype)}"
    if isinstance(head, Reduction):
        ranks = list(head.group.ranks) if head.group.ranks else "a group"
        return f"the {head.op} in {_dtype(head.dtype)} over ranks {ranks} of {describe(head.term, point)}"
    path = "".join(f"[{p}]" for p in head.path)
    place = ", ".join(str(value(i, point)) for i in head.indices)
    byte = "" if head.byte is None else f" byte {value(head.byte, point)}"
    rank = value(head.rank, point)
    whose = f"rank {rank}" if rank < FAR else "a peer"
    return f"{head.record.name}{path}[{place}]{byte} of {whose}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def different(old: Head, new: Head) -> Unequal:
    """Of heads that compute something else, or read something else."""
    for head in (new, old):
        found = signature(head) if isinstance(head, Access) else None
        if found is not None and found.opaque:
            return Unequal(f"not understood: {head.record.called} ({head.record.name})", shown=False)  # type: ignore[union-attr]
    return changed(old, new)
