"""Two values are equal: a walk through the old and the new graph at once.

A question is a pair of reads, one per graph, for all values of some variables. Both are followed to their heads. Equal
heads answer the question. Heads that compute the same operator turn into questions about their operands. No question is
asked twice. Where a layout needs a case distinction (:class:`NeedsCut`), both sides get it, so that the two are
compared piece by piece without expanding either. Names that are known to hold equal values in both graphs end the walk,
so only what a pass changed is looked at.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

from inductor_passes.verify.certificate import Narrowed
from inductor_passes.verify.values import freely
from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import ZERO, Affine, NeedsCut, Space, TooManyPiecesError
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.communication import Groups, NewCoordinateError, Reduction
from inductor_passes.verify.values.definitions import ROUND_FREELY, adds_one
from inductor_passes.verify.values.differences import Unequal, changed, different, value
from inductor_passes.verify.values.heads import Cast, Head, Resolver, position_of
from inductor_passes.verify.values.implied import alike, computed, implied
from inductor_passes.verify.values.layouts import Layouts
from inductor_passes.verify.values.matching import Side, matched
from inductor_passes.verify.values.memory import Root
from inductor_passes.verify.values.operators import signature
from inductor_passes.verify.values.own import Own
from inductor_passes.verify.values.program import Program, Record
from inductor_passes.verify.values.questions import Question
from inductor_passes.verify.values.replicas import Replicas
from inductor_passes.verify.values.signatures import Signature
from inductor_passes.verify.values.sizes import NoHintError, UndecidedError
from inductor_passes.verify.values.strided import NotRegularError
from inductor_passes.verify.values.terms import Flattener, Sum, in_any_order, is_zero, sum_op

Numerics = Literal["exact", "reassociate"]
#: What counts as equal on several ranks: what the graph shows, or what it implies, see ``implied``.
Replicated = Literal["proven", "implied"]
Pairs = list[tuple[Access, Access]]

#: Questions per proof.
MAX_QUESTIONS = 1_000_000
_NOT_UNDERSTOOD = (NoHintError, NotRegularError)


class Proof:
    """What is known so far about one old and one new graph; ``same`` maps names of equal values, new to old."""

    def __init__(
        self,
        old: Program,
        new: Program,
        numerics: Numerics,
        replicas: Replicated = "proven",
        rounds: Mapping[str, Narrowed] | None = None,
        own: Mapping[str, Narrowed] | None = None,
    ) -> None:
        self.space = Space()
        self.groups = Groups(self.space)
        self.exact = numerics == "exact"
        self.same: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self.memories = old.memory, new.memory
        here = self.groups.here.const
        layouts = Layouts(old, here)
        self._own = Own(old, here, layouts)
        self.old = Resolver(self.space, self.groups, self.memories[0], self._own)
        self.own_pieces = Own(new, here, layouts, self._own)
        self._implied = replicas == "implied"
        self.new = Resolver(self.space, self.groups, self.memories[1], self.own_pieces, rounds)
        self.new.other = self.old
        self._own_rounds = own or {}
        self._sides = (
            Side(self.space, self.old, self._kept, self._place),
            Side(self.space, self.new, self.same, self._place),
        )
        # What is read on the same ranks needs no replicas: looked at first, since a replica may stand for many ranks.
        self._apart = tuple(Side(self.space, side.resolver, side.common, _itself) for side in self._sides)
        self._specific = tuple(Side(s.space, s.resolver, s.common, s.holder, specific=True) for s in self._sides)
        self._flatteners = Flattener(self.space, self.old), Flattener(self.space, self.new)
        self._asked: set[object] = set()
        self._questions = 0

    def know(self, new: str, old: str) -> None:
        """A value of the new graph is one of the old graph's."""
        self.same[new] = old
        self._kept[old] = old

    def stand(self, new: Record, old: Record) -> None:
        """A value of the new graph is from now on read as the old graph's, if this rank can show that it is that.

        What other ranks made of it need not be in this rank's graph: each of them shows the same of its own value.
        Not where anything arrives rounded, which is counted, or where memory is written to later.
        """
        written = any(m.is_written(r.name) for m, r in zip(self.memories, (old, new)))
        if written or self.new.rounds or self._own_rounds or not hasattr(old.value, "dtype"):
            return
        try:
            self.show(Access(old, (), ZERO, ()), Access(new, (), ZERO, ()))
        except (Unequal, *_NOT_UNDERSTOOD):
            return
        self.new.stands[new.name] = old

    @contextlib.contextmanager
    def own_roundings(self) -> Iterator[None]:
        """Inside, what a rank widens of its own messages may be read; nothing that is shown so counts outside."""
        rounds, asked = self.new.rounds, set(self._asked)
        self.new.rounds = {**rounds, **self._own_rounds}
        try:
            yield
        finally:
            self.new.rounds, self._asked = rounds, asked

    def show(self, old: Access, new: Access) -> None:
        """Prove that two whole values are equal; ``index`` of both is free.

        Raises:
            Unequal: they are not, or it cannot be told.
        """
        if old.dtype != new.dtype or old.shape != new.shape:
            raise Unequal(f"is {new.dtype}{list(new.shape)} where the reference has {old.dtype}{list(old.shape)}")
        if 0 in old.shape:
            return
        while True:
            index = self.space.box(old.shape)
            here = self.groups.here
            first = Question(old._replace(rank=here, indices=index), new._replace(rank=here, indices=index), index)
            try:
                self.settle([first])
            except NewCoordinateError:
                continue
            return

    def settle(self, todo: list[Question]) -> None:
        """Answer questions until none is left. Raises :class:`Unequal` with ``at``, the index of a difference."""
        asked: list[object] = []
        question = todo[-1]
        try:
            while todo:
                question = todo.pop()
                self._questions += 1
                if self._questions > MAX_QUESTIONS:
                    raise Unequal("too many questions", shown=False)
                todo += self._turned(question, asked)
        except Unequal as unequal:
            raise self._failed(unequal, question, asked) from None
        except NewCoordinateError:
            self._asked.difference_update(asked)
            raise
        except TooManyPiecesError as why:
            said = "a layout that falls into too many pieces"
            raise self._failed(Unequal(f"not understood: {said}", shown=False), question, asked) from why
        except Exception as why:
            # What an operator was given that its rule does not expect is not understood either.
            said = str(why) if isinstance(why, _NOT_UNDERSTOOD) else f"{type(why).__name__}: {why}"
            raise self._failed(Unequal(f"not understood: {said}", shown=False), question, asked) from why

    def _failed(self, unequal: Unequal, question: Question, asked: list[object]) -> Unequal:
        self._asked.difference_update(asked)
        if not unequal.at:
            unequal.at = tuple(value(f, unequal.point) for f in question.where)
        return unequal

    def holds(self, questions: list[Question]) -> bool:
        """Whether all of these have the answer yes."""
        try:
            self.settle(questions)
        except Unequal:
            return False
        return True

    def _turned(self, q: Question, asked: list[object]) -> list[Question]:
        """What a question turns into."""
        try:
            if q.freely:
                return freely.turned(self, q)
            return self._answered(q, asked)
        except NeedsCut as cut:
            if not q.has(cut.variable):
                raise Unequal("a layout that is cut within an operator", shown=False) from cut
            return [q.put(cut.variable, piece) for piece in reversed(cut.pieces)]
        except NeedsBytes as why:
            if q.old.byte is not None:
                raise Unequal("not understood: bytes of an element that is made of other bytes", shown=False) from why
            byte = self.space.fresh(q.old.dtype.itemsize)
            return [q._replace(old=q.old._replace(byte=byte), new=q.new._replace(byte=byte))]

    def _answered(self, q: Question, asked: list[object]) -> list[Question]:
        try:
            heads = self.old.head(q.old), self.new.head(q.new)
            old, new = _same_byte(*heads)
        except NoHintError:
            if (wider := self._wider(q)) is None:
                raise
            return wider
        read = q.old.dtype
        if old is not heads[0] and isinstance(old, Access) and isinstance(new, Access) and read.is_complex:
            # Sums are taken apart by elements. Half of a complex number is one; bits seen as integers are not.
            return [Question(old, new, q.where)]
        if self._known(old, new):
            return []
        key = self._key(old, new)
        if key in self._asked:
            return []
        self._asked.add(key)
        asked.append(key)
        if isinstance(new, Access) and new.record.called in ROUND_FREELY:
            return freely.begun(q, new)
        return [Question(a, b, q.where) for a, b in self._compared(old, new, q)]

    def _wider(self, q: Question) -> list[Question] | None:
        """What answers a question about a piece whose size has a range that leaves it open where its elements are.

        A table of positions is cut to the length of a sequence, for example, after its shards were gathered. If one
        index into two values on the way is the same, it is enough that these are known to be equal, or that all of
        their elements are: those of values whose own sizes are numbers are asked about. Their elements are closer to
        the graph's inputs than the piece, so no question leads to itself. None where there are no such values.
        """
        if any(m.any for m in self.memories):
            return None
        trails = self.old.trail(q.old), self.new.trail(q.new)
        pairs = [(a, b) for a in reversed(trails[0]) for b in reversed(trails[1]) if _at_one_place(a, b)]
        if any(self._known(a, b) for a, b in pairs):
            return []
        for a, b in pairs:
            if not self._open(a) or not all(isinstance(size, int) for size in a.shape):
                continue
            index = self.space.box(a.shape)
            return [Question(a._replace(indices=index), b._replace(indices=index), q.where)]
        return None

    def _open(self, a: Access) -> bool:
        """Whether an index runs as far as a size that has a range."""
        return any(not isinstance(self.space.extents[v], int) for index in a.indices for v, _ in index.terms)

    # -- equal heads ------------------------------------------------------------------------------------------

    def _known(self, old: Head, new: Head) -> bool:
        if isinstance(old, Constant) and isinstance(new, Constant):
            return repr(old) == repr(new)
        if not isinstance(old, Access) or not isinstance(new, Access):
            return False
        # What stands for a value of the old graph is read there.
        memories = (self.memories[0], self.memories[new.record.program is not self._own.program])
        versions = [m.version(a.record.name, position_of(a.reader)) for m, a in zip(memories, (old, new))]
        same = (
            self.same.get(new.record.name) == old.record.name
            and (old.path, old.indices, old.byte) == (new.path, new.indices, new.byte)
            and (old.rank == new.rank or self._replicas(old, new))
            and versions[0] == self.translated(versions[1])
        )
        if not same and any(versions):
            name = next(writer for version in versions for _, writer in version)
            raise Unequal(f"not understood: memory that {name} writes to", shown=False)
        return same

    def translated(self, version: frozenset[tuple[Root, str]]) -> set[tuple[Root, str]]:
        """The new graph's memory and its writers, by the names that they have in the old one."""
        name = self.same.get
        return {(root._replace(producer=name(root.producer, root.producer)), name(w, w)) for root, w in version}

    def _replicas(self, old: Access, new: Access) -> bool:
        """Whether the program takes a value to be equal on the two ranks that it is read on."""
        return self._holder(old.record.name, old.rank) == self._holder(old.record.name, new.rank)

    def _holder(self, name: str, rank: Affine) -> Affine:
        """One of the ranks that hold a value of the old graph as ``rank`` does."""
        for group in self._replicated.get(name, ()):
            rank = group.base(self.space, rank)
        return rank

    def _place(self, name: str, rank: Affine) -> Affine:
        """The rank by which terms of a sum are recognised; that they are equal there is asked afterwards."""
        rank = self._holder(name, rank)
        for group in self._computed.get(name, ()):
            rank = group.base(self.space, rank)
        return rank

    @cached_property
    def _computed(self) -> dict[str, set[Replicas]]:
        return computed(self._own.program, self.groups, self._implied)

    @cached_property
    def _replicated(self) -> dict[str, set[Replicas]]:
        found = self._own.replicated()
        if self._implied:
            for name, groups in implied(self._own.program, self.groups).items():
                found.setdefault(name, set()).update(groups)
        return found

    def _key(self, old: Head, new: Head) -> object:
        """Equal for questions that differ in the names of their variables only."""
        names: dict[int, int] = {}
        extents = self.space.extents
        parts: list[object] = []
        for head in (old, new):
            label, functions = _label(head)
            parts.append(label)
            for f in functions:
                terms = []
                for v, k in f.terms:
                    if v not in names:
                        names[v] = len(names)
                    terms.append((names[v], k))
                parts.append((f.const, tuple(terms)))
        return (tuple(parts), tuple(extents[v] for v in names))

    # -- heads that compute alike -----------------------------------------------------------------------------

    def _compared(self, old: Head, new: Head, q: Question) -> Pairs:
        if isinstance(old, Cast) and isinstance(new, Cast) and _alike(old, new):
            return [(old.source, new.source)]
        if isinstance(old, Reduction) and isinstance(new, Reduction):
            ranks = old.group.sorted_digits()
            if (old.op, old.dtype, ranks) == (new.op, new.dtype, new.group.sorted_digits()) and old.byte == new.byte:
                digits = self.space.box(n for n, _ in ranks)
                pair = old.on(digits), new.on(digits)
                if self._nested_alike(*pair, old.op):
                    return [pair]
        if isinstance(old, Access) and isinstance(new, Access):
            if (cut := self._same_cut(old, new)) is not None:
                return cut
            found = signature(old), signature(new)
            if found[0] is not None and found[1] is not None and self._corresponds(old, new, found[0], found[1]):
                if old.rank != new.rank and not alike(new.record):
                    raise Unequal(f"not understood: numbers in {new.record.name} may be a rank's own", shown=False)
                return self._operands(old, new, found[0], found[1])
        return self._sums(old, new, q)

    def _same_cut(self, old: Access, new: Access) -> Pairs | None:
        """What is equal where the same may be taken out of two tensors at a rank's own place: all that lies there."""
        owns = self._own, self.own_pieces if new.record.program is self.own_pieces.program else self._own
        if not (owns[0].may_be_elsewhere(old) and owns[1].may_be_elsewhere(new)):
            return None
        found = owns[0].same_cut(old, owns[1], new)
        if found is None:
            return None
        dim, size = found
        # The result of a select has a dimension less.
        kept = len(old.indices) == len(old.record.first.shape())
        if kept and old.indices[dim] != new.indices[dim]:
            return None
        place = self.space.fresh(size)
        after = dim + 1 if kept else dim
        reads = [a.at(a.record.first, (*a.indices[:dim], place, *a.indices[after:])) for a in (old, new)]
        return [(reads[0], reads[1])]

    def _nested_alike(self, old: Access, new: Access, op: str) -> bool:
        """Whether both or neither of two terms are sums themselves."""
        try:
            heads = self.old.head(old), self.new.head(new)
        except NeedsCut as cut:
            v = cut.variable
            if v not in old.variables() | new.variables():
                return True
            return all(self._nested_alike(old.put(v, piece), new.put(v, piece), op) for piece in cut.pieces)
        except (NeedsBytes, UndecidedError):
            # Whether they are equal is asked next.
            return True
        return (sum_op(heads[0]) == op) == (sum_op(heads[1]) == op)

    def _corresponds(self, old: Access, new: Access, was: Signature, now: Signature) -> bool:
        """Whether two operators are one function of operands that can be compared one by one."""
        if was.key != now.key or len(was.uses) != len(now.uses) or old.byte != new.byte:
            return False
        sizes = [[size for _, size in inner] for s in (was, now) for inner in (s.whole, s.summed)]
        if sizes[:2] != sizes[2:] or was.positions(old) != now.positions(new):
            return False
        if self.exact and was.sized:
            return old.shape == new.shape and was.shapes() == now.shapes()
        # Whole numbers may be added in another order in the exact tier too.
        fixed = self.exact and (old.dtype.is_floating_point or old.dtype.is_complex)
        return fixed or not sum_op(old) or self._in_order(old, new, was, now)

    def _in_order(self, old: Access, new: Access, was: Signature, now: Signature) -> bool:
        """Whether two sums add the same things in the same order, by where their operands come from."""
        try:
            pairs = self._operands(old, new, was, now)
            return all(self._sides[0].anchor(a)[:2] == self._sides[1].anchor(b)[:2] for a, b in pairs)
        except NeedsCut:
            return False

    def _operands(self, old: Access, new: Access, was: Signature, now: Signature) -> Pairs:
        pairs = []
        mine, other = was.binding(old), now.binding(new)
        for (a, size), (b, _) in zip((*was.whole, *was.summed), (*now.whole, *now.summed)):
            mine[a] = other[b] = self.space.fresh(size)
        for left, right in zip(was.uses, now.uses):
            pairs.append((left.read(old, mine), right.read(new, other)))
        return pairs

    def _sums(self, old: Head, new: Head, q: Question) -> Pairs:
        op = sum_op(old) or sum_op(new)
        if isinstance(old, Constant) != isinstance(new, Constant) and self._both_nothing(old, new, q):
            return []
        if not op or isinstance(old, Constant) or isinstance(new, Constant) or q.old.dtype != q.new.dtype:
            raise different(old, new)
        # What must not be added in another order is a function of its operands, and no more is asked of it.
        numbers = q.old.dtype.is_floating_point or q.old.dtype.is_complex
        closed = self.exact and op in ("sum", "max", "min") and numbers
        # One graph may take a sum apart on one rank, and the other on another one that holds the same sum.
        with contextlib.suppress(Unequal), self._on_one_rank():
            return self._same_sums(old, new, *self._flattened(q, op, closed, widens=False), in_place=True)
        try:
            return self._same_sums(old, new, *self._flattened(q, op, closed, widens=False))
        except Unequal:
            # One graph may add a term of every rank, and the other the own one and those of the others. They are
            # recognised as one family where all of them are taken apart equally far.
            with contextlib.suppress(Unequal), self._stopping_here():
                return self._same_sums(old, new, *self._flattened(q, op, closed, widens=False))
            if closed and op == "sum" and (pairs := self._last_addition(old, new, q)) is not None:
                return pairs
            if self.exact:
                raise
            # Only now, because what is taken apart so can be compared in fewer ways.
            apart = self._flattened(q, op, closed, widens=True, whole=True)
            if not apart[0].narrower:
                raise
        try:
            return self._same_sums(old, new, *apart)
        except Unequal:
            return self._same_sums(old, new, *self._flattened(q, op, closed, widens=True))

    def _last_addition(self, old: Head, new: Head, q: Question) -> Pairs | None:
        """What has to be equal where only what is added last may be in another order: a reduction of sums, for one."""
        for stops in (contextlib.nullcontext, self._stopping_here):
            with contextlib.suppress(Unequal), stops():
                return self._same_sums(old, new, *self._flattened(q, "sum", True, widens=False, shallow=True))
        return None

    @contextlib.contextmanager
    def _stopping_here(self) -> Iterator[None]:
        """Inside, values of this rank are followed no further than those of other ranks."""
        owns = self._own, self.own_pieces
        for own in owns:
            own.stops_here = True
        try:
            yield
        finally:
            for own in owns:
                own.stops_here = False

    @contextlib.contextmanager
    def _on_one_rank(self) -> Iterator[None]:
        """Inside, sums that ranks hold alike are taken apart on one of these ranks."""
        if not self._replicated:
            raise Unequal("no value is taken to be equal on several ranks", shown=False)
        for flattener, side in zip(self._flatteners, self._sides):
            flattener.holder = functools.partial(self._held, side.common)
        try:
            yield
        finally:
            for flattener in self._flatteners:
                flattener.holder = None

    def _held(self, common: Mapping[str, str], name: str, rank: Affine) -> Affine:
        """:meth:`_holder` of what a graph calls ``name``."""
        known = common.get(name)
        return rank if known is None else self._holder(known, rank)

    def _both_nothing(self, old: Head, new: Head, q: Question) -> bool:
        """Whether one is zero and the other a sum of zeros: padding is added to padding."""
        place, read = (1, q.new) if isinstance(old, Constant) else (0, q.old)
        number, other = (old, new) if place else (new, old)
        if not isinstance(number, Constant) or not is_zero(number) or q.old.dtype != q.new.dtype:
            return False
        if sum_op(other) != "sum":
            return False
        resolver = (self.old, self.new)[place]
        total = self._flatteners[place].flattened(read, "sum", read.dtype)
        heads = [resolver.head(r) for term in total.terms for r in term.reads]
        nothing = all(isinstance(head, Constant) and is_zero(head) for head in heads)
        return nothing and all(term.scale > 0 for term in total.terms)

    def _flattened(
        self, q: Question, op: str, closed: bool, widens: bool, whole: bool = False, shallow: bool = False
    ) -> tuple[Sum, Sum, bool]:
        """Both sums, and whether what the new one adds was rounded to be sent."""
        rounded = self.new.roundings
        sides = zip(self._flatteners, (q.old, q.new))
        was, now = (side.flattened(read, op, q.old.dtype, closed, widens, whole, shallow) for side, read in sides)
        return was, now, self.new.roundings > rounded

    def _same_sums(
        self, old: Head, new: Head, was: Sum, now: Sum, sent_rounded: bool, in_place: bool = False
    ) -> Pairs:
        """What has to be equal for two sums to be; ``in_place``: see :func:`matched`."""
        if not was.joins and not now.joins:
            raise different(old, new)
        # A reduction over ranks may add in any order where what it adds was rounded to be sent.
        free = isinstance(old, Reduction) and sent_rounded
        if self.exact and not free and not in_any_order(self.space, was, now):
            raise changed(old, new, "the terms are added up in other steps, which the exact tier does not allow")
        one = isinstance(old, Access) and adds_one(old.record)
        if now.is_coarser_than(was) and not one:
            raise changed(old, new, f"it adds in {now.dtype} where the reference adds in a wider type")
        for sides in (self._apart, self._sides):
            with contextlib.suppress(Unequal):
                return matched(self.space, (was, sides[0]), (now, sides[1]), in_place)
        return matched(self.space, (was, self._specific[0]), (now, self._specific[1]), in_place)


