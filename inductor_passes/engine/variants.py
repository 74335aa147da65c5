"""What an earlier graph sends, for a further one with the same collectives that one rank may compile alone.

A function is compiled again for inputs of other shapes, for other arguments, in evaluation; and several functions call
one model. Where one rank alone meets such a case, the others go on with the graph that they have, and its collectives
were merged and reordered when all ranks had it. So graphs that come with the same collectives, for the same parameters,
send the same messages in the same order, or ranks wait for what never comes.

Generated code from a cache says when it is loaded which variant it is, as if the graph were compiled.
"""

from __future__ import annotations

import json
import threading
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes import _torch, agreement
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.pin.file import GraphPlan
from inductor_passes.pin.pins import Pins
from inductor_passes.rewriting.messages import messages
from inductor_passes.tuning.callers import nobody_calls

#: Members of each, see :class:`Variant`.
Buckets = tuple[tuple[int | str, ...], ...]
#: Forms that are remembered of graphs with the same collectives, and kinds of such graphs in all.
_MOST_VARIANTS, _MOST_KINDS = 16, 4096
#: Variable of a generated module; why code is not used of which this variable is no text of ours, and what that raises.
_TEXT, _UNKNOWN = "inductor_passes_variant", "it cannot be told what it sends"
_UNREADABLE = (ValueError, KeyError, TypeError, zlib.error)


