"""Numbers in a graph that may differ between ranks because they say which piece of a tensor is the rank's own.

A rank's graph holds them as plain integers: the piece that DTensor keeps of a replicated tensor, the first row of a
sharded embedding. One graph alone does not tell them from numbers that are the same everywhere: piece 0 of 2 may be
rank 0's own, or the first half of a rotary embedding on every rank. So the digest leaves such numbers *open*, and the
ranks compare them with those of the *corners* of their grid (``Grid.corners``). An open number has to be one of

- the same on all ranks. This is not allowed where a rewrite could take it for a rank's own piece (``Kind.NEAR``),
  because then it would be the own piece on one rank and not on the others;
- a piece: the rank's own position in one process group of the graph;
- an offset: ``c * s`` or ``(c + 1) * s``, where ``c`` is that position and ``s`` is the same for all ranks.

Anything else, such as pieces that ranks take in another order, is a difference between the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_MAX_VALUES_TEXT = 1 << 22


class Kind(str, Enum):
    """What an open number says."""

    PIECE = "p"
    NEAR = "n"
    """a piece next to a collective, the only one that is read, of as many as the collective has ranks"""
    OFFSET = "o"


@dataclass(frozen=True)
class Literals:
    """The open numbers of a graph as one rank has them.

    Attributes:
        values: in order of their lines.
        kinds: a letter per value, see :class:`Kind`.
        roles: per process group of the graph the position of this rank in its own, then that of each corner in its
            own; groups for which these are not known are left out.
        places: the number of each one's line, to show it.
    """

    values: tuple[int, ...] = ()
    kinds: str = ""
    roles: tuple[tuple[int, ...], ...] = ()
    places: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The values, for the store."""
        return ",".join(map(str, self.values))

    def misfit(self, corners: Sequence[Sequence[int]]) -> int | None:
        """The first value that is nothing of what the module's docstring lists, given those of each corner.

        None where all fit, on all ranks then.
        """
        for index, (own, kind) in enumerate(zip(self.values, self.kinds)):
            if own != self._expected(Kind(kind), [values[index] for values in corners]):
                return index
        return None

    def _expected(self, kind: Kind, there: Sequence[int]) -> int | None:
        """What this rank must have where the corners have ``there``; None where that is nothing allowed."""
        if len(set(there)) == 1:
            return None if kind is Kind.NEAR else there[0]
        for own, *at in self.roles:
            expected = _offset(own, at, there) if kind is Kind.OFFSET else own if list(there) == at else None
            if expected is not None:
                return expected
        return None


def _offset(own: int, at: Sequence[int], there: Sequence[int]) -> int | None:
    """``own``'s value of ``c * s`` or ``(c + 1) * s`` where the corners' positions ``at`` have the values ``there``."""
    other = next((i for i, c in enumerate(at) if c != at[0]), None)
    if other is None or (there[other] - there[0]) % (at[other] - at[0]):
        return None
    scale = (there[other] - there[0]) // (at[other] - at[0])
    for first in (0, 1):
        if scale and all(value == (c + first) * scale for c, value in zip(at, there)):
            return (own + first) * scale
    return None


def parsed(text: bytes, count: int) -> tuple[int, ...] | None:
    """Another rank's values out of the store; None when that is not what they are."""
    if len(text) > _MAX_VALUES_TEXT:
        return None
    parts = text.split(b",") if text else []
    if len(parts) != count or any(len(part) > 20 for part in parts):
        return None
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        return None
