"""Pieces that are each rank's own, and values that are equal on all ranks: what DTensor wrote into the graph.

A graph contains the rank's index as a constant. If a value is read on another rank, a slice at this rank's index has to
be taken at that rank's. One rank's numbers do not show which slices these are (on rank 0 every first piece looks like
one). So the evidence is the origin: a split of which one piece is used, traced from one of DTensor's conversions, into
as many pieces as exactly one of this process's groups has ranks, at this rank's position in it.

A pass that cuts a value so writes the group's ranks down at the split (``messages.OWN_KEY``). That is held against
this rank's graph, and assumed of the others. It shows no replicas.

DTensor slices in this way what is replicated along that group. It is an assumption of the proof, taken from DTensor,
that the replicas are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.layouts import COPY_KEY, noted
from inductor_passes.verify.messages import OWN_KEY
from inductor_passes.verify.values.layouts import Layouts
from inductor_passes.verify.values.moves import MOVES
from inductor_passes.verify.values.program import Program, Record, operands
from inductor_passes.verify.values.replicas import Replicas, replicas

_CONVERSIONS = frozenset({"redistribute", "full_tensor", "to_local", "from_local", "distribute_tensor"})
_SPLITS = frozenset({"aten::split", "aten::split_with_sizes"})
#: What passes on that ranks hold the same: everything that only moves elements, and gathers over other groups.
_GATHERS = frozenset(
    {"_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_coalesced"}
)


class Own:
    """The own pieces of one program.

    ``layouts``: those of the program as it came.
    """

    def __init__(self, program: Program, here: int, layouts: Layouts) -> None:
        self.program, self.here, self.layouts = program, here, layouts
        self._by_size: dict[int, Replicas | None] | None = None
        self._pieces: dict[str, Replicas | None] = {}

    def group(self, split: Record, piece: int) -> Replicas | None:
        """The group along which a piece of a split is the rank's own; None when it is not known to be."""
        if OWN_KEY in split.meta:
            return self.stated(split)
        if split.called not in _SPLITS or not (converted(split.meta) or noted(split.meta, COPY_KEY)):
            return None
        if split.name not in self._pieces:
            self._pieces[split.name] = self._found(split, piece)
        return self._pieces[split.name]

    def stated(self, split: Record) -> Replicas | None:
        """The group along which a split says that its only piece in use is the rank's own; None when it is not."""
        ranks: tuple[int, ...] = tuple(split.meta[OWN_KEY])
        pieces = [split.shape((i,)) for i in range(len(split.value))] if split.called in _SPLITS else []
        if len(pieces) != len(ranks) or len(set(pieces)) != 1 or self.here not in ranks:
            return None
        # Nobody may read another rank's piece, and what nobody reads says nothing.
        return replicas(ranks) if self.program.used_pieces(split) in ([], [ranks.index(self.here)]) else None

    def _found(self, split: Record, piece: int) -> Replicas | None:
        shapes = {split.shape((i,)) for i in range(len(split.value))}
        if len(shapes) != 1 or self.program.pieces_in_use(split) != [piece]:
            return None
        said = self.layouts.group(split)
        if said is not None:
            return replicas(said) if len(said) == len(split.value) and said.index(self.here) == piece else None
        group = self._groups().get(len(split.value))
        return group if group is not None and group.ranks.index(self.here) == piece else None

    def _groups(self) -> dict[int, Replicas | None]:
        """This process's groups by size, None for sizes that several have."""
        if self._by_size is None:
            self._by_size = {}
            for ranks in {r for r in _torch.group_layout().values() if self.here in r}:
                self._by_size[len(ranks)] = None if len(ranks) in self._by_size else replicas(ranks)
        return self._by_size

    def replicated(self) -> dict[str, set[Replicas]]:
        """Names of values that the program takes to be equal along groups."""
        found: dict[str, set[Replicas]] = {}
        for split in self.program.records.values():
            if split.called in _SPLITS and converted(split.meta) and OWN_KEY not in split.meta:
                used = self.program.used_pieces(split)
                group = self.group(split, used[0]) if len(used) == 1 else None
                if group is not None:
                    for leaf in _leaves(split.first, group):
                        found.setdefault(leaf.name, set()).add(group)
        if self.program is self.layouts.program:
            for source, ranks in self.layouts.replicated():
                if (group := replicas(ranks)) is not None:
                    for leaf in _leaves(source, group):
                        found.setdefault(leaf.name, set()).add(group)
        return found


def _leaves(record: Record, group: Replicas) -> list[Record]:
    """Where the elements of a value come from, through movement and gathers over other groups.

    What a gather over ranks of the group brings together is alike on them whatever each of them sends.
    """
    seen: dict[str, Record] = {}
    found, todo = [], [record]
    while todo:
        one = todo.pop()
        if one.name in seen:
            continue
        seen[one.name] = one
        if one.called in _GATHERS and len(_ranks(one) & {*group.ranks}) != 1:
            continue
        if one.called in MOVES or one.called in _GATHERS:
            todo += operands(one.arguments)
        elif hasattr(one.value, "dtype"):
            found.append(one)
    return found


def _ranks(gather: Record) -> set[int]:
    argument = gather.arguments["group_name"]
    return {*resolve(argument.value if isinstance(argument, Record) else argument).ranks}


def converted(meta: Mapping[str, Any]) -> bool:
    """Whether a node was traced from one of DTensor's conversions, forward or backward."""
    for key in ("source_fn_stack", "fwd_source_fn_stack"):
        if stack := meta.get(key):
            return _called(stack[-1][1]) in _CONVERSIONS
    sources = meta.get("from_node")
    return sources is not None and len(sources) > 0 and _called(str(sources[-1].target)) in _CONVERSIONS


def _called(call: object) -> str:
    text = call if isinstance(call, str) else getattr(call, "__qualname__", "")
    if method := re.search(r"method_(\w+)\.<locals>", text):
        return method.group(1)
    name = call if isinstance(call, str) else getattr(call, "__name__", str(call))
    return name.removeprefix("prim_")
