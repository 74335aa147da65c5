"""Memory that a backend takes for a message beside the tensors in the graph, see ``_torch.copies_messages``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inductor_passes import _torch
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.problems.builder import Block, Builder


def workspaces(collectives: Mapping[int, Collective], builder: Builder) -> list[Block]:
    """The blocks of a problem's collectives, by the number of their start; O(collectives).

    A reduce-scatter's lives until its last wait. A gather's lives while it travels; when that is an order does not say,
    so it is counted from the start to the last wait, too.
    """
    found = []
    for start, collective in collectives.items():
        size = _size(collective)
        if size:
            name = f"{builder.tasks[start].name}.workspace"
            found.append(Block(name, size, start, set(builder.in_flight(start)), workspace=True))
    return found


def _size(collective: Collective) -> int:
    sizes = {
        CollectiveKind.REDUCE_SCATTER: collective.input_bytes,
        CollectiveKind.ALL_GATHER: collective.output_bytes,
    }
    size = sizes.get(collective.kind)
    if not size or not collective.inputs:
        return 0
    value = collective.inputs[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not _torch.copies_messages(collective.group.name, value.device):
        return 0
    return size
