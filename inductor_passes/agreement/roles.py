"""Names for process groups that are equal on all ranks: by their place in the grid, since their own names differ."""

from __future__ import annotations

from collections.abc import Callable

from inductor_passes import _torch
from inductor_passes.agreement.grid import Grid, segments
from inductor_passes.ir.groups import Group, resolve


class IncomparableError(ValueError):
    """A graph holds something that one rank cannot describe to another; the message says what."""


class Roles:
    """Numbers the process groups of a graph by first use, and says of each what ranks can compare.

    Two groups of the same ranks are told apart by their place among all groups of these ranks, in order of their
    names: members of a group know it by one name, and they are members of the others too. So where ranks describe a
    group alike, those that share it mean the same communicator.

    Args:
        rank: of this process.
        grid: the participants, None where they are not known yet.
        describe: what else decisions depend on about a group, e.g. its link; equal on ranks that must decide alike.
    """

    def __init__(self, rank: int, grid: Grid | None, describe: Callable[[Group], str] | None = None) -> None:
        self._rank = rank
        self._grid = grid
        self._describe = describe
        self._layout = _torch.group_layout()
        self._descriptions = _torch.group_descriptions()
        self._number: dict[str, int] = {}
        self.groups: list[Group] = []
        self.lines: list[str] = []

    def of(self, argument: object) -> int:
        """The number of the group that a node names, as a name or as an object.

        Raises:
            IncomparableError: it does not exist in this process.
        """
        group = resolve(argument)
        if not group.ranks:
            raise IncomparableError(f"process group {group.name!r} does not exist in this process")
        if group.name not in self._number:
            self._number[group.name] = len(self.groups)
            self.groups.append(group)
            self.lines.append(f"group {self._number[group.name]}: {self._definition(group)}")
        return self._number[group.name]

    def positions(self) -> list[tuple[int, ...]]:
        """Per group the position of this rank in its own, and of each corner of the grid in its own; where known."""
        grid = self._grid
        found: list[tuple[int, ...]] = []
        for group in self.groups:
            if grid is None or self._rank not in group.ranks or not set(group.ranks) <= set(grid.ranks):
                continue
            row = [group.ranks.index(self._rank), *(grid.alike(group.ranks, corner) for corner in grid.corners)]
            known = [position for position in row if position is not None]
            if len(known) == len(row):
                found.append(tuple(known))
        return found

    def _definition(self, group: Group) -> str:
        ordered = sorted(group.ranks)
        offsets = [rank - ordered[0] for rank in ordered]
        axes = segments(offsets)
        shape = " x ".join(f"{size} by {stride}" for stride, size in axes) if axes is not None else str(offsets)
        if list(group.ranks) != ordered:
            shape += f" in order {[rank - ordered[0] for rank in group.ranks]}"
        if self._rank not in group.ranks:
            shape += " without this rank"
        twins = sorted(
            (name for name, ranks in self._layout.items() if set(ranks) == set(ordered)), key=lambda n: (len(n), n)
        )
        place = twins.index(group.name) if group.name in twins else -1
        facts = [
            f"{len(ordered)} ranks",
            shape,
            f"number {place} of {len(twins)}",
            _torch.group_backend(group.name),
            self._descriptions.get(group.name, ""),
            self._describe(group) if self._describe is not None else "",
        ]
        return ", ".join(fact for fact in facts if fact)
