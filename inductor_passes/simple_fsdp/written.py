"""What forward writes to a gathered parameter in place, as CLIP's ``logit_scale.clamp_()``.

Under FSDP2 a module's parameters are gathered once for its forward: what is written to them is read by the rest of it,
and lost when they are freed. Here every read gathers. So in a traced forward reads that follow a write give the values
that were written, with the gradient of the parameter. A write goes to one read, not always the last one
(``self.scale.mul_(self.scale)`` has two before it). Where two reads were written to apart, no one has the values that
both writes make, and a warning says so.

In eager execution nobody keeps what was gathered: a read that follows a write gathers again, and a warning says so.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from inductor_passes import _torch

log = logging.getLogger("inductor_passes")

#: While a graph is compiled: (id of a parameter, how it is read) -> its reads.
_TRACED: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], _Reads]] = weakref.WeakKeyDictionary()
#: Reads of a parameter in eager execution whose writes are counted: more than one statement makes.
_LAST = 4
#: In eager execution: id of a parameter -> its shape, and the writes to what was gathered of it last. No weak
#: reference: torch refuses to convert a module (``model.double()``) whose parameters have one.
_EAGER: dict[int, tuple[torch.Size, deque[_torch.Writes]]] = {}


@dataclass
class _Read:
    """A read in a traced forward.

    Attributes:
        whole: what was gathered.
        writes: how often the program had written to it when that was looked at last.
        state: the last of the parameter's states that its values have, see :class:`_Reads`.
    """

    whole: torch.Tensor
    writes: int
    state: int


@dataclass
class _Reads:
    """The reads of a parameter in a traced forward.

    Attributes:
        parameter: held, so that no other one gets its id meanwhile.
        state: how often writes were found.
        current: the read that has the parameter's values now; None: they are the stored ones.
    """

    parameter: torch.Tensor
    reads: list[_Read] = field(default_factory=list)
    state: int = 0
    current: torch.Tensor | None = None

    def look(self) -> bool:
        """Find what has been written since the last look; False where writes went to reads of different values."""
        changed = [r for r in self.reads if _torch.traced_writes(r.whole) != r.writes]
        if not changed:
            return True
        together = len(changed) == 1 and changed[0].state == self.state
        self.state += 1
        for read in changed:
            read.writes, read.state = _torch.traced_writes(read.whole) or 0, self.state
        self.current = changed[-1].whole
        return together


def written_to(parameter: torch.Tensor, how: tuple[object, ...], label: str) -> torch.Tensor | None:
    """The values that this traced forward has written to an earlier read; None where it has not.

    Warns once where writes are lost: in an eager forward, and where two reads were written to apart.

    Args:
        how: what the values of a read depend on besides the parameter; hashable.
        label: of the parameter, for the warning.
    """
    context = _torch.tracing_context()
    if context is not None:
        reads = _TRACED.get(context, {}).get((id(parameter), *how))
        if reads is None:
            return None
        if not reads.look():
            _warn(_APART, label)
        return reads.current
    shape, counted = _EAGER.get(id(parameter), (None, None))
    if counted is not None and shape == parameter.shape and any(writes.any for writes in counted):
        del _EAGER[id(parameter)]
        _warn(_LOST, label)
    return None


_APART = (
    "inductor_passes: forward wrote in place to %s through two reads of it, each of which lacks what was written to "
    "the other; what follows sees only the last. Read the parameter once (`weight = self.weight`) and write to that."
)
_LOST = (
    "inductor_passes: forward wrote in place to %s. Where the model is not compiled every read gathers the stored "
    "parameter again, so what was written is not seen. Compute instead (`scale = self.scale.clamp(max=1.5)`), or write "
    "to the stored parameter after the optimizer's step, inside `with "
    "inductor_passes.simple_fsdp.sharded_parameters():`"
)


@functools.cache
def _warn(what: str, label: str) -> None:
    """Once per process."""
    log.warning(what, label)


def note(parameter: torch.Tensor, how: tuple[object, ...], whole: torch.Tensor) -> None:
    """Remember what a read gathered.

    In eager execution only counters are kept of the last reads.
    """
    context = _torch.tracing_context()
    if context is not None:
        writes = _torch.traced_writes(whole)
        if writes is not None:
            of_graph = _TRACED.setdefault(context, {})
            reads = of_graph.setdefault((id(parameter), *how), _Reads(parameter))
            reads.reads.append(_Read(whole, writes, reads.state))
    elif _torch.counts_writes(whole):
        shape, counted = _EAGER.get(id(parameter), (None, None))
        if counted is None or shape != parameter.shape:
            counted = deque(maxlen=_LAST)
            _EAGER[id(parameter)] = parameter.shape, counted
        counted.append(_torch.Writes(whole))
