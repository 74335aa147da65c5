"""What a backend allocates for a message beside the graph's tensors; the verifier's own account of it.

Read from ``ProcessGroupGloo.cpp``: ``reduce_scatter_tensor_coalesced`` clones every input and keeps the clones in the
work object, which the wait destroys. ``AsyncAllgatherWork::run`` makes one flat tensor of what arrives and drops it
when it has copied it out, at some time before the wait. Nothing else that a graph sends is copied.
"""

from __future__ import annotations

import torch

from inductor_passes import _torch
from inductor_passes.verify.facts.view import Collective


def workspace_bytes(collective: Collective) -> int:
    """Bytes that the backend holds between start and wait; 0 where it holds nothing or a size is not known."""
    held = {"reduce_scatter": collective.input_bytes, "all_gather": collective.output_bytes}.get(collective.kind)
    values = [n.meta.get("val") for n in collective.inputs]
    if not held or not all(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values):
        return 0
    return held if _torch.copies_messages(collective.group.name, torch.device("cpu")) else 0