@dataclass(frozen=True)
class Variant:
    """A graph that ranks run: what they agreed on or, where they did not, what came.

    Attributes:
        came: its collectives before the passes, in order, see ``rewriting.messages``.
        sent: those that it has since.
        buckets: starts that were merged, by their places in ``came``; by name those that rewrites made.
        rewritten: collectives were changed in other ways than merging and reordering.
        left_out: what passes that do so left out, see ``GraphPlan.left_out``.
        phase: ``forward``, ``backward`` or ``inference``.
        graph: digest of the graph, "" where it has none.
        any_order: a graph that came with these collectives in another order is a variant as well.
    """

    came: tuple[str, ...]
    sent: tuple[str, ...]
    buckets: Buckets
    rewritten: bool = False
    phase: str = ""
    graph: str = ""
    any_order: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[str, ...]:
        """Equal for graphs whose collectives are the same ones for other ranks."""
        return kind_of(self.came, self.any_order)

    def pins(self, view: GraphView, rank: int) -> Pins:
        """Its buckets as a plan for another graph with these collectives.

        Raises:
            LookupError: it has other ones.
        """
        names: dict[str, list[str]] = {}
        for text, collective in zip(reversed(messages(view)), reversed(view.collectives)):
            names.setdefault(text, []).append(collective.start.name)
        starts = [names[text].pop() for text in self.came]

        def name(place: int | str) -> str:
            return place if isinstance(place, str) else starts[place]

        buckets = tuple(tuple(map(name, bucket)) for bucket in self.buckets)
        plan = GraphPlan(buckets=buckets, left_out=self.left_out)
        return Pins(plan, "an earlier variant", "", rank, replan=True)

    def text(self) -> str:
        """What ranks with other graphs and the same collectives need of it."""
        return json.dumps({"came": self.came, "sent": self.sent, "buckets": self.buckets}, separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> Variant:
        """The inverse of :meth:`text`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        data = json.loads(text)
        came, sent = (tuple(map(str, data[key])) for key in ("came", "sent"))
        return Variant(came, sent, _places(data["buckets"]))


def kind_of(came: Sequence[str], any_order: bool) -> tuple[str, ...]:
    """What is compared of two graphs' collectives, see :func:`rewriting.messages.in_any_order`."""
    return tuple(sorted(came)) if any_order else tuple(came)


def places(collectives: Sequence[Collective], buckets: Sequence[Sequence[str]]) -> Buckets:
    """Buckets of starts, by name, as places among a graph's collectives."""
    place = {one.start.name: number for number, one in enumerate(collectives)}
    return tuple(tuple(place.get(name, name) for name in bucket) for bucket in buckets)


def _places(data: Sequence[Sequence[int | str]]) -> Buckets:
    return tuple(tuple(one if isinstance(one, str) else int(one) for one in bucket) for bucket in data)


@dataclass(frozen=True)
class About:
    """Which graph a variant is.

    Attributes:
        compile_id: as ``torch._guards`` has it, e.g. ``0/1``; the part before the bar is the function's.
        phase: ``forward``, ``backward`` or ``inference``.
        settings: everything else that decisions depend on.
    """

    compile_id: str
    phase: str
    settings: str

    @property
    def function(self) -> tuple[str, str, str]:
        """Equal for variants of one function."""
        return self._parts[0], self.phase, self.settings

    @property
    def number(self) -> int:
        """How many variants of the function came before. Numbers begin again after ``torch._dynamo.reset()``.

        A graph without a number is no first one: torch compiles it when a size of ``specialize_on`` is met.
        """
        return int(self._parts[1]) if self._parts[1].isdecimal() else 1

    @property
    def _parts(self) -> tuple[str, str]:
        """Of ``0/1_2`` (function, variant, attempt) the first two."""
        function, _, number = self.compile_id.strip("[]").rpartition("/")
        return function, number.partition("_")[0]


_lock = threading.Lock()
_known: dict[tuple[str, tuple[str, ...]], list[Variant]] = {}
#: Functions that were compiled.
_functions: dict[tuple[str, str, str], None] = {}



@dataclass(eq=False)
class _Graph:
    """A graph that was compiled or loaded; none is dropped of which it is not certain that nobody can call it.

    Equal to itself only: modules hold tensors, which do not compare as a whole.

    Attributes:
        about: its compile id and phase; those of a graph that was thrown away come again.
        module: globals of its generated module; None until that is loaded.
    """

    about: tuple[str, str]
    module: dict[str, Any] | None = None


#: Graphs that came with the same collectives.
_graphs: dict[tuple[str, tuple[str, ...]], list[_Graph]] = {}


def _forget() -> None:
    with _lock:
        _known.clear()
        _functions.clear()
        _graphs.clear()


agreement.when_forgotten(_forget)


def remember(about: About, variant: Variant) -> None:
    """Keep what became of a graph."""
    with _lock:
        found = _known.setdefault((about.settings, variant.kind), [])
        if variant not in found:
            found.append(variant)
            # The first ones decide, the last one is about to be loaded.
            del found[_MOST_VARIANTS - 1 : -1]
        while len(_known) > _MOST_KINDS:
            del _known[next(iter(_known))]


def note(about: About, kind: tuple[str, ...], module: dict[str, Any] | None = None) -> None:
    """A graph with these collectives was compiled or, with the globals of its module, loaded."""
    name = about.compile_id, about.phase
    with _lock:
        found = _graphs.setdefault((about.settings, kind), [])
        # Of one name there are several after ``torch._dynamo.reset()``: the last one is being loaded.
        known = next((one for one in reversed(found) if one.about == name and one.module is None), None)
        if known is None:
            found.append(known := _Graph(name))
        known.module = module
        while len(_graphs) > _MOST_KINDS:
            del _graphs[next(iter(_graphs))]


def graphs_of(about: About, kind: tuple[str, ...]) -> tuple[int, int]:
    """How many graphs came with these collectives in this process, and how many of these before a reset.

    Under whatever settings, and without those of which it is certain that nobody can call them any more.
    """
    with _lock:
        every = [(found, one) for (_, same), found in _graphs.items() if same == kind for one in found]
        for found, one in every:
            if one.module is not None and nobody_calls(one.module):
                found.remove(one)
                # Where a cache gives the code back it is loaded, and noted, anew.
                _torch.forget_loaded_module(one.module)
        left = [one.about for found, one in every if one in found]
    return len(left), left.count((about.compile_id, about.phase)) - 1


def replace(about: About, variant: Variant) -> None:
    """A graph sends something else from now on: what comes with its collectives later sends that, too."""
    with _lock:
        _known[(about.settings, variant.kind)] = [variant]


def earlier(about: About, kind: tuple[str, ...], *, together: bool, graph: str = "") -> Variant | None:
    """What came with these collectives: the same graph, else the first of its phase, else the first.

    Args:
        kind: see :attr:`Variant.kind`.
        graph: its digest. Ranks that go on with a graph send what was agreed on for it.
        together: all ranks compile the graph now. If it is a function's first, and the function was compiled before,
            all have thrown away what they had (``torch._dynamo.reset()``), and may begin anew.
    """
    with _lock:
        if together and about.number == 0 and about.function in _functions:
            _known.pop((about.settings, kind), None)
        _functions[about.function] = None
        while len(_functions) > _MOST_KINDS:
            del _functions[next(iter(_functions))]
        found = _known.get((about.settings, kind), ())
        same = [one for one in found if graph and one.graph == graph]
        return next(iter((*same, *(one for one in found if one.phase == about.phase), *found)), None)


def statements(about: About, variant: Variant, *, alone: bool, agreed: bool = True) -> tuple[str, str]:
    """Two Python statements for the generated module: refuse the variant, or remember it, when code is loaded.

    The first has to run before other ranks are asked: code that says yes and is then refused is compiled to something
    else than it said.

    Args:
        alone: it sends what an earlier one sends although the ranks did not agree on it.
        agreed: the ranks agreed on the graph.
    """
    data = {
        "phase": about.phase,
        "settings": about.settings,
        "came": variant.came,
        "sent": variant.sent,
        "buckets": variant.buckets,
        "rewritten": variant.rewritten,
        "graph": variant.graph,
        "any_order": variant.any_order,
        "left_out": variant.left_out,
        "alone": alone,
        "agreed": agreed,
    }
    text = b85encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)).decode()
    ours = "__import__('inductor_passes.engine.variants', fromlist=['loaded'])"
    return f"{_TEXT} = {ours}.fitting({text!r})", f"{ours}.loaded(globals(), {_TEXT})"


