"""One verdict on one graph by all ranks of a set, through a store, without a collective and within a bounded time.

Each rank votes once for the digest of its graph. The rank with the last vote writes "agreed". A rank that has waited
long enough writes that it is alone. The first writer wins (the store compares and sets), and every rank takes what is
stored. So:

- No two ranks take different verdicts on one digest, because it is stored under one key and written once.
- "Agreed" means that every rank of the set has voted for this digest. Votes are counted under a token that only ranks
  of this set and of this life of the process group know (``session``), and no rank votes twice.
- A verdict stands for as long as the process group does. A rank that asks again, or asks after the others have
  given up, gets the same answer at once.
- If a rank dies, before or after its vote, the others wait in vain and then count as alone.

Open numbers (``literals``) are compared before the vote: the corners of the grid write theirs down, and a rank votes
only if its own numbers fit to them.

One case cannot be excluded with a store that can fail: a rank loses the store after its vote and before it has read the
verdict. It keeps trying for ``IN_DOUBT_S``, then goes on alone and says so.

A rank that has waited for a moment also writes down which digest it has, under the name of the graph (compile id and
phase). A rank that finds another digest there knows that the graphs differ. It ends the wait of both and shows the
first line in which they differ. Ranks with other settings may ask different questions, none of which the others ever
answer. So waiting ranks also compare, under the name of the compilation, what all of its questions rest on, and the
rank that finds a difference tells everybody who waits.

A rank that cannot describe its graph has nothing to vote for. It writes that down under the name of the graph, where
those that wait find it, and goes on without waiting.

Operations: one vote, one or two reads of the verdict, and with open numbers a few more for each rank, however many
ranks there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from inductor_passes.agreement import difference
from inductor_passes.agreement.board import StoreError
from inductor_passes.agreement.literals import Kind as LiteralKind
from inductor_passes.agreement.literals import Literals, parsed
from inductor_passes.agreement.session import Session

#: After this long a rank looks whether another rank has another graph under the same name.
GRACE_S = 0.3
#: How long a rank that has voted and lost the store tries to reach it again.
IN_DOUBT_S = 30.0
#: How long to wait for the lines of a rank that is known to differ.
_LINES_S = 2.0
#: In larger sets only the first rank and those that found the difference show it.
_ALL_SHOW = 16
_MAX_VERDICT = 200
#: How the digest of a rank begins that cannot describe its graph: no digest of a graph does.
_REFUSED = "refused"


class Kind(str, Enum):
    """How a verdict came about."""

    AGREED = "agreed"
    DIFFERS = "differs"
    SETTINGS = "settings"
    LITERAL = "literal"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    TROUBLE = "trouble"


@dataclass(frozen=True)
class Outcome:
    """A verdict as a rank takes it.

    Attributes:
        why: one sentence, "" when all agree.
        again: it was known in this process: nobody was asked, and the other ranks may be elsewhere.
    """

    kind: Kind
    why: str = ""
    again: bool = False

    @property
    def agreed(self) -> bool:
        """Whether every rank of the set has the same graph."""
        return self.kind is Kind.AGREED


@dataclass(frozen=True)
class Ballot:
    """What a rank votes for.

    Attributes:
        digest: of its graph.
        literals: the numbers that the digest leaves open.
        corners: the ranks that others compare these with.
        name: of the graph, equal on ranks that compile the same frames in the same order.
        lines: what the digest is made of, for people; called only when there is something to show.
        what: the ranks compare, for messages.
        first: whether it is about the first graph of a function, which all ranks compile unless programs differ.
        compilation: that the question belongs to, equal on ranks that compile the same frames in the same order.
        settings: digest of what all questions of a compilation rest on; "" where there is nothing of that kind.
    """

    digest: str
    literals: Literals
    corners: tuple[int, ...]
    name: str
    lines: Callable[[], Sequence[str]]
    what: str = "graph"
    first: bool = True
    compilation: str = ""
    settings: str = ""

    @property
    def refused(self) -> bool:
        """Whether it is no vote: the rank cannot describe its graph, and its first line says why."""
        return is_refusal(self.digest)


def refusal(why: str, rank: int) -> str:
    """The digest of a rank that cannot describe its graph; no other rank has it."""
    return _REFUSED + hashlib.blake2b(f"{rank} {why}".encode(), digest_size=16).hexdigest()


def is_refusal(digest: str) -> bool:
    """Whether a digest is one of :func:`refusal`."""
    return digest.startswith(_REFUSED)


def settle(session: Session, ballot: Ballot, timeout_s: float) -> Outcome:
    """The verdict of ``session``'s ranks on a graph; never raises.

    Waits for at most ``timeout_s`` seconds, less where somebody has not answered about a graph of the same kind before
    (the first of its function, or a further one), and longer only for a store that was lost after the vote
    (:data:`IN_DOUBT_S`).
    """
    deadline = session.board.clock.now() + session.patience(timeout_s, ballot.first)
    talk = _Talk(session, ballot, deadline)
    try:
        opened = session.usable and session.open(deadline)
    except StoreError as error:
        return Outcome(Kind.TROUBLE, f"the process group's store cannot be used ({error})")
    if not session.usable:
        return Outcome(Kind.TROUBLE, "this process was forked from one that has a vote already")
    if opened:
        outcome = talk.outcome()
    else:
        asked = f"not all of ranks {_listed(session.ranks)} have asked for this in time"
        outcome = Outcome(Kind.UNANSWERED, f"rank {session.rank} waited in vain: {asked}{_ABSENT}")
    session.note(outcome.kind is not Kind.UNANSWERED, ballot.first)
    return outcome


#: Why nobody may have answered.
_ABSENT = " (one that runs another graph meanwhile, for a batch of another size for instance, does not answer)"


class _Talk:
    """One rank's part in finding the verdict on one graph."""

    def __init__(self, session: Session, ballot: Ballot, deadline: float) -> None:
        self._session = session
        self._board = session.board
        self._ballot = ballot
        self._deadline = deadline
        self._voted = self._published = False
        # Graphs of equal digest and other open numbers are told apart by their order.
        self._number = session.number(ballot.digest, ballot.literals.values)
        self._name = f"{ballot.name} {session.number('name ' + ballot.name, ballot.digest)}"
        self._hint_at: float | None = session.board.clock.now() + GRACE_S
        self._settings_key = ""
        if ballot.settings:
            number = session.number(f"settings {ballot.compilation}", ballot.settings)
            self._settings_key = hashlib.blake2b(f"{ballot.compilation} {number}".encode(), digest_size=8).hexdigest()

    def outcome(self) -> Outcome:
        """The verdict."""
        try:
            return self._refused() or self._compared() or self._vote()
        except StoreError as error:
            if not self._voted:
                return Outcome(Kind.TROUBLE, f"the process group's store cannot be used ({error})")
            return self._in_doubt(error)

    def _key(self, *parts: str) -> str:
        return self._session.key(self._ballot.digest, str(self._number), *parts)

    def _refused(self) -> Outcome | None:
        """Tell those that wait that this rank has nothing to vote for, if that is so, and wait for nobody."""
        if not self._ballot.refused:
            return None
        self._hinted()
        return Outcome(Kind.REFUSED, next(iter(self._ballot.lines()), f"rank {self._session.rank} cannot vote"))

    def _compared(self) -> Outcome | None:
        """The verdict when open numbers do not fit, or when somebody has come to one meanwhile."""
        ballot, rank = self._ballot, self._session.rank
        if not ballot.literals.values:
            return None
        if rank in ballot.corners:
            key = self._key("corner", str(ballot.corners.index(rank)))
            if self._board.put_once(key, ballot.literals.text) != ballot.literals.text:
                return self._decide(Kind.LITERAL, "0")
        keys = [self._key("corner", str(i)) for i in range(len(ballot.corners))]

        def look() -> Outcome | bool | None:
            return True if self._board.has(keys) else self._looked()

        found = self._board.until(look, self._deadline)
        if isinstance(found, Outcome):
            return found
        if found is None:
            return self._decide(Kind.UNANSWERED, "")
        values = [parsed(text, len(ballot.literals.values)) for text in self._board.read(keys)]
        if any(value is None for value in values):
            return self._decide(Kind.LITERAL, "0")
        misfit = ballot.literals.misfit([value for value in values if value is not None])
        return None if misfit is None else self._decide(Kind.LITERAL, str(misfit))

    def _vote(self) -> Outcome:
        # From here on the others may count on this rank, also if what comes back is an error.
        self._voted = True
        votes = self._key("votes")
        if self._session.votes_first(votes) and self._board.add(votes) >= len(self._session.ranks):
            return self._decide(Kind.AGREED, "")
        found = self._board.until(self._looked, self._deadline)
        return found or self._decide(Kind.UNANSWERED, str(self._board.count(self._key("votes"))))

    def _looked(self) -> Outcome | None:
        """The verdict if there is one; while there is none, what a waiting rank has to do."""
        self._session.tend()
        key = self._key("verdict")
        if self._board.has([key]):
            return self._taken(self._board.read([key])[0])
        if self._hint_at is not None and self._board.clock.now() >= self._hint_at:
            self._hint_at = None
            return self._introduced() or self._hinted()
        if self._hint_at is None and self._settings_key:
            told = self._session.key("settings", self._settings_key, "differ")
            if self._board.has([told]):
                return self._told(self._board.read([told])[0].decode("ascii", "replace"))
        return None

    def _introduced(self) -> Outcome | None:
        """Compare what questions rest on with the first rank that waited; the verdict when that is something else."""
        if not self._settings_key:
            return None
        ballot, session = self._ballot, self._session
        self._publish_lines()
        mine = f"{ballot.settings} {ballot.digest} {session.rank}"
        first = self._board.put_once(session.key("settings", self._settings_key), mine)
        found = self._told(first)
        if found is not None:
            self._board.put_once(session.key("settings", self._settings_key, "differ"), mine)
        return found

    def _told(self, text: str) -> Outcome | None:
        """The verdict when somebody's settings, ``text``, are not this rank's."""
        parts = text.split(" ")
        if len(parts) != 3 or not all(part.isalnum() for part in parts) or not parts[2].isdecimal():
            return None
        settings, digest, other = parts
        return None if settings == self._ballot.settings else self._decide(Kind.SETTINGS, f"{digest} {other}")

    def _decide(self, kind: Kind, detail: str) -> Outcome:
        """Write a verdict unless there is one; the one that stands."""
        text = json.dumps([kind.value, self._session.rank, detail])
        return self._taken(self._board.put_once(self._key("verdict"), text).encode())

    def _taken(self, stored: bytes) -> Outcome:
        try:
            kind, rank, detail = json.loads(stored[:_MAX_VERDICT])
            kind, rank, detail = Kind(kind), int(rank), str(detail)
        except (ValueError, TypeError, RecursionError):
            return Outcome(Kind.TROUBLE, "the process group's store holds no verdict where one should be")
        if kind is Kind.AGREED:
            # Nobody can have counted a vote that was not given.
            if not self._voted:
                return Outcome(Kind.TROUBLE, "somebody voted in this rank's place")
            return Outcome(kind)
        if kind is Kind.UNANSWERED:
            count = f"{detail} of {len(self._session.ranks)}" if detail.isdecimal() else "not all"
            return Outcome(kind, f"rank {rank} waited in vain: {count} ranks answered in time{_ABSENT}")
        if kind is Kind.LITERAL:
            return Outcome(kind, self._literal(rank, detail))
        return Outcome(kind, self._difference(rank, detail, kind))

    def _literal(self, rank: int, detail: str) -> str:
        """What to say of an open number that fits to nothing; every rank knows in which line it is."""
        literals, lines = self._ballot.literals, list(self._ballot.lines())
        index = int(detail) if detail.isdecimal() else len(literals.values)
        if index >= len(literals.places) or literals.places[index] >= len(lines):
            return f"the {self._ballot.what}s are alike but for a number on rank {rank}"
        line = difference.shown(lines[literals.places[index]])
        if literals.kinds[index] == LiteralKind.NEAR.value:
            return (
                f"the {self._ballot.what}s are alike, but {line} reads a piece (here {literals.values[index]}) that is "
                "the rank's own on some ranks only: a rewrite would take it for that there alone"
            )
        return (
            f"the {self._ballot.what}s are alike but for a number on rank {rank} that is neither the same on all ranks "
            f"nor given by a rank's own position: {line}, in which rank {self._session.rank} has "
            f"{literals.values[index]}"
        )

    def _hinted(self) -> Outcome | None:
        """Compare digests under the graph's name; the verdict when another rank has another graph there."""
        ballot, session, board = self._ballot, self._session, self._board
        self._publish_lines()
        name = hashlib.blake2b(self._name.encode(), digest_size=8).hexdigest()
        mine = f"{ballot.digest} {self._number} {session.rank}"
        first = board.put_once(session.key("name", name), mine).split(" ")
        if len(first) != 3 or not all(part.isalnum() for part in first) or not first[2].isdecimal():
            return None
        digest, number, other = first
        if digest == ballot.digest:
            return None
        # This rank is not going to vote for the other graph, so no rank needs to wait for that.
        kind = Kind.REFUSED if ballot.refused or is_refusal(digest) else Kind.DIFFERS
        theirs = json.dumps([kind.value, session.rank, ballot.digest])
        board.put_once(session.key(digest, number, "verdict"), theirs)
        return self._decide(kind, f"{digest} {other}")

    def _publish_lines(self) -> None:
        if self._published:
            return
        self._published = True
        key = self._session.key("lines", self._ballot.digest)
        if self._board.add(f"{key}/writers") == 1:
            self._board.put(key, difference.packed(self._ballot.lines()))

    def _difference(self, rank: int, detail: str, kind: Kind) -> str:
        """One sentence on the graph that another rank has; of settings, only what all questions rest on is compared."""
        session = self._session
        digest, _, found_at = detail.partition(" ")
        other = int(found_at) if found_at.isdecimal() else rank
        if other == session.rank:
            # It said so of another rank's graph, and has the same one now.
            return f"ranks compared this {self._ballot.what} with another one before, and that verdict stands"
        facts = kind is Kind.SETTINGS
        what = f"what rank {other} was told" if facts else f"the {self._ballot.what} of rank {other}"
        sentence = f"{what} differs"
        if kind is Kind.REFUSED:
            sentence = f"rank {other} cannot describe its {self._ballot.what} to others"
        if len(session.ranks) > _ALL_SHOW and session.rank not in (rank, session.ranks[0]):
            return f"{sentence}; the log of rank {session.ranks[0]} shows the first difference"
        key = session.key("lines", digest)
        try:
            there = self._board.until(lambda: self._board.has([key]) or None, self._board.clock.now() + _LINES_S)
            lines = difference.unpacked(self._board.read([key])[0]) if there else None
        except StoreError:
            lines = None
        if lines is None:
            return sentence
        if kind is Kind.REFUSED:
            # Its only line says why.
            return f"{sentence}: {difference.shown(lines[0])[1:-1]}" if lines else sentence
        mine = list(self._ballot.lines())
        if facts:
            mine, lines = difference.shared_facts(mine), difference.shared_facts(lines)
        return f"{sentence}: {difference.first_difference(session.rank, mine, other, lines)}"

    def _in_doubt(self, error: StoreError) -> Outcome:
        """The verdict of a rank that has voted and lost the store: others may have agreed with it."""

        def look() -> Outcome | None:
            try:
                self._board.reconnect()
                if self._board.has([self._key("verdict")]) or self._board.clock.now() < self._deadline:
                    return self._looked()
                return self._decide(Kind.UNANSWERED, "")
            except StoreError:
                return None

        found = self._board.until(look, self._deadline + IN_DOUBT_S)
        why = f"this rank lost the process group's store after it had voted ({error}); other ranks may have agreed"
        return found or Outcome(Kind.TROUBLE, why)


def _listed(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{ranks[0]} ... {ranks[-1]} ({len(ranks)})"
