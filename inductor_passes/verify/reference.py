"""A graph against the graph that it was made from: nothing that matters is lost, duplicated, changed or reordered.

Nodes are matched by name, and by structure (same op on the same inputs) where a pass gave a new name. A matched node
must be the same op with the same arguments; operands may change only where a certificate says so. By induction every
matched node has the value that it had, provided that writes to memory keep their order. That is checked per storage:
whoever touches a storage that is written to must see the same last writer as before.

Literals, constants and the graphs that higher-order operators run are compared whatever certificates say.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from inductor_passes.ir.ops import Role
from inductor_passes.report import Finding
from inductor_passes.verify import transfers
from inductor_passes.verify.certificate import Certificate, Certified, Claim
from inductor_passes.verify.coverage import covered
from inductor_passes.verify.snapshot import CollectiveRecord, NodeRecord, ReferenceSnapshot

GroupOrder = Literal["kept", "any"]


def compare(
    before: ReferenceSnapshot,
    after: ReferenceSnapshot,
    certificates: Sequence[Certificate] = (),
    group_order: GroupOrder = "kept",
) -> list[Finding]:
    """Findings of ``after`` against ``before``.

    Args:
        certificates: what rewrites say that they did; everything else must be as it was.
        group_order: ``"kept"`` refuses another order of starts within a process group; ``"any"`` leaves that to a
            comparison of digests between ranks.
    """
    certified, found = covered(before, after, certificates)
    comparison = _Comparison(before, after, certified)
    found += [
        *comparison.signature(),
        *comparison.missing(),
        *comparison.extra(),
        *comparison.kept(),
        *comparison.channels(),
        *comparison.fences(),
        *comparison.transfers(group_order),
        *comparison.claims(),
        *comparison.bodies(),
    ]
    if group_order == "kept":
        found.extend(comparison.group_orders())
    return found


def inside(name: str, finding: Finding) -> Finding:
    """A finding inside the graph that an attribute holds, named ``attribute/node``."""
    other = f"{name}/{finding.other}" if finding.other else ""
    return dataclasses.replace(finding, node=f"{name}/{finding.node}", other=other)


def _at(rule: str, record: NodeRecord, message: str, other: str = "") -> Finding:
    return Finding(rule, record.name, message, other, record.source)


class _Comparison:
    def __init__(self, before: ReferenceSnapshot, after: ReferenceSnapshot, certified: Certified) -> None:
        self.before = before
        self.after = after
        self.certified = certified
        #: name after -> name before, for nodes that a pass renamed
        self.old_name = self._renamed()
        self.new_name = {old: new for new, old in self.old_name.items()}

    def _renamed(self) -> dict[str, str]:
        missing: dict[int, list[str]] = {}
        for name, record in self.before.nodes.items():
            if name not in self.after.nodes and name not in self.certified.removed:
                missing.setdefault(record.structure, []).append(name)
        if not missing:
            return {}
        for names in missing.values():
            names.reverse()
        renamed: dict[str, str] = {}
        for name, record in self.after.nodes.items():
            if name not in self.before.nodes and name not in self.certified.added and missing.get(record.structure):
                renamed[name] = missing[record.structure].pop()
        return renamed

    def _old(self, name: str) -> str:
        return self.old_name.get(name, name)

    def _pairs(self) -> Iterator[tuple[NodeRecord, NodeRecord]]:
        for name, record in self.after.nodes.items():
            old = self.before.nodes.get(self._old(name))
            if old is not None:
                yield old, record

    def signature(self) -> Iterator[Finding]:
        """Same graph inputs in the same order."""
        inputs = [
            [r.name for r in s.nodes.values() if r.op == "placeholder"] for s in (self.before, self.after)
        ]
        if inputs[0] != inputs[1]:
            yield Finding("signature", inputs[1][0] if inputs[1] else "", f"inputs were {inputs[0]}, are {inputs[1]}")

    def missing(self) -> Iterator[Finding]:
        """Effects that are gone. A pure node may go; that nobody kept needs it shows at its users."""
        for name, record in self.before.nodes.items():
            if name in self.after.nodes or name in self.new_name or name in self.certified.removed:
                continue
            if record.role is Role.START:
                yield _at("collective-lost", record, f"{name}: {self.before.collectives[name]} is gone")
            elif record.role is Role.WAIT:
                yield _at("wait-lost", record, f"the wait {name} is gone")
            elif record.channel:
                yield _at(f"{_CHANNEL_RULES[record.channel]}-lost", record, f"{name} ({record.target}) is gone")
            elif record.writes:
                yield _at("side-effect-lost", record, f"{name} wrote to {', '.join(record.writes)} and is gone")
            elif record.op == "output":
                yield _at("side-effect-lost", record, f"the output {name} is gone")

    def extra(self) -> Iterator[Finding]:
        """Nodes that came from nowhere. Views are free to come."""
        known = Counter(c.key for c in self.before.collectives.values())
        for name, record in self.after.nodes.items():
            if name in self.before.nodes or name in self.old_name or name in self.certified.added:
                continue
            if record.role is Role.START:
                collective = self.after.collectives[name]
                twice = known[collective.key] > 0
                rule = "collective-duplicated" if twice else "collective-added"
                yield _at(rule, record, f"{name}: {collective} was not in the reference{' as often' if twice else ''}")
            elif record.role is Role.WAIT:
                yield _at("wait-added", record, f"the wait {name} was not in the reference")
            elif record.channel:
                yield _at(f"{_CHANNEL_RULES[record.channel]}-added", record, f"{name} ({record.target}) is new")
            elif record.writes:
                yield _at("side-effect-added", record, f"{name} writes to {', '.join(record.writes)} and is new")
            elif record.role is Role.COMPUTE:
                yield _at("compute-added", record, f"{name} ({record.target}) was not in the reference")

    def kept(self) -> Iterator[Finding]:
        """Nodes of both graphs: same op, same arguments, same memory versions, same metadata."""
        for old, new in self._pairs():
            if self.certified.edited(old.name):
                continue
            if (old.op, old.target) != (new.op, new.target) or old.literals != new.literals:
                rule = "collective-changed" if old.role is Role.START else "node-changed"
                yield _at(rule, new, f"{new.name} was {old.target}({old.literals}), is {new.target}({new.literals})")
                continue
            operands = tuple(map(self._old, new.operands))
            if operands != old.operands:
                yield from self._operands(old, new, operands)
            if old.value != new.value:
                yield _at("metadata-changed", new, f"{new.name} was {old.value}, is {new.value}")
            if old.role is Role.START and operands == old.operands:
                was, now = self.before.collectives[old.name], self.after.collectives[new.name]
                if was.key != now.key:
                    yield _at("collective-changed", new, f"{new.name} was {was}, is {now}")
            if old.versions != new.versions:
                yield from self._versions(old, new, operands == old.operands)

    def _operands(self, old: NodeRecord, new: NodeRecord, operands: tuple[str, ...]) -> Iterator[Finding]:
        for was, now in zip(old.operands, operands):
            if was == now or self.certified.redirects(was, now):
                continue
            lost = was not in self.after.nodes and was not in self.new_name
            rule = "compute-lost" if lost and self.before.nodes[was].role is Role.COMPUTE else "operand-changed"
            yield _at(rule, new, f"{new.name} read {was}{', which is gone, and' if lost else ','} now reads {now}", was)

    def _versions(self, old: NodeRecord, new: NodeRecord, same_operands: bool) -> Iterator[Finding]:
        now = {self._old_block(block): self._old(writer) for block, writer in new.versions}
        for block, writer in old.versions:
            owner = block.rpartition("#")[0]
            if block not in now:
                # With other operands it may touch other memory; whether it may have them is a question of its own.
                if same_operands and not self._is_covered(owner):
                    message = f"{new.name} touches memory of {owner}, which is not what it was any more"
                    yield _at("memory-order", new, message, owner)
                continue
            seen = now[block]
            if seen != writer and not self.certified.redirects(writer, seen):
                yield _at(
                    "memory-order",
                    new,
                    f"{new.name} must see {owner} as {writer or 'its producer'} left it, "
                    f"but {seen or 'nobody'} wrote it last",
                    writer,
                )

    def _old_block(self, block: str) -> str:
        owner, _, number = block.rpartition("#")
        return f"{self._old(owner)}#{number}"

    def _is_covered(self, name: str) -> bool:
        return name in self.certified.removed or name in self.certified.added

    def _sequence(self, rule: str, before: Sequence[str], after: Sequence[str], what: str) -> Iterator[Finding]:
        """The nodes that both sequences hold come in the same order."""
        old = [n for n in before if n in self.after.nodes or n in self.new_name]
        present = set(old)
        new = [n for n in map(self._old, after) if n in present]
        for expected, got in zip(old, new):
            if expected != got:
                name = self.new_name.get(got, got)
                yield _at(rule, self.after.nodes[name], f"{what}: {name} comes where {expected} was", expected)
                return

    def channels(self) -> Iterator[Finding]:
        """Random draws and asserts keep their order, draws also towards what may draw or set a state unseen."""
        for channels, what in (
            (("random",), "random draws changed order"),
            (("random", "fence"), "a random draw moved across an op with unknown effects"),
            (("assert",), "asserts changed order"),
        ):
            rule = f"{_CHANNEL_RULES[channels[0]]}-order"
            yield from self._sequence(rule, self.before.channel(*channels), self.after.channel(*channels), what)

    def group_orders(self) -> Iterator[Finding]:
        """Starts of a process group keep their order."""
        after = self.after.group_order
        for group, names in self.before.group_order.items():
            yield from self._sequence("group-order", names, after.get(group, ()), f"order on group {group} changed")

    def fences(self) -> Iterator[Finding]:
        """Fences keep their order, and everything that communicates stays between the fences where it was."""
        before, after = self.before.fences, self.after.fences
        if not before and not after and not self.before.transfers:
            return
        yield from self._sequence("fence-order", before, after, "fences changed order")
        was, now = self._segments(moving=True)
        for name, segment in now.items():
            old = self._old(name)
            if old in was and segment != was[old]:
                yield self._crossed(name, segment or was[old])
        # What a rewrite adds stays between the transfers that were around what it stands for.
        was, now = self._segments(moving=False)
        for name in self.certified.added:
            allowed = {
                was[removed]
                for number in self.certified.added[name]
                for removed in self.certified.certificates[number].removed
                if removed in was
            }
            if name in now and self._old(name) not in was and allowed and now[name] not in allowed:
                yield self._crossed(name, now[name] or next(iter(allowed)))

    def _crossed(self, name: str, fence: str) -> Finding:
        return _at("fence", self.after.nodes[name], f"{name} moved across the fence {fence}", fence)

    def _segments(self, *, moving: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Of both graphs: name of a communicating node -> the last fence before it that both have, by its old name.

        Args:
            moving: whether transfers move between fences; otherwise they are some.
        """
        gone = {f for f in self.before.nodes if f not in self.after.nodes and f not in self.new_name}
        came = {f for f in self.after.nodes if self._old(f) not in self.before.nodes}
        now = _segments(self.after, came, moving)
        return _segments(self.before, gone, moving), {name: self._old(fence) for name, fence in now.items()}

    def transfers(self, group_order: GroupOrder) -> Iterator[Finding]:
        """Messages between two ranks, and everything around them, in an order in which no rank hangs."""
        if not self.before.transfers:
            return
        for found in transfers.compared(
            {name: record.role for name, record in self.before.nodes.items()},
            self.before.transfers,
            {wait for record in self.before.collectives.values() for wait in record.waits},
            {self._old(name): place for place, name in enumerate(self.after.nodes)},
            agreed=group_order == "any",
        ):
            yield dataclasses.replace(found, source=self.before.nodes[found.node].source)

    def claims(self) -> Iterator[Finding]:
        """Certificates: what they claim about collectives holds."""
        for certificate in self.certified.certificates:
            old = [self.before.collectives[n] for n in certificate.removed if n in self.before.collectives]
            new = [self.after.collectives[n] for n in certificate.added if n in self.after.collectives]
            yield from _claim(certificate, old, new)

    def bodies(self) -> Iterator[Finding]:
        """The graphs that higher-order operators run are what they were; no certificate covers anything in them."""
        for name, old in self.before.bodies.items():
            new = self.after.bodies.get(name)
            if new is not None:
                yield from (inside(name, f) for f in compare(old, new))
            elif any(r.op == "get_attr" and r.target == name for r in self.after.nodes.values()):
                yield Finding("node-changed", name, f"{name} was a graph that is run, and is none any more")


