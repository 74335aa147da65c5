"""Before ranks gather because the user asked for it: are all of them there?

A collective that one rank enters alone hangs, or aborts the process when the others enter a different one. So what the
user starts outside of forward (``full_tensor``, ``gathered_parameters``, ``save_pretrained``) first meets through the
default process group's store, with a limit, and a rank that waits in vain gets an error.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter

from inductor_passes import _torch

#: How long a rank waits for the others, seconds.
LIMIT_S = 60.0

#: Global ranks of a mesh, in ascending order.
Ranks = tuple[int, ...]

#: How often these ranks have met, and under which key this rank came last.
_met: Counter[Ranks] = Counter()
_last: dict[Ranks, str] = {}


class MissingRanksError(RuntimeError):
    """Some ranks did not come to where all of them have to gather."""


def meet(ranks: Ranks, what: str) -> None:
    """Wait until all of ``ranks`` are at ``what``; never a collective.

    Args:
        ranks: this rank among them, the same on all of them.
        what: what the ranks are about to do, the same text on all of them.

    Raises:
        MissingRanksError: some did not come within :data:`LIMIT_S`.
    """
    group = str(_torch.default_group().group_name)
    found = _torch.group_store(group)
    if found is None or len(ranks) == 1 or _torch.group_backend(group) == "fake":
        return
    store, own, _ = found
    # Ranks that are at something else use another key: they do not meet.
    digest = hashlib.sha256(f"{ranks} {what}".encode()).hexdigest()[:16]
    keys = {rank: f"inductor_passes/simple_fsdp/{_met[ranks]}/{digest}/{rank}" for rank in ranks}
    store.set(keys[own], "here")
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=LIMIT_S))
    except RuntimeError:
        # Stores report a timeout as different kinds of RuntimeError.
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing:
            # Who comes later must not take this rank for waiting.
            store.delete_key(keys[own])
            raise MissingRanksError(
                f"{what} needs all ranks {list(ranks)}, and rank {own} waited {LIMIT_S:g} s for {missing}. Is this "
                "line run by some ranks only? If the others are just late, call torch.distributed.barrier() before it."
            ) from None
    _met[ranks] += 1
    # All have come here, so none still looks for this rank at the place before.
    if before := _last.get(ranks):
        store.delete_key(before)
    _last[ranks] = keys[own]
