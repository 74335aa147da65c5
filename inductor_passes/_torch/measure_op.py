"""``inductor_passes::measure_rounding``: how far a message is from what it carries, into a store of this process.

The operator reads a message as its bytes lie in memory, so no fusion hides a rounding, and widens it by arithmetic of
its own. It computes nothing that a graph uses: it writes the error into a number that it gets for that (without such a
write, compilers would drop the call), and keeps it under a name. Who runs the graph again overwrites it.

The error of an element is relative to the largest element of its block, or, of a cast, to itself. Not counted is what
has no such bound: blocks with an element that is not finite, and those whose largest element is below 2**-109 (the
scale itself loses digits there). What is finite and arrives infinite errs by :data:`INFINITE`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

#: Stands for an infinite error; records hold finite numbers.
INFINITE = 1e9
#: Blocks below are not counted.
SMALLEST = 2.0**-109
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_log = logging.getLogger("inductor_passes")


@dataclass
class Figure:
    """What is known of one rounding.

    Attributes:
        calls: how often the graph ran.
        runs: how often it was measured; ``last`` and ``largest`` are relative errors.
        heard: called after each measurement.
    """

    calls: int = 0
    runs: int = 0
    last: float = 0.0
    largest: float = 0.0
    warned: bool = False
    heard: list[Callable[[], None]] = field(default_factory=list)


_lock = threading.Lock()
_figures: dict[str, Figure] = {}


def figure(place: str) -> Figure:
    """What is known of the rounding of this name; an empty record before the first run."""
    with _lock:
        return _figures.setdefault(place, Figure())


def restart(place: str) -> None:
    """Forget what is known of a rounding: its graph is compiled anew. Who follows the old one hears no more."""
    with _lock:
        _figures.pop(place, None)


def error(rows: torch.Tensor, message: torch.Tensor, form: str) -> torch.Tensor:
    """Largest relative error of a message, a float32 number on its device.

    Args:
        rows: what was narrowed, [blocks, block] in float32.
        message: [blocks, block + 2] codes and scale as bytes, or [blocks, block] in bfloat16.
        form: as in the settings.
    """
    wide = _widened(message, form)
    size = rows.abs() if form == "bf16" else rows.abs().amax(1, keepdim=True)
    counted = size.isfinite() & (size >= SMALLEST)
    off = ((wide.double() - rows.double()).abs() / size.double()).nan_to_num(INFINITE, posinf=INFINITE)
    return torch.where(counted, off, 0.0).clamp(max=INFINITE).amax().float()


def _widened(message: torch.Tensor, form: str) -> torch.Tensor:
    if form == "bf16":
        return message.float()
    codes, digits = message[:, :-2].contiguous(), message[:, -2:].to(torch.int32)
    scale = ((digits[:, :1] | digits[:, 1:] << 8) << 16).view(torch.float32)
    numbers = codes.float() - 128 if form == "int8" else codes.view(_CODES[form]).float()
    return numbers * scale


@torch.library.custom_op("inductor_passes::measure_rounding", mutates_args=("result",))
def measure_rounding(
    rows: torch.Tensor, message: torch.Tensor, result: torch.Tensor, form: str, bound: float, every: int, place: str
) -> None:
    """Measure in every ``every``-th call, the first one included; warn once per place above ``bound``.

    Args:
        rows, message, form: see :func:`error`.
        result: one float32 number, which gets the error.
        place: the name under which it is kept.
    """
    about = figure(place)
    with _lock:
        measured = about.calls % every == 0
        about.calls += 1
    if not measured or (rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    result.fill_(error(rows, message, form))
    _note(about, float(result), bound, place)


@measure_rounding.register_fake
def _(
    rows: torch.Tensor, message: torch.Tensor, result: torch.Tensor, form: str, bound: float, every: int, place: str
) -> None:
    return None


def _note(about: Figure, found: float, bound: float, place: str) -> None:
    with _lock:
        about.runs += 1
        about.last, about.largest = found, max(about.largest, found)
        heard, warn = list(about.heard), found > bound and not about.warned
        about.warned = about.warned or warn
    if warn:
        _log.warning(
            "inductor_passes: the message of %s errs by %g of the largest element of a block, more than its bound %g: "
            "elements may be close to the largest number of their type, or the program is wrong",
            place,
            found,
            bound,
        )
    for one in heard:
        one()
