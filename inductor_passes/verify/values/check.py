"""What a pass changed, value by value, by induction over the nodes that both graphs have.

A node of both graphs that calls the same operator on equal values has an equal value. So it is enough to prove, in the
order of the new graph, each operand that was replaced, for every matched node that computes, has an effect or returns.
Nodes that only move elements, and collectives, are not proven themselves; instead their readers are. Certificates
excuse nothing. A node that a certificate says was edited is treated as a new one, whose readers are proven instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch.fx

from inductor_passes.operators import SENT
from inductor_passes.report import Finding
from inductor_passes.verify.certificate import Certificate, Narrowed
from inductor_passes.verify.facts.operators import nodes_in
from inductor_passes.verify.messages import KEY, OWN_KEY
from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import ZERO, TooManyPiecesError
from inductor_passes.verify.values.communication import COLLECTIVES
from inductor_passes.verify.values.definitions import DEFINED
from inductor_passes.verify.values.differences import Unequal
from inductor_passes.verify.values.kept import wrongly_kept
from inductor_passes.verify.values.movement import ALIASES
from inductor_passes.verify.values.moves import MOVES
from inductor_passes.verify.values.program import Program, Record
from inductor_passes.verify.values.proof import Numerics, Proof, Replicated
from inductor_passes.verify.values.sending import wrongly_sent
from inductor_passes.verify.values.signatures import is_pure
from inductor_passes.verify.values.sizes import NoHintError
from inductor_passes.verify.values.strided import NotRegularError

#: Proofs that fail until the rest is left unexamined.
MAX_FINDINGS = 10


def changed_values(
    before: Program,
    after: Program,
    numerics: Numerics = "exact",
    edited: Collection[str] = (),
    replicas: Replicated = "proven",
    rounds: Mapping[str, Narrowed] | None = None,
    own: Mapping[str, Narrowed] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Everything in ``after`` whose value is not shown to be that of ``before``; empty when all is proven.

    Args:
        numerics: ``"exact"``: bit for bit; ``"reassociate"``: sums may be regrouped, see ``docs/verifier.md``.
        edited: names of nodes that a pass says it edited in place.
        replicas: ``"implied"``: operands are taken to be equal on ranks as ``implied`` says.
        rounds: names of nodes that may arrive rounded -> by how much at most, and over which group, see ``narrowed``.
        own: the same of nodes that may be read in the place of ``sent`` only, see ``kept``.
        replaced: names of new values -> the value in whose place others read it.
    """
    replaced = replaced or {}
    proof = Proof(before, after, numerics, replicas, rounds, own)
    found: list[Finding] = []
    for record in after.records.values():
        if KEY in record.meta:
            found += _statement(proof, record)
        if OWN_KEY in record.meta:
            found += _own_piece(proof, record)
        stands_for = before.records.get(replaced.get(record.name, ""))
        if stands_for is not None and record.name not in before.records:
            proof.stand(record, stands_for)
        old = before.records.get(record.name)
        if old is not None and old.op == record.op:
            found += _kept(proof, old, record, record.name in edited)
            if len(found) >= MAX_FINDINGS:
                break
    return found


def compared(
    before: Program | None,
    after: Program | None,
    certificates: Sequence[Certificate],
    numerics: Numerics,
    replicas: Replicated = "proven",
    rounding: Fraction | None = None,
) -> list[Finding]:
    """:func:`changed_values` with what certificates say; nothing without both programs."""
    if before is None or after is None:
        return []
    edited = {name for c in certificates for name in {*c.removed} & {*c.added}}
    found = list(_excessive(certificates, rounding))
    named = [one for certificate in certificates for one in certificate.narrowed]
    rounds, own = ({one.read: one for one in named if one.own is kept} for kept in (False, True))
    replaced = {new: was for certificate in certificates for was, new in certificate.replaced}
    return found or changed_values(before, after, numerics, edited, replicas, rounds, own, replaced)


def _excessive(certificates: Sequence[Certificate], rounding: Fraction | None) -> Iterator[Finding]:
    """Findings where a certificate asks for more than is allowed."""
    for certificate in certificates:
        for one in certificate.narrowed:
            if one.read not in certificate.added:
                yield Finding("narrowed", one.read, f"{certificate.rewrite} narrows what it did not add")
            elif rounding is None or one.error > rounding:
                most = "none is" if rounding is None else f"{float(rounding):g} is"
                said = f"{certificate.rewrite} rounds by up to {float(one.error):g} of a block's largest element"
                yield Finding("narrowed", one.read, f"{said}; {most} allowed")


def _kept(proof: Proof, old: Record, new: Record, edited: bool) -> list[Finding]:
    if new.op in ("placeholder", "get_attr"):
        if old.target == new.target:
            proof.know(new.name, old.name)
        return []
    if _is_untouched(proof, old, new):
        proof.know(new.name, old.name)
        return []
    moves = new.called in MOVES or new.called in COLLECTIVES or new.called in DEFINED
    # Memory that is written to later is not what it began as: it has to be equal from the beginning.
    looked_through = moves and not proof.memories[1].is_written(new.name)
    pure = is_pure(new)
    pairs = _paired(old, new) if old.target == new.target else None
    if pairs is None:
        # What it computes now is for its readers to need. Something with an effect has none.
        if pure or looked_through:
            return []
        return [_finding("value-changed", new, None, None, f"{new.name} is not the call that it was")]
    changed = [(a, b) for a, b in pairs if proof.same.get(b.name) != a.name or _rewritten(proof, (old, a), (new, b))]
    if changed and (looked_through or (edited and pure)):
        return []
    found = [f for a, b in changed for f in _operand(proof, old, new, a, b)]
    # What has been reported once is not reported again for everything behind it.
    proof.know(new.name, old.name)
    return found


