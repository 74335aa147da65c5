"""Backward graphs of a function's variants gather the same parameters again.

What torch's partitioner saves depends on sizes. For a batch of one row it computes operators again that it saves the
results of for other batches, and gathers their parameters for that. One rank alone may have such a batch: the others go
on with a graph whose backward gathers less, and the job hangs. So a further variant is made to gather what the
function's first one gathers: it saves and computes again what that one does (``first_saved``), where this is known;
else what torch would compute again with another parameter is saved, or the other way round.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine import agreeing, first_saved, identity, variants
from inductor_passes.engine.first_saved import Saved
from inductor_passes.ir.ops import Role, role
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.messages import gather_of_parameters, messages

log = logging.getLogger(__name__)

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


def wanted(settings: PassConfig, *, reset: bool = False) -> Counter[str] | None:
    """The gathers of parameters in backward of the function's first graph, as messages.

    None where this graph is the first, or it is not known what that one gathers.

    Args:
        reset: see :func:`variants.first_gathers`.
    """
    about = variants.About(_torch.compile_id(), "backward", "")
    if not about.number and not reset:
        return None
    profile = identity.load_profile(settings)
    key = identity.cache_key(agreeing.deciding(settings), profile) or ""
    return variants.first_gathers(replace(about, settings=key), reset=reset)


def gathers(graph: torch.fx.Graph) -> Counter[str]:
    """The gathers of parameters of a graph, as messages."""
    return Counter(filter(gather_of_parameters, messages(GraphView(graph))))


def not_gathered(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node], theirs: Counter[str]) -> frozenset[str]:
    """Names of the gathers among some nodes of a joint graph that the first variant's backward does not make again."""
    view, among = GraphView(graph), set(nodes)
    sent = zip(view.collectives, messages(view), strict=True)
    return frozenset(one.start.name for one, text in sent if one.start in among and text not in theirs)


@dataclass(frozen=True)
class Alike:
    """How a further variant is separated.

    Attributes:
        copy: the joint graph, anew each time.
        split: separates a joint graph, which it may change.
        theirs: see :func:`wanted`.
        first: what the first variant saves; None where it is not known.
    """

    copy: Callable[[], torch.fx.GraphModule]
    split: Callable[[torch.fx.GraphModule], Split]
    theirs: Counter[str]
    first: Saved | None

    def fits(self, both: Split) -> bool:
        """Whether backward gathers what that of the first variant gathers."""
        return gathers(both[1].graph) == self.theirs

    @cached_property
    def as_first(self) -> Split | None:
        """Forward and backward that save what the first variant saves; None where they then gather something else."""
        if self.first is None:
            return None
        gm = self.copy()
        try:
            both = self.split(gm) if first_saved.mark(gm.graph, self.first) else None
        except RuntimeError:
            # torch's partitioner was told to save and to compute again what cannot be had together in this graph.
            log.debug("a variant cannot be separated as its function's first graph", exc_info=True)
            return None
        return both if both is not None and self.fits(both) else None

    def made(self, both: Split) -> Split:
        """Forward and backward that gather in backward what the first variant gathers; as they are where none do.

        Args:
            both: what the joint graph was separated into.
        """
        ours = gathers(both[1].graph)
        if ours == self.theirs:
            return both
        if self.as_first is not None:
            return self.as_first
        gm = self.copy()
        if not _mark(gm.graph, set(ours - self.theirs), set(self.theirs - ours)):
            return both
        found = self.split(gm)
        return found if self.fits(found) else both


def _mark(graph: torch.fx.Graph, more: set[str], fewer: set[str]) -> int:
    """Have saved what is computed with some gathers, and computed again what is computed with others; O(nodes + edges).

    Args:
        more: gathers that backward shall not need, as far as that depends on what is saved.
        fewer: gathers that it shall need.

    Returns:
        How many nodes were marked.
    """
    view = GraphView(graph)
    backward = first_saved.of_backward(graph)
    count = 0
    for one, message in zip(view.collectives, messages(view), strict=True):
        if one.start in backward or message not in more | fewer:
            continue
        for node in _computed_with(one.start, backward, converts=message in fewer):
            way = _to_smallest(node, backward)
            if message in more:
                _torch.compute_again(way[-1], again=False)
            else:
                for one_more in way:
                    _torch.compute_again(one_more, again=True)
            count += 1
    return count


def _computed_with(
    start: torch.fx.Node, backward: set[torch.fx.Node], *, converts: bool = False
) -> Iterator[torch.fx.Node]:
    """The first operators of forward that compute with what a gather brings.

    Args:
        converts: what is made of it alone, too (``torch.autocast`` converts a weight, a bias may come with a factor of
            1), and the first ones that compute with that.
    """
    stack, seen = [start], {start}
    while stack:
        for user in stack.pop().users:
            if user in seen or user in backward or user.op != "call_function":
                continue
            seen.add(user)
            # What returns several values cannot be saved; what is computed with these can.
            one_value = isinstance(user.meta.get("val"), torch.Tensor)
            if _torch.is_gathered_again(user) or role(user) in (Role.WAIT, Role.FREE) or not one_value:
                stack.append(user)
            else:
                yield user
                if converts and len(user.all_input_nodes) == 1:
                    stack.append(user)


def _to_smallest(node: torch.fx.Node, backward: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """A node and what is computed from it alone, up to the one that takes least to save.

    A product of a row is a sum of products in Inductor's graphs: saving those would take as much as the matrix.
    """
    way, best, least = [node], 1, _bytes(node)
    while len(node.users) == 1:
        (node,) = node.users
        if node in backward or node.op != "call_function":
            break
        way.append(node)
        # torch computes a view again whatever is asked.
        if role(node) is not Role.FREE and (size := _bytes(node)) < least:
            best, least = len(way), size
    return way[:best]


def _bytes(node: torch.fx.Node) -> float:
    value = node.meta.get("val")
    size = _torch.tensor_bytes(value) if isinstance(value, torch.Tensor) else None
    return math.inf if size is None else size
