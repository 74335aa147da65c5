"""Two sums have the same terms: each family of one sum is found, piece by piece, among those of the other.

A term is recognised by its *anchor*: the value that both graphs have and that is reached by following first operands
of the result's type,
and the place where it is read. The anchor's address, as a function of the family's variables, is a numeral in mixed
radix. Solving it for the variables of the other graph's family says which of its terms each term is. Then the pieces
have to cover the family exactly, and each has to be the same value, which the proof is asked next.

What several ranks hold alike is one term, so many times over, for a graph that adds it up on one group of ranks, and a
term per rank for one that adds what each rank sends. Where families do not correspond, sums are compared term by term:
at each place, how often it is added has to be the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import ZERO, Affine, NeedsCut, Space
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.communication import Reduction
from inductor_passes.verify.values.cover import Cover, IrregularError
from inductor_passes.verify.values.differences import Unequal, describe
from inductor_passes.verify.values.heads import Cast, Resolver, variables
from inductor_passes.verify.values.operators import signature
from inductor_passes.verify.values.signatures import ONE, Use
from inductor_passes.verify.values.terms import IDEMPOTENT, Sum, Term

MAX_DEPTH = 10_000
#: How many terms are compared one by one.
MAX_POINTS = 20_000
Pairs = list[tuple[Access, Access]]


@dataclass(frozen=True)
class Anchored:
    """A term, what it is recognised by, and the address there.

    ``trail``: what is computed on the way there. Passes may change that, so terms with other trails can be equal.
    """

    term: Term
    leaf: tuple[object, ...]
    address: tuple[Affine, ...]
    trail: tuple[object, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Terms with different keys are different."""
        return (self.leaf, self.term.scale, self.term.kind)


class Side:
    """One of the two graphs; ``common`` maps its names to those of values that both keep.

    ``holder`` gives one rank for all those that hold a common value alike, by its name. Of several operands an anchor
    follows the one with most dimensions, or (``specific``) the one that depends on most variables where it comes from:
    a row that was stretched to a tensor has the dimensions of that tensor.
    """

    def __init__(
        self,
        space: Space,
        resolver: Resolver,
        common: Mapping[str, str],
        holder: Callable[[str, Affine], Affine],
        specific: bool = False,
    ) -> None:
        self.space, self.resolver, self.common, self.holder = space, resolver, common, holder
        self.specific = specific

    def anchor(self, read: Access) -> tuple[tuple[object, ...], tuple[Affine, ...], tuple[object, ...]]:
        """The first value that both graphs keep among what is read, where it is read, and the way there."""
        trail: list[object] = []
        for _ in range(MAX_DEPTH):
            try:
                head = self.resolver.head(read)
            except NeedsBytes:
                read = read._replace(byte=ZERO)
                continue
            if isinstance(head, Constant):
                return ("number", head.value), (), tuple(trail)
            if isinstance(head, Cast):
                read = head.source
            elif isinstance(head, Reduction):
                read = head.term
            else:
                found = signature(head)
                known = self.common.get(head.record.name)
                if known is not None or found is None or not found.uses:
                    if known is not None:
                        head = head._replace(rank=self.holder(known, head.rank))
                    return (known or ("?", head.record.name), head.path), head.functions(), tuple(trail)
                trail += [head.record.called, *(v for v in head.record.args if type(v) in (int, float))]
                # Whatever the whole of a cut is read for has one place, and a part of it another one.
                if (taken := self.resolver.taken_here(head)) is not None:
                    read = taken
                    continue
                inner = {letter: ZERO for letter, _ in (*found.whole, *found.summed)}
                binding = {**found.binding(head), **inner}
                # A condition or an index says less about a value than what is chosen by it.
                uses = [u for u in found.uses if u.record.dtype() == head.dtype] or list(found.uses)
                if self.specific and len(uses) > 1:
                    read = max((u.read(head, binding) for u in uses), key=self._depends)
                else:
                    read = max(uses, key=_letters).read(head, binding)
        raise Unequal("a chain of too many operators", shown=False)

    def _depends(self, read: Access) -> int:
        """On how many variables it depends where a value comes from."""
        try:
            head = self.resolver.head(read)
        except NeedsBytes:
            return 0
        return 0 if isinstance(head, Constant) else len(variables(head))

    def anchored(self, terms: list[Term]) -> list[Anchored]:
        """All terms with their anchors; a family is cut where its anchor is not one function of it."""
        result = []
        todo = terms[::-1]
        while todo:
            term = todo.pop()
            try:
                found = [self.anchor(read) for read in term.reads]
            except NeedsCut as cut:
                if cut.variable not in term.bound:
                    raise
                todo += [term.put(cut.variable, piece) for piece in reversed(cut.pieces)]
                continue
            # A number and what it is rounded to have one anchor, and are different terms.
            leaves = tuple((leaf, read.dtype) for (leaf, _, _), read in zip(found, term.reads))
            address = itertools.chain(*(address for _, address, _ in found), term.places)
            result.append(Anchored(term, leaves, tuple(address), tuple(trail for _, _, trail in found)))
        return result


