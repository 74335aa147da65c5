"""Sums split into terms: what is added up in the end, over which ranks, rows and columns, with which factor.

``add``, ``sum``, ``mean``, a matrix product (and what it adds), a reduction over ranks, and a sum that is computed in a
wider type and rounded once, are all sums. Nested ones flatten into terms: a factor, variables that run over everything
that is added, and what is read for each of their values. ``min`` and ``max`` flatten likewise.

A sum that was added up in a narrower type and then widened may count as a sum of widened terms (``widens``). Each of
its terms then says through which additions of the narrower type it went; the new graph may send it through no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from inductor_passes.verify.values import definitions
from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import ZERO, Affine, NeedsCut, Space
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.communication import Reduction
from inductor_passes.verify.values.differences import Unequal
from inductor_passes.verify.values.heads import Cast, Head, Resolver, holds, variables
from inductor_passes.verify.values.operators import signature

MAX_TERMS = 20_000
#: Reductions in which a term counts once however often it comes.
IDEMPOTENT = frozenset({"max", "min", "band", "bor"})
#: Over dimensions -> over ranks. A NaN is the largest to both only where the backend says so, and where it does not,
#: the sums of a softmax are NaN in any case: the exact tier keeps them apart.
_EXTREMES = {"aten::amax": "max", "aten::amin": "min"}
_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::_grouped_mm", "aten::_int_mm"})


@dataclass(frozen=True)
class Term:
    """One summand, or a family of them.

    Attributes:
        reads: what is read: one element, or two that are multiplied (with the offsets of a grouped product).
        bound: variables over which the family runs.
        scale: factor.
        kind: "" or the product that the two reads belong to.
        places: functions of variables that run over a whole: which part of it the term is about.
        through: kinds of additions in a narrower type that it goes through before it is widened: (type, kind).
        coarse: how many of them at most.
        rounded: it was rounded to a type narrower than float32 before it is added.
        added: it is a term of an addition, or of a reduction over ranks.
    """

    reads: tuple[Access, ...]
    bound: tuple[int, ...] = ()
    scale: Fraction = Fraction(1)
    kind: object = ""
    places: tuple[Affine, ...] = ()
    through: frozenset[tuple[torch.dtype, str]] = frozenset()
    coarse: int = 0
    rounded: bool = False
    added: bool = False

    def put(self, variable: int, value: Affine) -> Term:
        """With a variable of its own replaced."""
        bound = (*(v for v in self.bound if v != variable), *(v for v, _ in value.terms))
        reads = tuple(r.put(variable, value) for r in self.reads)
        return replace(self, reads=reads, bound=bound, places=tuple(p.put(variable, value) for p in self.places))


@dataclass
class Sum:
    """A flattened sum.

    Attributes:
        op: ``sum``, ``max`` ...; dtype: in which it is added up.
        terms: of it.
        roundings: which additions round to a type narrower than float32: ``add``, ``rank``.
        least: how many numbers the shortest of the products and sums over dimensions adds up that are rounded to such a
            type before they are added; None without any.
        joins: how many sums were flattened into it.
        once: it is carried in a wider type and rounded at the end.
        closed: products and sums over dimensions were not taken apart.
        widens: sums in a narrower type that are widened are taken apart.
        whole: of what is in a narrower type, sums that were computed in a wider one and rounded once are terms.
        shallow: what is added up last is taken apart, and not what these terms are sums of.
        steps: kinds of additions, whatever their type: ``add``, ``rank``, ``scale``.
        narrower: how many sums in a narrower type were taken apart.
    """

    op: str
    dtype: torch.dtype
    terms: list[Term] = field(default_factory=list)
    roundings: set[str] = field(default_factory=set)
    joins: int = 0
    once: bool = False
    products: int = 0
    closed: bool = False
    widens: bool = False
    whole: bool = False
    shallow: bool = False
    steps: set[str] = field(default_factory=set)
    narrower: int = 0
    least: int | None = None

    def rounds(self, numbers: int) -> None:
        """A rounded product or sum of so many numbers is added."""
        self.least = numbers if self.least is None else min(self.least, numbers)

    def is_coarser_than(self, other: Sum) -> bool:
        """Whether it rounds where the other one does not, or shorter sums."""
        shorter = self.least is not None and (other.least is None or self.least < other.least)
        return shorter or not self.roundings <= other.roundings or (other.once and not self.once)


def narrow(dtype: torch.dtype) -> bool:
    """Whether sums in this type are rounded more coarsely than in float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_zero(number: Constant) -> bool:
    """Whether a number is 0 and not -0.0, which adds up to 0 only with another sign."""
    return number.value == 0 and not str(number.value).startswith("-")