_CHANNEL_RULES = {"random": "rng", "assert": "side-effect", "fence": "side-effect", "transfer": "transfer"}


def _segments(snapshot: ReferenceSnapshot, ignored: set[str], moving: bool) -> dict[str, str]:
    """Name of a communicating node -> the last fence before it that counts; see :meth:`_Comparison._segments`."""
    segment = ""
    result: dict[str, str] = {}
    for name, record in snapshot.nodes.items():
        if record.role in (Role.START, Role.WAIT) or (moving and name in snapshot.transfers):
            result[name] = segment
        elif record.role is Role.FENCE and name not in ignored:
            segment = name
    return result


def _claim(certificate: Certificate, old: list[CollectiveRecord], new: list[CollectiveRecord]) -> Iterator[Finding]:
    where = (new or old)[0].name if new or old else (certificate.added + certificate.removed + ("",))[0]
    # A message is rounded once, and once more where its sum is sent on.
    hops = 0 if len(old) != 1 else 2 if old[0].kind == "all_reduce" else 1
    arrive = [one for one in certificate.narrowed if not one.own]
    if len(arrive) > hops:
        said = f"{certificate.rewrite} narrows {len(arrive)} messages in the place of {len(old)}"
        yield Finding("narrowed", where, f"{said} collectives; {hops} is allowed")
    if certificate.claim is Claim.REMOVE and new:
        yield Finding("certificate", where, f"{certificate.rewrite} claims to remove collectives and adds {len(new)}")
    if certificate.claim is not Claim.MERGE:
        return
    kinds = {(c.kind, c.group, c.reduce_op) for c in old}
    if len(kinds) != 1 or {(c.kind, c.group, c.reduce_op) for c in new} != kinds:
        yield Finding(
            "certificate",
            where,
            f"{certificate.rewrite} claims to merge collectives of one kind, group and reduce op; "
            f"had {', '.join(map(str, old))}; has {', '.join(map(str, new))}",
        )
    elif len(new) > len(old):
        yield Finding("certificate", where, f"{certificate.rewrite} turns {len(old)} collectives into {len(new)}")
    else:
        was, now = [_total(old), _total(new)]
        if was is not None and now is not None and now < was:
            yield Finding("certificate", where, f"{certificate.rewrite} merges {was} bytes into {now}")


def _total(records: list[CollectiveRecord]) -> int | None:
    sizes = [r.input_bytes for r in records]
    return None if None in sizes else sum(s for s in sizes if s is not None)
