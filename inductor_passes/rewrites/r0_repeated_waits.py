"""R0: what was waited for need not be waited for again.

before::

    s = all_gather(x, a); y = wait(s); ... ; z = wait(s)

after::

    s = all_gather(x, a); y = wait(s); ... ; z is y

The same where ``z = wait(y)``, or waits for what was computed of ``y``: a program waits for a functional collective,
which has waited for itself when it is read.

From torch 2.15 on equal gathers are merged ahead of us, but not their waits; everything else in the catalogue, and
bucketing, asks for one wait. Refused when anything in the graph writes to the result, or when two of the graph's
results would newly share memory. Bit-exact; a second wait does nothing, so it saves a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.rewrites.work import Match, Work


class WaitOnce:
    """See the module's docstring."""

    name: ClassVar[str] = "R0"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Collectives with several waits for one result, and waits for what is there."""
        return itertools.chain(work.repeatedly_awaited(), work.idle_waits())

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """All waits but the first, or one that waits for nothing."""
        if work.is_idle(root):
            return self._idle(work, root)
        waits = work.repeated_waits(root)
        if not waits:
            return None
        kept, *again = waits
        work.never_written(kept, *again)
        for wait in again:
            work.may_stand_for(kept, wait)

        def apply() -> None:
            for wait in again:
                work.drop(self.name, root, (wait,), kept)
            work.fresh.append(root)

        return Match(1, f"{len(waits)} waits for one result", apply)

    def _idle(self, work: Work, wait: torch.fx.Node) -> Match:
        (kept,) = wait.all_input_nodes
        work.never_written(kept, wait)
        work.may_stand_for(kept, wait)

        def apply() -> None:
            work.drop(self.name, wait, (wait,), kept)
            work.fresh.extend(one.start for one in work.awaited(kept))

        return Match(1, "it waits for what is there", apply)
