"""An order of Inductor's scheduler nodes against the order that it was made from; O(nodes + dependencies).

Inductor runs whatever order its last hook returns without a look. So: the same nodes, every dependency that it keeps
(artificial ones included) honoured, and, derived again from buffers instead of dependencies, the rules that hold on
FX: no read of a result before its wait, no write to a buffer in flight, waits complete, order per process group,
nothing that communicates across a fence, random draws and asserts in order, memory within budget.

Buffers that share memory (mutations, aliases) are followed to the buffer that owns it, the *root*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import groups, ops
from inductor_passes.ir.ops import Role
from inductor_passes.report import Finding
from inductor_passes.verify.reference import GroupOrder


def check_snodes(
    nodes: Sequence[Any],
    reference_order: Sequence[Any],
    *,
    memory_budget: int | None = None,
    donated: Mapping[str, int] | None = None,
    group_order: GroupOrder = "kept",
) -> list[Finding]:
    """Everything the verifier holds against an order of scheduler nodes; empty when it is legal.

    Args:
        nodes: the order to check.
        reference_order: the same nodes as Inductor had them.
        memory_budget: cap in bytes on :func:`snodes_peak_bytes`; None: no cap. Needs the graph being lowered.
        donated: graph inputs that are freed after their last use, with their bytes.
        group_order: as in :func:`~inductor_passes.verify.check`.
    """
    found = _permutation(nodes, reference_order)
    if found:
        return found
    after, before = _Order(nodes), _Order(reference_order)
    found = [*after.dependencies(), *after.flight()]
    known = {(f.rule, f.node, f.other) for f in before.flight()} if found else set()
    found = [f for f in found if (f.rule, f.node, f.other) not in known]
    found.extend(_sequences(before, after, group_order))
    found.extend(_fences(before, after))
    if memory_budget is not None:
        peak = after.peak_bytes(donated or {})
        if peak > memory_budget:
            found.append(Finding("memory", "", f"peak is {peak} bytes, budget {memory_budget} bytes"))
    return found


def snodes_peak_bytes(nodes: Sequence[Any], donated: Mapping[str, int] | None = None) -> int:
    """Peak bytes of what scheduler nodes allocate and of the ``donated`` inputs; inside of Inductor's lowering only.

    ``donated`` maps graph inputs that are freed after their last use to their bytes; other inputs are not counted.
    """
    return _Order(nodes).peak_bytes(donated or {})


def _permutation(nodes: Sequence[Any], reference: Sequence[Any]) -> list[Finding]:
    names = [_torch.snode_name(n) for n in nodes]
    expected = {_torch.snode_name(n) for n in reference}
    found = []
    seen: set[str] = set()
    for name in names:
        if name in seen:
            found.append(Finding("duplicated", name, f"{name} is scheduled twice"))
        elif name not in expected:
            found.append(Finding("added", name, f"{name} was not in the reference"))
        seen.add(name)
    found.extend(Finding("lost", n, f"{n} is not scheduled") for n in sorted(expected - seen))
    return found


class _Order:
    """One order of scheduler nodes, its groups taken apart."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.nodes = [part for node in nodes for part in _torch.snode_parts(node)]
        self.names = [_torch.snode_name(n) for n in self.nodes]
        self.kinds = [_torch.snode_kind(n) for n in self.nodes]
        self.buffers = [_torch.snode_buffers(n) for n in self.nodes]
        self.outputs = [_torch.snode_output_names(n) for n in self.nodes]
        self.producer = {b: i for i, names in enumerate(self.outputs) for b in names}
        self.parents = {name: list(shared) for own in self.buffers for name, _, shared, _ in own if shared}
        self.parcel = {name: packed for own in self.buffers for name, _, _, packed in own if packed}
        self._roots: dict[str, tuple[str, ...]] = {}

    def roots(self, buffer: str) -> tuple[str, ...]:
        """The buffers that own the memory of ``buffer``."""
        if buffer not in self._roots:
            stack, seen, result = [buffer], {buffer}, []
            while stack:
                name = stack.pop()
                parents = [p for p in self.parents.get(name, ()) if p != name]
                if not parents:
                    result.append(name)
                for parent in parents:
                    if parent not in seen:
                        seen.add(parent)
                        stack.append(parent)
            self._roots[buffer] = tuple(result)
        return self._roots[buffer]

    def _roots_of(self, buffers: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(r for b in buffers for r in self.roots(b)))

    def origin(self, i: int) -> torch.fx.Node | None:
        """The FX node behind a start, wait or other extern kernel."""
        if self.kinds[i] not in ("start", "wait", "extern"):
            return None
        node = self.nodes[i]
        origin = _torch.snode_origin(node)
        if self.kinds[i] == "start" and (origin is None or ops.role(origin) is not Role.START):
            starts = [n for n in _torch.snode_origins(node) if ops.role(n) is Role.START]
            return starts[0] if len(starts) == 1 else None
        return origin

    def _finding(self, rule: str, i: int, message: str, other: str = "") -> Finding:
        origin = self.origin(i)
        return Finding(rule, self.names[i], message, other, ops.source_line(origin) if origin is not None else "")

    def dependencies(self) -> Iterator[Finding]:
        """Every producer comes before whoever depends on it."""
        for i, node in enumerate(self.nodes):
            for buffer, artificial in _torch.snode_dependencies(node):
                before = self.producer.get(buffer, i)
                if before > i:
                    what = "must come after" if artificial else "depends on"
                    yield self._finding(
                        "dependency", i, f"{self.names[i]} {what} {self.names[before]} ({buffer})", self.names[before]
                    )

    def flight(self) -> Iterator[Finding]:
        """Waits complete; no read before the wait; no write to memory in flight."""
        written_by: dict[str, int] = {}
        read_by: dict[str, set[int]] = {}
        results: dict[int, set[str]] = {}
        inputs: dict[int, list[str]] = {}
        untaken = Counter(self.parcel.values())
        started = {
            r for i, kind in enumerate(self.kinds) if kind == "start" for r in self._roots_of(self.outputs[i])
        }
        unknown = {r for i in range(len(self.nodes)) if self._is_fence(i) for r in self._roots_of(self.outputs[i])}

        def land(start: int, root: str) -> None:
            results[start].discard(root)
            if not results[start]:
                for read in inputs[start]:
                    read_by[read].discard(start)

        for i, node in enumerate(self.nodes):
            kind = self.kinds[i]
            if kind == "wait":
                for root in self._roots_of(_torch.snode_waited_buffers(node)):
                    start = written_by.pop(root, None)
                    if start is not None:
                        land(start, root)
                    elif root in self.producer and self.parcel.get(root, root) not in started and root not in unknown:
                        yield self._finding("wait-without-start", i, f"{self.names[i]} waits for {root}: no collective")
                continue
            packed = {self.parcel[b] for b in self.outputs[i] if b in self.parcel}
            for read in self._roots_of(_torch.snode_data_reads(node)):
                start = written_by.get(read)
                if start is None or start == i:
                    continue
                if read in packed:
                    # one result of a coalesced collective is taken out of the list; it stays in flight
                    for buffer in self.outputs[i]:
                        written_by[buffer] = start
                        results[start].add(buffer)
                    untaken[read] -= 1
                    if not untaken[read]:
                        written_by.pop(read)
                        results[start].discard(read)
                    continue
                yield self._finding(
                    "read-before-wait",
                    i,
                    f"{self.names[i]} reads {read}, which {self.names[start]} is still writing",
                    self.names[start],
                )
            for root in self._roots_of(_torch.snode_mutations(node)):
                start = written_by.get(root, next(iter(read_by.get(root, ())), None))
                if start is not None:
                    yield self._finding(
                        "write-in-flight",
                        i,
                        f"{self.names[i]} writes {root}, which {self.names[start]} has in flight",
                        self.names[start],
                    )
            if kind == "start":
                own = self._roots_of(self.outputs[i])
                results[i] = set(own)
                inputs[i] = [r for r in self._roots_of(_torch.snode_data_reads(node)) if r not in results[i]]
                written_by.update(dict.fromkeys(own, i))
                for read in inputs[i]:
                    read_by.setdefault(read, set()).add(i)
        for root, start in written_by.items():
            if root in results[start]:
                yield self._finding("missing-wait", start, f"{self.names[start]}: nothing waits for {root}")

    def _is_fence(self, i: int) -> bool:
        # A result taken out of a multi-output kernel carries that kernel's origin, but does nothing itself.
        if self.kinds[i] != "extern" or any(packed for _, _, _, packed in self.buffers[i]):
            return False
        origin = self.origin(i)
        return origin is not None and ops.role(origin) is Role.FENCE

    def sequences(self) -> dict[str, list[int]]:
        """Positions of starts by process group, and of random draws, asserts and fences."""
        found: dict[str, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            origin = self.origin(i)
            if kind == "start" and origin is None:
                found.setdefault("group unknown", []).append(i)
            elif origin is None or any(packed for _, _, _, packed in self.buffers[i]):
                continue
            elif kind == "start":
                arguments = _torch.op_arguments(origin)
                group = arguments.get("group_name", arguments.get("group", ""))
                if isinstance(group, torch.fx.Node):
                    group = group.meta.get("val", group.name)
                found.setdefault(f"group {groups.resolve(group).name}", []).append(i)
            elif kind == "extern" and (channel := ops.effect_channel(origin, ops.role(origin))):
                found.setdefault(channel, []).append(i)
        return found

    def segments(self) -> dict[str, str]:
        """Communicating node -> the last fence before it."""
        fence, found = "", {}
        for i, kind in enumerate(self.kinds):
            if kind in ("start", "wait"):
                found[self.names[i]] = fence
            elif self._is_fence(i):
                fence = self.names[i]
        return found

    def peak_bytes(self, donated: Mapping[str, int]) -> int:
        """Replay of allocations in this order; a collective's inputs and results live at least until its waits."""
        last: dict[str, int] = {}
        waits: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            touched = self._roots_of([*_torch.snode_reads(node), *self.outputs[i]])
            last.update(dict.fromkeys(touched, i))
            if self.kinds[i] == "wait":
                for root in self._roots_of(_torch.snode_waited_buffers(node)):
                    waits[root] = waits[self.parcel.get(root, root)] = i
        for i, node in enumerate(self.nodes):
            if self.kinds[i] == "start":
                end = max((waits[r] for r in self._roots_of(self.outputs[i]) if r in waits), default=i)
                for read in self._roots_of(_torch.snode_data_reads(node)):
                    last[read] = max(last.get(read, i), end)
        kept = set(self._roots_of(_torch.lowered_outputs()))
        delta = [0] * (len(self.nodes) + 1)
        for name, size in donated.items():
            delta[0] += size
            if name not in kept and name in last:
                delta[last[name] + 1] -= size
        held = dict(donated)
        done: set[str] = set()
        for i, own in enumerate(self.buffers):
            for before, after in _torch.snode_overwrites(self.nodes[i], done):
                size = held.get(before, 0)
                if before not in kept and last.get(before) == i and (after, size) in {(n, s) for n, s, *_ in own}:
                    # The result is stored where the operand was: the two are never there at the same time.
                    delta[i] -= size
                    delta[i + 1] += size
            done.update(_torch.snode_operations(self.nodes[i]))
            for name, size, shared, packed in own:
                if not shared and size:
                    held[name] = size
                    delta[self.producer.get(packed, i)] += size
                    if name not in kept:
                        delta[last[name] + 1] -= size
        live = peak = 0
        for change in delta:
            live += change
            peak = max(peak, live)
        return peak


def _sequences(before: _Order, after: _Order, group_order: GroupOrder) -> Iterator[Finding]:
    now = after.sequences()
    for what, positions in before.sequences().items():
        if what.startswith("group ") and group_order == "any":
            continue
        expected = [before.names[i] for i in positions]
        for name, i in zip(expected, now.get(what, ())):
            if after.names[i] != name:
                rule = {"random": "rng-order", "assert": "side-effect-order", "fence": "fence-order"}.get(
                    what, "group-order"
                )
                yield after._finding(rule, i, f"{what}: {after.names[i]} comes where {name} was", name)
                break


def _fences(before: _Order, after: _Order) -> Iterator[Finding]:
    was = before.segments()
    for name, fence in after.segments().items():
        if was.get(name, fence) != fence:
            crossed = fence or was[name]
            yield Finding("fence", name, f"{name} moved across the fence {crossed}", crossed)
