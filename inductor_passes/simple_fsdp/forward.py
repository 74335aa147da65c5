"""Whether a parameter is read by a forward pass, whose ranks all take part, or from outside, where one may be alone.

Asked only in eager execution: what Dynamo traces is compiled into a graph that gathers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from inductor_passes import _torch

_CALLS = _torch.module_call_code()


class _Thread(threading.local):
    gathers = 0


_THREAD = _Thread()


def gathers(owner: nn.Module) -> bool:
    """Whether reads of this thread gather: inside a module's forward, its recomputation, or :func:`reads_gather`.

    Args:
        owner: the module whose parameter is read.
    """
    return _THREAD.gathers > 0 or _is_called(owner in _PARAMETRIZATIONS) or _torch.is_recomputing()


#: Modules that compute an attribute of another module; calling them alone is not a forward pass.
_PARAMETRIZATIONS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_parametrizations(module: nn.Module) -> None:
    """Remember which parts of a module compute attributes of others."""
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            _PARAMETRIZATIONS.update(part.modules())


@contextlib.contextmanager
def reads_gather() -> Iterator[None]:
    """Inside, reads of this thread gather as in forward."""
    _THREAD.gathers += 1
    try:
        yield
    finally:
        _THREAD.gathers -= 1


def _is_called(of_parametrization: bool) -> bool:
    """Whether this thread is inside the call of a module, its hooks included, or inside a direct ``.forward()``.

    Looks at the stack: unlike a counter that forward would keep, the stack is right after exceptions, in threads, in
    code between two compiled parts, and without a wrapper around every forward.

    Args:
        of_parametrization: calls of parametrizations do not count.
    """
    named: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in _CALLS and not (of_parametrization and frame.f_locals.get("self") in _PARAMETRIZATIONS):
            return True
        if code.co_name == "forward" and code.co_argcount:
            named.append(frame)
        frame = frame.f_back
    # Looking at locals keeps a copy of them alive with the frame (before Python 3.13), so this comes last.
    return any(_is_forward(frame) for frame in named)


def _is_forward(frame: FrameType) -> bool:
    found = frame.f_locals.get(frame.f_code.co_varnames[0])
    return isinstance(found, nn.Module) and found not in _PARAMETRIZATIONS
