"""What a graph needs to be planned and compiled again while its code runs, handed on by the compiler.

The compiler leaves a :class:`Kept` under the text of the plan that the generated module carries. The module takes it
when it is loaded the first time. Code from a cache finds none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from inductor_passes.cost.profile import CostProfile
from inductor_passes.tuning.plan import Planned

#: Graphs that were compiled and not loaded yet are that many at most; the oldest go first.
_MOST = 64


class UnfitError(Exception):
    """A graph cannot be planned again; the message says why."""


@dataclass(frozen=True)
class New:
    """The second plan of a graph.

    Attributes:
        planned: as the generated module carries it; None where it is the plan that runs.
        module: globals of the generated module.
        call: runs the graph: takes the list of inputs. Keeps alive what the code needs.
        digest: of all that ranks must do alike.
        plan: in the form of a plan file.
        before: the first plan, the one that runs, in the same form.
        peak_bytes: its planned peak.
        unwritten: why there can be no file of these plans; "" where there can.
        use: called when the plan comes into use (True) and when the one before returns (False).
    """

    planned: Planned | None
    module: dict[str, Any]
    call: Callable[[list[Any]], Any]
    digest: str
    plan: dict[str, Any]
    before: dict[str, Any]
    use: Callable[[bool], None]
    unwritten: str = ""
    peak_bytes: int = 0


class Kept(Protocol):
    """A graph as it came to the passes."""

    def compile(self, profile: CostProfile) -> New:
        """Plan and compile it with another cost profile.

        Raises:
            UnfitError: it cannot be done.
        """

    def conflict(self) -> str:
        """Why this process must not change what the graph sends now, in one sentence; "" where it may."""

    def place(self) -> str:
        """How much this process has sent in the graph's groups, as text; equal on ranks that stand at one call."""


#: Why what is under way when the program ends does not go on.
ENDED = "the program ended"
#: Set then: a compilation under way stops where it looks.
ending = threading.Event()
_lock = threading.Lock()
_kept: dict[str, Kept | str] = {}
_catching = threading.local()


def keep(text: str, kept: Kept | str) -> None:
    """Leave a graph, or why there is none, for the module that is about to be loaded with ``text``."""
    with _lock:
        _kept[text] = kept
        while len(_kept) > _MOST:
            del _kept[next(iter(_kept))]


def take(text: str) -> Kept | str:
    """What was kept for a module; a sentence where nothing was."""
    with _lock:
        return _kept.pop(text, "its code came out of a cache, which keeps no graph to plan again")


@contextlib.contextmanager
def caught() -> Iterator[list[tuple[dict[str, Any], Planned]]]:
    """While it is entered, modules that are loaded on this thread are collected and not timed."""
    found: list[tuple[dict[str, Any], Planned]] = []
    _catching.found = found
    try:
        yield found
    finally:
        del _catching.found


def catches(module: dict[str, Any], planned: Planned) -> bool:
    """Whether somebody on this thread collects the modules that are loaded."""
    found: list[tuple[dict[str, Any], Planned]] | None = getattr(_catching, "found", None)
    if found is None:
        return False
    found.append((module, planned))
    return True