def sum_op(head: Head) -> str:
    """``sum``, ``max`` ... when the head is a sum, else ""."""
    if isinstance(head, Reduction):
        return "sum" if head.op == "avg" else head.op
    if not isinstance(head, Access):
        return ""
    if head.record.called in _EXTREMES:
        return _EXTREMES[head.record.called]
    product = head.record.called in _PRODUCTS or definitions.product_of(head.record) is not None
    return "sum" if product or _added(head) or _over_dims(head) else ""


def _added(a: Access) -> list[tuple[Access, int]] | None:
    """The operands of an addition of tensors of the result's type, with their signs."""
    called, given = a.record.called, a.record.arguments
    if called not in ("aten::add", "aten::sub") or given.get("alpha", 1) != 1:
        return None
    found = signature(a)
    if found is None or len(found.uses) != 2 or any(u.record.dtype() != a.dtype for u in found.uses):
        return None
    binding = found.binding(a)
    signs = (1, -1 if called == "aten::sub" else 1)
    return [(use.read(a, binding), sign) for use, sign in zip(found.uses, signs)]


def _biased(a: Access) -> tuple[Access, Access] | None:
    """What a matmul adds to its product, and the product."""
    product, found = definitions.product_of(a.record), signature(a)
    if product is None or found is None:
        return None
    return found.uses[-1].read(a, found.binding(a)), a._replace(record=product)


def _over_dims(a: Access) -> bool:
    return a.record.called in ("aten::sum", "aten::mean") and a.record.first.dtype() == a.dtype


