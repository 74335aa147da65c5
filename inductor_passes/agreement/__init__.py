"""Agreement: whether all ranks that take part in a graph's collectives compile the same graph.

Each rank sees only its own graph, but a rewrite or order of collectives is right only when every rank of a process
group decides the same. :func:`reach` asks the other ranks, before anything is decided, whether they have the same
graph. :func:`statement` and :func:`loaded` do the same for code that comes out of a cache. :func:`session_of` and
:func:`bounded` are the protocol itself, for code that compares something else.
"""

from inductor_passes.agreement.asking import (
    bounded,
    explaining,
    forget,
    is_explained,
    nobody_to_ask,
    session_of,
    when_forgotten,
)
from inductor_passes.agreement.cached import StaleVerdictError, loaded, refuse, statement
from inductor_passes.agreement.claim import opens_a_function
from inductor_passes.agreement.consensus import Ballot, Kind, Outcome
from inductor_passes.agreement.literals import Literals
from inductor_passes.agreement.reach import TIMEOUT_S, Agreement, compare, confirm, reach
from inductor_passes.agreement.sharing import share

__all__ = [
    "TIMEOUT_S",
    "Agreement",
    "Ballot",
    "Kind",
    "Literals",
    "Outcome",
    "StaleVerdictError",
    "bounded",
    "compare",
    "confirm",
    "explaining",
    "forget",
    "is_explained",
    "loaded",
    "nobody_to_ask",
    "opens_a_function",
    "reach",
    "refuse",
    "session_of",
    "share",
    "statement",
    "when_forgotten",
]
