"""Operators that do not round between their steps: an all-reduce, a residual and a norm in one.

Only here casts do not count: the operator computes in float32 throughout what the graph before computed with roundings
in between. Factors of a product and terms of a sum may come in any order. Everything else must be the same steps, down
to the operands, which must be equal as usual.
"""

from __future__ import annotations

from collections.abc import Iterator

from inductor_passes.verify.values import definitions
from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.communication import COLLECTIVES, Reduction
from inductor_passes.verify.values.differences import Unequal, changed
from inductor_passes.verify.values.heads import Cast, Head, Resolver
from inductor_passes.verify.values.operators import signature
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.questions import Prover, Question

_PRODUCTS, _SUMS = frozenset({"aten::mul", "aten::pow"}), frozenset({"aten::add"})


def begun(q: Question, new: Access) -> list[Question]:
    """The question for an operator's result, from here on up to roundings."""
    step = definitions.meaning(new.record, new.path)
    if step is None:
        raise Unequal(f"not understood: {new.record.called} ({new.record.name})", shown=False)
    return [q._replace(new=new._replace(record=step, path=()), freely=True)]


def turned(proof: Prover, q: Question) -> list[Question]:
    """What a question up to roundings turns into."""
    step = q.new.record
    if not step.rounds_freely:
        if any(proof.holds([q._replace(old=old, freely=False)]) for old in _peeled(proof.old, q.old)):
            return []
        raise _failed(proof, q)
    if step.called == "prims::convert_element_type":
        return [q._replace(new=q.new.at(step.first, q.new.indices))]
    old = _bare(proof.old, q.old)
    if step.called in COLLECTIVES:
        return _over_ranks(proof, q, old)
    if not isinstance(old, Access):
        raise _failed(proof, q)
    if step.called in _PRODUCTS:
        return _in_any_order(proof, q, _flat(proof.old, old, _PRODUCTS), _flat(proof.new, q.new, _PRODUCTS))
    if step.called in _SUMS and _number(step) is None:
        return _in_any_order(proof, q, _flat(proof.old, old, _SUMS), _flat(proof.new, q.new, _SUMS))
    return _same_step(proof, q, old)


def _failed(proof: Prover, q: Question) -> Unequal:
    return changed(proof.old.head(q.old), q.new, "not the same up to roundings")


def _peeled(resolver: Resolver, read: Access) -> Iterator[Access]:
    """The read, and what it is under one cast after the other."""
    yield read
    head = resolver.head(read)
    while isinstance(head, Cast):
        yield head.source
        head = resolver.head(head.source)


def _bare(resolver: Resolver, read: Access) -> Head:
    head = resolver.head(read)
    while isinstance(head, Cast):
        head = resolver.head(head.source)
    if isinstance(head, Access) and head.record.called in definitions.NORMS and head.path == (0,):
        return head._replace(record=definitions.norm_steps(head.record), path=())
    return head


def _number(record: Record) -> float | None:
    """What an addition or a power has as its second operand, when it is a number."""
    for name in ("other", "exponent"):
        value = record.arguments.get(name)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _over_ranks(proof: Prover, q: Question, old: Head) -> list[Question]:
    new = COLLECTIVES[q.new.record.called](proof.groups, q.new)
    if not isinstance(old, Reduction) or not isinstance(new, Reduction):
        raise _failed(proof, q)
    ranks = old.group.sorted_digits()
    if old.op != new.op or ranks != new.group.sorted_digits():
        raise changed(old, new)
    digits = proof.space.box(n for n, _ in ranks)
    return [q._replace(old=old.on(digits), new=new.on(digits))]


def _flat(resolver: Resolver, read: Access, names: frozenset[str]) -> list[Access]:
    """The factors of a product, or the terms of a sum."""
    todo, found = [read], []
    while todo:
        one = todo.pop()
        head = _bare(resolver, one)
        if not isinstance(head, Access) or head.record.called not in names:
            found.append(one)
            continue
        number, own = _number(head.record), signature(head)
        if own is None or (number is not None and (number != 2 or head.record.called != "aten::pow")):
            found.append(one)
            continue
        reads = [use.read(head, own.binding(head)) for use in own.uses]
        todo += reads * 2 if number is not None else reads[::-1]
    return found


def _in_any_order(proof: Prover, q: Question, old: list[Access], new: list[Access]) -> list[Question]:
    if len(old) != len(new):
        raise _failed(proof, q)
    left = list(old)
    for read in new:
        for candidate in left:
            if proof.holds([q._replace(old=candidate, new=read)]):
                left.remove(candidate)
                break
        else:
            raise _failed(proof, q)
    return []


def _same_step(proof: Prover, q: Question, old: Access) -> list[Question]:
    """A mean, an inverse root, an addition of a number."""
    was, now = signature(old), signature(q.new)
    if was is None or now is None or old.record.called != q.new.record.called or len(was.uses) != len(now.uses):
        raise _failed(proof, q)
    if _number(old.record) != _number(q.new.record) or [s for _, s in was.summed] != [s for _, s in now.summed]:
        raise _failed(proof, q)
    mine, other = was.binding(old), now.binding(q.new)
    for (a, size), (b, _) in zip(was.summed, now.summed):
        mine[a] = other[b] = proof.space.fresh(size)
    pairs = zip(was.uses, now.uses)
    return [q._replace(old=a.read(old, mine), new=b.read(q.new, other)) for a, b in pairs]
