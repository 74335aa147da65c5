"""R0: what was waited for need not be waited for again.

before::

    s = all_gather(x, a); y = wait(s); ... ; z = wait(s)

after::

    s = all_gather(x, a); y = wait(s); ... ; z is y

The same where ``z = wait(y)``: a program waits for a functional collective that waits for itself when it is read.

From torch 2.15 on equal gathers are merged ahead of us, but not their waits; everything else in the catalogue, and
bucketing, asks for one wait. Refused when anything in the graph writes to the result, or when two of the graph's
results would newly share memory. Bit-exact; a second wait does nothing, so it saves a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch.fx

from inductor_passes.rewrites.work import Match, Work


class WaitOnce:
    """See the module's docstring."""

    name: ClassVar[str] = "R0"
    local: ClassVar[bool] = True

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Collectives with several waits for one result."""
        return work.repeatedly_awaited()

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """All waits but the first."""
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
