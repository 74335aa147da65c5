"""``inductor_passes::all_gather``: torch's functional all_gather, in a form that gloo can run beside others.

torch's own operator starts gloo's *coalesced* gather. When a worker thread of gloo has done a collective, it writes
the collective's name into a string that all workers share, and holds no lock. ``ALLGATHER_COALESCED`` is too long to be
kept in place, so two collectives that end at the same time free one piece of memory twice: the process aborts
(``malloc(): unaligned tcache chunk detected``) or goes on with a broken heap. Seen with torch 2.13, without any plugin.
The gather into one given tensor has a name that is kept in place.

What travels is the same, so a rank that starts torch's operator is understood. Results and waits are alike.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor input, SymInt group_size, str group_name) -> Tensor")


def _empty(input: torch.Tensor, group_size: int) -> torch.Tensor:
    return input.new_empty((input.shape[0] * group_size, *input.shape[1:]))


def _all_gather(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    start = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    sent, received = input.contiguous(), _empty(input, group_size)
    if input.is_complex():
        # Gloo has no complex numbers. A wait finds what it waits for by the memory, which is the same.
        start(torch.view_as_real(sent), group_size, group_name, out=torch.view_as_real(received))
        return received
    return start(sent, group_size, group_name, out=received)


def _shape(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return _empty(input, group_size)


_LIBRARY.impl("all_gather", _all_gather, "CPU")
_LIBRARY.impl("all_gather", _shape, "Meta")
OPERATOR = torch.ops.inductor_passes.all_gather
