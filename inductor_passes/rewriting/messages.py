"""What other ranks notice of a graph's collectives, and putting a graph into the order of another one's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from itertools import pairwise

import torch.fx

from inductor_passes.agreement.grid import segments
from inductor_passes.ir.parameters import names_of
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.order import ordered

#: Where a merged start keeps the names of those that it was made of. Its own name depends on what else was tried.
_MEMBERS = "inductor_passes_members"
#: Between the parts of a message: group, what it is, its sizes, what it carries. Parameters begin with the second.
_BETWEEN, _PARAMETERS = " | ", "of "


def note_members(merged: torch.fx.Node, starts: Sequence[torch.fx.Node]) -> None:
    """Enter in a merged start which starts it was made of."""
    merged.meta[_MEMBERS] = tuple(name for start in starts for name in members_of(start))


def messages(view: GraphView) -> tuple[str, ...]:
    """Each collective in order: group, kind, sizes, and the parameters that it carries, or the starts that it was.

    Equal on ranks that send the same: a group is described by its shape in the grid of ranks.
    """
    return tuple(map(_message, view.collectives))


def group_of(message: str) -> str:
    """The group of one of :func:`messages`."""
    return message.partition(_BETWEEN)[0]


def within(sent: Sequence[str], groups: Container[str]) -> tuple[str, ...]:
    """Those of some :func:`messages` that go to certain groups."""
    return tuple(text for text in sent if group_of(text) in groups)


def gather_of_parameters(message: str) -> bool:
    """Whether one of :func:`messages` gathers parameters and nothing else."""
    parts = message.split(_BETWEEN, 3)
    gathers = len(parts) == 4 and parts[1].partition(" ")[0] == CollectiveKind.ALL_GATHER.value
    return gathers and parts[3].startswith(_PARAMETERS)


def without_sizes(message: str) -> str:
    """One of :func:`messages` as it is for every batch: sizes count where it carries parameters only."""
    parts = message.split(_BETWEEN, 3)
    if len(parts) < 4 or parts[3].startswith(_PARAMETERS):
        return message
    group, what, _, starts = parts
    return _BETWEEN.join((group, what, starts.partition(":")[0]))


def all_carry_parameters(view: GraphView) -> frozenset[str]:
    """Groups in which every collective carries parameters or their gradients: other graphs of the model have the same.

    In which order a graph comes with them is torch's choice: with activation checkpointing a variant for symbolic sizes
    gathers and reduces in another order than one for fixed sizes. Named as :func:`group_of` names them.
    """
    every: dict[str, bool] = {}
    for one in view.collectives:
        group = _group(one)
        every[group] = every.get(group, True) and bool(names_of([one.start]))
    return frozenset(group for group, carries in every.items() if carries)


def counterparts(ours: Sequence[str], others: Sequence[str]) -> list[int] | None:
    """The place in ``ours`` of each of ``others``; None where these are not the same messages.

    Where they are the same but for the sizes of what carries no parameters, the first such is the first one.
    """
    for text in (str, without_sizes):
        mine = [text(one) for one in ours]
        theirs = [text(one) for one in others]
        if Counter(mine) == Counter(theirs):
            places: dict[str, list[int]] = defaultdict(list)
            for place in range(len(mine) - 1, -1, -1):
                places[mine[place]].append(place)
            return [places[one].pop() for one in theirs]
    return None


def order_like(view: GraphView, others: Sequence[Sequence[str]]) -> list[torch.fx.Node] | None:
    """The nodes of a graph, put into an order in which it sends the same messages as other graphs.

    Args:
        others: for some groups each, :func:`messages` of another graph that go to these, in its order.

    Returns:
        The nodes, in their order as far as possible; None where the messages are other ones.

    Raises:
        CycleError: no legal order sends them like that.
    """
    texts = messages(view)
    pairs: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    for other in others:
        groups = set(map(group_of, other))
        places = [place for place, text in enumerate(texts) if group_of(text) in groups]
        found = counterparts([texts[place] for place in places], other)
        if found is None:
            return None
        pairs += pairwise(view.collectives[places[place]].start for place in found)
    return ordered(view, pairs)


def _message(one: Collective) -> str:
    parameters, members = names_of([one.start]), members_of(one.start)
    carried = f"{_PARAMETERS}{parameters}" if parameters else f"{len(members)} starts: {members}"
    what = f"{one.kind.value} {one.reduce_op} {one.dtypes}"
    return _BETWEEN.join((_group(one), what, f"{one.input_bytes} {one.output_bytes}", carried))


def _group(one: Collective) -> str:
    return str(_shape(one.group.ranks))


def _shape(ranks: Sequence[int]) -> object:
    """Steps and sizes of a group's ranks; the ranks where they are not regular."""
    ordered = sorted(ranks)
    axes = segments([rank - ordered[0] for rank in ordered])
    return ordered if axes is None else axes


def members_of(start: torch.fx.Node) -> tuple[str, ...]:
    """The starts that a start was made of, in the order of its message; itself where it was not merged."""
    found: tuple[str, ...] = start.meta.get(_MEMBERS, (start.name,))
    return found
