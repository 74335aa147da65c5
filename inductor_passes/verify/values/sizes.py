"""Sizes that hold for a whole range: polynomials of symbols with integer coefficients, used in the place of ints.

A symbol that is known to be a multiple of a number stands for that number times another symbol, so that divisions come
out even. Every comparison, quotient and remainder is decided for all values of the symbols, or not at all: then
:class:`UndecidedError` ends the proof. Hints take no part in it.

Bounds: each symbol is written as its least value plus a number that is not negative. What is left with a negative
coefficient counts at its greatest value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, cast

import sympy
import torch

from inductor_passes import _torch

Number = int | Fraction
#: Symbols to powers, ascending by symbol.
Monomial = tuple[tuple["Symbol", int], ...]


class NoHintError(Exception):
    """A size is symbolic, and what is asked cannot be told."""


class UndecidedError(NoHintError):
    """A question about sizes has no answer that holds for their whole range."""


class Symbol(NamedTuple):
    """A number that is only known at run time.

    Attributes:
        name: of the symbol, or the text of an expression that is not looked into.
        low, high: its bounds; None where there is none.
    """

    name: str
    low: int | None
    high: int | None


class Size:
    """A polynomial that is no constant; arithmetic gives an int where the result is one."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, Number]) -> None:
        self.terms = terms

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _sum(self, other, -1)

    def __rsub__(self, other: Any) -> Any:
        return _sum(-self, other, 1)

    def __neg__(self) -> Any:
        return Size({m: -c for m, c in self.terms.items()})

    def __abs__(self) -> Any:
        return self if self > 0 else -self

    def __mul__(self, other: Any) -> Any:
        terms = _terms(other)
        if terms is None:
            return NotImplemented
        found: dict[Monomial, Number] = {}
        for m, c in self.terms.items():
            for n, d in terms.items():
                both = _times(m, n)
                found[both] = found.get(both, 0) + c * d
        return _made(found)

    __rmul__ = __mul__

    def __divmod__(self, by: Any) -> Any:
        return _divided(self, by)

    def __rdivmod__(self, other: Any) -> Any:
        return _divided(other, self)

    def __floordiv__(self, by: Any) -> Any:
        return _divided(self, by)[0]

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided(other, self)[0]

    def __mod__(self, by: Any) -> Any:
        return _divided(self, by)[1]

    def __rmod__(self, other: Any) -> Any:
        return _divided(other, self)[1]

    # -- comparisons --------------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __eq__(self, other: object) -> bool:
        terms = _terms(other)
        if terms is None:
            return False
        if terms == self.terms:
            return True
        gap = self - other  # type: ignore[operator]
        if _is_positive(gap) or _is_positive(-gap):
            return False
        raise UndecidedError(f"{self} may or may not be {other}")

    def __lt__(self, other: Any) -> bool:
        return _is_below(self, other)

    def __gt__(self, other: Any) -> bool:
        return _is_below(other, self)

    def __le__(self, other: Any) -> bool:
        return not _is_below(other, self)

    def __ge__(self, other: Any) -> bool:
        return not _is_below(self, other)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        raise UndecidedError(f"{self} would have to be counted")

    def __repr__(self) -> str:
        said = ["*".join([*([str(c)] if c != 1 or not m else []), *_powers(m)]) for m, c in self.terms.items()]
        return " + ".join(said)


def is_one(size: int) -> bool:
    """Whether a size is written as 1; a symbolic one counts as the range that it is, even where it may be 1."""
    return type(size) is int and size == 1


def is_same(a: int, b: int) -> bool:
    """Whether two sizes are equal for the whole range; False where they may or may not be."""
    try:
        return a == b
    except UndecidedError:
        return False


def is_at_most(a: int, b: int) -> bool:
    """Whether ``a <= b`` for the whole range; False where it may or may not be."""
    try:
        return a <= b
    except UndecidedError:
        return False


def is_stretched(size: int, to: int) -> bool:
    """Whether broadcasting stretches a dimension of ``size`` to ``to``; sizes that are equal are not stretched."""
    return size == 1 if type(size) is int else size != to


def towards_zero(a: int, by: int) -> int:
    """A quotient rounded towards 0; 0 where it is not known: a remainder need not be the least one."""
    try:
        return a // by if a > 0 else -(-a // by)
    except UndecidedError:
        return 0


def largest_first(terms: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(variable, coefficient) by falling coefficient; as given where that order is not known.

    A coefficient that may be equal to another one and cannot be below it counts as the larger one.
    """
    given = list(terms)

    def order(a: tuple[int, int], b: tuple[int, int]) -> int:
        return -_compared(abs(a[1]), abs(b[1]))

    try:
        return sorted(given, key=functools.cmp_to_key(order))
    except UndecidedError:
        return given


def _compared(a: int, b: int) -> int:
    """-1, 0 or 1: which is smaller.

    Raises:
        UndecidedError: each may be.
    """
    if is_same(a, b):
        return 0
    if is_at_most(a, b):
        return -1
    if is_at_most(b, a):
        return 1
    raise UndecidedError(f"{a} may or may not be below {b}")


def size_of(value: object) -> int | None:
    """An int, or a :class:`Size` that stands for one, of a size of a fake tensor; None for anything else.

    A symbol without bounds still has a size, about which little can be told.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, Size):
        return cast(int, value)
    if not isinstance(value, torch.SymInt):
        return _torch.size_hint(value)
    return cast(int, _Reader(value).read(_torch.size_expression(value)))