def _is_untouched(proof: Proof, old: Record, new: Record) -> bool:
    """Whether a node has the very arguments that it had, all of them known to be equal: nothing else is looked at."""
    if old.target is not new.target or old.args is not new.args or old.kwargs is not new.kwargs:
        return False
    if any(m.any for m in proof.memories):
        return False
    known, was = proof.same, old.program.record
    return all(known.get(n.name) == was(n).name for n in nodes_in((new.args, new.kwargs)))


def _rewritten(proof: Proof, old: tuple[Record, Record], new: tuple[Record, Record]) -> bool:
    """Whether somebody else has written to what (reader, operand) reads."""
    if not any(m.any for m in proof.memories) or new[0].called in ALIASES:
        return False
    versions = [m.version(o.name, r.position) for m, (r, o) in zip(proof.memories, (old, new))]
    return versions[0] != proof.translated(versions[1])


def _statement(proof: Proof, exchange: Record) -> list[Finding]:
    """An exchange with unequal parts has to send what it says."""
    try:
        why = wrongly_sent(proof.new, exchange)
    except (NoHintError, NotRegularError, TooManyPiecesError) as unknown:
        return [_finding("value-unproven", exchange, None, None, f"{exchange.name}: not understood: {unknown}")]
    return [_finding("value-changed", exchange, None, None, f"{exchange.name} {why}")] if why else []


def _own_piece(proof: Proof, split: Record) -> list[Finding]:
    """A split that says that its piece is the rank's own has to be cut so on this rank."""
    if proof.own_pieces.stated(split) is not None:
        return []
    used = proof.own_pieces.program.used_pieces(split)
    rank = proof.groups.here.const
    said = f"of {split.name}, pieces {used} are used, which it says are rank {rank}'s own and are not"
    return [_finding("value-changed", split, None, None, said)]


def _operand(proof: Proof, old: Record, new: Record, was: Record, now: Record) -> Iterator[Finding]:
    """Findings of one operand that was replaced."""
    if was.name in proof.memories[0].written(old.name) and was.name != now.name:
        yield _finding("value-changed", new, was, now, f"{new.name} writes to {now.name} and wrote to {was.name}")
        return
    try:
        paths = _tensors(was.value)
        if paths is None or paths != _tensors(now.value):
            if was.value is None or str(was.value) != str(now.value):
                raise Unequal(f"{now.name} is no tensor", shown=False)
            return
        for path in paths:
            readers = (old, new) if any(m.any for m in proof.memories) else (None, None)
            with proof.own_roundings() if was.called == SENT else contextlib.nullcontext():
                proof.show(
                    Access(was, path, ZERO, (), None, readers[0]),
                    Access(now, path, ZERO, (), None, readers[1]),
                )
                if was.called == SENT and (why := wrongly_kept(proof, now)):
                    raise Unequal(f"is not what the rank's message brings: {why}")
    except Unequal as unequal:
        rule = "value-changed" if unequal.shown else "value-unproven"
        at = f" at {list(unequal.at)}" if unequal.at else ""
        rank = proof.groups.here.const
        said = f"on rank {rank}, {new.name} reads {now.name} in the place of {was.name}, which{at} {unequal.message}"
        yield _finding(rule, new, was, now, said)
    except (NoHintError, NotRegularError) as why:
        yield _finding("value-unproven", new, was, now, f"{new.name} reads {now.name}: {why}")


def _finding(rule: str, new: Record, was: Record | None, now: Record | None, message: str) -> Finding:
    return Finding(rule, new.name, message, "" if was is None else was.name)


def _tensors(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]] | None:
    """Where the tensors of a result are; None when there is something else."""
    if hasattr(value, "dtype"):
        return [path]
    if not isinstance(value, (list, tuple)):
        return None
    found: list[tuple[int, ...]] = []
    for place, item in enumerate(value):
        inner = _tensors(item, (*path, place))
        if inner is not None:
            found += inner
    return found or None


def _paired(old: Record, new: Record) -> list[tuple[Record, Record]] | None:
    """Corresponding operands of two calls of one operator; None when anything else about them differs."""
    pairs: list[tuple[Record, Record]] = []
    if old.kwargs.keys() != new.kwargs.keys():
        return None
    values = [(old.args, new.args), *((value, new.kwargs[key]) for key, value in old.kwargs.items())]
    return pairs if all(_pair(a, b, old.program, new.program, pairs) for a, b in values) else None


def _pair(a: Any, b: Any, before: Program, after: Program, pairs: list[tuple[Record, Record]]) -> bool:
    if isinstance(a, torch.fx.Node):
        if not isinstance(b, torch.fx.Node):
            return False
        pairs.append((before.record(a), after.record(b)))
        return True
    if isinstance(a, (list, tuple)):
        return (
            isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(_pair(x, y, before, after, pairs) for x, y in zip(a, b))
        )
    if isinstance(a, dict):
        same = isinstance(b, dict) and a.keys() == b.keys()
        return same and all(_pair(x, b[key], before, after, pairs) for key, x in a.items())
    if isinstance(a, slice):
        parts = (a.start, a.stop, a.step)
        return isinstance(b, slice) and _pair(parts, (b.start, b.stop, b.step), before, after, pairs)
    return a is b or (type(a) is type(b) and str(a) == str(b))
