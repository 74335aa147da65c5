"""One order of Inductor's scheduler nodes as the verifier reads it: kinds, buffers and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.ops import Role, source_line
from inductor_passes.ir.parameters import names_at
from inductor_passes.report import Finding
from inductor_passes.verify.facts.operators import by_name, operator_of
from inductor_passes.verify.facts.places import NodeFacts
from inductor_passes.verify.facts.view import alone, describe, is_collective
from inductor_passes.verify.insides import inside_bytes
from inductor_passes.verify.workspaces import workspace_bytes


class SnodeOrder:
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
        self._facts: dict[torch.fx.Node, NodeFacts] = {}

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

    def roots_of(self, buffers: Sequence[str]) -> list[str]:
        """The buffers that own the memory of ``buffers``, each once."""
        return list(dict.fromkeys(r for b in buffers for r in self.roots(b)))

    def facts(self, node: torch.fx.Node) -> NodeFacts:
        """What the FX node behind a scheduler node does."""
        if node not in self._facts:
            self._facts[node] = alone(node)
        return self._facts[node]

    def origin(self, i: int) -> torch.fx.Node | None:
        """The FX node behind a start, wait or other extern kernel."""
        if self.kinds[i] not in ("start", "wait", "extern"):
            return None
        node = self.nodes[i]
        origin = _torch.snode_origin(node)
        if self.kinds[i] == "start" and (origin is None or self.facts(origin).role is not Role.START):
            starts = [n for n in _torch.snode_origins(node) if self.facts(n).role is Role.START]
            return starts[0] if len(starts) == 1 else None
        if self.kinds[i] == "extern" and origin is None:
            # Inductor names none for a kernel with several results.
            called = _torch.snode_op(node)
            calls = [n for n in _torch.snode_origins(node) if n.op == "call_function" and n.target == called]
            return calls[0] if len(calls) == 1 else None
        return origin

    def finding(self, rule: str, i: int, message: str, other: str = "") -> Finding:
        """A finding about node ``i``."""
        origin = self.origin(i)
        source, names = ("", ()) if origin is None else (source_line(origin), names_at(origin))
        return Finding(rule, self.names[i], message, other, source, names)

    def dependencies(self) -> Iterator[Finding]:
        """Every producer comes before whoever depends on it."""
        for i, node in enumerate(self.nodes):
            for buffer, artificial in _torch.snode_dependencies(node):
                before = self.producer.get(buffer, i)
                if before > i:
                    what = "must come after" if artificial else "depends on"
                    yield self.finding(
                        "dependency", i, f"{self.names[i]} {what} {self.names[before]} ({buffer})", self.names[before]
                    )

    def _calls(self, i: int) -> bool:
        """Whether node ``i`` is an extern kernel, and not a result taken out of one: that does nothing itself."""
        return self.kinds[i] == "extern" and not any(packed for _, _, _, packed in self.buffers[i])

    def channel(self, i: int) -> str:
        """The effect channel of an extern kernel: ``random``, ``assert``, ``fence`` or ""; "" for anything else."""
        if not self._calls(i):
            return ""
        origin, called = self.origin(i), _torch.snode_op(self.nodes[i])
        if origin is not None:
            facts = self.facts(origin)
            return "" if facts.certain else facts.channel
        if not isinstance(called, torch._ops.OpOverload):
            return "" if called is None else "fence"
        what = operator_of(called)
        return "random" if what.draws else "assert" if what.checks else "" if what.trusted else "fence"

    def is_fence(self, i: int) -> bool:
        """Whether nothing that communicates may cross node ``i``."""
        if self._calls(i) and (origin := self.origin(i)) is not None:
            return self.facts(origin).role is Role.FENCE
        return self.channel(i) == "fence"

    def sequences(self) -> dict[str, list[int]]:
        """Positions of starts by process group, and of random draws, asserts and fences.

        Draws and fences keep their order among each other, too: a fence may draw.
        """
        found: dict[str, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            origin = self.origin(i)
            if channel := self.channel(i):
                found.setdefault(channel, []).append(i)
                if channel in ("random", "fence"):
                    found.setdefault("random and fence", []).append(i)
            elif kind == "start" and origin is None:
                found.setdefault("group unknown", []).append(i)
            elif kind == "start" and origin is not None and not any(packed for _, _, _, packed in self.buffers[i]):
                arguments = by_name(origin.target, origin.args, origin.kwargs)
                group = arguments.get("group_name", arguments.get("group", ""))
                if isinstance(group, torch.fx.Node):
                    group = group.meta.get("val", group.name)
                found.setdefault(f"group {resolve(group).name}", []).append(i)
        return found

    def segments(self) -> dict[str, str]:
        """Communicating node -> the last fence before it."""
        fence, found = "", {}
        for i, kind in enumerate(self.kinds):
            if kind in ("start", "wait"):
                found[self.names[i]] = fence
            elif self.is_fence(i):
                fence = self.names[i]
        return found

    def _rows(self) -> list[int]:
        """For every position the one behind which memory is freed that is read there for the last time."""
        ends = list(range(len(self.nodes)))
        for i in reversed(range(len(self.nodes) - 1)):
            if _torch.snode_is_batched(self.nodes[i]) and _torch.snode_is_batched(self.nodes[i + 1]):
                ends[i] = ends[i + 1]
        return ends

    def _workspace_bytes(self, i: int) -> int:
        """What the backend holds beside the message that node ``i`` starts."""
        origin = self.origin(i)
        return workspace_bytes(describe(i, origin, ())) if origin is not None and is_collective(origin) else 0

    def peak_bytes(self, donated: Mapping[str, int], together: Mapping[str, str] | None = None) -> int:
        """Replay of allocations in this order; a collective's inputs and results live at least until its waits.

        Memory is allocated for the first part that is written to it, which may come before the node that names it. What
        C++ kernels in a row have read is freed behind the last of them: they become one function.

        Args:
            donated: graph inputs that are freed after their last use, with the bytes of their blocks.
            together: inputs that are memory of another one -> that one, with which they are freed.
        """
        together = together or {}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        waits: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            touched = self.roots_of([*_torch.snode_reads(node), *self.outputs[i]])
            last.update(dict.fromkeys(touched, i))
            for root in self.roots_of(self.outputs[i]):
                first.setdefault(root, i)
            if self.kinds[i] == "wait":
                for root in self.roots_of(_torch.snode_waited_buffers(node)):
                    waits[root] = waits[self.parcel.get(root, root)] = i
        delta = [0] * (len(self.nodes) + 1)
        for i, node in enumerate(self.nodes):
            if self.kinds[i] == "start":
                end = max((waits[r] for r in self.roots_of(self.outputs[i]) if r in waits), default=i)
                for read in self.roots_of(_torch.snode_data_reads(node)):
                    last[read] = max(last.get(read, i), end)
                beside = self._workspace_bytes(i)
                delta[i] += beside
                delta[end + 1] -= beside
            elif self._calls(i):
                origin = self.origin(i)
                taken = inside_bytes(origin) if origin is not None else 0
                delta[i] += taken
                delta[i + 1] -= taken
        for name, one in together.items():
            if name in last:
                last[one] = max(last.get(one, 0), last[name])
        last.update({name: last[one] for name, one in together.items() if one in last})
        ends, used = self._rows(), last
        last = {root: ends[i] for root, i in last.items()}
        kept = set(self.roots_of(_torch.lowered_outputs()))
        for name, size in donated.items():
            if name in together:
                continue
            delta[0] += size
            if name not in kept and name in last:
                delta[last[name] + 1] -= size
        held = dict(donated)
        done: set[str] = set()
        for i, own in enumerate(self.buffers):
            for before, after in _torch.snode_overwrites(self.nodes[i], done):
                size = held.get(before, 0)
                if before not in kept and used.get(before) == i and (after, size) in {(n, s) for n, s, *_ in own}:
                    # The result is stored where the operand was: the two are never there at the same time.
                    delta[i] -= size
                    delta[ends[i] + 1] += size
            done.update(_torch.snode_operations(self.nodes[i]))
            for name, size, shared, packed in own:
                if not shared and size:
                    held[name] = size
                    delta[self.producer.get(packed, first.get(name, i))] += size
                    if name not in kept:
                        delta[last[name] + 1] -= size
        live = peak = 0
        for change in delta:
            live += change
            peak = max(peak, live)
        return peak
