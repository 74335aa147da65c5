"""What a rewrite states that it did, in a form that the verifier can check against the graph.

A pass that only reorders needs no certificate. A pass that removes, adds or rewires nodes hands in one certificate
per applied rewrite. Every difference from the reference that no certificate names is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction


class Claim(str, Enum):
    """How the removed collectives relate to the added ones; the verifier holds the rewrite to it."""

    MERGE = "merge"
    """several became fewer of the same kind, group and reduce op, carrying at least the same bytes"""
    REMOVE = "remove"
    """collectives went away, none came"""
    REPLACE = "replace"
    """anything else: the certificate only says which nodes became which"""


@dataclass(frozen=True)
class Narrowed:
    """A value that arrives rounded, because it was sent in a narrower type.

    Attributes:
        read: name of the node that widens what arrived.
        error: how far an element may be from what was sent, relative to the largest element of its block.
        own: it did not travel: the rank widens what it sends itself, in the place of ``inductor_passes::sent``.
        over: global ranks, in order, of this rank's group on which it travels narrow, one rank per host; inside a host
            it is wide then. (): narrow on any group.
    """

    read: str
    error: Fraction
    own: bool = False
    over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """One applied rewrite.

    Attributes:
        rewrite: its name, e.g. ``bucket`` or ``R4``.
        removed: names of the reference's nodes that are gone or were edited in place.
        added: names of nodes that came or were edited in place. A user of a removed node may read any added node.
        replaced: (old, new) pairs for users that were redirected to a node that existed before.
        claim: see :class:`Claim`.
        narrowed: what arrives rounded; every other value has to be what it was.
    """

    rewrite: str
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
    claim: Claim = Claim.REPLACE
    narrowed: tuple[Narrowed, ...] = ()


class Certified:
    """All certificates of a graph, indexed by node name."""

    def __init__(self, certificates: tuple[Certificate, ...] = ()) -> None:
        self.certificates = certificates
        self.removed: dict[str, set[int]] = {}
        self.added: dict[str, set[int]] = {}
        self.replaced: set[tuple[str, str]] = set()
        for number, certificate in enumerate(certificates):
            for name in certificate.removed:
                self.removed.setdefault(name, set()).add(number)
            for name in certificate.added:
                self.added.setdefault(name, set()).add(number)
            self.replaced.update(certificate.replaced)

    def edited(self, name: str) -> bool:
        """Whether a rewrite says that it edited this node in place."""
        return name in self.removed and name in self.added

    def redirects(self, old: str, new: str) -> bool:
        """Whether a user of ``old`` may now read ``new``."""
        if (old, new) in self.replaced:
            return True
        return bool(self.removed.get(old, set()) & self.added.get(new, set()))
