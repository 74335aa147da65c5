"""Replica groups as arithmetic on global ranks: which ranks a rank talks to, and where it stands among them.

The ranks of a group, in order, are read as digits: position ``p`` has digits ``p_j`` below ``n_j``, and its rank is
``first + sum(stride_j * p_j)``. A rank's own position is given by those digits of its number, and other digits in their
place give the other members of its group. So the group of another rank is this rank's group translated, as a mesh lays
out ranks. Then a flat group is the product of two others exactly if the ranks are equal.

A group whose ranks are no such digits, or which this process cannot look up (it is a node of the graph), gets a
coordinate of its own: positions in it are related to no other group. If even this process's position is unknown, it is
a variable, and what is proven holds for every position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inductor_passes.verify.values.affine import ZERO, Affine, Space

#: Groups with a coordinate of their own are this far apart; meshes of any usual shape divide it.
FAR = 720_720 * 2**20 * 3**6 * 5**4 * 7**2


@dataclass(frozen=True)
class Replicas:
    """One process group.

    Attributes:
        digits: (extent, stride) from the slowest to the fastest.
        origin: the rank from which digits count.
        ranks: global ranks in group order, () when not known; for messages.
    """

    digits: tuple[tuple[int, int], ...]
    origin: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(n for n, _ in self.digits)

    def position(self, space: Space, rank: Affine) -> Affine:
        """Where a rank stands in its group. Raises ``NeedsCut``, see :class:`Space`."""
        position = ZERO
        for (n, _), digit in zip(self.digits, self._digits_of(space, rank)):
            position = position.times(n).plus(digit)
        return position

    def member(self, space: Space, rank: Affine, position: Affine) -> Affine:
        """The global rank at a position in the group of ``rank``. Raises as :meth:`position`."""
        found = self.base(space, rank)
        for place, (n, stride) in reversed(list(enumerate(self.digits))):
            position, digit = space.divide(position, n) if place else (ZERO, position)
            found = found.plus(digit.times(stride))
        return found

    def base(self, space: Space, rank: Affine) -> Affine:
        """The rank with its digits in this group set to 0. Raises as :meth:`position`."""
        for (_, stride), digit in zip(self.digits, self._digits_of(space, rank)):
            rank = rank.minus(digit.times(stride))
        return rank

    def _digits_of(self, space: Space, rank: Affine) -> list[Affine]:
        found = []
        for n, stride in self.digits:
            quotient, _ = space.divide(rank.shifted(-self.origin), stride)
            found.append(space.remainder(quotient, n))
        return found

    def sorted_digits(self) -> tuple[tuple[int, int], ...]:
        """The digits from the widest stride, neighbours that make one range as one: equal for equal sets of ranks."""
        result: list[tuple[int, int]] = []
        for n, stride in sorted(self.digits, key=lambda digit: -digit[1]):
            if n == 1:
                continue
            if result and result[-1][1] == n * stride:
                result[-1] = (result[-1][0] * n, stride)
            else:
                result.append((n, stride))
        return tuple(result)


def replicas(ranks: tuple[int, ...]) -> Replicas | None:
    """A group by its global ranks in order; None when they are no digits."""
    digits = _digits([r - ranks[0] for r in ranks])
    if digits is None:
        return None
    space = Space()
    for origin in (0, ranks[0]):
        group = Replicas(digits or ((1, 1),), origin, ranks)
        if all(group.position(space, Affine(r)).const == place for place, r in enumerate(ranks)):
            return group
    return None


def apart(number: int, size: int, ranks: tuple[int, ...] = ()) -> Replicas:
    """The ``number``-th group with a coordinate of its own."""
    return Replicas(((size, FAR * (number + 1)),), 0, ranks)


def _digits(offsets: list[int]) -> tuple[tuple[int, int], ...] | None:
    if len(offsets) == 1:
        return ()
    stride = offsets[1] - offsets[0]
    run = 1
    while run < len(offsets) and offsets[run] - offsets[run - 1] == stride:
        run += 1
    while len(offsets) % run:
        run -= 1
    if run < 2 or stride <= 0:
        return None
    inner = [o - offsets[0] for o in offsets[:run]]
    for start in range(0, len(offsets), run):
        if [o - offsets[start] for o in offsets[start : start + run]] != inner:
            return None
    outer = _digits(offsets[::run])
    return None if outer is None else (*outer, (run, stride))
