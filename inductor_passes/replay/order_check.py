"""Does the generated code run in the planned order? Checked on the emitted statements of every compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_passes import _torch

CONFIRMED = "as planned"
UNCHECKED = "not checked"


def compare(nodes: Sequence[Any], statements: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """``as planned``, or the first difference between planned scheduler nodes and emitted statements.

    A generated kernel may stand for several neighbouring fused nodes; it is placed by the buffers that it defines.
    Every start and wait must appear, and all statements must come in the order of the nodes that they stand for.
    """
    if nodes and not statements:
        return f"{UNCHECKED}: the code was generated in partitions"
    position: dict[str, int] = {}
    fused: set[str] = set()
    for i, node in enumerate(nodes):
        kind = _torch.snode_kind(node)
        for name in _torch.snode_output_names(node):
            position[name] = i
            if kind == "fused":
                fused.add(name)
    seen: set[int] = set()
    reached = -1
    reached_name = ""
    for kind, names in statements:
        if kind == "extern":
            places = [(position[n], n) for n in names if n in position]
        else:
            places = [(position[n], n) for n in names if n in fused and position[n] not in seen]
        if not places:
            continue
        first, name = min(places)
        if first < reached:
            return f"{name} was emitted after {reached_name}; planned before it"
        reached, reached_name = max(places)
        seen.update(place for place, _ in places)
    for i, node in enumerate(nodes):
        if _torch.snode_kind(node) in ("start", "wait") and i not in seen:
            return f"{_torch.snode_name(node)} was planned and not found in the generated code"
    return CONFIRMED
