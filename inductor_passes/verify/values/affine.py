"""Integer functions ``c + k1 v1 + k2 v2 + ...`` of loop variables, and the cuts that keep functions of this form.

An index into a tensor, and a rank, is such a function of variables that each run from 0 to an extent. Splitting a
tensor or folding its dimensions needs quotients, remainders and case distinctions. These are such functions only on
parts of the variables' ranges. :class:`NeedsCut` then says how to replace a variable: by digits (one variable becomes
an outer and an inner one) or by ranges (one case becomes several). The caller that introduced the variable cuts it and
asks again. So ranks of a group, members of a bucket and rows stay one variable for as long as they behave alike.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inductor_passes.verify.values.sizes import is_at_most, is_one, is_same, largest_first, towards_zero

#: Pieces per proof: beyond, a layout counts as not understood.
MAX_PIECES = 100_000


class Affine(NamedTuple):
    """``const + sum(coefficient * variable)``; terms ascend by variable, no coefficient is 0."""

    const: int
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Affine) -> Affine:
        """The sum."""
        if not other.terms:
            return Affine(self.const + other.const, self.terms) if other.const else self
        if not self.terms:
            return Affine(self.const + other.const, other.terms)
        total = dict(self.terms)
        for v, k in other.terms:
            total[v] = total.get(v, 0) + k
        return Affine(self.const + other.const, tuple(sorted((v, k) for v, k in total.items() if k)))

    def shifted(self, by: int) -> Affine:
        """With a constant added."""
        return Affine(self.const + by, self.terms) if by else self

    def times(self, factor: int) -> Affine:
        """Multiplied by a constant."""
        if is_one(factor):
            return self
        if factor == 0:
            return ZERO
        return Affine(self.const * factor, tuple((v, k * factor) for v, k in self.terms))

    def minus(self, other: Affine) -> Affine:
        """The difference."""
        return self.plus(other.times(-1))

    def put(self, variable: int, value: Affine) -> Affine:
        """With a variable replaced."""
        for place, (v, k) in enumerate(self.terms):
            if v == variable:
                rest = Affine(self.const, self.terms[:place] + self.terms[place + 1 :])
                return rest.plus(value.times(k))
        return self

    def coefficient(self, variable: int) -> int:
        """Of a variable; 0 when it does not occur."""
        return next((k for v, k in self.terms if v == variable), 0)


ZERO = Affine(0)


class TooManyPiecesError(Exception):
    """A layout falls into more pieces than a proof may look at."""


class NeedsCut(Exception):
    """``variable`` has to become one of ``pieces`` (all of them, case by case) before the question has an answer."""

    def __init__(self, variable: int, pieces: tuple[Affine, ...]) -> None:
        self.variable = variable
        self.pieces = pieces


class Space:
    """The variables of one proof and their extents."""

    def __init__(self) -> None:
        self.extents: list[int] = []
        self.pieces = 0

    def fresh(self, extent: int) -> Affine:
        """A new variable that runs from 0 to ``extent`` (exclusive); the constant 0 where it has one value."""
        if is_one(extent):
            return ZERO
        self.extents.append(extent)
        return Affine(0, ((len(self.extents) - 1, 1),))

    def box(self, shape: Iterable[int]) -> tuple[Affine, ...]:
        """A variable per dimension."""
        return tuple(self.fresh(size) for size in shape)

    def bounds(self, a: Affine) -> tuple[int, int]:
        """Least and greatest value."""
        low = high = a.const
        for v, k in a.terms:
            if k > 0:
                high += k * (self.extents[v] - 1)
            else:
                low += k * (self.extents[v] - 1)
        return low, high

    def divide(self, a: Affine, by: int) -> tuple[Affine, Affine]:
        """Quotient (rounded down) and remainder of a division by a positive constant.

        Raises:
            NeedsCut: the quotient is no affine function yet.
        """
        if is_one(by):
            return a, ZERO
        q, r = divmod(a.const, by)
        if not a.terms:
            return Affine(q), Affine(r)
        quotient: list[tuple[int, int]] = []
        rest: list[tuple[int, int]] = []
        for v, k in a.terms:
            kq = towards_zero(k, by)
            if kq:
                quotient.append((v, kq))
            if k != kq * by:
                rest.append((v, k - kq * by))
        inner = Affine(r, tuple(rest))
        low, high = self.bounds(inner)
        # Where a symbolic range may have one quotient only, digits are right as well.
        if not is_same(low // by, high // by):
            self._cut_digits(inner, by)
        return Affine(q + low // by, tuple(quotient)), inner.shifted(-(low // by) * by)

    def remainder(self, a: Affine, by: int) -> Affine:
        """See :meth:`divide`."""
        return self.divide(a, by)[1]

    def locate(self, a: Affine, edges: Sequence[int]) -> tuple[int, Affine]:
        """Which of the ranges between ascending ``edges`` a value is in, and how far from its beginning.

        -1 and the value itself: below the first edge; ``len(edges) - 1``: at or above the last one.

        Raises:
            NeedsCut: several ranges.
        """
        low, high = self.bounds(a)
        first, last = bisect_right(edges, low) - 1, bisect_right(edges, high) - 1
        if first != last:
            self._cut_at(a, edges[first + 1 : last + 1])
        return first, a.shifted(-edges[first]) if first >= 0 else a

    def points(self, variable: int) -> NeedsCut:
        """A variable value by value."""
        return self._cut(variable, range(1, self.extents[variable]))

    # -- where to cut -----------------------------------------------------------------------------------------

    def _cut(self, variable: int, at: Iterable[int]) -> NeedsCut:
        edges = sorted({0, self.extents[variable], *at})
        self._count(len(edges) - 1)
        return NeedsCut(variable, tuple(self.fresh(b - a).shifted(a) for a, b in itertools.pairwise(edges)))

    def _count(self, pieces: int) -> None:
        self.pieces += pieces
        if self.pieces > MAX_PIECES:
            raise TooManyPiecesError

    def _others(self, a: Affine, variable: int) -> tuple[int, int]:
        return self.bounds(a.put(variable, ZERO))

    def _cut_digits(self, a: Affine, by: int) -> None:
        """For the quotient of ``a``, whose coefficients are below ``by``."""
        for v, k in largest_first(a.terms):
            extent, (low, high) = self.extents[v], self._others(a, v)
            if by % abs(k) == 0 and not is_at_most(extent, by // abs(k)) and is_at_most(by // abs(k), extent):
                begun = low // k if k > 0 and low // k == high // k else 0
                raise self._cut_periods(v, by // abs(k), begun)
            whole = self.bounds(a)
            edges = range((whole[0] // by + 1) * by, whole[1] + 1, by)
            if at := self._crossings(k, extent, low, high, edges):
                raise self._cut(v, at)
        raise self.points(max(a.terms, key=lambda term: abs(term[1]))[0])

    def _cut_periods(self, variable: int, period: int, begun: int) -> NeedsCut:
        """Into whole periods (outer and inner digit) and what is left before and after; ``begun``: of the first."""
        extent = self.extents[variable]
        head = min(-begun % period, extent)
        count, tail = divmod(extent - head, period)
        pieces = []
        if head:
            pieces.append(self.fresh(head))
        if count:
            digits = self.fresh(count).times(period).plus(self.fresh(period))
            pieces.append(digits.shifted(head))
        if tail:
            pieces.append(self.fresh(tail).shifted(head + count * period))
        self._count(len(pieces))
        return NeedsCut(variable, tuple(pieces))

    def _cut_at(self, a: Affine, edges: Sequence[int]) -> None:
        """So that values stop straddling ``edges``."""
        for v, k in largest_first(a.terms):
            low, high = self._others(a, v)
            if at := self._crossings(k, self.extents[v], low, high, edges):
                raise self._cut(v, at)
        raise self.points(max(a.terms, key=lambda term: abs(term[1]))[0])

    def _crossings(self, k: int, extent: int, low: int, high: int, edges: Iterable[int]) -> set[int]:
        """Values of a variable at which ``k * variable + [low, high]`` begins or ends to straddle an edge."""
        found: set[int] = set()
        for edge in edges:
            if k > 0:
                begins, ends = -((high - edge) // k), -((low - edge) // k)
            else:
                begins, ends = (low - edge) // -k + 1, (high - edge) // -k + 1
            found.update(t for t in (begins, ends) if 0 < t < extent)
            self._count(1)
        return found
