"""What earlier graphs send, for a further one with the same collectives that one rank may compile alone.

A function is compiled again for inputs of other shapes, for other arguments, in evaluation; and several functions call
one model. Where one rank alone meets such a case, the others go on with the graph that they have, and its collectives
were merged and reordered when all ranks had it. So graphs that come with the same collectives, for the same parameters,
send the same messages in the same order, or ranks wait for what never comes.

Generated code from a cache says when it is loaded which variant it is, as if the graph were compiled.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inductor_passes import _torch, agreement
from inductor_passes.engine.following import Earlier, Kind, Part, Variant, as_places
from inductor_passes.records.packed import pack, unpack
from inductor_passes.rewriting.messages import gather_of_parameters
from inductor_passes.tuning.callers import nobody_calls

#: Forms that are remembered of graphs with the same collectives, and kinds of such graphs in all.
_MOST_VARIANTS, _MOST_KINDS = 16, 4096
#: Variable of a generated module; why code is not used of which this variable is no text of ours, and what that raises.
_TEXT, _UNKNOWN = "inductor_passes_variant", "it cannot be told what it sends"
_UNREADABLE = (ValueError, KeyError, TypeError)


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
#: By :func:`_key`.
_known: dict[tuple[str, bool, Kind], list[Variant]] = {}
#: Functions that were compiled.
_functions: dict[tuple[str, str, str], None] = {}
#: What the first graph of a function came with.
_first: dict[tuple[str, str, str], frozenset[Kind]] = {}


def _key(about: About, kind: Kind) -> tuple[str, bool, Kind]:
    """Settings, direction, and what came in one group.

    A backward graph never runs while another rank of the group runs a forward one, though it may gather the same: its
    gradients are held for a later reduction, for example.
    """
    return about.settings, about.phase == "backward", kind


@dataclass(eq=False)
class _Graph:
    """A graph that was compiled or loaded; none is dropped of which it is not certain that nobody can call it.

    Equal to itself only: modules hold tensors, which do not compare as a whole.

    Attributes:
        about: its compile id and phase; those of a graph that was thrown away come again.
        settings: those of :class:`About`.
        kinds: what it came with, by groups.
        module: globals of its generated module; None until that is loaded.
    """

    about: tuple[str, str]
    settings: str
    kinds: frozenset[Kind]
    module: dict[str, Any] | None = None


#: Graphs, by what they came with in all groups.
_graphs: dict[frozenset[Kind], list[_Graph]] = {}


def _forget() -> None:
    with _lock:
        _known.clear()
        _functions.clear()
        _first.clear()
        _graphs.clear()


agreement.when_forgotten(_forget)


def remember(about: About, variant: Variant) -> None:
    """Keep what became of a graph."""
    with _lock:
        for kind in variant.kinds.values():
            found = _known.setdefault(_key(about, kind), [])
            if variant not in found:
                found.append(variant)
                # The first ones decide, the last one is about to be loaded.
                del found[_MOST_VARIANTS - 1 : -1]
        while len(_known) > _MOST_KINDS:
            del _known[next(iter(_known))]


def note(about: About, kinds: Mapping[str, Kind], module: dict[str, Any] | None = None) -> None:
    """A graph with these collectives was compiled or, with the globals of its module, loaded."""
    name, came = (about.compile_id, about.phase), frozenset(kinds.values())
    with _lock:
        found = _graphs.setdefault(came, [])
        # Of one name there are several after ``torch._dynamo.reset()``: the last one is being loaded.
        same = (one for one in reversed(found) if one.about == name and one.settings == about.settings)
        known = next((one for one in same if one.module is None), None)
        if known is None:
            found.append(known := _Graph(name, about.settings, came))
        known.module = module
        if about.number == 0:
            _first[about.function] = came
        else:
            _first.setdefault(about.function, came)
        while len(_first) > _MOST_KINDS:
            del _first[next(iter(_first))]
        while len(_graphs) > _MOST_KINDS:
            del _graphs[next(iter(_graphs))]


def first_gathers(about: About, *, reset: bool = False) -> Counter[str] | None:
    """The gathers of parameters of a function's first graph as it came; None for that one, or where it is not known.

    Args:
        reset: for a first one, too: that of the function of this name before ``torch._dynamo.reset()``.
    """
    with _lock:
        came = _first.get(about.function) if about.number or reset else None
    return None if came is None else Counter(text for kind in came for text in kind if gather_of_parameters(text))


def graphs_of(about: About, kinds: Mapping[str, Kind]) -> tuple[int, int]:
    """How many graphs came in some group with these collectives in this process, and how many of these before a reset.

    Under whatever settings, and without those of which it is certain that nobody can call them any more.
    """
    wanted = frozenset(kinds.values())
    with _lock:
        left = []
        for came, found in _graphs.items():
            if came.isdisjoint(wanted):
                continue
            for one in list(found):
                if one.module is not None and nobody_calls(one.module):
                    found.remove(one)
                    # Where a cache gives the code back it is loaded, and noted, anew.
                    _torch.forget_loaded_module(one.module)
                else:
                    left.append(one.about)
    return len(left), left.count((about.compile_id, about.phase)) - 1


def use(about: About, variant: Variant) -> None:
    """A graph sends something else from now on: what comes with its collectives later sends that, too."""
    with _lock:
        for kind in variant.kinds.values():
            _known[_key(about, kind)] = [variant]


def earlier(about: About, kinds: Mapping[str, Kind], *, together: bool, graph: str = "") -> Earlier | None:
    """What came with these collectives: for each group the same graph, else the first of its phase, else the first.

    Args:
        kinds: see :func:`~inductor_passes.engine.following.kinds_of`.
        graph: its digest. Ranks that go on with a graph send what was agreed on for it.
        together: all ranks compile the graph now. If it is a function's first, and the function was compiled before,
            all have thrown away what they had (``torch._dynamo.reset()``), and may begin anew.
    """
    groups: dict[Variant, set[str]] = {}
    with _lock:
        if together and about.number == 0 and about.function in _functions:
            for kind in kinds.values():
                _known.pop(_key(about, kind), None)
        _functions[about.function] = None
        while len(_functions) > _MOST_KINDS:
            del _functions[next(iter(_functions))]
        for group, kind in kinds.items():
            found = _known.get(_key(about, kind), ())
            same = [one for one in found if graph and one.graph == graph]
            one = next(iter((*same, *(one for one in found if one.phase == about.phase), *found)), None)
            if one is not None:
                groups.setdefault(one, set()).add(group)
    # The graph that most of it comes from first.
    parts = sorted((Part(one, frozenset(its)) for one, its in groups.items()), key=lambda part: -len(part.sent))
    return Earlier(tuple(parts)) if parts else None


def statements(
    about: About, variant: Variant, *, alone: Iterable[str] = (), agreed: bool = True
) -> tuple[str, str]:
    """Two Python statements for the generated module: refuse the variant, or remember it, when code is loaded.

    The first has to run before other ranks are asked: code that says yes and is then refused is compiled to something
    else than it said.

    Args:
        alone: groups in which it sends what an earlier one sends although the ranks did not agree on it.
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
        "alone": sorted(alone),
        "agreed": agreed,
    }
    text = pack(data)
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
        why = _unfit(about, variant, alone, agreed=agreed)
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
    note(about, variant.kinds, module)
    if {*variant.kinds} - alone and not all(_sent(about, variant).values()):
        remember(about, variant)