# -- reading expressions --------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, value: torch.SymInt) -> None:
        self.value = value

    def read(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Add:
            return sum(map(self.read, expr.args), 0)
        if expr.is_Mul:
            return math.prod(map(self.read, expr.args))
        if expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
            return math.prod([self.read(expr.args[0])] * int(expr.args[1]))
        if expr.is_Symbol:
            low, high, period = _torch.symbol_range(self.value, expr)
            low, high = low if low is None else low // period, high if high is None else high // period
            name = str(expr) if period == 1 else f"({expr}/{period})"
            return (low if low is not None and low == high else _symbol(name, low, high)) * period
        division = _torch.floor_division(expr)
        if division is not None:
            try:
                return self.read(division[0]) // self.read(division[1])
            except UndecidedError:
                pass
        low, high = _torch.size_range(self.value, expr)
        return _symbol(str(expr), low, high)


def _symbol(name: str, low: int | None, high: int | None) -> Any:
    return Size({((Symbol(name, low, high), 1),): 1})


# -- polynomials ----------------------------------------------------------------------------------------------------


def _terms(value: object) -> Mapping[Monomial, Number] | None:
    if isinstance(value, Size):
        return value.terms
    if isinstance(value, (int, Fraction)):
        return {(): value} if value else {}
    return None


def _made(terms: Mapping[Monomial, Number]) -> Any:
    kept = {m: c for m, c in terms.items() if c}
    return kept.get((), 0) if not kept.keys() - {()} else Size(kept)


def _sum(a: Any, b: Any, factor: int) -> Any:
    terms = _terms(b)
    if terms is None:
        return NotImplemented
    found = dict(_terms(a) or {})
    for m, c in terms.items():
        found[m] = found.get(m, 0) + factor * c
    return _made(found)


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for symbol, power in b:
        powers[symbol] = powers.get(symbol, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].name))


def _over(a: Monomial, b: Monomial) -> Monomial | None:
    """The quotient of two monomials; None where it is none."""
    powers = dict(a)
    for symbol, power in b:
        left = powers.get(symbol, 0) - power
        if left < 0:
            return None
        powers[symbol] = left
    return tuple((symbol, power) for symbol, power in powers.items() if power)


def _powers(m: Monomial) -> list[str]:
    return [symbol.name if power == 1 else f"{symbol.name}**{power}" for symbol, power in m]


def _lead(terms: Mapping[Monomial, Number]) -> Monomial:
    return max(terms, key=lambda m: (sum(power for _, power in m), _powers(m)))


def _divided(a: Any, by: Any) -> tuple[Any, Any]:
    """Quotient (rounded down) and remainder of a division by a positive number, for the whole range.

    Raises:
        UndecidedError: it is no polynomial.
    """
    whole, divisor = _terms(a), _terms(by)
    if whole is None or not divisor:
        raise UndecidedError(f"{a} divided by {by}")
    lead = _lead(divisor)
    quotient: Any = 0
    rest = _made(whole)
    for m in sorted(whole, key=lambda m: (sum(power for _, power in m), _powers(m)), reverse=True):
        left, factor = _over(m, lead), (_terms(rest) or {}).get(m, 0) // divisor[lead]
        if left is not None and factor:
            part = _made({left: factor})
            quotient, rest = quotient + part, rest - part * by
    if not _is_below(0, by):
        raise UndecidedError(f"{a} divided by {by}, which is not positive")
    for shift in (0, -1, 1):
        moved = rest - shift * by
        if _low(moved, 0) and _low(by - moved, 1):
            return quotient + shift, moved
    raise UndecidedError(f"{a} divided by {by}")


def _is_below(a: Any, b: Any) -> bool:
    gap = b - a
    if _is_positive(gap):
        return True
    if _low(-gap, 0):
        return False
    raise UndecidedError(f"{a} may or may not be below {b}")


def _is_positive(value: Any) -> bool:
    return _low(value, 1)


def _low(value: Any, least: int) -> bool:
    """Whether a polynomial is at least ``least`` for the whole range."""
    if not isinstance(value, Size):
        return bool(value >= least)
    shifted: Any = 0
    highest: dict[Symbol, int | None] = {}
    for m, c in value.terms.items():
        part: Any = c
        for symbol, power in m:
            if symbol.low is None:
                return False
            above = symbol if symbol.low == 0 else symbol._replace(low=0, name=f"{symbol.name}'")
            highest[above] = None if symbol.high is None else symbol.high - symbol.low
            part = math.prod([Size({((above, 1),): 1}) + symbol.low] * power, start=part)
        shifted = shifted + part
    terms = _terms(shifted) or {}
    total: Number = 0
    for m, c in terms.items():
        if not m:
            total += c
        elif c < 0:
            ends = [highest[symbol] for symbol, _ in m]
            if any(end is None for end in ends):
                return False
            total += c * math.prod(cast(int, end) ** power for end, (_, power) in zip(ends, m))
    return total >= least


