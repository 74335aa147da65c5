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

import contextlib
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.layouts import COPY_KEY, noted
from inductor_passes.verify.messages import CUT_KEY, OWN_KEY
from inductor_passes.verify.values.access import Access, dim_of
from inductor_passes.verify.values.affine import Affine
from inductor_passes.verify.values.layouts import Layouts
from inductor_passes.verify.values.movement import slice_range
from inductor_passes.verify.values.moves import MOVES
from inductor_passes.verify.values.program import Program, Record, operands, whole
from inductor_passes.verify.values.replicas import Replicas, replicas
from inductor_passes.verify.values.sizes import NoHintError

_CONVERSIONS = frozenset({"redistribute", "full_tensor", "to_local", "from_local", "distribute_tensor"})
_SPLITS = frozenset({"aten::split", "aten::split_with_sizes"})
_LISTS = frozenset({"aten::chunk", "aten::unbind", "aten::tensor_split"})
_ROWS = frozenset({"aten::select", "aten::select_scatter"})
#: What takes a part of a tensor, at a place that is a number, and nothing else.
CUTS = frozenset({"aten::select", "aten::slice"}) | _SPLITS
#: Whose numbers the ranks do not compare as they stand.
_MAYBE_OWN = _SPLITS | _LISTS | _ROWS | {"aten::slice", "aten::slice_scatter", "aten::full"}
#: What passes on that ranks hold the same: everything that only moves elements, and gathers over other groups.
_GATHERS = frozenset(
    {"_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_coalesced"}
)


class Own:
    """The own pieces of one program.

    ``layouts``: those of the program as it came. ``came``: its own pieces; itself where this is that program.
    ``stops_here``: what may be taken elsewhere on other ranks is not followed on this one either.
    """

    def __init__(self, program: Program, here: int, layouts: Layouts, came: Own | None = None) -> None:
        self.program, self.here, self.layouts = program, here, layouts
        self.came = came or self
        self._by_size: dict[int, Replicas | None] | None = None
        self._pieces: dict[str, Replicas | None] = {}
        self.stops_here = False

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

    def may_be_elsewhere(self, a: Access) -> bool:
        """Whether a read takes something else out of a tensor, or is another whole number, on the rank it is read on.

        Ranks compile one graph but for numbers that say which piece is the rank's own. Such a number is one of the
        program as it came. Passes write down where they take own pieces and where they cut by numbers of their own;
        else they may have copied a number of the program.
        """
        if a.record.called not in _MAYBE_OWN or CUT_KEY in a.record.meta:
            return False
        if a.rank == Affine(self.here) and not self.stops_here:
            return False
        piece = a.path[0] if len(a.path) == 1 else None
        taken = self._taken(a.record, piece)
        shapes = None if taken is None else self.came.suspects.get(taken)
        if not shapes or not any(_is_share(self._whole(a.record), shape) for shape in shapes):
            return False
        return piece is None or self.group(a.record, piece) is None

    def same_cut(self, a: Access, other: Own, b: Access) -> tuple[int, int] | None:
        """(dimension, size) of the sources of two cuts that are at the same place there, wherever that is; else None.

        Args:
            other: of ``b``'s program. Of both :meth:`may_be_elsewhere` is true.
        """
        if a.rank != b.rank or not {a.record.called, b.record.called} <= CUTS or len(a.path) != len(b.path):
            return None
        dims = []
        for own, read in ((self, a), (other, b)):
            shape, pieces = read.record.first.shape(), read.record.value if read.path else ()
            dim = dim_of(read.record.arguments.get("dim", 0), len(shape))
            # Pieces of one number begin at one place where all pieces are as long.
            lengths = [read.record.shape((k,))[dim] for k in range(len(pieces))]
            dims.append((dim, shape[dim], own._taken(read.record, read.path[0] if read.path else None), lengths))
        return dims[0][:2] if dims[0] == dims[1] else None

    @cached_property
    def _largest(self) -> int:
        """How many ranks the largest process group has."""
        return max(map(len, _torch.group_layout().values()), default=1)

    @cached_property
    def suspects(self) -> dict[tuple[str, int, int, int], set[tuple[Any, ...]]]:
        """What the program takes that may be the rank's own, see :meth:`_taken`, and out of which shapes."""
        found: dict[tuple[str, int, int, int], set[tuple[Any, ...]]] = {}
        for record in self.program.records.values():
            if record.called in _MAYBE_OWN:
                lists = isinstance(record.value, (list, tuple))
                for piece in self.program.used_pieces(record) if lists else [None]:
                    if (taken := self._taken(record, piece)) is not None:
                        found.setdefault(taken, set()).add(self._whole(record))
        return found

    @staticmethod
    def _whole(record: Record) -> tuple[Any, ...]:
        """The shape of what something is taken out of."""
        return record.shape() if record.called == "aten::full" else record.first.shape()

    def _taken(self, record: Record, piece: int | None) -> tuple[str, int, int, int] | None:
        """What is taken, where ranks may take another one each: kind, place, length, size of the whole; else None.

        It is the same on all ranks where no two stretches of its length fit, where more stretches are in front of it
        than any group has ranks, and where other pieces are read, too. Of sizes that vary ranks compare the numbers
        themselves. Of a tensor of one whole number it is the number.
        """
        if record.called == "aten::full":
            filled = record.arguments.get("fill_value")
            counts = not record.dtype().is_floating_point and not record.dtype().is_complex
            return ("number", filled, 0, 0) if counts and type(filled) is int else None
        if isinstance(record.value, (list, tuple)):
            count = len(record.value)
            with contextlib.suppress(KeyError, NoHintError):
                if piece is None or count < 2 or len(self.program.pieces_in_use(record)) != 1:
                    return None
            return "piece", piece or 0, 1, count
        try:
            source, given = record.first.shape(), record.arguments
            size = source[dim_of(given.get("dim", 0), len(source))]
            if record.called in _ROWS:
                start, length, step = whole(given["index"]), 1, 1
            else:
                _, start, end, step = slice_range(record)
                length = max(0, end - start)
        except NoHintError:
            return None
        if type(start) is not int or type(length) is not int or type(size) is not int or step != 1:
            return None
        regular = length > 0 and start % length == 0 and 0 <= start // length < self._largest and 2 * length <= size
        return ("rows" if record.called in _ROWS else "stretch", start, length, size) if regular else None

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


def _is_share(shape: tuple[Any, ...], whole: tuple[Any, ...]) -> bool:
    """Whether a tensor may be another one, or a rank's share of it along one dimension: passes copy cuts to shares."""
    return len(shape) == len(whole) and sum(a != b for a, b in zip(shape, whole)) <= 1


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
