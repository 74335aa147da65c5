"""Ranks change from one plan of a graph to another at one and the same call of it, or none of them does.

Two ranks that run different plans of a graph issue other collectives, or the same ones in another order, and wait for
each other forever. So a change has two parts.

1. In the background each rank writes that it is ready, or why it is not, and the digest of what it would run
   (:func:`agreed_call`). Where all are ready with equal digests the first rank of the set names a call that all have
   before them.
2. At that call each rank, before it runs the graph, writes that it is here and how much it has sent so far, and looks
   for the others (:class:`Vote`). Who sees all of them here, alike, writes "yes"; who has waited long enough, or has a
   reason of its own, writes "no". The first writer wins (the store compares and sets), and every rank obeys what is
   stored. A "yes" can only be written where every rank stands at the same call.

A rank that dies or does not take part costs the others one wait at most, and the change. One that comes late finds the
"no" there, as all do, and they look for a later call: each try has keys of its own, and a rank gets ready for the next
one only after it has come to the call before, so nobody is waited for at a call who has not been seen since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from inductor_passes.agreement.asking import within
from inductor_passes.agreement.board import Board, StoreError
from inductor_passes.tuning.exchange import Talks, listed

#: A store that does not answer for so much longer than a vote may take is given up, in seconds.
_STALLED_S = 10.0
#: A call that a rank had behind it when it was told: the ranks may try a later one.
LATE = "had that call behind it when it was told"
#: A call to which a rank did not come in time; so is this, for it answers again only when it has come to that call.
ABSENT = "did not come to that call within"


class DeadStoreError(RuntimeError):
    """The store does not say whether the other ranks run another plan now."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do at a call: change, or not and why not."""

    yes: bool
    why: str = ""

    @property
    def late(self) -> bool:
        """Whether a later call may be tried."""
        return not self.yes and (LATE in self.why or ABSENT in self.why)


@dataclass(frozen=True)
class Ready:
    """One rank's side of the talks: why it cannot change ("" where it can), and the digest of what it would run."""

    why: str
    digest: str = ""

    def text(self) -> str:
        """For the store."""
        return json.dumps([self.why, self.digest])


@dataclass(frozen=True)
class Place:
    """Where ranks meet.

    Args:
        board: a connection to the store of one thread's own.
        name: equal on all ranks and used once.
    """

    session: Talks
    board: Board
    name: str

    def key(self, *parts: str) -> str:
        """A key of this change."""
        return self.session.key("swap", hashlib.blake2b(self.name.encode(), digest_size=12).hexdigest(), *parts)


def agreed_call(place: Place, mine: Ready, propose: Callable[[], int], timeout_s: float) -> tuple[int, str]:
    """The call at which all ranks are to change, 1 for the first; 0 and a sentence where they are not.

    Args:
        propose: a call that is well before all ranks; asked on the first rank of the set when all are ready.
        timeout_s: how long this rank waits for the others, half as long again where it is not the first.

    Raises:
        StoreError: the store cannot be used.
    """
    board, session = place.board, place.session
    keys = {rank: place.key("ready", str(rank)) for rank in session.ranks}
    board.put(keys[session.rank], mine.text())
    answer, deadline = place.key("call"), board.clock.now() + timeout_s
    if mine.why:
        # Nobody has to wait for what cannot come.
        return _taken(board.put_once(answer, json.dumps([0, _of(session.rank, mine.why)])))
    if session.rank != session.ranks[0]:
        deadline += timeout_s / 2
        if not board.until(lambda: board.has([answer]) or None, deadline):
            board.put_once(answer, json.dumps([0, f"rank {session.ranks[0]} named no call"]))
        return _taken(board.read([answer])[0].decode(errors="replace"))
    board.until(lambda: board.has([answer]) or board.has(list(keys.values())) or None, deadline)
    if not board.has(list(keys.values())):
        missing = [rank for rank, key in keys.items() if not board.has([key])]
        return _taken(board.put_once(answer, json.dumps([0, f"{_ranks(missing)} did not get ready"])))
    return _taken(board.put_once(answer, json.dumps(_proposal(place, keys, propose))))


