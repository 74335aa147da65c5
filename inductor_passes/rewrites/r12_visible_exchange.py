"""R12: DTensor's blocking exchange of shards becomes pack, asynchronous exchange, unpack.

before::

    y = shard_dim_alltoall(x, gather_dim, shard_dim, a)

after::

    p = x with the pieces of shard_dim behind each other along dimension 0
    y = wait(all_to_all(p, a)) with its pieces behind each other along gather_dim

Matches a shard dimension that the group divides. The operator copies the same way inside, waits inside, and nothing may
move across it; in the new form both copies fuse with their neighbours and the exchange overlaps with what does not need
it. Complex elements travel as pairs of real ones. Bit-exact: element [.., i, .., j, ..] of piece r goes to rank r in
both forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.view import behind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import name_of
from inductor_passes.rewrites.packing import packed, static_shape, unpacked
from inductor_passes.rewrites.work import EXCHANGE, Match, Work, refuse
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, exchanged


class VisibleExchange:
    """See the module's docstring."""

    name: ClassVar[str] = "R12"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every shard_dim_alltoall."""
        return work.named(EXCHANGE)

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The operator's arguments, when they divide."""
        if name_of(root) != EXCHANGE:
            return None
        arguments = _torch.op_arguments(root)
        x, gather_dim, shard_dim = arguments["input"], arguments["gather_dim"], arguments["shard_dim"]
        argument = arguments["group_name"]
        group = resolve(behind(argument))
        shape = static_shape(x)
        if shape is None or not group.size:
            refuse(Reason.UNSUPPORTED, "symbolic sizes or an unknown group")
        gather_dim, shard_dim = gather_dim % len(shape), shard_dim % len(shape)
        if gather_dim == shard_dim or shape[shard_dim] % group.size:
            refuse(Reason.UNSUPPORTED, f"dimension {shard_dim} of {shape} does not divide by {group.size}")
        if x.meta["val"].is_conj():
            refuse(Reason.UNSUPPORTED, "a conjugation that is yet to be done")
        work.never_written(root)
        work.unwritten(x, root, root)

        def build(emit: Emitter) -> torch.fx.Node:
            paired = x.meta["val"].dtype.is_complex
            whole = emit.call(torch.ops.aten.view_as_real.default, dense(emit, x)) if paired else dense(emit, x)
            sent = packed(emit, whole, shard_dim, group.size)
            rows = [sent.meta["val"].shape[0] // group.size] * group.size
            result = unpacked(emit, exchanged(emit, sent, rows, rows, argument), gather_dim, group.size)
            return emit.call(torch.ops.aten.view_as_complex.default, result) if paired else result

        return Match(
            0,
            f"{group.size} ranks, dimension {gather_dim} for {shard_dim}",
            lambda: work.replace(self.name, root, (root,), build),
        )