def _letters(use: Use) -> int:
    return sum(letter != ONE for letter in use.letters)


def matched(space: Space, old: tuple[Sum, Side], new: tuple[Sum, Side], in_place: bool = False) -> Pairs:
    """Pairs of reads that have to be equal for the two sums to be.

    Args:
        in_place: whether terms of which there is one of a kind have to be at one place, too.

    Raises:
        Unequal: no terms correspond so.
        NeedsCut: a variable that no term binds has to be cut first.
    """
    was, now = (side.anchored(total.terms) for total, side in (old, new))
    try:
        return _families(space, was, now, new[0].op, in_place)
    except Unequal:
        pairs = _point_by_point(space, was, now) if new[0].op == "sum" else None
        if pairs is None:
            raise
        return pairs


def _families(space: Space, old: list[Anchored], new: list[Anchored], op: str, in_place: bool) -> Pairs:
    groups: dict[tuple[object, ...], tuple[list[Anchored], list[Anchored]]] = {}
    for place, terms in enumerate((old, new)):
        for one in terms:
            groups.setdefault(one.key, ([], []))[place].append(one)
    pairs: Pairs = []
    for was, now in groups.values():
        if not was or not now:
            raise _unmatched(was, now)
        pairs += _group(space, was, now, op, in_place)
    return pairs


class _Point:
    """All terms of one sum that are recognised by one place.

    Attributes:
        counts: how often they are added and taken off, with their factors.
        terms: one for each way to read them.
    """

    def __init__(self) -> None:
        self.counts = [Fraction(0), Fraction(0)]
        self.terms: dict[tuple[object, ...], Anchored] = {}

    def enter(self, one: Anchored) -> None:
        self.counts[one.term.scale < 0] += one.term.scale
        self.terms[(one.term.reads, one.term.through, one.term.coarse)] = one


def _point_by_point(space: Space, old: list[Anchored], new: list[Anchored]) -> Pairs | None:
    """As :func:`matched`, for sums that add each value equally often; None when they do not, or have too many terms.

    Of all that is read at one place in one graph, everything has to be equal to the first of the other graph: so all of
    it is equal, and the factors add up. An element and what is computed with it stand at one place and are not equal:
    so places are told apart by what is computed on the way there, as long as both graphs have the same.
    """
    points = _points(space, old, True), _points(space, new, True)
    if points[0] is None or points[1] is None:
        return None
    if points[0].keys() != points[1].keys():
        points = _points(space, old, False), _points(space, new, False)
    assert points[0] is not None and points[1] is not None
    if points[0].keys() != points[1].keys():
        return None
    pairs: dict[tuple[Access, Access], None] = {}
    for place, one in points[0].items():
        other = points[1][place]
        if one.counts != other.counts:
            return None
        was, now = list(one.terms.values()), list(other.terms.values())
        if not all(_as_fine(a, b) for a in was for b in now):
            return None
        for a, b in [*((was[0], b) for b in now), *((a, now[0]) for a in was[1:])]:
            pairs.update(dict.fromkeys(zip(a.term.reads, b.term.reads)))
    return list(pairs)


