"""Error feedback: what a rank takes its own message to bring is what all ranks that receive it widen from it.

``inductor_passes::sent`` of a value is that value. Where it is read rounded instead, some collective has to send that
very rounding. So for every element that arrives somewhere, rounded, the rank that sent it has to read an element of
the same codes and of the same scale in the place of ``sent``: one division by one scale, rounded to one type. That no
other element is read there, and how exact it is, is proven as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from inductor_passes.verify.values import narrowed
from inductor_passes.verify.values.access import Access, Constant
from inductor_passes.verify.values.affine import NeedsCut
from inductor_passes.verify.values.bytes import NeedsBytes
from inductor_passes.verify.values.communication import NewCoordinateError
from inductor_passes.verify.values.heads import Resolver
from inductor_passes.verify.values.program import Program, Record
from inductor_passes.verify.values.proof import Proof
from inductor_passes.verify.values.sizes import NoHintError


def wrongly_kept(proof: Proof, now: Record) -> str:
    """What is wrong with the value that is read in the place of ``sent``; nothing when all is well.

    Args:
        now: in the new graph, proven to be what the operand of ``sent`` was, rounded or not.

    Raises:
        NoHintError, NotRegularError: it is not understood.
    """
    while True:
        try:
            return _wrong(proof, now)
        except NewCoordinateError:
            continue
        except NeedsBytes:
            raise NoHintError(f"{now.name} is put together from bytes") from None


def _wrong(proof: Proof, now: Record) -> str:
    new, here = proof.new, proof.groups.here
    sources: set[Record] = set()
    exact: list[bool] = []

    def own(a: Access) -> None:
        """An element that the rank takes to have been sent."""
        found = new.arrival(a)
        exact.append(found is None)
        if found is not None:
            source = new.head(found.source)
            if not isinstance(source, Access) or (source.rank, source.indices) != (a.rank, a.indices):
                raise NoHintError(f"{now.name} is another layout of what is sent")
            sources.add(source.record)

    _by_piece(Access(now, (), here, proof.space.box(now.shape())), own)
    if all(exact):
        return ""
    if any(exact) or len(sources) != 1:
        return f"{now.name} is in part what is sent and in part what arrives of it"
    (source,) = sources
    far: list[bool] = []

    def other(a: Access) -> None:
        """An element that arrives anywhere."""
        found = narrowed.rounded(new, a)
        if new.arrival(found.source) is not None:
            return  # it carries what another message brought, which is looked at there
        value = new.head(found.source)
        if isinstance(value, Constant) or not isinstance(value, Access) or value.record is not source:
            return
        mine = new.arrival(Access(now, (), value.rank, value.indices))
        if mine is None or mine.codes != found.codes:
            raise _Another(f"{now.name} is not widened from the codes that {a.record.name} widens")
        far.append(value.rank != here)

    try:
        for read in _reading(new, now.program, source):
            _by_piece(Access(read, (), here, proof.space.box(read.shape())), other)
    except _Another as why:
        return str(why)
    return "" if any(far) else f"{now.name} is rounded, and no message sends it so"


class _Another(Exception):
    """Codes of another message, or of another rounding."""


def _reading(new: Resolver, program: Program, source: Record) -> list[Record]:
    """The nodes that widen what is a rounding of ``source``, as far as an edge tells: all others are others'."""
    behind = {source.name}
    for record in program.records.values():
        if any(operand.name in behind for operand in record.raw_operands):
            behind.add(record.name)
    return [program.records[name] for name in new.rounds if name in behind]


def _by_piece(a: Access, examine: Callable[[Access], None]) -> None:
    """Examine an element for all values of its variables, cut where the layout needs it."""
    todo = [a]
    while todo:
        one = todo.pop()
        try:
            examine(one)
        except NeedsCut as cut:
            if cut.variable not in one.variables():
                raise NoHintError("a layout that is cut within an operator") from cut
            todo += [one.put(cut.variable, piece) for piece in cut.pieces]
