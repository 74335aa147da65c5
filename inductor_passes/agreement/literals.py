"""Numbers in a graph that may differ between ranks because they say which piece of a tensor is the rank's own.

A rank's graph holds them as plain integers: the piece that DTensor keeps of a replicated tensor, the first row of a
sharded embedding. One graph alone does not tell them from numbers that are the same everywhere: piece 0 of 2 may be
rank 0's own, or the first half of a rotary embedding on every rank. So the digest leaves such numbers *open*, and the
ranks compare them with those of the *corners* of their grid (``Grid.corners``). An open number has to be one of

- the same on all ranks. This is not allowed where a rewrite could take it for a rank's own piece (``Kind.NEAR``),
  because then it would be the own piece on one rank and not on the others;
- a piece: the rank's own position in one process group of the graph;
- an offset: ``c * s`` or ``(c + 1) * s``, where ``c`` is that position and ``s`` is the same for all ranks.

Anything else, such as pieces that ranks take in another order, is a difference between the graphs. The answer says what
each number turned out to be: ``Reading.roles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_MAX_TEXT = 1 << 22
#: In place of a role: the number is the same on all ranks.
CONSTANT = -1


class Kind(str, Enum):
    """What an open number says."""

    PIECE = "p"
    NEAR = "n"
    """a piece next to a collective, the only one that is read, of as many as the collective has ranks"""
    OFFSET = "o"


@dataclass(frozen=True)
class Reading:
    """What open numbers turned out to be.

    Attributes:
        misfit: index of the first one that is nothing of what the module's docstring lists, None when all fit.
        roles: per number the role by whose position it is given, :data:`CONSTANT` for one that is the same on all
            ranks; up to the misfit.
    """

    misfit: int | None
    roles: tuple[int, ...]


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

    def read(self, corners: Sequence[Sequence[int]]) -> Reading:
        """What the values are, given those of each corner: the same on all ranks that find no misfit."""
        found: list[int] = []
        for index, (own, kind) in enumerate(zip(self.values, self.kinds)):
            role, expected = self._role(Kind(kind), [values[index] for values in corners])
            if own != expected:
                return Reading(index, tuple(found))
            found.append(role)
        return Reading(None, tuple(found))

    def _role(self, kind: Kind, there: Sequence[int]) -> tuple[int, int | None]:
        """The role of a value that the corners have, and what this rank must have; None where it is nothing allowed."""
        if len(set(there)) == 1:
            return CONSTANT, None if kind is Kind.NEAR else there[0]
        for role, (own, *at) in enumerate(self.roles):
            expected = _offset(own, at, there) if kind is Kind.OFFSET else own if list(there) == at else None
            if expected is not None:
                return role, expected
        return CONSTANT, None


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
    if len(text) > _MAX_TEXT:
        return None
    parts = text.split(b",") if text else []
    if len(parts) != count or any(len(part) > 20 for part in parts):
        return None
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        return None
