"""What other ranks notice of a graph's collectives, and putting a graph into the order of another one's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch.fx

from inductor_passes.agreement.grid import segments
from inductor_passes.ir.parameters import names_of
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.order import ordered

#: Where a merged start keeps the names of those that it was made of. Its own name depends on what else was tried.
_MEMBERS = "inductor_passes_members"


def note_members(merged: torch.fx.Node, starts: Sequence[torch.fx.Node]) -> None:
    """Enter in a merged start which starts it was made of."""
    merged.meta[_MEMBERS] = tuple(name for start in starts for name in _members(start))


def messages(view: GraphView) -> tuple[str, ...]:
    """Each collective in order: kind, sizes, group, and the parameters that it carries, or the starts that it was.

    Equal on ranks that send the same: a group is described by its shape in the grid of ranks.
    """
    return tuple(map(_message, view.collectives))


def carry_parameters(view: GraphView) -> bool:
    """Whether all collectives carry parameters or their gradients: other graphs of the model then have the same."""
    return all(names_of([one.start]) for one in view.collectives)


def in_any_order(view: GraphView) -> bool:
    """Whether these collectives are the same ones for the other ranks in whatever order the graph came with them.

    They carry parameters, by which each is known, and no two reductions look alike: an equal gather could take the
    other's place, an equal reduction could not. The order in which a graph comes is torch's choice: with activation
    checkpointing a variant for symbolic sizes gathers and reduces in another order than one for fixed sizes.
    """
    if not carry_parameters(view):
        return False
    reductions = Counter(_message(one) for one in view.collectives if one.kind is not CollectiveKind.ALL_GATHER)
    return all(count == 1 for count in reductions.values())


def order_like(view: GraphView, other: Sequence[str]) -> list[torch.fx.Node] | None:
    """The nodes of a graph, put into an order in which it sends the same messages as another graph.

    Args:
        other: :func:`messages` of the other graph.

    Returns:
        The nodes, in their order as far as possible; None where the messages are other ones.

    Raises:
        CycleError: no legal order sends them like that.
    """
    ours = [(_message(c), c.start) for c in view.collectives]
    if Counter(text for text, _ in ours) != Counter(other):
        return None
    starts: dict[str, list[torch.fx.Node]] = defaultdict(list)
    for text, start in reversed(ours):
        starts[text].append(start)
    return ordered(view, pairwise([starts[text].pop() for text in other]))


def _message(one: Collective) -> str:
    carried = names_of([one.start]) or _members(one.start)
    sizes = (one.dtypes, one.input_bytes, one.output_bytes)
    return " ".join(map(str, (one.kind.value, one.reduce_op, *sizes, _shape(one.group.ranks), carried)))


def _shape(ranks: Sequence[int]) -> object:
    """Steps and sizes of a group's ranks; the ranks where they are not regular."""
    ordered = sorted(ranks)
    axes = segments([rank - ordered[0] for rank in ordered])
    return ordered if axes is None else axes


def _members(start: torch.fx.Node) -> tuple[str, ...]:
    found: tuple[str, ...] = start.meta.get(_MEMBERS, (start.name,))
    return found
