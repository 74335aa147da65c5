"""Whether parts make up a whole: boxes in a space that contain each point exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from inductor_passes.verify.values.affine import Affine, NeedsCut, Space
from inductor_passes.verify.values.sizes import is_one, largest_first

Box = tuple[tuple[int, int], ...]


class IrregularError(Exception):
    """Parts that are not cut along the same digits."""


class Cover:
    """Which points of a space have been found; its coordinates are ``variables``.

    Args:
        repeats: whether a point may be found more than once.
    """

    def __init__(self, space: Space, variables: Sequence[int], repeats: bool) -> None:
        self.space, self.variables, self.repeats = space, variables, repeats
        self.room = math.prod(space.extents[v] for v in variables)
        self.pieces: list[dict[int, Affine]] = []

    def has_room(self, count: int) -> bool:
        """Whether so many points can be among those that are left."""
        return self.repeats or count <= self.room

    def enter(self, solution: dict[int, Affine], count: int) -> None:
        """``count`` points have been found: the coordinates as functions of other variables."""
        self.room -= count
        self.pieces.append(solution)

    def complete(self) -> bool:
        """Whether every point has been found, once.

        Raises:
            IrregularError: the parts are not understood.
        """
        extents = [self.space.extents[v] for v in self.variables]
        rows = [[piece[v] for v in self.variables] for piece in self.pieces]
        place = 0
        while place < len(extents):
            radix = max((_gap(self.space, row[place]) for row in rows), default=1)
            if is_one(radix):
                place += 1
                continue
            if extents[place] % radix:
                raise IrregularError
            rows = [_refined(self.space, row, place, radix) for row in rows]
            extents[place : place + 1] = [extents[place] // radix, radix]
        boxes = [tuple((f.const, self.space.bounds(f)[1] + 1) for f in row) for row in rows]
        return tiles(list(dict.fromkeys(boxes)) if self.repeats else boxes, tuple(extents))


def _gap(space: Space, f: Affine) -> int:
    """The widest stride at which a function leaves out numbers; 1 when it takes a range."""
    below = 1
    widest = 1
    for v, k in reversed(largest_first(f.terms)):
        if k != below:
            widest = max(widest, k)
        below = k * space.extents[v]
    return widest


def _refined(space: Space, row: list[Affine], place: int, radix: int) -> list[Affine]:
    try:
        return [*row[:place], *space.divide(row[place], radix), *row[place + 1 :]]
    except NeedsCut as cut:
        raise IrregularError from cut


def tiles(boxes: list[Box], extents: tuple[int, ...]) -> bool:
    """Whether boxes fill a space of these extents, each point once."""
    if sum(math.prod(b - a for a, b in box) for box in boxes) != math.prod(extents):
        return False
    if not extents:
        return len(boxes) == 1
    return all(tiles(rest, extents[1:]) for rest in _layers(boxes, extents[0]))


def _layers(boxes: list[Box], extent: int) -> Iterator[list[Box]]:
    """For each range of the first dimension in which the same boxes lie, what they are in the others."""
    edges = sorted({0, extent, *(e for box in boxes for e in box[0])})
    starting: dict[int, list[Box]] = {}
    for box in boxes:
        starting.setdefault(box[0][0], []).append(box)
    active: list[Box] = []
    for edge in edges[:-1]:
        active = [box for box in active if box[0][1] > edge] + starting.get(edge, [])
        yield [box[1:] for box in active]