def _itself(name: str, rank: Affine) -> Affine:
    """As ``Proof._place``, where every rank is taken for itself."""
    return rank


def _same_byte(old: Head, new: Head) -> tuple[Head, Head]:
    """Equal bytes of equal elements: ask for the elements."""
    if isinstance(old, Constant) or isinstance(new, Constant) or old.byte is None or old.byte != new.byte:
        return old, new
    return old._replace(byte=None), new._replace(byte=None)


def _alike(old: Cast, new: Cast) -> bool:
    return (old.dtype, old.source.dtype, old.byte) == (new.dtype, new.source.dtype, new.byte)


def _label(head: Head) -> tuple[object, tuple[Affine, ...]]:
    if isinstance(head, Access):
        return (id(head.record), head.path, head.byte is None, id(head.reader)), head.functions()
    if isinstance(head, Cast):
        inner, functions = _label(head.source)
        return ("cast", head.dtype, inner, head.byte), functions
    if isinstance(head, Reduction):
        inner, functions = _label(head.term)
        return ("reduction", head.op, head.dtype, head.group.sorted_digits(), inner, head.byte), functions
    return head, ()


def _at_one_place(old: Access, new: Access) -> bool:
    """Whether two reads are of values of one form, at one index."""
    if (old.rank, old.indices, old.byte, old.dtype) != (new.rank, new.indices, new.byte, new.dtype):
        return False
    try:
        return old.shape == new.shape
    except UndecidedError:
        return False
