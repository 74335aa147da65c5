"""Process groups as plain data: a name and the global ranks in group order (the *replica group*)."""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes import _torch


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator.

    Attributes:
        name: torch's group name; equal names are the same communicator.
        ranks: global ranks in group order; empty when the group does not exist in this process.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def start_stride(self) -> tuple[int, int] | None:
        """(first rank, stride) when the ranks form an arithmetic progression, else None."""
        if len(self.ranks) < 2:
            return (self.ranks[0], 1) if self.ranks else None
        stride = self.ranks[1] - self.ranks[0]
        regular = all(b - a == stride for a, b in zip(self.ranks, self.ranks[1:]))
        return (self.ranks[0], stride) if regular else None

    def __str__(self) -> str:
        progression = self.start_stride
        if progression is None:
            return f"{self.name}{list(self.ranks)}"
        start, stride = progression
        return f"{self.name}[{start}:{self.ranks[-1] + 1}:{stride}]"


def resolve(group: object) -> Group:
    """The :class:`Group` of a collective's group argument: a name (str) or a process-group object."""
    found = _torch.resolve_group_ranks(group)
    if found is None:
        return Group(group if isinstance(group, str) else str(group), ())
    return Group(*found)
