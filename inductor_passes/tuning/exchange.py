"""The ranks of a graph put their records together and take one and the same result, through the group's store.

Each rank writes its record. The first rank of the set makes the result when all records are there; a rank that has
waited long enough writes that there is none. The first writer wins (the store compares and sets), and every rank takes
what is stored, so no two ranks hold different results. Nobody waits longer than the timeout, no collective is used, and
all of it runs on a thread of its own: a rank that dies or comes late costs the others nothing but the result.

The keys lie under the token of the ranks' session (``agreement.session``), which no other life of the process group
knows. The thread has a connection to the store of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inductor_passes.agreement.board import Board, ClosedError, StoreError

#: A result is that large at most.
MAX_BYTES = 1 << 24
#: After the others have given up the first rank's answer is looked for so much longer, as a share of the timeout.
_LONGER = 0.5


class Talks(Protocol):
    """What is needed of ``agreement.session.Session``."""

    rank: int
    ranks: tuple[int, ...]

    def open(self, deadline: float) -> bool:
        """Find the token of the ranks."""

    def key(self, *parts: str) -> str:
        """A key under the token."""


@dataclass(frozen=True)
class Result:
    """What all ranks hold: ``content`` is None where there is no result; ``why`` is then one sentence."""

    content: Any
    why: str = ""
    digest: str = ""


def exchange(
    session: Talks,
    board: Board,
    name: str,
    record: bytes,
    combine: Callable[[Mapping[int, bytes]], Any],
    timeout_s: float,
    title: str = "",
) -> Result:
    """One result for all ranks of ``session``; never raises, and waits for at most two and a half times ``timeout_s``.

    Args:
        board: this thread's own connection to the store.
        name: of what is exchanged, equal on all ranks and used once.
        record: this rank's.
        combine: all ranks' records into the result, plain data; called on the first rank only.
        timeout_s: in seconds.
        title: what the ranks call what was timed, also where ``name`` is another one; for the sentence, "" for none.
    """
    try:
        now = board.clock.now()
        if not session.open(now + timeout_s):
            return Result(None, f"not all of ranks {listed(session.ranks)} came to exchange their times")
        return _Exchange(session, board, name, combine, title).result(record, timeout_s)
    except ClosedError as error:
        return Result(None, f"{error} before the ranks' times were put together")
    except StoreError as error:
        return Result(None, f"the process group's store cannot be used ({error})")
    except Exception as error:  # a measurement must never stop a program
        return Result(None, f"the ranks' times could not be put together: {type(error).__name__}: {error}")


class _Exchange:
    def __init__(
        self, session: Talks, board: Board, name: str, combine: Callable[[Mapping[int, bytes]], Any], title: str
    ) -> None:
        self._session = session
        self._board = board
        self._name = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        self._combine = combine
        self._plan = name.partition(" ")[0]
        self._title = hashlib.blake2b(title.encode(), digest_size=12).hexdigest() if title else ""

    def _key(self, *parts: str) -> str:
        return self._session.key("timing", self._name, *parts)

    def result(self, record: bytes, timeout_s: float) -> Result:
        board, session = self._board, self._session
        if self._title:
            board.put(self._said(session.rank), self._plan)
        board.put(self._key("record", str(session.rank)), record.hex())
        deadline = board.clock.now() + timeout_s
        if session.rank == session.ranks[0]:
            keys = {rank: self._key("record", str(rank)) for rank in session.ranks}
            if board.until(lambda: board.has(list(keys.values())) or None, deadline):
                return self._taken(board.put_once(self._key("result"), self._made(keys)))
            missing = [rank for rank, key in keys.items() if not board.has([key])]
            return self._give_up(self._why(missing))
        there = board.until(lambda: board.has([self._key("result")]) or None, deadline + _LONGER * timeout_s)
        if there:
            return self._taken(board.read([self._key("result")])[0].decode(errors="replace"))
        return self._give_up(
            self._another(session.ranks[0]) or f"rank {session.ranks[0]} did not answer rank {session.rank}"
        )

    def _said(self, rank: int) -> str:
        """Where a rank says which plan it timed, for ranks that timed another one."""
        return self._session.key("timed plan", self._title, str(rank))

    def _another(self, rank: int) -> str:
        """That a rank timed another plan, as a sentence; "" where it did not say so."""
        if not self._title or not self._board.has([self._said(rank)]):
            return ""
        plan = self._board.read([self._said(rank)])[0].decode(errors="replace")
        return "" if plan == self._plan else f"rank {rank} timed another plan: {plan}, and not {self._plan}"

    def _why(self, missing: Sequence[int]) -> str:
        for rank in missing:
            if another := self._another(rank):
                return another
        return f"rank{'s' * (len(missing) > 1)} {listed(missing)} did not hand in any times"

    def _made(self, keys: Mapping[int, str]) -> str:
        found = zip(keys, self._board.read(list(keys.values())))
        try:
            content = self._combine({rank: bytes.fromhex(text.decode("ascii")) for rank, text in found})
        except Exception as error:
            return json.dumps([None, f"the ranks' times do not fit together: {error}"])
        return json.dumps([content, ""], sort_keys=True)

    def _give_up(self, why: str) -> Result:
        return self._taken(self._board.put_once(self._key("result"), json.dumps([None, why])))

    def _taken(self, stored: str) -> Result:
        if len(stored) > MAX_BYTES:
            return Result(None, f"the result has more than {MAX_BYTES} bytes")
        content, why = json.loads(stored)
        return Result(content, str(why), hashlib.sha256(stored.encode()).hexdigest()[:16])


def listed(ranks: Sequence[int]) -> str:
    """Numbers of ranks as text, only the ends of many."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} ... {ranks[-1]} ({len(ranks)})"