def _points(space: Space, terms: list[Anchored], trails: bool) -> dict[tuple[object, ...], _Point] | None:
    """Terms by what they are recognised by, each family term by term; None: too many, or nobody knows how many.

    Args:
        trails: those with other trails apart.
    """
    sizes = [space.extents[v] for one in terms for v in one.term.bound]
    if any(type(size) is not int for size in sizes) or sum(_count(space, one) for one in terms) > MAX_POINTS:
        return None
    found: dict[tuple[object, ...], _Point] = {}
    todo = terms[::-1]
    while todo:
        one = todo.pop()
        if one.term.bound:
            v = one.term.bound[0]
            todo += [_put(one, v, Affine(i)) for i in reversed(range(space.extents[v]))]
        else:
            trail = one.trail if trails else ()
            found.setdefault((one.leaf, one.term.kind, one.address, trail), _Point()).enter(one)
    return found


def _unmatched(was: list[Anchored], now: list[Anchored]) -> Unequal:
    if now:
        return Unequal(f"adds {_said(now[0])}, which the reference does not")
    return Unequal(f"does not add {_said(was[0])}, which the reference does")


def _said(one: Anchored) -> str:
    product = " * ".join(describe(read) for read in one.term.reads)
    return product if one.term.scale == 1 else f"{one.term.scale} * {product}"


def _group(space: Space, was: list[Anchored], now: list[Anchored], op: str, in_place: bool) -> Pairs:
    alone = len(was) == len(now) == 1 and not was[0].term.bound and not now[0].term.bound
    if alone and not (in_place and was[0].address != now[0].address):
        if not _as_fine(was[0], now[0]):
            raise _coarser(now[0])
        return list(zip(was[0].term.reads, now[0].term.reads))
    swapped = len(was) > len(now)
    families, singles = (now, was) if swapped else (was, now)
    covers = [Cover(space, family.term.bound, op in IDEMPOTENT) for family in families]
    pairs: Pairs = []
    # The largest first, each where it fits most tightly: one term may be of several families.
    todo = sorted(singles, key=lambda one: _count(space, one))
    while todo:
        single = todo.pop()
        try:
            reads = _placed(space, families, covers, single, swapped)
        except NeedsCut as cut:
            if cut.variable not in single.term.bound:
                raise
            todo += [_put(single, cut.variable, piece) for piece in reversed(cut.pieces)]
            continue
        pairs += zip(single.term.reads, reads) if swapped else zip(reads, single.term.reads)
    for family, cover in zip(families, covers):
        _check(family, cover)
    return pairs


def _as_fine(was: Anchored, now: Anchored) -> bool:
    """Whether a term goes through no more additions of narrower types than it did."""
    return now.term.through <= was.term.through and now.term.coarse <= was.term.coarse


def _coarser(now: Anchored) -> Unequal:
    return Unequal(f"adds {_said(now)} in a narrower type than the reference, or more often")


def _count(space: Space, one: Anchored) -> int:
    return math.prod(space.extents[v] for v in one.term.bound)


def _check(family: Anchored, cover: Cover) -> None:
    try:
        complete = cover.complete()
    except IrregularError as why:
        raise Unequal(f"not understood: parts of {_said(family)} that are cut irregularly", shown=False) from why
    if not complete:
        raise Unequal(f"does not add {_said(family)} and its like each exactly once, as the reference does")


