"""A graph as it was before a pass, for undoing the pass and for the verifier. Only the pipeline takes snapshots."""

from __future__ import annotations

import torch.fx

from inductor_passes import verify
from inductor_passes.engine.backup import Backup


class Snapshot:
    """A graph as it was; O(nodes + edges).

    Attributes:
        reference: what the verifier holds later versions against.
    """

    def __init__(self, graph: torch.fx.Graph, reference: verify.ReferenceSnapshot) -> None:
        """``reference``: of the graph as it is."""
        self._backup = Backup(graph)
        self.reference = reference

    def restore(self) -> None:
        """Put the graph back; its nodes may be other objects then."""
        self._backup.restore()
