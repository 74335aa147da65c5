"""R10: a pack that moves nothing is a view.

before::

    y = cat(split(x, k), j)

after::

    y = view(x, shape of y)

Matches a dense x with nothing but extents of 1 before dimension k, and a result with nothing but extents of 1 before
dimension j: the pieces lie in memory in the order in which they are joined. P -> S1 of a tensor with batch 1 packs so,
and S1 -> R unpacks so. Bit-exact. Saves a copy of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes import _torch
from inductor_passes.report import Reason
from inductor_passes.rewrites.packing import joined_split, padded
from inductor_passes.rewrites.work import Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter


class ViewInsteadOfPack:
    """See the module's docstring."""

    name: ClassVar[str] = "R10"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every cat."""
        return work.named("aten::cat")

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The split that is joined here, in memory order."""
        joined = joined_split(root)
        if joined is None or not joined.keeps_memory_order:
            return None
        if not joined.source.meta["val"].is_contiguous() or not root.meta["val"].is_contiguous():
            refuse(Reason.UNSUPPORTED, "the tensor is not dense")
        # The result shares the source's memory from now on.
        work.never_written(joined.source, *joined.nodes)
        if not joined.padding:
            work.may_stand_for(joined.source, root)

        def build(emit: Emitter) -> torch.fx.Node:
            whole = padded(emit, joined.source, joined.split_dim, joined.padding)
            return emit.view(whole, list(root.meta["val"].shape))

        return Match(
            work.copy_ns(_torch.tensor_bytes(root.meta["val"]) or 0),
            f"{joined.pieces} pieces in memory order",
            lambda: work.replace(self.name, root, (root,), build),
        )
