"""What is computed in parts: a pass that cuts work so that transfers run beside it says so at every node it makes."""

from __future__ import annotations

import torch.fx

#: Key of a node's meta; the value is (name of what was cut, number of the part).
PART_KEY = "inductor_passes_part"


def mark_part(node: torch.fx.Node, cut: str, part: int) -> None:
    """Say that a node belongs to one part of what is called ``cut``: nothing of it needs another part."""
    node.meta[PART_KEY] = (cut, part)


def part_of(node: torch.fx.Node) -> tuple[str, int] | None:
    """(name of what was cut, number of the part); None for a node of no part."""
    found = node.meta.get(PART_KEY)
    return None if found is None else (str(found[0]), int(found[1]))