def _put(one: Anchored, variable: int, value: Affine) -> Anchored:
    address = tuple(a.put(variable, value) for a in one.address)
    return Anchored(one.term.put(variable, value), one.leaf, address, one.trail)


def _placed(
    space: Space, families: list[Anchored], covers: list[Cover], single: Anchored, swapped: bool
) -> tuple[Access, ...]:
    """The reads of the family's terms that correspond to a single, which is entered there.

    Args:
        swapped: the families are those of the new graph, and the single is of the old one.
    """
    count = _count(space, single)
    full, coarser = False, None
    # Of families at one place the one that computes the same.
    order = sorted(zip(families, covers), key=lambda one: (one[0].trail != single.trail, one[1].room))
    for family, cover in order:
        solution = _solved(space, family, single)
        if solution is None:
            continue
        was, now = (single, family) if swapped else (family, single)
        if not _as_fine(was, now):
            coarser = now
            continue
        if not cover.has_room(count):
            full = True
            continue
        cover.enter(solution, count)
        reads = family.term.reads
        for variable, value in solution.items():
            reads = tuple(r.put(variable, value) for r in reads)
        return reads
    if coarser is not None:
        raise _coarser(coarser)
    said = "more often than the reference" if full else "at another place than the reference"
    raise Unequal(f"adds {_said(single)} {said}")


def _solved(space: Space, family: Anchored, single: Anchored) -> dict[int, Affine] | None:
    """The family's variables as functions of the single's, such that both read the same place; None: they do not."""
    unknown = set(family.term.bound)
    solution: dict[int, Affine] = {}
    equations = []
    for mine, other in zip(family.address, single.address):
        known = Affine(mine.const, tuple(t for t in mine.terms if t[0] not in unknown))
        equations.append(([t for t in mine.terms if t[0] in unknown], other.minus(known)))
    progress = True
    while progress:
        progress, left = False, []
        for terms, value in equations:
            for v, k in terms:
                if v in solution:
                    value = value.minus(solution[v].times(k))
            terms = sorted((t for t in terms if t[0] not in solution), key=lambda t: -t[1])
            if not terms:
                if value != ZERO:
                    if value.terms and any(v in single.term.bound for v, _ in value.terms):
                        _separate(space, value, single)
                    return None
                continue
            if not _is_numeral(space, terms):
                left.append((terms, value))
                continue
            for v, k in terms:
                inside, _ = space.locate(value, (0, k * space.extents[v]))
                if inside:
                    return None
                solution[v], value = space.divide(value, k)
            if value != ZERO:
                return None
            progress = True
        equations = left
    return _rest(space, family, single, solution, unknown)


def _separate(space: Space, value: Affine, single: Anchored) -> None:
    """Where only some of a family's terms are at the place in question."""
    low, high = space.bounds(value)
    if low <= 0 <= high:
        raise space.points(next(v for v, _ in value.terms if v in single.term.bound))


def _is_numeral(space: Space, terms: list[tuple[int, int]]) -> bool:
    """Whether the value of ``sum(k * v)`` tells every variable; by falling coefficient."""
    below = 0
    for v, k in reversed(terms):
        if k <= below:
            return False
        below += k * (space.extents[v] - 1)
    return True


def _rest(
    space: Space, family: Anchored, single: Anchored, solution: dict[int, Affine], unknown: set[int]
) -> dict[int, Affine] | None:
    """Variables that the anchors do not depend on run alike."""
    used = {v for value in solution.values() for v, _ in value.terms}
    mine = [v for v in family.term.bound if v not in solution]
    others = [v for v in single.term.bound if v not in used]
    if sorted(space.extents[v] for v in mine) != sorted(space.extents[v] for v in others):
        return None
    for v in mine:
        other = next(o for o in others if space.extents[o] == space.extents[v])
        others.remove(other)
        solution[v] = Affine(0, ((other, 1),))
    free = set(single.term.bound)
    return solution if all(v in free for value in solution.values() for v, _ in value.terms) else None
