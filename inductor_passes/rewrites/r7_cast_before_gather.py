"""R7: the narrow side of a cast is what an all_gather sends.

before::

    y = cast(unpack(wait(all_gather(x, a))), bfloat16)
    y = cast(clamp(unpack(wait(all_gather(x, a))) * s), float8)
    y = wait(all_gather(cast(x, float32), a))               (x in bfloat16)

after::

    y = unpack(wait(all_gather(cast(x, bfloat16), a)))
    y = unpack(wait(all_gather(cast(clamp(x * s), float8), a)))
    y = cast(wait(all_gather(x, a)), float32)

Matches, in the first form, a gather whose every reader, through whatever only moves elements (views, slices, splits,
cats, copies), is a cast to one dtype of fewer bytes; in the second a gather of a widening cast. A cast acts on every
element alone, and gathering moves elements, so the two commute bit for bit; reductions are never crossed. Scaling,
clamping and rounding on the way to the cast move with it, by numbers that are written down or equal on all ranks. What
Inductor computes in 16 bits, or would scale in the kernel that computes it, stays: the gather is what rounds it.
Saves the share of the gather's bytes by which the dtype shrinks (half for fp32 to bf16).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes.ir.ops import is_view
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import is_split, name_of, repeat_movement
from inductor_passes.rewrites.replicas import equal_values
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import gathered

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
#: Nodes between a gather and its casts.
MAX_REGION = 1024


class CastBeforeGather:
    """See the module's docstring."""

    name: ClassVar[str] = "R7"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every all_gather."""
        return work.collectives(CollectiveKind.ALL_GATHER)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """Casts behind this gather, or the one before it."""
        gather = work.collective(root, CollectiveKind.ALL_GATHER)
        if gather is None:
            return None
        wide = gather.inputs[0]
        if wide.target in CASTS and _itemsize(wide) > _itemsize(wide.all_input_nodes[0]):
            return self._widen_after(work, gather, wide)
        region, exits = _region(gather.waits[0])
        tails = [tail for node in exits if (tail := _tail(node, gather.waits[0]))]
        return self._narrow_before(work, gather, region, exits, tails) if tails else None

    def _narrow_before(
        self,
        work: Work,
        gather: Collective,
        region: tuple[torch.fx.Node, ...],
        exits: list[torch.fx.Node],
        tails: list[list[torch.fx.Node]],
    ) -> Match:
        (wait,) = gather.waits
        casts = [tail[-1] for tail in tails]
        dtypes = {cast.meta["val"].dtype for cast in casts}
        before, after = wait.meta["val"].dtype, casts[0].meta["val"].dtype
        if len(casts) < len(exits) or len(dtypes) > 1:
            refuse(Reason.DATA_DEPENDENCY, "the gathered tensor has other readers")
        for cast in casts:
            _only_dtype(cast)
        if after.itemsize >= before.itemsize:
            refuse(Reason.NOT_PROFITABLE, f"{before} to {after} does not narrow")
        entries = [_operand(tail[0], {wait, *region}) for tail in tails]
        if len({_said(entry, tail) for entry, tail in zip(entries, tails)}) > 1:
            refuse(Reason.DATA_DEPENDENCY, "the gathered tensor is scaled in several ways")
        steps = [node for tail in tails for node in tail]
        if len(tails[0]) > 1 and not work.facts.compared:
            refuse(Reason.RANKS_DIFFER, "ranks may scale by other numbers")
        _scales_are_equal(work, gather, _scales(entries[0], tails[0]))
        if (before.itemsize < 4 or len(tails[0]) > 1) and _fuses(work, gather.inputs[0]):
            refuse(Reason.NUMERICS, f"{gather.inputs[0].name} would be narrowed before it is rounded to {before}")
        work.unwritten(gather.inputs[0], gather.start, wait)
        work.never_written(wait, *region, *steps)

        def build(emit: Emitter) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
            narrow, before = gather.inputs[0], entries[0]
            for node in tails[0]:
                args = [narrow if a is before else a for a in node.args]
                narrow, before = emit.call(node.target, *args, **node.kwargs), node
            whole = gathered(emit, narrow, gather.group.size, gather.group_argument)
            new = repeat_movement(emit, region, {wait: whole})
            return [(tail[-1], new[entry]) for entry, tail in zip(entries, tails)]

        # The gather stays where it was: other passes decide its position among the collectives.
        removed = (*reversed(steps), *reversed(region), wait, gather.start)
        return Match(
            self._gain(work, gather, before, after),
            f"{before} to {after}",
            lambda: work.replace(self.name, gather.start, removed, build, before=gather.start),
        )

    def _widen_after(self, work: Work, gather: Collective, wide: torch.fx.Node) -> Match:
        _only_dtype(wide)
        (wait,) = gather.waits
        (narrow,) = wide.all_input_nodes
        before, after = wide.meta["val"].dtype, narrow.meta["val"].dtype
        if not narrow.meta["val"].is_contiguous():
            refuse(Reason.UNSUPPORTED, "the narrow tensor is not dense")
        if before.is_floating_point and after.itemsize > 1 and _fuses(work, narrow):
            refuse(Reason.NUMERICS, f"{narrow.name} is widened before it is rounded to {after}")
        work.unwritten(narrow, wide, wait)
        # What is written to the result has to reach the memory of a gather, not that of a cast.
        work.never_written(wide, wait)

        def build(emit: Emitter) -> torch.fx.Node:
            whole = gathered(emit, narrow, gather.group.size, gather.group_argument)
            return emit.call(wide.target, whole, *wide.args[1:], **wide.kwargs)

        return Match(
            self._gain(work, gather, before, after),
            f"{before} to {after}",
            lambda: work.replace(self.name, gather.start, (wait, gather.start), build),
        )

    def _gain(self, work: Work, gather: Collective, before: torch.dtype, after: torch.dtype) -> int:
        sizes = [(n or 0) * after.itemsize // before.itemsize for n in (gather.input_bytes, gather.output_bytes)]
        after = work.collective_ns(CollectiveKind.ALL_GATHER, sizes[0], sizes[1], gather.group.ranks)
        return work.price_ns(gather) - after


#: Operators on each element alone whose result is the same bits whatever code computes it.
_EXACT = frozenset(f"aten::{name}" for name in ("mul", "div", "add", "sub", "clamp", "clamp_min", "clamp_max", "round"))


def _fuses(work: Work, node: torch.fx.Node) -> bool:
    """Whether Inductor may narrow a value in the kernel that computes it.

    It keeps 16-bit numbers in float32 inside of a kernel, and may contract a product and a sum. What is sent as it is
    has been rounded in memory.
    """
    while is_view(node):
        node = node.all_input_nodes[0]
    return work.facts.config.codegen == "inductor" and node.op == "call_function" and not work.is_wait(node)


def _tail(node: torch.fx.Node, wait: torch.fx.Node) -> list[torch.fx.Node]:
    """From a reader of what was gathered to a cast that narrows it; a cast that does not narrow stands for itself."""
    tail = [node]
    while not (tail[-1].target in CASTS and _itemsize(tail[-1]) < _itemsize(wait)):
        last, users = tail[-1], list(tail[-1].users)
        moves_on = last.target in CASTS or (last.op == "call_function" and name_of(last) in _EXACT)
        if not moves_on or len(users) != 1 or len(tail) > MAX_REGION or not _same_shape(last):
            return [node] if node.target in CASTS else []
        tail.append(users[0])
    return tail if len(tail) == 1 or _same_shape(tail[-1]) else []


def _same_shape(node: torch.fx.Node) -> bool:
    """Whether a node has one operand of its own shape and no other, but numbers and tensors of one number."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.kwargs.keys() - {"dtype", "min", "max"}:
        return False
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if not all(isinstance(one, torch.Tensor) for one in operands):
        return False
    return sum(one.dim() > 0 for one in operands) == 1 and all(one.shape in (value.shape, ()) for one in operands)