def fitting(text: str) -> str:
    """Called by a generated module before it asks other ranks.

    Returns:
        The text.

    Raises:
        StaleVerdictError: the code must not be used: an earlier graph with its collectives sends something else.
    """
    why = _UNKNOWN
    try:
        about, variant, alone, agreed = _of_text(text)
        why = _unfit(about, variant, alone=alone, agreed=agreed)
    except _UNREADABLE as error:
        why = f"{why}: {type(error).__name__}: {error}"
    if why:
        agreement.refuse(why)
    return text


def loaded(module: dict[str, Any], text: str) -> None:
    """Called by a generated module while it is loaded: remembers what it sends.

    Args:
        module: its globals.

    Raises:
        StaleVerdictError: as for :func:`fitting`; another thread may have compiled something since.
    """
    about, variant, alone, _ = _of_text(fitting(text))
    note(about, variant.kind, module)
    if not alone and variant.sent not in _sent(about, variant):
        remember(about, variant)


def _of_text(text: str) -> tuple[About, Variant, bool, bool]:
    """What :func:`statements` wrote: the last two are its ``alone`` and ``agreed``."""
    data = json.loads(zlib.decompress(b85decode(text)))
    about = About(_torch.compile_id(), data["phase"], data["settings"])
    came, sent, buckets = tuple(data["came"]), tuple(data["sent"]), _places(data["buckets"])
    left_out = tuple(data["left_out"])
    variant = Variant(
        came, sent, buckets, data["rewritten"], about.phase, data["graph"], data["any_order"], left_out
    )
    return about, variant, data["alone"], data["agreed"]


def _unfit(about: About, variant: Variant, *, alone: bool, agreed: bool) -> str:
    """Why code must not be used, ""."""
    sent = _sent(about, variant)
    if variant.sent in sent:
        return ""  # just compiled, or as good as
    if sent and (about.number or not agreed):
        return "an earlier graph with its collectives sends something else"
    return "it sends what a graph sends that is not known here" if alone else ""


def _sent(about: About, variant: Variant) -> list[tuple[str, ...]]:
    """What is remembered of graphs with its collectives."""
    with _lock:
        return [one.sent for one in _known.get((about.settings, variant.kind), ())]
