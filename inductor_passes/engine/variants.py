"""What a function's earlier graph sends, for a further variant of it that one rank compiles alone.

A function is compiled again for inputs of other shapes. Where one rank alone meets them (batches that are padded to
their longest text), the others go on with the graph that they have, and its collectives were merged and reordered when
all ranks had it. The variant has to send the same messages in the same order, or both wait for what never comes.

Generated code from a cache says when it is loaded which variant it is, as if the graph were compiled.
"""

from __future__ import annotations

import json
import threading
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from inductor_passes import _torch, agreement
from inductor_passes.ir.view import Collective
from inductor_passes.pin.file import GraphPlan
from inductor_passes.pin.pins import Pins

#: Variants that are remembered of one function, and functions in all; dynamo makes 8 variants by default.
_MOST_VARIANTS, _MOST_FUNCTIONS = 16, 4096


@dataclass(frozen=True)
class Variant:
    """A graph that ranks run: what they agreed on or, where they did not, what came.

    Attributes:
        came: its collectives before the passes, in order, see ``pins.described``.
        sent: those that it has since, in order, see ``rewriting.messages``.
        buckets: starts that were merged.
        rewritten: collectives were changed in other ways than merging and reordering.
    """

    came: Mapping[str, str]
    sent: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...]
    rewritten: bool = False

    def pins(self, rank: int) -> Pins:
        """Its buckets as a plan for another graph."""
        return Pins(GraphPlan(buckets=self.buckets), "an earlier variant", "", rank, replan=True)


def shared(came: Sequence[Collective], sent: Sequence[str], buckets: Sequence[Sequence[str]]) -> str:
    """What a graph sends, as text for ranks with other graphs and the same collectives.

    Args:
        came: the graph's collectives before the passes, in order.
        sent, buckets: as of :class:`Variant`.
    """
    place = {one.start.name: number for number, one in enumerate(came)}
    members = [[place[name] for name in bucket] for bucket in buckets]
    return json.dumps({"sent": list(sent), "buckets": members}, separators=(",", ":"))


def led(came: Sequence[Collective], text: str) -> Variant:
    """The inverse of :func:`shared`, for a graph with collectives of its own.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is no such text.
    """
    data = json.loads(text)
    buckets = tuple(tuple(came[int(number)].start.name for number in bucket) for bucket in data["buckets"])
    return Variant({}, tuple(map(str, data["sent"])), buckets)


@dataclass(frozen=True)
class About:
    """Which function a variant is of.

    Attributes:
        compile_id: as ``torch._guards`` has it, e.g. ``0/1``; the part before the bar is the function's.
        phase: ``forward``, ``backward`` or ``inference``.
        settings: everything else that decisions depend on.
    """

    compile_id: str
    phase: str
    settings: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for variants of one function."""
        return self._parts[0], self.phase, self.settings

    @property
    def is_first(self) -> bool:
        """Whether it is a function's first graph. Numbers begin again after ``torch._dynamo.reset()``."""
        return self._parts[1] == "0"

    @property
    def _parts(self) -> tuple[str, str]:
        """Of ``0/1_2`` (function, variant, attempt) the first two."""
        function, _, number = self.compile_id.strip("[]").rpartition("/")
        return function, number.partition("_")[0]


_lock = threading.Lock()
_known: dict[tuple[str, str, str], list[Variant]] = {}


def remember(about: About, variant: Variant) -> None:
    """Keep what became of a graph; nothing for a graph of which it is not known whose it is."""
    if not about.compile_id:
        return
    with _lock:
        found = _known.setdefault(about.key, [])
        if variant not in found:
            found.append(variant)
            # The first ones decide, the last one is about to be loaded.
            del found[_MOST_VARIANTS - 1 : -1]
        while len(_known) > _MOST_FUNCTIONS:
            del _known[next(iter(_known))]


def earlier(about: About, came: Mapping[str, str]) -> Variant | None:
    """The first graph of a function that came with these collectives in this order; None where there is none."""
    with _lock:
        if about.is_first:
            # After a reset what is known is about another function.
            _known.pop(about.key, None)
        return next(_alike(about, came), None)


def _alike(about: About, came: Mapping[str, str]) -> Iterator[Variant]:
    return (one for one in _known.get(about.key, ()) if list(one.came.items()) == list(came.items()))


def statement(about: About, variant: Variant, *, alone: bool) -> str:
    """A Python statement for the generated module: remembers the variant, or refuses it, when code is loaded.

    Args:
        alone: it sends what an earlier one sends although the ranks did not agree on it.
    """
    data = {
        "phase": about.phase,
        "settings": about.settings,
        "came": list(variant.came.items()),
        "sent": variant.sent,
        "buckets": variant.buckets,
        "rewritten": variant.rewritten,
        "alone": alone,
    }
    text = b85encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)).decode()
    return f"__import__('inductor_passes.engine.variants', fromlist=['loaded']).loaded({text!r})"


def loaded(text: str) -> None:
    """Called by a generated module while it is loaded.

    Raises:
        StaleVerdictError: the code must not be used: it sends something else than an earlier graph of its function.
    """
    why = "it cannot be told what it sends"
    try:
        data = json.loads(zlib.decompress(b85decode(text)))
        about = About(_torch.compile_id(), data["phase"], data["settings"])
        buckets = tuple(map(tuple, data["buckets"]))
        variant = Variant(dict(data["came"]), tuple(data["sent"]), buckets, data["rewritten"])
        with _lock:
            sent = [one.sent for one in _alike(about, variant.came)]
        if variant.sent in sent:
            why = ""  # just compiled, or as good as
        elif sent and not about.is_first:
            why = "an earlier graph of its function sends something else"
        elif data["alone"]:
            why = "it sends what a graph sends that is not known here"
        else:
            why = ""
            earlier(about, variant.came)
            remember(about, variant)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        why = f"{why}: {type(error).__name__}: {error}"
    if why:
        agreement.refuse(why)
