"""What Inductor's kernels make of the values of an FX graph, as far as the graph alone shows it.

Inductor keeps the code of an element-wise result and computes it anew in every element-wise reader and every reduction
that comes before the first reader which needs it in memory. A result that nobody needs in memory is never stored, and
its operands are needed until its last reader. What is stored may still vanish, where all of its readers end up in the
kernel that makes it, and a kernel may store its result over an operand that nobody else reads. The parts of a
concatenation are computed where they belong in its memory. This follows the compiler's own rules, some of which count
the operators of code: it is an estimate. The memory of fused kernels is exact (``kernel_memory``), but known late.

Source: ``GraphLowering.run_node`` in torch/_inductor/graph.py and ``StorageBox`` in torch/_inductor/ir.py (what is
stored when), ``ConcatKernel`` in the same file, ``Scheduler.can_fuse`` and ``SchedulerNode.decide_inplace_update`` in
torch/_inductor/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import GraphView

#: Operators beside those that torch calls pointwise whose results Inductor computes element by element.
_BY_ELEMENT = frozenset(
    f"aten::{name}"
    for name in (
        "arange", "constant_pad_nd", "embedding", "fill", "flip", "full", "full_like", "gather", "index",
        "lift_fresh_copy", "ones", "ones_like", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "tril",
        "triu", "zeros", "zeros_like",
    )
) | {"prims::iota", "prims::convert_element_type"}
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min", "prod", "std", "sum",
        "var", "var_mean", "xor_sum",
    )
)
#: Operators that start from a copy of their first argument, which is computed where it is copied.
_FROM_A_COPY = frozenset(
    {
        "aten::scatter",
        "aten::scatter_add",
        "aten::index_put",
        "aten::_unsafe_index_put",
        "aten::_unsafe_masked_index_put_accumulate",
    }
)
#: Operators whose code is that of several.
_LONG_CODE = {"aten::gelu": 8, "aten::gelu_backward": 16, "aten::silu": 2, "aten::silu_backward": 6}
#: What a processor stores rather than computes twice (``StorageBox.should_realize_on_reuse``).
_HEAVY = frozenset(
    f"aten::{name}"
    for name in (
        "exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "silu", "silu_backward", "logit",
        "log_sigmoid_forward", "sigmoid_backward",
    )
)
#: Operators beside pointwise ones that take in the code of what they read.
_BY_CODE = _BY_ELEMENT | _REDUCTIONS | _FROM_A_COPY | {"aten::cat"}
_NOT_IN_PLACE = _REDUCTIONS | _FROM_A_COPY
_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
#: Views under which an element keeps its place in memory.
_SAME_PLACES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unsqueeze"})
#: Operations per element beyond which a result is stored whatever it reads.
_LONGEST_CODE = 100
#: How many nodes between a value and one of its readers are looked at before fusion counts as impossible.
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class _Code:
    """What would compute a value, or what computes a kernel's result.

    Attributes:
        reads: values in memory that it reads.
        operators: about how many operations it is for an element.
        heavy: one of them is of ``_HEAVY``.
    """

    reads: frozenset[torch.fx.Node] = frozenset()
    operators: int = 0
    heavy: bool = False


class Generated:
    """Where values are computed and stored; near linear in nodes and edges.

    Args:
        apart: nodes that belong to a collective: kernels do not take them in.
        freed: inputs that are freed after their last use: a kernel may write over them.
    """

    def __init__(
        self, view: GraphView, apart: Container[torch.fx.Node], freed: Container[torch.fx.Node] = frozenset()
    ) -> None:
        self._view = view
        self._apart = apart
        self._freed = freed
        self._limits_of = {cpu: _torch.inlining_limits(cpu) for cpu in (False, True)}
        #: Of values that are not in memory, up to now, the code.
        self._pending: dict[torch.fx.Node, _Code] = {}
        #: Nodes that make their results in a kernel of their own or a fused one, and what their kernel reads.
        self._kernels: dict[torch.fx.Node, _Code] = {}
        #: Readers that compute a value by themselves.
        self._inlined: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self._computed_at: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
        #: Results that would be stored if they had more readers than they have.
        self._dear: set[torch.fx.Node] = set()
        self._whole: dict[FxStorage, FxStorage] = {}
        self._first: dict[FxStorage, FxStorage] = {}
        for node in view.nodes:
            self._enter(node)
        for node in reversed(view.nodes):
            if node in self._kernels or node in self._pending:
                self._computed_at[node] = self._where(node)
        for node in self._kernels:
            if node in self.computed_at(node):
                self._store(node)

    def computed_at(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        """The nodes whose kernels compute a node's result: later ones, itself, or both; none where nobody needs it."""
        return self._computed_at.get(node, (node,))

    def is_only_code(self, node: torch.fx.Node) -> bool:
        """Whether no kernel stores a node's result, whatever kernels are fused: each reader computes it."""
        return node in self._pending

    def is_stored(self, storage: FxStorage) -> bool:
        """Whether a storage is memory."""
        return storage.producer in self.computed_at(storage.producer)

    def is_stored_if_shared(self, storage: FxStorage) -> bool:
        """Whether a storage is memory, or would be if somebody else read it far from where it is read."""
        return self.is_stored(storage) or storage.producer in self._dear

    def first(self, storage: FxStorage) -> FxStorage:
        """What this storage is stored over, in a row the first; the storage itself where that is nothing."""
        return self._first.get(storage, storage)

    def whole(self, storage: FxStorage) -> FxStorage | None:
        """The storage of the concatenation in which this storage has its place; None where it has none."""
        return self._whole.get(storage)

    def _enter(self, node: torch.fx.Node) -> None:
        """What Inductor makes of one node when it comes to it."""
        role = self._view.role(node)
        if role is Role.INPUT:
            return
        if role is Role.FREE and self._view.storages.of(node):
            self._reused(node)
            return
        name = _torch.op_name(node.target) if node.op == "call_function" else ""
        if role is Role.COMPUTE and node not in self._apart and self._owns(node):
            if name in _BY_ELEMENT or _torch.is_pointwise(node.target):
                self._by_element(node, name)
                return
            if name in _REDUCTIONS:
                self._kernels[node] = self._code(node, name, node.all_input_nodes)
                return
            if name == "aten::cat":
                self._concatenated(node)
                return
            if name in _FROM_A_COPY:
                (first, *others) = node.all_input_nodes
                self._in_memory(others)
                self._kernels[node] = self._code(node, name, [first])
                return
        self._in_memory(node.all_input_nodes)

    def _owns(self, node: torch.fx.Node) -> bool:
        """Whether a node makes tensors in memory of its own, to which nobody else writes."""
        own = self._view.storages.of(node)
        return bool(own) and all(s.producer is node and not s.writers for s in own)

    def _made(self, operand: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """The nodes whose results an operand is, or is a view of."""
        return (storage.producer for storage in self._view.storages.of(operand))

    def _code(self, node: torch.fx.Node, name: str, operands: list[torch.fx.Node]) -> _Code:
        """The code of a node, with that of operands which are not in memory: it computes these by itself."""
        reads: set[torch.fx.Node] = set()
        operators = _LONG_CODE.get(name, 1) + sum(isinstance(a, (int, float)) for a in node.args[:2])
        heavy = name in _HEAVY
        for made in dict.fromkeys(m for operand in operands for m in self._made(operand)):
            if (code := self._pending.get(made)) is None:
                reads.add(made)
                operators += 1
                continue
            self._inlined.setdefault(made, []).append(node)
            reads |= code.reads
            operators += code.operators
            heavy = heavy or code.heavy
        return _Code(frozenset(reads), operators, heavy)

    def _by_element(self, node: torch.fx.Node, name: str) -> None:
        self._pending[node] = own = self._code(node, name, node.all_input_nodes)
        if self._is_dear(node, own):
            self._dear.add(node)
        self._reused(node)
        if (code := self._pending.get(node)) is None:
            return
        limits = self._limits(node)
        much = len(code.reads) > limits.reads or code.operators > limits.operators
        if (much and len(code.reads) > 1) or code.operators > _LONGEST_CODE:
            self._to_memory(node)

    def _reused(self, node: torch.fx.Node) -> None:
        """Decide whether what has several users is stored right away. A view's users are users of its value."""
        if len(node.users) < 2:
            return
        for made in self._made(node):
            if (code := self._pending.get(made)) is None:
                continue
            stored = self._is_dear(made, code)
            # What will be needed in memory anyway is stored at once, unless it is a copy of one value.
            needed = any(user.op == "output" or self._needs_memory(user) for user in node.users)
            if stored or (needed and len(code.reads) > 1):
                self._to_memory(made)

    def _is_dear(self, node: torch.fx.Node, code: _Code) -> bool:
        """Whether several readers would not each compute a result."""
        limits = self._limits(node)
        dear = (code.heavy and limits.cpu) or code.operators > limits.operators
        return dear or len(code.reads) > limits.reads_of_reused

    def _needs_memory(self, user: torch.fx.Node) -> bool:
        if self._view.role(user) is not Role.COMPUTE or user in self._apart:
            return False
        name = _torch.op_name(user.target)
        return name not in _BY_CODE and not _torch.is_pointwise(user.target)

    def _limits(self, node: torch.fx.Node) -> _torch.InliningLimits:
        value = node.meta.get("val")
        return self._limits_of[isinstance(value, torch.Tensor) and value.device.type == "cpu"]

    def _to_memory(self, node: torch.fx.Node) -> None:
        self._kernels[node] = self._pending.pop(node)

    def _in_memory(self, operands: list[torch.fx.Node]) -> None:
        """Somebody needs these operands in memory."""
        for operand in operands:
            for made in self._made(operand):
                if made in self._pending:
                    self._to_memory(made)

    def _concatenated(self, node: torch.fx.Node) -> None:
        """Parts are computed where they belong in the whole, unless they were needed in memory of their own before."""
        (whole,) = self._view.storages.of(node)
        for operand in node.all_input_nodes:
            for storage in self._view.storages.of(operand):
                if storage.producer in self._pending:
                    self._to_memory(storage.producer)
                if operand is storage.producer and self._may_be_a_part(storage, node):
                    self._whole[storage] = whole

    def _may_be_a_part(self, storage: FxStorage, node: torch.fx.Node) -> bool:
        producer = storage.producer
        if producer not in self._kernels and _torch.op_name(producer.target) not in _MATMULS:
            return False
        if producer in self._apart or len(self._view.storages.of(producer)) > 1 or storage in self._whole:
            return False
        position = self._view.position
        earlier = (u for m in storage.members for u in m.users if position[u] < position[node])
        return all(self._view.role(u) is Role.FREE or u in self._kernels or u in self._pending for u in earlier)

    def _where(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        """See :meth:`computed_at`; of everything behind the node it is known."""
        found: dict[torch.fx.Node, None] = {}
        for reader in self._inlined.get(node, ()):
            found.update(dict.fromkeys(self.computed_at(reader)))
        if node in self._kernels:
            readers = self._fused_readers(node)
            found.update(dict.fromkeys([node] if readers is None else readers))
        return tuple(found)

    def _fused_readers(self, node: torch.fx.Node) -> list[torch.fx.Node] | None:
        """The kernels that read a stored result, where all of them become one kernel with that which makes it."""
        elements = self._elements(node)
        if elements is None or len(self._view.storages.of(node)) > 1:
            return None
        (storage,) = self._view.storages.of(node)
        if storage in self._whole or not _keeps_places(storage):
            return None
        readers: dict[torch.fx.Node, None] = {}
        inlined = self._inlined.get(node, ())
        for user in (u for member in storage.members for u in member.users):
            if user in storage.members or user in inlined:
                continue
            readers.update(dict.fromkeys(self.computed_at(user)))
        if not readers:
            return None
        for reader in readers:
            if reader not in self._kernels or self._elements(reader) != elements or not self._close(node, reader):
                return None
            if self._limits(node).cpu and not _reduces_rows(reader):
                return None
        return list(readers)

    def _elements(self, node: torch.fx.Node) -> int | None:
        """How many elements a kernel goes through; None where that is not known, or the node makes none."""
        if node not in self._kernels:
            return None
        name = _torch.op_name(node.target)
        if name in _FROM_A_COPY:
            return None
        values = [node.meta.get("val")] if name not in _REDUCTIONS else [node.all_input_nodes[0].meta.get("val")]
        (value,) = values
        return _torch.elements(value) if isinstance(value, torch.Tensor) else None

    def _close(self, node: torch.fx.Node, reader: torch.fx.Node) -> bool:
        """Whether nothing between a kernel and a reader of its result keeps the two from being one kernel."""
        position = self._view.position
        seen, todo = {reader}, [reader]
        while todo:
            one = todo.pop()
            for source in one.all_input_nodes:
                if source is node or source in seen or position[source] <= position[node]:
                    continue
                between = self._view.role(source) is Role.FREE or source in self._kernels or source in self._pending
                if not between or len(seen) > _LOOKED_AT:
                    return False
                seen.add(source)
                todo.append(source)
        return True

    def _store(self, node: torch.fx.Node) -> None:
        """Find an operand that the kernel of a node may store its result over."""
        if len(self._view.storages.of(node)) > 1 or _torch.op_name(node.target) in _NOT_IN_PLACE:
            return
        (result,) = self._view.storages.of(node)
        if result in self._whole or any(user.op == "output" for member in result.members for user in member.users):
            return
        for operand in sorted(self._kernels[node].reads, key=self._view.position.__getitem__):
            over = self._view.storages.of(operand)
            if len(over) == 1 and self._is_stored_over(over[0], result, node):
                self._first[result] = self.first(over[0])
                return

    def _is_stored_over(self, over: FxStorage, result: FxStorage, reader: torch.fx.Node) -> bool:
        fits = over.size_bytes == result.size_bytes and not over.writers and over not in self._whole
        own = self._view.role(over.producer) is Role.COMPUTE or over.producer in self._freed
        if not fits or not own or not _same_elements(over, result):
            return False
        return all(
            self.computed_at(user) == (reader,)
            for member in over.members
            for user in member.users
            if user not in over.members
        )


def _reduces_rows(node: torch.fx.Node) -> bool:
    """Whether a kernel goes through its operand in the order of memory: sums of columns on a processor do not."""
    if _torch.op_name(node.target) not in _REDUCTIONS:
        return True
    dims, value = node.args[1] if len(node.args) > 1 else None, node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(dims, (int, list, tuple)) or not dims:
        return dims is None or dims == []
    listed = {int(d) % value.dim() for d in ([dims] if isinstance(dims, int) else dims) if isinstance(d, int)}
    return listed == set(range(value.dim() - len(listed), value.dim()))


def _same_elements(over: FxStorage, result: FxStorage) -> bool:
    """Whether an element of the result has the place of the element of the operand that it is computed from."""
    values = [member.meta.get("val") for member in (*over.members, result.producer)]
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in values):
        return False
    if len({value.dtype for value in values}) > 1 or len({value.device for value in values}) > 1:
        return False
    return _keeps_places(over)


def _keeps_places(storage: FxStorage) -> bool:
    """Whether every view of a storage has its elements where the storage has them."""
    return all(_torch.op_name(member.target) in _SAME_PLACES for member in storage.members[1:])