def _of_text(text: str) -> tuple[About, Variant, frozenset[str], bool]:
    """What :func:`statements` wrote: the last two are its ``alone`` and ``agreed``."""
    data = unpack(text)
    about = About(_torch.compile_id(), data["phase"], data["settings"])
    came, sent, buckets = tuple(data["came"]), tuple(data["sent"]), as_places(data["buckets"])
    any_order, left_out = tuple(data["any_order"]), tuple(data["left_out"])
    variant = Variant(came, sent, buckets, data["rewritten"], about.phase, data["graph"], any_order, left_out)
    return about, variant, frozenset(data["alone"]), data["agreed"]


_FOLLOWS = (
    "it was made to send what another graph sends (the first rank's, or an earlier variant), and this process has not "
    "compiled that"
)


def _unfit(about: About, variant: Variant, alone: frozenset[str], *, agreed: bool) -> str:
    """Why code must not be used, ""."""
    known = _sent(about, variant)
    if False in known.values() and (about.number or not agreed):
        return "an earlier graph with its collectives sends something else"
    return _FOLLOWS if any(not known.get(group) for group in alone) else ""


def _sent(about: About, variant: Variant) -> dict[str, bool | None]:
    """By group whether a graph is remembered that sends this there; None where none is that came with this."""
    found: dict[str, bool | None] = {}
    with _lock:
        for group, kind in variant.kinds.items():
            others = _known.get(_key(about, kind))
            mine = variant.sent_in(group)
            found[group] = any(one.sent_in(group) == mine for one in others) if others else None
    return found
