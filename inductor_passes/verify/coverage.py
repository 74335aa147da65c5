"""What certificates may cover: data movement, casts, computation and collectives, and nothing that has an effect.

A fence, a random draw, an assert, an input, an output or a write to memory that the graph had before must stay,
whatever a certificate says. Whoever reads an input or the result of an effect must go on reading it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from inductor_passes.ir.ops import Role
from inductor_passes.report import Finding
from inductor_passes.verify.certificate import Certificate, Certified
from inductor_passes.verify.snapshot import NodeRecord, ReferenceSnapshot


def covered(
    before: ReferenceSnapshot, after: ReferenceSnapshot, certificates: Sequence[Certificate]
) -> tuple[Certified, list[Finding]]:
    """(the certificates as far as they count, what stands against them)."""
    found: list[Finding] = []
    kept = []
    for certificate in certificates:
        against = dict(_against(before, after, certificate))
        kept.append(
            dataclasses.replace(
                certificate,
                removed=tuple(n for n in certificate.removed if n not in against),
                added=tuple(n for n in certificate.added if n not in against),
                replaced=tuple(p for p in certificate.replaced if p[0] not in against and p[1] not in against),
            )
        )
        found.extend(Finding("certificate", name, f"{certificate.rewrite}: {why}") for name, why in against.items())
    return Certified(tuple(kept)), found


def _against(
    before: ReferenceSnapshot, after: ReferenceSnapshot, certificate: Certificate
) -> Iterator[tuple[str, str]]:
    """(name, why it cannot be covered)."""
    added = frozenset(certificate.added)
    for name in certificate.removed:
        record = before.nodes.get(name)
        if record is None:
            yield name, f"{name} was not in the reference"
        elif why := _effect(record, frozenset()):
            yield name, f"{name} {why}, and no rewrite may take it away or change it"
    for name in certificate.added:
        record = after.nodes.get(name)
        if record is None:
            yield name, f"{name} is not in the graph"
        elif why := _effect(record, added):
            yield name, f"{name} {why}, and no rewrite may add or change it"
    for old, _ in certificate.replaced:
        record = before.nodes.get(old)
        if record is None:
            yield old, f"{old} was not in the reference"
        elif why := _effect(record, frozenset()):
            yield old, f"{old} {why}, and who reads it must go on reading it"


def _effect(record: NodeRecord, own: frozenset[str]) -> str:
    """What keeps a certificate from covering a node; ``own`` names nodes whose memory may be written to."""
    if record.role in (Role.INPUT, Role.OUTPUT):
        return f"is an {record.role.value} of the graph"
    if record.role is Role.FENCE and not record.communicates:
        return "has unknown effects"
    if record.channel in ("random", "assert") and not record.certain:
        return "draws random numbers" if record.channel == "random" else "checks something"
    if any(name not in own for name in record.written):
        return "writes to memory"
    return ""
