"""What forward saves for backward and backward could compute again: from two FX graphs to a ``derived.Step``.

A saved value is computed again by a *chain*: the nodes that make it, back to what backward has anyway (inputs, other
saved values, gathered parameters). A parameter that backward does not need otherwise is gathered again: the chain
sends its message once more, unless the parameter is as small as the bias of a linear layer, which is not worth a
decision. Apart from that, a chain may not draw random numbers, communicate, or read or write memory that somebody
writes to: it would not give the same bits, or do something twice. What activation checkpointing has tagged is the
user's to decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem
from inductor_passes.schedule.problem import Kind, Storage
from inductor_passes.step.derived import Candidate, Step

#: Values below this share of all that is saved are not worth a decision each.
_SMALLEST_SHARE = 2000


@dataclass(frozen=True)
class Saved:
    """A step, and what its problems do not show.

    Attributes:
        step: with its candidates.
        refused: saved values that cannot be computed again -> why.
        names: of all values that are saved, parameters and other inputs left out.
    """

    step: Step
    refused: Mapping[str, str]
    names: frozenset[str]


class _Chain:
    """The nodes that make one saved block again."""

    def __init__(self, reader: _Reader, block: FxStorage) -> None:
        self.reader = reader
        self.mine = {n for n in block.members if n.name in reader.saved}
        self.nodes: set[torch.fx.Node] = set()
        self.refusal = ""
        stack = list(self.mine)
        while stack and not self.refusal:
            node = stack.pop()
            if node in self.nodes or (node not in self.mine and reader.in_backward(node)):
                continue
            if node.op in ("placeholder", "get_attr") or not _is_tensor(node) or reader.brought_again(node):
                continue
            self.refusal = reader.refusal(node)
            self.nodes.add(node)
            stack.extend(node.all_input_nodes)


def _is_tensor(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


class _Reader:
    def __init__(
        self,
        views: tuple[GraphView, GraphView],
        problems: tuple[FxProblem, FxProblem],
        outputs: int,
        tagged: Collection[str],
    ) -> None:
        self.view, self.back = views
        self.forward, self.backward = problems
        self.tagged = tagged
        results = self.view.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self.results = {n for n in results[:outputs] if isinstance(n, torch.fx.Node)}
        self.again = {n.name: n for n in self.back.nodes if n.op == "call_function"}
        self.inputs = {str(n.target): n for n in self.back.nodes if n.op == "placeholder"}
        self.saved = {
            n.name
            for n in results[outputs:]
            if isinstance(n, torch.fx.Node) and n.op == "call_function" and n.name in self.inputs and _is_tensor(n)
        }
        self.task = _tasks(self.forward)
        self.back_task = _tasks(self.backward)
        self.storage, self.back_storage = _indices(self.view, self.forward), _indices(self.back, self.backward)
        self.blocks = [s for s in self.view.storages.all if any(m.name in self.saved for m in s.members)]
        self.total_bytes = sum(s.size_bytes or 0 for s in self.blocks)
        self.written = {m for s in self.view.storages.all if s.writers for m in s.members}
        #: Tasks that bring a parameter which backward does not gather, and chains may.
        self.gathers = {
            task
            for node, task in self.task.items()
            if self.view.role(node) in (Role.START, Role.WAIT)
            and _torch.is_gathered_again(node)
            and not self.in_backward(node)
            and not self.brought_again(node)
        }

    def in_backward(self, node: torch.fx.Node) -> bool:
        """Whether backward has the value of a forward node anyway."""
        return node.name in self.saved or node.name in self.again

    def is_small(self, size_bytes: int) -> bool:
        """Whether so many bytes are not worth a decision."""
        return size_bytes * _SMALLEST_SHARE <= self.total_bytes

    def brought_again(self, node: torch.fx.Node) -> bool:
        """Whether backward gathers a value again if it needs it, and that costs next to nothing."""
        size = _torch.tensor_bytes(node.meta["val"]) if isinstance(node.meta.get("val"), torch.Tensor) else None
        return _torch.is_gathered_again(node) and size is not None and self.is_small(size)

    def refusal(self, node: torch.fx.Node) -> str:
        """Why a node may not run again, "" where it may."""
        role, name = self.view.role(node), _torch.op_name(node.target)
        channel = ops.order_channel(node, role)
        if channel == "random":
            return f"{node.name} draws random numbers"
        of_gather = _torch.is_gathered_again(node)
        if role in (Role.START, Role.WAIT):
            if not of_gather:
                return f"{node.name} communicates"
        elif role not in (Role.COMPUTE, Role.FREE) or name.startswith("higher_order::") or channel:
            return f"it is not known whether {node.name} can run twice"
        if node in self.written or any(i in self.written for i in node.all_input_nodes) or ops.mutated_inputs(node):
            return f"{node.name} uses memory that is written to"
        if of_gather:
            # Pads of the rank's own shard are among them, which other ranks do not see.
            return ""
        task = self.task.get(node)
        if role is Role.COMPUTE and task is not None and self.forward.problem.tasks[task].kind is not Kind.COMPUTE:
            return f"{node.name} runs with what communicates"
        if node.name in self.tagged:
            return f"activation checkpointing decides about {node.name}"
        return ""

    def read(self) -> Saved:
        """Candidates, and why others are none."""
        found, refused = [], {}
        chains: list[_Chain] = []
        for block in self.blocks:
            if self.is_small(block.size_bytes or 0):
                continue
            one = self._candidate(block)
            if isinstance(one, str):
                refused[block.producer.name] = one
            else:
                found.append(one[0])
                chains.append(one[1])
        latent = self._latent({n for chain in chains for n in chain.nodes})
        needs, reads = self._links({n for chain in chains for n in chain.nodes})
        callers = tuple(
            i
            for s in self.view.storages.all
            if s.producer.op in ("placeholder", "get_attr") and not self._is_held(s.producer.name)
            for i in self.storage.get(s, ())
        )
        storages = (*self.backward.problem.storages, *(block for block, _ in latent))
        backward = replace(self.backward.problem, storages=storages)
        first = len(self.backward.problem.storages)
        sizes = {first + k: size for k, (_, size) in enumerate(latent)}
        step = Step(self.forward.problem, backward, tuple(found), needs, reads, callers, sizes)
        return Saved(step, refused, frozenset(self.saved))

    def _is_held(self, name: str) -> bool:
        """Whether backward's memory has an input of forward. It has no place for one that nobody reads there."""
        twin = self.inputs.get(name)
        return twin is not None and any(self.back_storage.get(s) for s in self.back.storages.of(twin))

    def _candidate(self, block: FxStorage) -> tuple[Candidate, _Chain] | str:
        mine = self.storage.get(block, ())
        if any(m in self.results for m in block.members):
            return "it is a result of the model"
        if block.producer not in self.task or len(mine) != 1:
            return "it is memory that forward does not allocate by itself"
        if any(len(self.view.storages.of(m)) != 1 for m in block.members if m.name in self.saved):
            return "it may be memory of several values"
        chain = _Chain(self, block)
        if chain.refusal:
            return chain.refusal
        if block.producer not in chain.nodes:
            return "what allocates it is not part of what makes it"
        inputs = [self.inputs[m.name] for m in block.members if m.name in self.saved]
        blocks = dict.fromkeys(s for n in inputs for s in self.back.storages.of(n))
        theirs = tuple(i for s in blocks for i in self.back_storage.get(s, ()))
        if not theirs or any(self.backward.problem.storages[i].pinned for i in theirs):
            return "backward does not free it"
        one = Candidate(
            name=block.producer.name,
            size_bytes=self.forward.problem.storages[mine[0]].size_bytes,
            chain=tuple(sorted({t for n in chain.nodes for t in self._runs(n)})),
            forward_storage=mine[0],
            backward_storages=theirs,
            nodes=tuple(n.name for n in self.view.nodes if n in chain.nodes),
            source=ops.source_line(block.producer),
            readers=tuple(sorted({t for n in inputs for t in self._read_in_backward(n)})),
        )
        return one, chain

    def _read_in_backward(self, value: torch.fx.Node) -> set[int]:
        """Backward's tasks that read one of its inputs, or a view of it."""
        found, seen, todo = set[int](), set(value.users), list(value.users)
        while todo:
            user = todo.pop()
            if user in self.back_task:
                found.add(self.back_task[user])
                continue
            more = [u for u in user.users if u not in seen]
            seen.update(more)
            todo += more
        return found

    def _runs(self, node: torch.fx.Node) -> set[int]:
        """The task that runs again with a node; none where it is a view of what backward gathers anyway."""
        task = self.task.get(node)
        if task is None or (self.forward.problem.tasks[task].kind is not Kind.COMPUTE and task not in self.gathers):
            return set()
        return {task}

    def _readers(self, node: torch.fx.Node, nodes: set[torch.fx.Node]) -> set[int]:
        """The tasks of chains that read what a node reads: its own, or those that read the view that it is."""
        seen, found, todo = {node}, set[int](), [node]
        while todo:
            one = todo.pop()
            if own := self._runs(one):
                found |= own
                continue
            more = [u for u in one.users if u in nodes and u not in seen]
            seen.update(more)
            todo += more
        return found

    def _latent(self, nodes: set[torch.fx.Node]) -> list[tuple[Storage, int]]:
        """Values of backward that are no memory, and would be if one of ``nodes`` read them: without bytes, and these.

        Entered among backward's storages, so that :meth:`_links` finds them.
        """
        found: list[tuple[Storage, int]] = []
        count = len(self.backward.problem.storages)
        numbers = {s.name: i for i, s in enumerate(self.backward.problem.storages)}
        chained = [node for node in self.view.nodes if node in nodes]
        for source in dict.fromkeys(source for node in chained for source in node.all_input_nodes):
            twin = self.again.get(source.name)
            for storage in () if twin is None else self.back.storages.of(twin):
                made = self.back_task.get(storage.producer)
                if storage in self.back_storage or made is None or not storage.size_bytes:
                    continue
                home = self.backward.homes.get(storage.producer.name)
                if home is not None:
                    self.back_storage[storage] = (numbers[home],) if home in numbers else ()
                    continue
                readers = {t for member in storage.members for t in self._read_in_backward(member)} - {made}
                self.back_storage[storage] = (count + len(found),)
                block = Storage(0, made, tuple(sorted(readers)), False, storage.producer.name)
                found.append((block, storage.size_bytes))
        return found

    def _links(
        self, nodes: set[torch.fx.Node]
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """What the tasks of chains need and read of what is in backward already."""
        needs: dict[int, set[int]] = {}
        reads: dict[int, set[int]] = {}
        for node in self.view.nodes:
            if node not in nodes:
                continue
            readers = self._readers(node, nodes)
            for source in node.all_input_nodes:
                twin = self.inputs.get(source.name) or self.again.get(source.name)
                if twin is None:
                    continue
                for task in readers:
                    if twin in self.back_task:
                        needs.setdefault(task, set()).add(self.back_task[twin])
                    for storage in self.back.storages.of(twin):
                        reads.setdefault(task, set()).update(self.back_storage.get(storage, ()))
        return ({t: tuple(sorted(v)) for t, v in needs.items()}, {t: tuple(sorted(v)) for t, v in reads.items()})


def read(
    views: tuple[GraphView, GraphView], problems: tuple[FxProblem, FxProblem], outputs: int, tagged: Collection[str]
) -> Saved:
    """What backward could compute again; O(nodes and edges of all chains).

    Args:
        views, problems: of forward and backward.
        outputs: how many results of forward are not saved values.
        tagged: names of nodes about which activation checkpointing has decided.
    """
    return _Reader(views, problems, outputs, tagged).read()


def _tasks(fx: FxProblem) -> dict[torch.fx.Node, int]:
    return {node: task for task, members in enumerate(fx.members) for node in members}


def _indices(view: GraphView, fx: FxProblem) -> dict[FxStorage, tuple[int, ...]]:
    """Block of memory -> its number among the problem's storages; without those that cannot be told apart."""
    by_name: dict[str, list[int]] = {}
    for i, s in enumerate(fx.problem.storages):
        by_name.setdefault(s.name, []).append(i)
    blocks: dict[str, list[FxStorage]] = {}
    for block in view.storages.all:
        if block.size_bytes:
            blocks.setdefault(block.producer.name, []).append(block)
    return dict(_paired(blocks, by_name))


def _paired(
    blocks: Mapping[str, list[FxStorage]], by_name: Mapping[str, list[int]]
) -> Iterator[tuple[FxStorage, tuple[int, ...]]]:
    for name, ones in blocks.items():
        numbers = by_name.get(name, [])
        if len(numbers) == len(ones):
            yield from ((block, (number,)) for block, number in zip(ones, numbers))