def _operand(node: torch.fx.Node, among: set[torch.fx.Node]) -> torch.fx.Node:
    """The operand of a node that was gathered."""
    found = [n for n in node.all_input_nodes if n in among]
    if len(found) != 1:
        refuse(Reason.DATA_DEPENDENCY, f"{node.name} reads the gathered tensor twice")
    return found[0]


def _said(entry: torch.fx.Node, tail: list[torch.fx.Node]) -> str:
    """What a tail computes, equal for tails that compute the same."""
    before, said = entry, []
    for node in tail:
        args = ["x" if a is before else str(a) for a in node.args]
        said.append(f"{node.target}({args}, {node.kwargs})")
        before = node
    return " ".join(said)


def _scales(entry: torch.fx.Node, tail: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The tensors that a tail reads besides what was gathered."""
    return [n for before, node in zip([entry, *tail], tail) for n in node.all_input_nodes if n is not before]


def _scales_are_equal(work: Work, gather: Collective, scales: list[torch.fx.Node]) -> None:
    """Refuse unless all ranks scale alike, by numbers that are there before the gather is."""
    if not scales:
        return
    equal = equal_values(work, gather.group.ranks, implied=False)
    for scale in scales:
        if scale not in equal:
            refuse(Reason.DATA_DEPENDENCY, f"nothing shows that ranks scale by the same {scale.name}")
        if not scale < gather.start:
            refuse(Reason.DATA_DEPENDENCY, f"{scale.name} is not known before the gather")
    work.never_written(*scales)


def _itemsize(node: torch.fx.Node) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _only_dtype(cast: torch.fx.Node) -> None:
    if set(cast.kwargs) - {"dtype"}:
        refuse(Reason.UNSUPPORTED, f"a cast that also changes {sorted(cast.kwargs)}")


#: Views that read the bytes of an element as something else.
_REINTERPRETS = frozenset(
    {"aten::view_as_real", "aten::view_as_complex", "aten::real", "aten::imag", "aten::to", "aten::_to_copy"}
)


def _moves(node: torch.fx.Node) -> bool:
    """Whether a node puts elements elsewhere and nothing more."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], torch.fx.Node) and is_split(node.args[0])
    if node.op != "call_function" or node.target is torch.ops.aten.view.dtype or name_of(node) in _REINTERPRETS:
        return False
    return name_of(node) in ("aten::cat", "aten::clone") or is_split(node) or is_view(node)


def _region(wait: torch.fx.Node) -> tuple[tuple[torch.fx.Node, ...], list[torch.fx.Node]]:
    """What only moves the elements of ``wait``, in order, and the first other readers."""
    inside: dict[torch.fx.Node, None] = {wait: None}
    exits: dict[torch.fx.Node, None] = {}
    todo = [wait]
    while todo:
        for user in todo.pop().users:
            if user in inside:
                continue
            whole = all(n in inside for n in user.all_input_nodes)
            if _moves(user) and whole and len(inside) < MAX_REGION:
                inside[user] = None
                exits.pop(user, None)
                todo.append(user)
            else:
                exits[user] = None
    del inside[wait]
    return tuple(sorted(inside)), list(exits)
