"""A graph as it was before a pass, for undoing the pass and for the verifier. Only the pipeline takes snapshots."""

from __future__ import annotations

from collections.abc import Collection

import torch.fx

from inductor_passes import verify
from inductor_passes.engine.backup import Backup


class Snapshot:
    """A graph as it was; O(nodes + edges).

    Attributes:
        reference: what the verifier holds later versions against.
    """

    def __init__(self, graph: torch.fx.Graph, freed: Collection[str] = ()) -> None:
        """``freed``: names of inputs that are freed after their last use."""
        self._backup = Backup(graph)
        self.reference = verify.snapshot(graph, donated=freed, for_ranks=False)

    def restore(self) -> None:
        """Put the graph back; its nodes may be other objects then."""
        self._backup.restore()
