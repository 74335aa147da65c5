"""A fresh name space in the store for one set of ranks and one life of the default process group.

A store may outlive the process group: launchers keep theirs over restarts, and a program may destroy its group and
make another one over the same store. What an earlier life left there must not count. So the ranks of a set first find a
token that no earlier life can know:

1. Every rank writes down a random number, made for this life.
2. When all have, the first rank answers each with that number and one random token.
3. A rank takes the token when the answer contains its own number.

An answer to an old number is ignored. The first rank sees the new number when it appears and answers again. All later
keys contain the token. Every rank but the first needs a constant number of operations, once per set and life.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from inductor_passes.agreement.board import Board, Clock

#: In every key: other versions of this protocol never meet.
PROTOCOL = "inductor_passes/agreement/2"
_MAX_BYTES = 200
#: Share of the timeout for later waits of the same kind, after a rank of the set did not answer.
_IMPATIENT = 0.1


class Session:
    """One rank's part in the talks of a set of ranks.

    Args:
        store: that all of them reach.
        rank: of this process.
        ranks: the set, sorted.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], clock: Clock | None = None) -> None:
        self.board = Board(store, clock)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.token: str | None = None
        self.lock = threading.Lock()
        self._opening = threading.Lock()
        self._process = os.getpid()
        self._number = uuid.uuid4().hex
        self._place = f"{PROTOCOL}/{hashlib.blake2b(repr(self.ranks).encode(), digest_size=8).hexdigest()}"
        self._fresh = uuid.uuid4().hex
        self._answered: dict[int, bytes] = {}
        self._said_hello = self._complete = False
        #: Kinds of graphs (whether they are the first of their function) for which somebody waited in vain.
        self._in_vain: set[bool] = set()
        self._asked: dict[str, list[object]] = {}
        self._voted: set[str] = set()

    @property
    def usable(self) -> bool:
        """False in a process that was forked off: it holds its parent's numbers and connection."""
        return os.getpid() == self._process

    @property
    def _leads(self) -> bool:
        return self.rank == self.ranks[0]

    def key(self, *parts: str) -> str:
        """A key under the token."""
        assert self.token is not None
        return "/".join((self._place, self.token, *parts))

    def patience(self, timeout_s: float, first: bool) -> float:
        """How long to wait this time: a tenth of ``timeout_s`` after somebody has not answered.

        A further variant of a function is often compiled by one rank alone. That it waited in vain says nothing about
        the next function, which all ranks compile, each in its own time.

        Args:
            first: whether the graph is the first of its function.
        """
        return timeout_s * _IMPATIENT if first in self._in_vain else timeout_s

    def note(self, answered: bool, first: bool) -> None:
        """Whether everybody answered this time."""
        if answered:
            self._in_vain.clear()
        else:
            self._in_vain.add(first)

    def number(self, about: str, what: object) -> int:
        """Counts the different things that were asked under one name: 0 for the first, the same for the same thing."""
        with self.lock:
            known = self._asked.setdefault(about, [])
            if what not in known:
                known.append(what)
            return known.index(what)

    def votes_first(self, key: str) -> bool:
        """Whether this rank has not voted under this key yet; it has from now on."""
        with self.lock:
            first = key not in self._voted
            self._voted.add(key)
            return first

    def open(self, deadline: float) -> bool:
        """Find the token; False when not all ranks have come by ``deadline``.

        Raises:
            StoreError: the store cannot be used.
        """
        if self.token is not None:
            return True
        with self._opening:
            if self.token is None:
                if not self._said_hello:
                    self.board.put(f"{self._place}/hello/{self.rank}", self._number)
                    self._said_hello = True
                self.token = self.board.until(self._gathered if self._leads else self._answer, deadline)
                if self.token is not None:
                    self.board.add(self.key("joined"))
        return self.token is not None

    def tend(self) -> None:
        """The first rank's duty while it waits for anything: to answer those whose number has changed since.

        Raises:
            StoreError: the store cannot be used.
        """
        if not self._leads or self._complete or self.token is None:
            return
        self._gathered()
        self._complete = self.board.count(self.key("joined")) >= len(self.ranks)

    def _gathered(self) -> str | None:
        """Answer everybody once all numbers are there; the token then."""
        keys = {rank: f"{self._place}/hello/{rank}" for rank in self.ranks if rank != self.rank}
        if not self.board.has(list(keys.values())):
            return None
        for rank, number in zip(keys, self.board.read(list(keys.values()))):
            if self._answered.get(rank) != number:
                self.board.put(f"{self._place}/answer/{rank}", f"{_text(number)} {self._fresh}")
                self._answered[rank] = number
        return self._fresh

    def _answer(self) -> str | None:
        """The token, out of an answer that has this rank's number in it."""
        key = f"{self._place}/answer/{self.rank}"
        if not self.board.has([key]):
            return None
        (answer,) = self.board.read([key])
        number, _, token = _text(answer).partition(" ")
        return token if number == self._number and len(token) == 32 and token.isalnum() else None


def _text(value: bytes) -> str:
    return value[:_MAX_BYTES].decode("ascii", "replace")
