"""Peak memory of an FX graph: storages are allocated and released in graph order; O(nodes + edges).

Counted are storages, not the allocator's reserve. Views share a storage, and an in-place op adds none. The inputs of a
collective or a transfer live until the last of its waits. Graph inputs and attributes belong to the caller and live for
the whole call unless they are named as donated. Outputs live to the end. A node's results are allocated before its
operands are released. A view does not touch memory, so a view that nobody reads keeps none alive. An input that nobody
reads is never released, because generated code drops its inputs after a use. Inputs that are noted as one block
(``ops.SAVED_BLOCK``) are allocated once, and released behind the last use of any of them. What a backend copies for a
message counts too (``verify.workspaces``), and what attention takes while it runs (``verify.insides``).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx

from inductor_passes.ir.ops import SAVED_BLOCK, Role
from inductor_passes.verify.facts.storages import Block
from inductor_passes.verify.facts.view import View
from inductor_passes.verify.insides import inside_bytes
from inductor_passes.verify.workspaces import workspace_bytes


def peak_bytes(graph: torch.fx.Graph, *, donated: Collection[str] = ()) -> int | None:
    """Peak bytes of a graph, by hint; None when a size has no hint.

    Args:
        donated: names of graph inputs that are freed after their last use (activations in a backward graph).
    """
    return peak_of(View(graph), donated)


def peak_of(view: View, donated: Collection[str] = ()) -> int | None:
    """:func:`peak_bytes` of a graph that has been looked at already."""
    last = len(view.nodes) - 1
    released: list[int] = [0] * (last + 2)
    allocated: list[int] = [0] * (last + 2)
    live = 0
    #: First input of a block -> its bytes and the ends of all inputs that are the block.
    together: dict[str, tuple[int, list[int]]] = {}
    for storage in view.storages.all:
        if storage.size_bytes is None:
            return None
        if (noted := storage.producer.meta.get(SAVED_BLOCK)) is not None:
            first, size_bytes = noted
            # A block that is not given away stays, as if the output read it.
            end = _last_touch(view, storage) if storage.producer.name in donated else last
            together.setdefault(first, (size_bytes, []))[1].append(end)
            continue
        if storage.producer.op in ("placeholder", "get_attr"):
            live += storage.size_bytes
            if storage.producer.name not in donated:
                continue
        else:
            allocated[view.position[storage.producer]] += storage.size_bytes
        end = _last_touch(view, storage)
        if 0 <= end < last:
            released[end] += storage.size_bytes
    for collective in view.collectives:
        start, held = view.position[collective.start], workspace_bytes(collective)
        allocated[start] += held
        released[max((view.position[w] for w in collective.waits), default=start)] += held
    for node in view.nodes:
        if node.op == "call_function" and (taken := inside_bytes(node)):
            allocated[view.position[node]] += taken
            released[view.position[node]] += taken
    for size_bytes, ends in together.values():
        live += size_bytes
        if min(ends) >= 0 and max(ends) < last:
            released[max(ends)] += size_bytes
    peak = live
    for index in range(last + 1):
        live += allocated[index]
        peak = max(peak, live)
        live -= released[index]
    return peak


def _last_touch(view: View, block: Block) -> int:
    """Position after which a block is not needed any more; -1 for an input that nobody touches."""
    end = -1 if view.roles[block.producer] is Role.INPUT else view.position[block.producer]
    for member in block.members:
        for node in (member, *member.users):
            if view.roles[node] is Role.INPUT or (view.roles[node] is Role.FREE and not view.reads(node)):
                continue
            end = max(end, view.position[node], *(view.position[w] for w in view.ends(node)))
    return end
