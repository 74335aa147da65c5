"""From Inductor's fused scheduler nodes to a scheduling problem.

By the time of Inductor's last hook kernels are fused and buffers are known, so durations and memory are those of the
code that will run. Dependencies are Inductor's own, the artificial ones included (order of collectives, mutation);
to them come the lifetimes that Inductor does not show: a collective's inputs live until its wait. What reads a buffer
comes after whoever changed it before, the wait of a collective among them: where C++ kernels of several shapes are
fused, Inductor (``SchedulerNode.recompute_size_and_body``, seen in torch 2.13) forgets that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.flops import flops, library_shape, operand_dtype
from inductor_passes.cost.fused import operator_ns
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name
from inductor_passes.ir import ops, transfers
from inductor_passes.ir.memory import received_into
from inductor_passes.ir.view import Collective, collective_of, transfer_of
from inductor_passes.problems.builder import Block, Builder
from inductor_passes.problems.estimates import Estimates
from inductor_passes.problems.inside import inside_blocks
from inductor_passes.problems.kernel_calls import effect_channel, is_call, origin_of
from inductor_passes.problems.kernel_memory import kernel_blocks, overwritten
from inductor_passes.problems.kernel_waits import is_message
from inductor_passes.problems.workspaces import workspaces
from inductor_passes.schedule.problem import Problem


@dataclass(frozen=True)
class SchedulerProblem:
    """A problem over scheduler nodes; task ``i`` is ``nodes[i]``.

    ``collectives`` maps the number of a start to what it does. ``batched`` says of every task whether the code
    generator makes one function of it and its like in a row, see ``replay.batches``.
    """

    problem: Problem
    nodes: tuple[Any, ...]
    collectives: dict[int, Collective]
    batched: tuple[bool, ...] = ()


def build(
    nodes: Sequence[Any],
    profile: CostProfile,
    *,
    backward: bool,
    name: str = "",
    estimator: Callable[[torch.fx.Node], float | None] | None = None,
    keep_overwrites: bool = False,
) -> SchedulerProblem:
    """The scheduling problem of a list of scheduler nodes in a legal order; O(nodes + dependencies).

    Args:
        backward: whether inputs other than parameters and gradients are freed after their last use.
        estimator: own durations for FX nodes; what it says of the nodes of a fused kernel, see ``estimates``.
        keep_overwrites: what a kernel writes over an operand because the operand's other readers come before it stays
            so: they stay before it. Less memory, and less freedom.
    """
    return _Reader(nodes, profile, backward, name, estimator, keep_overwrites).read()


class _Reader:
    """Makes one task of every scheduler node."""

    def __init__(
        self,
        nodes: Sequence[Any],
        profile: CostProfile,
        backward: bool,
        name: str,
        estimator: Callable[[torch.fx.Node], float | None] | None,
        keep_overwrites: bool,
    ) -> None:
        self.nodes = nodes
        self.profile = profile
        self.backward = backward
        self.estimator = estimator
        # Inductor's dependencies keep collectives of a group that we do not know in their order.
        self.builder = Builder(profile, estimator, name=name, hold_unknown=False)
        self.producer: dict[str, int] = {}
        for i, node in enumerate(nodes):
            for buffer in _torch.snode_output_names(node):
                self.producer[buffer] = i
        self.allocated_with = {
            name: packed for node in nodes for name, _, _, packed in _torch.snode_buffers(node) if packed
        }
        self.kinds = [_torch.snode_kind(node) for node in nodes]
        self.estimates = None
        if estimator is not None:
            self.estimates = Estimates(estimator, [n for n, kind in zip(nodes, self.kinds) if kind == "fused"], profile)
        self.collectives: dict[int, Collective] = {}
        #: Of what a batch of messages sends, an element is taken out of its list by a node of its own.
        self.taken_from: dict[str, list[str]] = {}
        self.awaited: dict[int, set[str]] = {}
        if any(map(is_message, nodes)):
            self.taken_from = {b: shared for node in nodes for b, _, shared, _ in _torch.snode_buffers(node)}
            self.awaited = self._awaited()
        self.overwrites = overwritten(nodes, in_this_order=keep_overwrites)
        #: Buffer -> the one whose memory it is a new version of; memory -> the last task that changed it.
        self.version_of: dict[str, str] = {}
        self.changed_by: dict[str, int] = {}
        #: Effect channel -> the last task in it.
        self.last: dict[str, int] = {}

    def read(self) -> SchedulerProblem:
        for i in range(len(self.nodes)):
            self._enter(i)
        sends = {i for i, c in self.collectives.items() if c.input_bytes and is_message(self.nodes[i])}
        self.builder.keep_sends_early(sends)
        self.builder.add_memory(kernel_blocks(self.nodes, self.producer, self.builder, self.backward, self.overwrites))
        self.builder.add_memory(workspaces(self.collectives, self.builder))
        self.builder.add_memory(self._insides())
        batched = tuple(map(_torch.snode_is_batched, self.nodes))
        return SchedulerProblem(self.builder.problem(), tuple(self.nodes), self.collectives, batched)

    def _insides(self) -> list[Block]:
        """What library calls take while they run."""
        called = {}
        for i, node in enumerate(self.nodes):
            if is_call(node) and (origin := origin_of(node)) is not None:
                called[origin] = i
        return inside_blocks(called, called, {})

    def _predecessors(self, i: int) -> set[int]:
        found = {self.producer[name] for name, _ in _torch.snode_dependencies(self.nodes[i]) if name in self.producer}
        read = (self._memory_of(name) for name in _torch.snode_data_reads(self.nodes[i]))
        found.update(self.changed_by[memory] for memory in read if memory in self.changed_by)
        found.update(r for one in self.overwrites[i] for r in one.behind)
        found.discard(i)
        # A write to a buffer that a collective reads must come after the collective's wait, not only after its start.
        for start in [p for p in found if p in self.builder.waits_of and self._writes_input_of(i, p)]:
            found.update(self.builder.waits_of[start])
        return found

    def _writes_input_of(self, i: int, start: int) -> bool:
        """Whether node ``i`` writes to memory that collective ``start`` reads."""
        mutated = {s for _, _, shared, _ in _torch.snode_buffers(self.nodes[i]) for s in shared}
        return bool(mutated) and not mutated.isdisjoint(_torch.snode_reads(self.nodes[start])) and (
            self.kinds[i] != "wait"
        )

    def _enter(self, i: int) -> None:
        node, kind, preds = self.nodes[i], self.kinds[i], self._predecessors(i)
        name = _torch.snode_name(node)
        if kind == "start" and (collective := self._describe(i)) is not None:
            queue = transfers.queues(collective.start)[0] if is_message(node) else ""
            self.builder.start(name, collective, preds, queue=queue)
        elif kind == "wait" and (start := self._start_of(node)) is not None:
            self.builder.wait(name, start, preds, source=self.builder.tasks[start].source)
        else:
            self._compute(node, kind, name, preds)
        for buffer, changed in _torch.snode_versions(node):
            self.version_of[buffer] = self._memory_of(changed)
            self.changed_by[self._memory_of(changed)] = i

    def _memory_of(self, buffer: str) -> str:
        return self.version_of.get(buffer, buffer)

    def _describe(self, i: int) -> Collective | None:
        if is_message(self.nodes[i]):
            return self._message(i)
        origin = _torch.snode_origin(self.nodes[i])
        if origin is None or ops.role(origin) is not ops.Role.START:
            starts = [n for n in _torch.snode_origins(self.nodes[i]) if ops.role(n) is ops.Role.START]
            if len(starts) != 1:
                return None
            origin = starts[0]
        collective = collective_of(len(self.collectives), origin, ())
        if collective.input_bytes is None or collective.output_bytes is None:
            return None
        self.collectives[i] = collective
        return collective

    def _message(self, i: int) -> Collective | None:
        """A message between two ranks; None where not all of it is waited for: then it is a fence."""
        origin = _torch.snode_call(self.nodes[i])
        if origin is None or len(self.awaited.get(i, ())) < len(received_into(origin)):
            return None
        found = transfer_of(len(self.collectives), origin, ())
        if found.input_bytes is None or found.output_bytes is None:
            return None
        self.collectives[i] = found
        return found

    def _start_of(self, node: Any) -> int | None:
        """The start that a wait belongs to.

        An out-of-place wait names the start's result, directly or through an output of a coalesced collective; an
        in-place one names the memory itself, and only its reads lead to the start that writes to it. Memory can be the
        result of an earlier collective (hybrid sharding sums in place what a reduce_scatter left): the last one counts.
        """
        return max((start for _, start in self._issuers(node) if start in self.collectives), default=None)

    def _issuers(self, node: Any) -> Iterator[tuple[str, int]]:
        """What may have issued what a wait waits for, as (buffer, task), the likeliest first."""
        for buffer in (*_torch.snode_waited_buffers(node), *_torch.snode_data_reads(node)):
            for name in (buffer, self.allocated_with.get(buffer, ""), *self.taken_from.get(buffer, ())):
                if name in self.producer:
                    yield name, self.producer[name]

    def _awaited(self) -> dict[int, set[str]]:
        """Per message between two ranks the results of it that are waited for."""
        found: dict[int, set[str]] = {}
        for node, kind in zip(self.nodes, self.kinds):
            issuers = self._issuers(node) if kind == "wait" else ()
            start = next((i for _, i in issuers if is_message(self.nodes[i])), None)
            if start is not None:
                found.setdefault(start, set()).update(_torch.snode_waited_buffers(node))
        return found

    def _compute(self, node: Any, kind: str, name: str, preds: set[int]) -> None:
        origins = _torch.snode_origins(node)
        source = next((s for o in origins if (s := ops.source_line(o))), "")
        fence = kind in ("start", "wait", "group")
        duration = 0
        label = ""
        if is_call(node):
            origin, called = origin_of(node), _torch.snode_op(node)
            preds = preds | self._keep_order(effect_channel(node))
            if origin is not None:
                label = ops.label(origin)
            if origin is not None or called is not None:
                fence = fence or (ops.op_role(called) if origin is None else ops.role(origin)) is ops.Role.FENCE
            # Of kernels with several results, attention among them, Inductor names no origin.
            if (named := _torch.snode_origin(node) or _torch.snode_call(node)) is not None:
                duration = self._extern_ns(node, named)
            elif called is not None:
                duration = self.profile.compute_ns(0, _torch.snode_bytes(node), "float32", 1)
        elif kind == "start":
            # A collective that we cannot move; Inductor counts those that block among them.
            origin = _torch.snode_origin(node)
            duration = self._known_ns(origin) or 0 if origin is not None else 0
        elif kind == "fused":
            counted = [o for o in origins if flops(o) is not None] if _torch.snode_is_template(node) else []
            dtype = dtype_name(origins[0].meta.get("val")) if origins else "float32"
            shape = library_shape(counted[0]) if counted else None
            count = sum(flops(o) or 0 for o in counted)
            duration = self.profile.compute_ns(count, _torch.snode_bytes(node), dtype, 1, shape)
            if self.estimates is not None:
                duration = self.estimates.duration_ns(node, duration)
            label = ops.label(counted[0]) if counted else ""
        self.builder.compute(name, duration, preds, label=label, source=source, fence=fence)

    def _keep_order(self, channel: str) -> set[int]:
        """Earlier tasks that the next one to be entered may not cross because of its effects: draws stay in order."""
        if not channel:
            return set()
        before = {self.last[other] for other in ops.NOT_CROSSED[channel] if other in self.last}
        self.last[channel] = len(self.builder.tasks)
        return before

    def _known_ns(self, origin: torch.fx.Node) -> int | None:
        """What is known of a node beyond FLOPs and bytes: the estimator's answer, or the price of what communicates."""
        if self.estimator is not None and (own := self.estimator(origin)) is not None:
            return max(0, round(own))
        return operator_ns(origin, self.profile)

    def _extern_ns(self, node: Any, origin: torch.fx.Node) -> int:
        blocked = self._known_ns(origin)
        if blocked is not None:
            return blocked
        moved, dtype = _torch.snode_bytes(node), operand_dtype(origin)
        return self.profile.compute_ns(flops(origin) or 0, moved, dtype, 1, library_shape(origin))
