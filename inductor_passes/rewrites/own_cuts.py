"""Cuts that may be other ones on every rank.

Ranks take graphs for one that differ in numbers which say which piece is the rank's own (``agreement/pieces.py``).
What one rank decides by such a number, others may decide differently, and then they do not issue the same collectives.
"""

from __future__ import annotations

import torch.fx

from inductor_passes import _torch
from inductor_passes.agreement.pieces import cut, opened
from inductor_passes.rewrites.movement import name_of


def may_be_own(node: torch.fx.Node) -> bool:
    """Whether what a node takes out of a dimension, or puts into it, may be something else on every rank.

    Ranks leave such numbers open when they compare their graphs. A stretch is no rank's own where no second one fits.
    """
    arguments = _torch.op_arguments(node)
    _, found = opened(node, name_of(node), arguments, _torch.rank_and_world_size()[1])
    stretch = cut(node, arguments) if name_of(node) in ("aten::slice", "aten::slice_scatter") else None
    if stretch is None:
        return bool(found)
    _, _, length, size = stretch
    return bool(found) and 2 * length <= size
