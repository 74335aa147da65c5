"""What must not differ between ranks when the order of collectives is decided.

Ranks agree on a plan only when they solve the same problem. Uneven shards break that: one rank pads its shard before
a gather, its neighbour has nothing to pad, and trimming after a reduction differs likewise. The collectives themselves
are of equal (padded) size everywhere. So everything that only prepares a collective's input from graph inputs counts as
part of the collective's start, with the sizes of the collective, whatever a rank has to do for it; and everything
that only trims a collective's result counts as part of its wait.
"""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import GraphView

#: Operators that only move, pad or convert data: all that uneven shards need around a collective.
_MOVES = frozenset(
    {
        "aten::constant_pad_nd",
        "aten::_to_copy",
        "aten::clone",
        "aten::cat",
        "aten::copy",
        "aten::slice_scatter",
        "aten::full",
        "aten::new_zeros",
        "aten::zeros",
        "aten::empty",
        "aten::new_empty",
        "aten::split_with_sizes_copy",
        "prims::convert_element_type",
    }
)


#: Those that every rank has alike, whatever its shard's size.
COPIES = frozenset({"aten::_to_copy", "aten::cat", "prims::convert_element_type"})


def moves_data(view: GraphView, node: torch.fx.Node) -> bool:
    """Whether a node only moves, pads or converts data, or is a view."""
    role = view.role(node)
    return role is Role.FREE or (role is Role.COMPUTE and _torch.op_name(node.target) in _MOVES)


def _written(view: GraphView) -> set[torch.fx.Node]:
    """Nodes whose memory is written to after it was made."""
    return {n for storage in view.storages.all if storage.writers for n in storage.members}


def preparations(view: GraphView) -> dict[torch.fx.Node, torch.fx.Node]:
    """Compute nodes that only prepare a collective's input from graph inputs -> that collective's start.

    A node qualifies when all its inputs are graph inputs (or qualify themselves) and all its users are one start (or
    qualify for it). O(nodes + edges), by one sweep forwards and one backwards.
    """
    from_inputs: set[torch.fx.Node] = set()
    for node in view.nodes:
        if view.role(node) is Role.INPUT or (
            moves_data(view, node) and all(n in from_inputs for n in node.all_input_nodes)
        ):
            from_inputs.add(node)
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    written = _written(view)
    for node in reversed(view.nodes):
        if node not in from_inputs or view.role(node) is Role.INPUT:
            continue
        if node in written or any(n in written for n in node.all_input_nodes):
            continue
        starts = {user if view.role(user) is Role.START else found.get(user) for user in node.users}
        if len(starts) == 1 and (start := starts.pop()) is not None:
            found[node] = start
    return found


def trims(view: GraphView) -> dict[torch.fx.Node, torch.fx.Node]:
    """Compute nodes that only cut or copy a wait's result and leave the graph -> that wait.

    A node qualifies when its only tensor input is a wait of a reduction (through views or nodes that qualify) and its
    value is used by graph outputs only (or by nodes that qualify). Nobody else may write to what it touches: it would
    move ahead of the write.
    """
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    root: dict[torch.fx.Node, torch.fx.Node] = {}
    leaves: set[torch.fx.Node] = set()
    written = _written(view)
    for node in reversed(view.nodes):
        if node in written or any(n in written for n in node.all_input_nodes):
            continue
        if moves_data(view, node) and all(user.op == "output" or user in leaves for user in node.users):
            leaves.add(node)
    for node in view.nodes:
        role = view.role(node)
        if role is Role.WAIT:
            root[node] = node
        elif moves_data(view, node):
            sources = {root.get(n) for n in node.all_input_nodes}
            if len(sources) == 1 and (source := sources.pop()) is not None and node in leaves:
                root[node] = source
                if role is Role.COMPUTE:
                    found[node] = source
    return found
