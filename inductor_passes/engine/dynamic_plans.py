"""Several plans for one function whose sizes are symbols, each for sizes of its own.

A plan is priced at the sizes that its graph was compiled with, and what is not known to divide for the whole range is
left alone. With ``dynamic_plans`` a graph gets guards: its sizes are near those of the example, and multiples of what
divides the example. Other sizes make torch compile the function again. The last graph is for all sizes that no earlier
one is for. Its guards rule these out: torch calls the graph that was called last, where several fit.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.complain import warn_once
from inductor_passes.ir.view import GraphView

#: A plan is for sizes from the example divided by this to the example times this.
_NEAR = 2
#: Functions that are remembered.
_MOST_FUNCTIONS = 4096
_DECLARED = (
    "inductor_passes: dynamic_plans does nothing where bounds of a size are declared (mark_dynamic with min or max): "
    "torch wants one graph for all sizes within them"
)


@dataclass(frozen=True)
class Range:
    """Sizes that a plan is for: multiples of a number from ``low`` to ``high``."""

    low: int
    high: int
    multiple: int = 1

    def __str__(self) -> str:
        steps = f" in steps of {self.multiple}" if self.multiple > 1 else ""
        return f"from {self.low} to {self.high}{steps}"

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high and size % self.multiple == 0


#: Sizes by what they are in the program (``L['x'].size()[0]``) -> those that a plan is for.
Ranges = Mapping[str, Range]

_lock = threading.Lock()
#: By function, and whether it runs without gradients: what the plans that it has are for.
_taken: dict[tuple[str, bool], list[Ranges]] = {}


@dataclass
class _Divided:
    """What a compilation's plan is for.

    Attributes:
        own: its sizes; empty: all that no other plan is for.
        ruled_out: what other plans are for.
    """

    inference: bool
    own: Ranges = field(default_factory=dict)
    ruled_out: list[Ranges] = field(default_factory=list)


#: Compilations whose sizes have their guards already: the joint graph comes before the graphs that are made of it.
_seen: weakref.WeakKeyDictionary[Any, _Divided] = weakref.WeakKeyDictionary()


def divide(graph: torch.fx.Graph, settings: PassConfig, *, inference: bool) -> None:
    """Give a graph with symbolic sizes the guards that its plan is for; nothing with ``dynamic_plans=1``.

    Before ranks are asked whether they agree: the sizes that a plan is for belong to what they compare.
    """
    if settings.dynamic_plans > 1:
        with guarded("dividing the range of sizes", "the plan is for all sizes", settings):
            _divide(graph, settings, inference)


def _divide(graph: torch.fx.Graph, settings: PassConfig, inference: bool) -> None:
    sizes = _symbols(graph)
    env = next((_torch.shape_env_of(size) for size in sizes.values()), None)
    if env is not None and env in _seen:
        return
    _forget_thrown_away()
    if env is None:
        return
    _seen[env] = found = _Divided(inference)
    if _torch.has_declared_bounds():
        warn_once(_DECLARED)
        return
    example = {name: _torch.size_hint(size) or 0 for name, size in sizes.items()}
    with _lock:
        taken = _plans_of(inference)
        others = [ranges for ranges in taken if not _holds(ranges, example)]
        if len(taken) < settings.dynamic_plans - 1:
            found.own = _own(example, _multiples(graph, settings))
            taken.append(found.own)
    for name, its in found.own.items():
        _torch.keep_within(sizes[name], its.low, its.high, its.multiple)
    for ranges in others:
        bounds = [(sizes[name], r.low, r.high, r.multiple) for name, r in ranges.items() if name in sizes]
        if bounds:
            _torch.keep_without(bounds)
            found.ruled_out.append(ranges)


def _function() -> tuple[str, bool]:
    """The function that is compiled or loaded, and whether this is the first of its graphs."""
    function, _, number = _torch.compile_id().strip("[]").rpartition("/")
    return function, number.partition("_")[0] == "0"


def _forget_thrown_away() -> None:
    """Numbers begin again after ``torch._dynamo.reset()``."""
    function, first = _function()
    if first:
        with _lock:
            _taken.pop((function, True), None)
            _taken.pop((function, False), None)


def _plans_of(inference: bool) -> list[Ranges]:
    """What the function's plans are for."""
    found = _taken.setdefault((_function()[0], inference), [])
    while len(_taken) > _MOST_FUNCTIONS:
        del _taken[next(iter(_taken))]
    return found


def statement(graph: torch.fx.Graph) -> str:
    """For the generated module: what its plan is for counts where it comes out of a cache; "" for all other sizes."""
    env = next(map(_torch.shape_env_of, _symbols(graph).values()), None)
    found = None if env is None else _seen.get(env)
    if found is None or not found.own:
        return ""
    own = {name: (r.low, r.high, r.multiple) for name, r in found.own.items()}
    return f"__import__({__name__!r}, fromlist=['loaded']).loaded({found.inference}, {own!r})"


def loaded(inference: bool, own: Mapping[str, tuple[int, int, int]]) -> None:
    """Called by a generated module while it is loaded."""
    ranges = {name: Range(*its) for name, its in own.items()}
    _forget_thrown_away()
    with _lock:
        if ranges not in (taken := _plans_of(inference)):
            taken.append(ranges)


def notes(graph: torch.fx.Graph) -> list[str]:
    """For the report: the sizes that a plan is not for because other plans of its function are."""
    sizes = _symbols(graph)
    env = next((_torch.shape_env_of(size) for size in sizes.values()), None)
    found = None if env is None else _seen.get(env)
    if found is None or not found.ruled_out:
        return []
    said = [" and ".join(f"{sizes[n]} {r}" for n, r in ranges.items() if n in sizes) for ranges in found.ruled_out]
    return [f"other plans are for {'; '.join(said)}"]


def _symbols(graph: torch.fx.Graph) -> dict[str, torch.SymInt]:
    """Sizes of a graph's inputs that are symbols with a hint, by what they are in the program."""
    found: dict[str, torch.SymInt] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            has_hint = isinstance(size, torch.SymInt) and _torch.size_hint(size) is not None
            if has_hint and (name := _torch.symbol_source(size)):
                found.setdefault(name, size)
    return found


def _holds(ranges: Ranges, example: Mapping[str, int]) -> bool:
    """Whether a plan is for these sizes: other guards than those on sizes have ruled it out."""
    return all(example[name] in its for name, its in ranges.items() if name in example)


def _own(example: Mapping[str, int], multiples: list[int]) -> dict[str, Range]:
    return {
        name: Range(-(-size // _NEAR), _NEAR * size, next(m for m in multiples if size % m == 0))
        for name, size in example.items()
    }


def _multiples(graph: torch.fx.Graph, settings: PassConfig) -> list[int]:
    """What sizes may be wanted to be multiples of, from the largest to 1.

    The ranks of groups that send something of symbolic size share it evenly, and async TP cuts the share into parts.
    """
    view = GraphView(graph)
    groups = [c.group.size for c in view.collectives if any(map(_is_symbolic, (*c.inputs, c.start)))]
    if not groups:
        return [1]
    ranks = math.lcm(*groups)
    return [*(ranks * parts for parts in sorted(settings.async_tp_overrides.parts, reverse=True)), ranks, 1]


def _is_symbolic(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _torch.is_symbolic(value)