def _proposal(place: Place, keys: dict[int, str], propose: Callable[[], int]) -> list[object]:
    found = zip(keys, (json.loads(data) for data in place.board.read(list(keys.values()))))
    ready = {rank: Ready(str(why), str(digest)) for rank, (why, digest) in found}
    for rank, one in ready.items():
        if one.why:
            return [0, _of(rank, one.why)]
    digests = {one.digest for one in ready.values()}
    if len(digests) > 1:
        first = next(iter(ready.values()))
        others = [rank for rank, one in ready.items() if one.digest != first.digest]
        return [0, f"{_ranks(others)} planned something else than rank {place.session.ranks[0]}"]
    return [propose(), ""]


def _of(rank: int, why: str) -> str:
    return f"rank {rank}: {why}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _taken(stored: str) -> tuple[int, str]:
    call, why = json.loads(stored)
    return int(call), str(why)


class Vote:
    """What this rank does at the agreed call.

    Args:
        place: with a connection that no other thread uses.
        timeout_s: how long ranks that are here wait for the others.
        conflict: why this rank must not change now, "" where it may.
        sent: how much it has sent so far, as text.
    """

    def __init__(
        self, place: Place, timeout_s: float, conflict: Callable[[], str], sent: Callable[[], str]
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._conflict = conflict
        self._sent = sent

    def refuse(self, why: str) -> Decision:
        """Say that this rank is not going to change; what is stored then."""
        return self._say(Decision(False, _of(self._place.session.rank, why)))

    def cast(self) -> Decision:
        """Decide, with the others, before the call runs.

        Raises:
            DeadStoreError: this rank was here, and the store does not say what the ranks do.
        """
        found = within(self._cast, self._timeout_s + _STALLED_S)
        if found is None:
            raise DeadStoreError(_DEAD.format(why="it did not answer"))
        if isinstance(found, StoreError):
            raise DeadStoreError(_DEAD.format(why=found)) from found
        return found

    def _cast(self) -> Decision | StoreError:
        board, here = self._place.board, False
        try:
            why = self._conflict()
            if why:
                return self.refuse(why)
            if board.has([self._place.key("decision")]):
                return self._stored()
            here = True
            board.put(self._place.key("here", str(self._place.session.rank)), self._sent())
            return self._decided()
        except StoreError as error:
            if not here:
                # Without this rank nobody can have decided to change.
                return Decision(False, f"the process group's store cannot be used ({error})")
            return self._once_more(error)
        except Exception as error:
            # Whatever it is, the others must not be told something else than what this rank does.
            return self._once_more(StoreError(f"{type(error).__name__}: {error}"))

    def _decided(self) -> Decision:
        board, session = self._place.board, self._place.session
        keys = {rank: self._place.key("here", str(rank)) for rank in session.ranks}
        decision, everybody = self._place.key("decision"), list(keys.values())
        deadline = board.clock.now() + self._timeout_s
        board.until(lambda: board.has([decision]) or board.has(everybody) or None, deadline)
        if board.has([decision]):
            return self._stored()
        if not board.has(everybody):
            missing = [rank for rank, key in keys.items() if not board.has([key])]
            why = f"{_ranks(missing)} {ABSENT} {self._timeout_s:g} s"
            return self._say(Decision(False, why))
        if len(set(board.read(everybody))) > 1:
            return self._say(Decision(False, "the ranks had not sent equally much at that call"))
        return self._say(Decision(True))

    def _once_more(self, error: StoreError) -> Decision | StoreError:
        """With another connection; what was decided stands, and where nothing was this rank says no."""
        try:
            self._place.board.reconnect()
            return self.refuse(f"the process group's store failed once ({error})")
        except StoreError as again:
            return again

    def _say(self, mine: Decision) -> Decision:
        return _decision(self._place.board.put_once(self._place.key("decision"), json.dumps([mine.yes, mine.why])))

    def _stored(self) -> Decision:
        return _decision(self._place.board.read([self._place.key("decision")])[0].decode(errors="replace"))


_DEAD = (
    "inductor_passes: the ranks were about to change to another plan of a graph, and the process group's store does "
    "not say whether they did ({why}): this rank cannot go on without sending something else than the others"
)


def _decision(stored: str) -> Decision:
    yes, why = json.loads(stored)
    return Decision(bool(yes), str(why))
