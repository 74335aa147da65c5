"""What the ranks of an all_to_all with unequal parts state that they send each other.

A rank's graph shows what it sends, not what arrives. A pass that emits such a collective attaches all ranks' traffic to
its start. The verifier proves that this rank sends what is stated, and assumes it of the peers. That the peers state
the same is an assumption too: the traffic has to be a function of the two ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inductor_passes.ir.canonical import STATED

#: Key in a start's ``meta``.
KEY = STATED
#: Key in the ``meta`` of a split into equal pieces of which one is used: global ranks in order. Every one of them takes
#: the piece at its own position. The verifier checks this rank, and assumes it of the others.
OWN_KEY = "inductor_passes_own_piece"
#: Key in the ``meta`` of a slice whose numbers a pass worked out, the same on every rank, and of a copy of a split of
#: which the program reads several pieces. What else a pass takes over from the program has none: one rank's graph does
#: not say whether such a number is the rank's own.
CUT_KEY = "inductor_passes_cut"


@dataclass(frozen=True)
class Part:
    """Elements ``[begin, end)``, in row-major order, of a box of the sender's tensor.

    Attributes:
        first, shape: of the box, one entry per dimension.
        begin, end: which of its elements.
    """

    first: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Messages:
    """The traffic of one exchange.

    Attributes:
        source: name of the node whose elements travel.
        parts: (global rank of the sender, of the receiver) -> what travels, in the order of the message.
    """

    source: str
    parts: Callable[[int, int], tuple[Part, ...]]
