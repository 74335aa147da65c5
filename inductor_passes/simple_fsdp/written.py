"""What forward writes to a gathered parameter in place, as CLIP's ``logit_scale.clamp_()``.

Under FSDP2 a module's parameters are gathered once for its forward: what is written to them is read by the rest of it,
and lost when they are freed. Here every read gathers. So in a traced forward a read that follows a write gives the
values that were written, with the gradient of the parameter. In eager execution nobody keeps what was gathered: a read
that follows a write gathers again, and a warning says so.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from inductor_passes import _torch

log = logging.getLogger("inductor_passes")

#: While a graph is compiled: (id of a parameter, how it is read) -> the last read of it.
_TRACED: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], _Read]] = weakref.WeakKeyDictionary()
#: In eager execution: id of a parameter -> its shape, and the writes to what was gathered of it last. No weak
#: reference: torch refuses to convert a module (``model.double()``) whose parameters have one.
_EAGER: dict[int, tuple[torch.Size, _torch.Writes]] = {}


@dataclass(frozen=True)
class _Read:
    """A read in a traced forward.

    Attributes:
        parameter: held, so that no other one gets its id meanwhile.
        whole: what was gathered; ``writes`` counts how often the program had written to it then.
    """

    parameter: torch.Tensor
    whole: torch.Tensor
    writes: int


def written_to(parameter: torch.Tensor, how: tuple[object, ...], label: str) -> torch.Tensor | None:
    """What an earlier read of this traced forward gathered, if the forward has written to it since; else None.

    Warns once where an eager forward did.

    Args:
        how: what the values of a read depend on besides the parameter; hashable.
        label: of the parameter, for the warning.
    """
    context = _torch.tracing_context()
    if context is not None:
        read = _TRACED.get(context, {}).get((id(parameter), *how))
        return None if read is None or _torch.traced_writes(read.whole) == read.writes else read.whole
    shape, writes = _EAGER.pop(id(parameter), (None, None))
    if writes is not None and shape == parameter.shape and writes.any:
        _warn(label)
    return None


_LOST = (
    "inductor_passes: forward wrote in place to %s. Where the model is not compiled every read gathers the stored "
    "parameter again, so what was written is not seen. Compute instead (`scale = self.scale.clamp(max=1.5)`), or write "
    "to the stored parameter after the optimizer's step, inside `with "
    "inductor_passes.simple_fsdp.sharded_parameters():`"
)


@functools.cache
def _warn(label: str) -> None:
    """Once per process."""
    log.warning(_LOST, label)


def note(parameter: torch.Tensor, how: tuple[object, ...], whole: torch.Tensor) -> None:
    """Remember what a read gathered.

    In eager execution only a counter is kept of it.
    """
    context = _torch.tracing_context()
    if context is not None:
        writes = _torch.traced_writes(whole)
        if writes is not None:
            key = (id(parameter), *how)
            _TRACED.setdefault(context, {})[key] = _Read(parameter, whole, writes)
    elif _torch.counts_writes(whole):
        _EAGER[id(parameter)] = parameter.shape, _torch.Writes(whole)
