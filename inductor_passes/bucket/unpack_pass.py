"""Copies out of one message in one launch, where nothing takes them in.

before::

    w = wait(all_gather(m)); a = clone(w[:, :n]); b = clone(w[:, n:]); mm(.., a); mm(.., b)

after::

    w = wait(all_gather(m)); a, b = unpack(w, [0, n], [n, ..]); mm(.., a); mm(.., b)

Inductor folds the copy of a member into readers that compute pointwise, and makes a kernel of it for any other: a
matmul, attention, a result of the graph. On a GPU each costs a launch and a gap. Members that only such readers have
are taken out by one operator. Bit-exact: the operator copies. It makes all results at once where the first one was
made, so that they live for longer while the message dies earlier; the memory budget decides.

On a CPU the pass does nothing: a call is free there, and results that are made when they are needed stay in the cache
(``tools/bench packs``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx

import inductor_passes.rewriting.unpack_op  # noqa: F401  registers the operator
from inductor_passes import _torch
from inductor_passes.ir.ops import Role, label, source_line
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewriting.contract import Facts, GroupOrder, Outcome
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.verify.certificate import Certificate


@dataclass(frozen=True)
class Column:
    """A dense copy of a range of columns: ``clone(slice(message, 1, first, first + width))``."""

    first: int
    width: int
    slice: torch.fx.Node
    copy: torch.fx.Node


@dataclass(frozen=True)
class UnpackPass:
    """The pass.

    Attributes:
        devices: kinds of device that it is for.
    """

    devices: tuple[str, ...] = ("cuda",)
    name: str = "unpack"
    group_order: ClassVar[GroupOrder] = "kept"

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        """One decision per message of which several members are copied out for readers that cannot take it in."""
        view = facts.view
        found = [(wait, columns) for wait in view.collectives_of_wait if (columns := self._columns(view, wait))]
        kernel_ns = facts.profile.compute_ns(0, 0, "float32", 1)
        decisions = [
            Decision(
                self.name,
                wait.name,
                Verdict.APPLIED,
                Reason.PROFITABLE,
                f"{len(columns)} copies in one launch",
                source=source_line(wait),
                gain_ns=(len(columns) - 1) * kernel_ns,
                setting='unpack="inductor"',
            )
            for wait, columns in found
        ]
        certificates = tuple(_together(graph, wait, columns) for wait, columns in found)
        return Outcome(PassReport(self.name, changed=bool(found), decisions=decisions), certificates)

    def _columns(self, view: GraphView, wait: torch.fx.Node) -> list[Column]:
        """What is copied out of a message for readers that cannot take the copy in; none for fewer than two."""
        value = wait.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.device.type not in self.devices:
            return []
        if not value.is_contiguous() or any(storage.writers for storage in view.storages.of(wait)):
            return []
        found = []
        for user in wait.users:
            column = _column(user, value)
            if column is None:
                continue
            written = any(storage.writers for storage in view.storages.of(column.copy))
            if not written and not _is_folded(column.copy, view.role):
                found.append(column)
        return sorted(found, key=lambda c: c.first) if len(found) > 1 else []


def _column(node: torch.fx.Node, message: torch.Tensor) -> Column | None:
    if _torch.op_name(node.target) != "aten::slice" or len(node.users) != 1:
        return None
    arguments = _torch.op_arguments(node)
    (copy,) = node.users
    part, made = node.meta["val"], copy.meta.get("val")
    dense = isinstance(made, torch.Tensor) and made.is_contiguous() and made.dtype == message.dtype
    if _torch.op_name(copy.target) != "aten::clone" or not dense or arguments.get("dim", 0) != 1:
        return None
    first, step = arguments.get("start", 0), arguments.get("step", 1)
    if step != 1 or type(first) is not int or first < 0 or any(type(s) is not int for s in part.shape):
        return None
    return Column(first, part.shape[1], node, copy)


def _is_folded(copy: torch.fx.Node, role: Callable[[torch.fx.Node], Role]) -> bool:
    """Whether some reader, through views, is of a kind that Inductor fuses with what it reads."""
    todo, seen = [copy], {copy}
    while todo:
        for user in todo.pop().users:
            if role(user) is Role.FREE and user not in seen:
                seen.add(user)
                todo.append(user)
            elif role(user) is Role.COMPUTE and not label(user):
                return True
    return False


def _together(graph: torch.fx.Graph, wait: torch.fx.Node, columns: list[Column]) -> Certificate:
    """Replace the copies by one operator, in place."""
    earliest = min(c.copy for c in columns)
    emit = Emitter(graph, earliest.prev)
    with emit.standing_for(earliest):
        firsts, widths = [c.first for c in columns], [c.width for c in columns]
        made = emit.call(torch.ops.inductor_passes.unpack.default, wait, firsts, widths)
        pieces = [(column, emit.call(operator.getitem, made, k)) for k, column in enumerate(columns)]
    removed: list[str] = []
    for column, piece in pieces:
        column.copy.replace_all_uses_with(piece)
        for node in (column.copy, column.slice):
            removed.append(node.name)
            graph.erase_node(node)
    replaced = tuple((c.copy.name, p.name) for c, p in pieces)
    return Certificate("unpack", tuple(removed), tuple(n.name for n in emit.made), replaced)
