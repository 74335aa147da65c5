"""R13: a slice that leaves the graph does not keep the whole tensor alive.

before::

    y = split(x, n)[i]; return y            (y is a view: its memory is all of x)

after::

    y = clone(split(x, n)[i]); return y

Matches results of the graph (saved activations included) that are views of memory which the graph made, when all
results in that memory need at most a quarter of it, and memory is limited: where they need more (one of three chunks
of a fused projection), the copies cost more than the memory is worth. DTensor copies its slices for
this reason; Inductor removes the copy as doing nothing. Values stay the same. Costs a copy of the slice, releases the
rest of the tensor: k times the slice's size on a mesh dimension of k + 1 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.report import Reason
from inductor_passes.rewrites.work import Match, Refusal, Work
from inductor_passes.rewriting.emit import Emitter

#: How many times as large as what results need of it a storage must be, for a copy to be worth it.
WORTH = 4

#: From where on it is mentioned: below, there is no slice to speak of.
CONSIDERED = 2


class ReleaseStorage:
    """See the module's docstring."""

    name: ClassVar[str] = "R13"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Every result of the graph that is a view."""
        return (n for n in work.results_by_storage if work.alive(n))

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The memory that this result keeps alive."""
        storage = work.results_by_storage.get(root)
        if storage is None:
            return None
        producer, size, results = storage
        outputs = [user for user in root.users if user.op == "output"]
        if not outputs or not work.alive(producer) or any(not work.alive(r) for r in results):
            return None
        needed = sum(_torch.tensor_bytes(r.meta["val"]) or 0 for r in results)
        if needed == 0 or needed * CONSIDERED > size:
            return None
        released = f"releases {size - needed} of {size} bytes"
        if needed * WORTH > size:
            raise Refusal(Reason.NOT_PROFITABLE, f"{released}, too little for copying {needed}")
        if work.facts.config.budget.unlimited:
            raise Refusal(Reason.NOT_PROFITABLE, f"{released}, and memory is unlimited", 'memory_budget="+5%"')
        work.never_written(root)

        def build(emit: Emitter) -> torch.fx.Node:
            return emit.call(torch.ops.aten.clone.default, root, memory_format=torch.contiguous_format)

        return Match(
            0,
            released,
            lambda: work.redirect(self.name, root, outputs[0], build),
        )
