"""What a function's first graph saves for backward and computes again, for variants that this rank compiles alone.

A choice by sizes (a memory budget below the peak) is not made anew for such a variant: other ranks go on with the graph
that they have, and what backward gathers depends on the choice. The joint graph of a variant has the same operators,
but for what torch computes of symbolic sizes and leaves out for a size of one. So the n-th of a kind is taken for the
n-th.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch, agreement
from inductor_passes.config import PassConfig
from inductor_passes.engine import agreeing, identity
from inductor_passes.engine.variants import About
from inductor_passes.records.packed import pack, unpack

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
#: Functions of which it is remembered.
_MOST = 4096
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Saved:
    """Operators of a joint graph, see :func:`operators`.

    Attributes:
        saved: those whose results forward hands to backward.
        again: those of forward that backward runs again.
    """

    saved: frozenset[str]
    again: frozenset[str]

    def text(self) -> str:
        """For a cache key, and for :meth:`of_text`."""
        return pack([sorted(self.saved), sorted(self.again)])

    @staticmethod
    def of_text(text: str) -> Saved:
        """The inverse of :meth:`text`.

        Raises:
            ValueError, TypeError: it is none.
        """
        saved, again = unpack(text)
        return Saved(frozenset(map(str, saved)), frozenset(map(str, again)))


_lock = threading.Lock()
#: By function and settings.
_known: dict[tuple[str, str, str], Saved] = {}


def _forget() -> None:
    with _lock:
        _known.clear()


agreement.when_forgotten(_forget)


def of_backward(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes of a joint graph that depend on a gradient that comes in, and these; O(nodes + edges)."""
    found = set[torch.fx.Node]()
    for node in graph.nodes:
        comes_in = node.op == "placeholder" and "tangent" in node.name
        if comes_in or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def operators(graph: torch.fx.Graph) -> dict[str, str]:
    """By the names of forward's nodes in a joint graph: which operator that is; O(nodes + edges).

    Numbers, such as symbolic sizes, are left out.
    """
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    backward = of_backward(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node in backward or isinstance(node.meta.get("val"), _NUMBERS):
            continue
        if node.target is operator.getitem:
            if (whole := found.get(node.args[0].name)) is not None:
                found[node.name] = f"{whole}[{node.args[1]}]"
            continue
        kind = str(node.target)
        found[node.name] = f"{kind} {counts[kind]}"
        counts[kind] += 1
    return found


def note(names: Mapping[str, str], both: Split, outputs: int, settings: PassConfig) -> None:
    """Remember what a function's first graph was separated into.

    Args:
        names: :func:`operators` of its joint graph.
        outputs: how many results of forward are not saved values.
    """
    about = _about(settings)
    if about.number:
        return
    handed = next(iter(both[0].graph.find_nodes(op="output"))).args[0][outputs:]
    saved = frozenset(names[n.name] for n in handed if isinstance(n, torch.fx.Node) and n.name in names)
    again = {names[n.name] for n in both[1].graph.nodes if n.op == "call_function" and n.name in names}
    # What has several results, as attention, may have another name in backward; its results have theirs.
    again.update(name.partition("[")[0] for name in tuple(again))
    _remember(about, Saved(saved, frozenset(again)))


def known(settings: PassConfig, *, reset: bool = False) -> Saved | None:
    """What the function's first graph saves; None where this graph is the first, or it is not known.

    Args:
        reset: for a first one, too: what that of the function of this name saved before ``torch._dynamo.reset()``.
    """
    about = _about(settings)
    with _lock:
        return _known.get(about.function) if about.number or reset else None


def mark(graph: torch.fx.Graph, like: Saved) -> bool:
    """Have a joint graph separated as the function's first one; False where it has none of its operators.

    What activation checkpointing has tagged stays as it is.
    """
    names, done = operators(graph), False
    for node in graph.nodes:
        name = names.get(node.name)
        if name is None or _torch.is_tagged(node):
            continue
        # Several values cannot be saved as one; torch refuses.
        if name in like.again or (name in like.saved and isinstance(node.meta.get("val"), torch.Tensor)):
            _torch.compute_again(node, again=name in like.again)
            done = True
    return done


def statement(settings: PassConfig) -> str:
    """A Python statement for the generated code of a function's first forward graph: remembers it when it is loaded; ""
    where nothing is known of it."""
    about = _about(settings)
    with _lock:
        found = None if about.number else _known.get(about.function)
    if found is None:
        return ""
    ours = "__import__('inductor_passes.engine.first_saved', fromlist=['loaded'])"
    return f"{ours}.loaded({about.settings!r}, {found.text()!r})"


def loaded(settings: str, text: str) -> None:
    """Called by generated code: remembers what :func:`statement` says."""
    about = About(_torch.compile_id(), "forward", settings)
    if about.number == 0:
        try:
            _remember(about, Saved.of_text(text))
        except (ValueError, TypeError):
            return  # a variant is then made to gather the same in another way


def _about(settings: PassConfig) -> About:
    profile = identity.load_profile(settings)
    key = identity.cache_key(agreeing.deciding(settings), profile) or ""
    return About(_torch.compile_id(), "forward", key)


def _remember(about: About, one: Saved) -> None:
    with _lock:
        _known[about.function] = one
        while len(_known) > _MOST:
            del _known[next(iter(_known))]