class Flattener:
    """Takes sums of one graph apart.

    ``holder`` gives one rank for all those that hold a value of the graph alike, by its name; None: each for itself.
    """

    def __init__(self, space: Space, resolver: Resolver) -> None:
        self.space, self.resolver = space, resolver
        self.holder: Callable[[str, Affine], Affine] | None = None

    def flattened(
        self,
        read: Access,
        op: str,
        dtype: torch.dtype,
        closed: bool = False,
        widens: bool = False,
        whole: bool = False,
        shallow: bool = False,
    ) -> Sum:
        """The sum that ``read`` comes to.

        Args:
            closed: products and sums over dimensions are terms, and are not taken apart.
            widens: sums in a narrower type that are widened to ``dtype`` are taken apart too.
            whole: in these, what was computed in a wider type and rounded once is a term.
            shallow: terms of the last addition, or of the last reduction over ranks, are not taken apart.

        Raises:
            NeedsCut: a variable that is not bound by a term has to be cut first.
        """
        result = Sum(op, dtype, closed=closed, widens=widens, whole=whole, shallow=shallow)
        todo = [Term((read,))]
        while todo:
            term = todo.pop()
            try:
                opened = self._opened(term, result)
            except NeedsCut as cut:
                if cut.variable not in term.bound:
                    raise
                todo += [term.put(cut.variable, piece) for piece in reversed(cut.pieces)]
                continue
            todo += reversed(opened)
            if len(todo) + len(result.terms) > MAX_TERMS:
                raise Unequal("a sum of too many terms", shown=False)
        return result

    def _opened(self, term: Term, into: Sum) -> list[Term]:
        try:
            head = self.resolver.head(term.reads[0])
        except NeedsBytes:
            into.terms.append(term)
            return []
        if self.holder is not None and isinstance(head, Access):
            head = head._replace(rank=self.holder(head.record.name, head.rank))
        found = None if into.shallow and term.added else self._one(head, term, into)
        if found is None:
            if isinstance(head, Cast) and _widening(head, into):
                # The number that is added is the one that was widened.
                term = replace(term, reads=(head.source,))
                head = head.source
            into.terms.append(self._settled(head, term, into.op))
            return []
        into.joins += 1
        return found

    def _one(self, head: Head, term: Term, into: Sum) -> list[Term] | None:
        """The terms of a head that is a sum of the wanted kind."""
        if isinstance(head, Reduction):
            return self._ranks(head, term, into)
        if isinstance(head, Cast):
            return self._rounded_once(head, term, into) or self._widened(head, term, into)
        if not isinstance(head, Access) or head.byte is not None:
            return None
        if _EXTREMES.get(head.record.called) == into.op and head.dtype == into.dtype and not into.closed:
            return self._letters(head, term, into)
        if into.op != "sum":
            return None
        if head.record.called in ("aten::div", "aten::mul"):
            return self._scaled(head, term, into)
        if head.dtype != into.dtype:
            return None
        if (added := _added(head)) is not None:
            into.steps.add("add")
            if narrow(head.dtype):
                into.roundings.add("add")
            rounded = term.rounded or narrow(head.dtype)
            term = replace(term, rounded=rounded, added=True)
            return [replace(term, reads=(read,), scale=term.scale * sign) for read, sign in added]
        if not into.closed and (biased := _biased(head)) is not None:
            into.steps.add("add")
            bias, product = biased
            rounded = term.rounded or narrow(head.dtype)
            return [replace(term, reads=(bias,), rounded=rounded), replace(term, reads=(product,))]
        if not into.closed and (_over_dims(head) or head.record.called in _PRODUCTS):
            return self._letters(head, term, into)
        return None

    def _ranks(self, head: Reduction, term: Term, into: Sum) -> list[Term] | None:
        op = "sum" if head.op == "avg" else head.op
        if op != into.op or head.dtype != into.dtype or head.byte is not None:
            return None
        into.steps.add("rank")
        rounded = narrow(head.dtype) and op not in IDEMPOTENT
        if rounded:
            into.roundings.add("rank")
        digits = self.space.box(n for n, _ in head.group.sorted_digits())
        scale = term.scale / head.group.size if head.op == "avg" else term.scale
        return [Term((head.on(digits),), (*term.bound, *_variables(digits)), scale, rounded=rounded, added=True)]

    def _rounded_once(self, head: Cast, term: Term, into: Sum) -> list[Term] | None:
        """``cast(cast(x) + cast(y))`` with casts to a wider type and back is the sum of ``x`` and ``y``."""
        if head.byte is not None or into.op != "sum" or into.whole:
            return None
        if head.dtype == into.dtype and narrow(head.dtype) and holds(head.source.dtype, head.dtype):
            inner = self.resolver.head(head.source)
            if sum_op(inner) != "sum" and not self._is_scaled_sum(inner):
                return None
            wide = self.flattened(head.source, "sum", head.source.dtype, shallow=into.shallow)
            into.once = True
            into.roundings |= wide.roundings
            if wide.least is not None:
                into.rounds(wide.least)
            into.products += wide.products
            terms = [self._narrowed(one, into.dtype) for one in wide.terms]
            return self._joined_into(term, terms)
        return None

    def _widened(self, head: Cast, term: Term, into: Sum) -> list[Term] | None:
        """``cast(x + y)`` to a wider type, where sums of numbers count, is a sum of ``x`` and ``y``."""
        if not _widening(head, into):
            return None
        inner = self.resolver.head(head.source)
        if not isinstance(inner, Reduction) and not (isinstance(inner, Access) and _added(inner)):
            return None
        narrower = self.flattened(head.source, "sum", head.source.dtype, True, True, into.whole)
        into.narrower += 1 + narrower.narrower
        # In any order none of so many terms goes through more additions.
        most = sum(math.prod(self.space.extents[v] for v in t.bound) for t in narrower.terms) - 1
        through = frozenset((head.source.dtype, step) for step in narrower.steps)
        terms = [replace(t, through=t.through | through, coarse=t.coarse + most) for t in narrower.terms]
        return self._joined_into(term, terms)

    def _joined_into(self, term: Term, inner: list[Term]) -> list[Term]:
        return [replace(t, bound=(*term.bound, *t.bound), scale=term.scale * t.scale) for t in inner]

    def _narrowed(self, term: Term, dtype: torch.dtype) -> Term:
        if len(term.reads) != 1:
            return term
        head = self.resolver.head(term.reads[0])
        widened = isinstance(head, Cast) and head.source.dtype == dtype
        return replace(term, reads=(head.source,), rounded=True) if widened and isinstance(head, Cast) else term

    def _scaled(self, head: Access, term: Term, into: Sum) -> list[Term] | None:
        """A sum times or divided by a number."""
        factor = head.record.arguments.get("other")
        found = signature(head)
        if not isinstance(factor, (int, float)) or not factor or found is None or head.dtype != into.dtype:
            return None
        if not (head.dtype.is_floating_point or head.dtype.is_complex) and head.rank != Affine(self.resolver.own.here):
            # Ranks do not compare such numbers, which may be a rank's own.
            return None
        read = found.uses[0].read(head, found.binding(head))
        if read.dtype != into.dtype or sum_op(self.resolver.head(read)) != "sum":
            return None
        into.steps.add("scale")
        by = Fraction(factor) if head.record.called == "aten::mul" else 1 / Fraction(factor)
        rounded = term.rounded or narrow(head.dtype)
        return [replace(term, reads=(read,), scale=term.scale * by, rounded=rounded)]

    def _is_scaled_sum(self, head: Head) -> bool:
        if not isinstance(head, Access) or head.record.called not in ("aten::div", "aten::mul"):
            return False
        return self._scaled(head, Term((head,)), Sum("sum", head.dtype)) is not None

    def _letters(self, head: Access, term: Term, into: Sum) -> list[Term] | None:
        found = signature(head)
        if found is None:
            return None
        inner = {letter: self.space.fresh(size) for letter, size in found.summed}
        wholes = {letter: self.space.fresh(size) for letter, size in found.whole}
        binding = {**found.binding(head), **wholes, **inner}
        reads = tuple(use.read(head, binding) for use in found.uses)
        bound = (*term.bound, *_variables((*wholes.values(), *inner.values())))
        if term.rounded:
            into.rounds(math.prod(size for _, size in found.summed))
        if len(reads) > 1:
            into.products += 1
            into.joins += 1
            product = Term(
                reads, bound, term.scale, ("product", found.key, *found.positions(head)), tuple(wholes.values())
            )
            into.terms.append(product)
            return []
        count = 1
        if head.record.called == "aten::mean":
            for _, size in found.summed:
                count *= size
        return [Term(reads, bound, term.scale / count, rounded=narrow(head.dtype))]

    def _settled(self, head: Head, term: Term, op: str) -> Term:
        """A term that is no sum. Variables on which it does not depend multiply it."""
        if isinstance(head, Constant):
            used: set[int] = set()
        else:
            used = variables(head)
        idle = [v for v in term.bound if v not in used]
        if not idle:
            return term
        reads = term.reads
        for v in idle:
            reads = tuple(r.put(v, ZERO) for r in reads)
        scale = term.scale
        if op == "sum":
            for v in idle:
                scale *= self.space.extents[v]
        elif op not in IDEMPOTENT:
            return term
        return replace(term, reads=reads, bound=tuple(v for v in term.bound if v in used), scale=scale)


def _widening(head: Cast, into: Sum) -> bool:
    """Whether a cast keeps the number that ``into`` adds, which is one with a point."""
    wide, source = into.dtype, head.source.dtype
    points = wide.is_floating_point and source.is_floating_point and holds(wide, source)
    return into.widens and into.op == "sum" and head.byte is None and head.dtype == wide and points


def _variables(functions: Iterable[Affine]) -> tuple[int, ...]:
    return tuple(v for f in functions for v, _ in f.terms)


def in_any_order(space: Space, was: Sum, now: Sum) -> bool:
    """Whether the order of addition cannot matter: whole numbers, the largest of some, or a sum of two terms."""
    if was.op in IDEMPOTENT or was.op == "bxor":
        return True
    if not was.dtype.is_floating_point and not was.dtype.is_complex:
        return True
    return all(_two_terms(space, total) for total in (was, now))


def _two_terms(space: Space, total: Sum) -> bool:
    count = 0
    for term in total.terms:
        family = 1
        for v in term.bound:
            family *= space.extents[v]
        count += family
    return count == 2 and total.products == 0 and total.op == "sum" and len({t.scale for t in total.terms}) == 1
