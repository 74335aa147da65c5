"""Asks the other ranks, once per graph and process.

Answers are kept for the life of the process, also after the end of a process group: compiled code is kept too, and code
that is compiled later must get the same answer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from inductor_passes import _torch
from inductor_passes.agreement.claim import Claim, opens_a_function
from inductor_passes.agreement.consensus import IN_DOUBT_S, Ballot, Kind, Outcome, settle
from inductor_passes.agreement.session import Session

log = logging.getLogger("inductor_passes")
T = TypeVar("T")

#: A store that blocks for longer than all waits together is given up.
_STALLED_S = 5.0
_lock = threading.Lock()
_answers: dict[tuple[object, ...], Outcome] = {}
_asking: dict[tuple[object, ...], threading.Lock] = {}
_sessions: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Session]] = weakref.WeakKeyDictionary()
#: (participants, compiled function, phase) -> verdicts on its graphs so far.
_verdicts_of: dict[tuple[object, ...], set[bool]] = {}
_follows: list[Callable[[], None]] = []
_explaining: ContextVar[bool] = ContextVar("inductor_passes_explaining", default=False)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """While it is entered no rank is asked: ranks are taken to agree. For graphs that are not going to run."""
    token = _explaining.set(True)
    try:
        yield
    finally:
        _explaining.reset(token)


def is_explained() -> bool:
    """Whether what is compiled is not going to run, see :func:`explaining`."""
    return _explaining.get()


def nobody_to_ask() -> bool:
    """Whether ranks agree by definition: collectives move nothing, or nothing is going to run."""
    return _explaining.get() or _torch.moves_nothing()


def ask(claim: Claim, lines: Sequence[str] | None = None) -> tuple[Outcome, Session | None]:
    """The verdict of a claim's participants; asked at most once per process, by one thread at a time.

    Never raises, and waits for no longer than ``claim.timeout_s`` (see ``consensus.settle``).
    """
    if nobody_to_ask() or claim.participants == (claim.rank,):
        return Outcome(Kind.AGREED), None
    session = session_of(claim.participants)
    if session is None:
        return Outcome(Kind.TROUBLE, "there is no default process group with a store"), None
    if claim.refused:
        # Nothing that could stand: it is told anew of every graph.
        return bounded(session, claim.ballot(_torch.compile_id(), lines), claim.timeout_s), session
    key = (claim.rank, claim.world_size, claim.participants, claim.digest, claim.values)
    with _lock:
        turn = _asking.setdefault(key, threading.Lock())
    with turn:
        found = _answers.get(key)
        if found is None:
            ballot = claim.ballot(_torch.compile_id(), lines)
            found = bounded(session, ballot, claim.timeout_s)
            _answers[key] = replace(found, again=True)
    _note(claim, found.agreed)
    return found, session


def _note(claim: Claim, agreed: bool) -> None:
    """Remember the verdict for :func:`is_mixed`."""
    compile_id = _torch.compile_id()
    key = claim.participants, compile_id.rpartition("/")[0], claim.phase
    with _lock:
        if opens_a_function(compile_id):
            # Dynamo counts anew after a reset.
            _verdicts_of[key] = set()
        _verdicts_of.setdefault(key, set()).add(agreed)


def is_mixed(claim: Claim) -> bool:
    """Whether ranks agree on some graphs of the function that is being compiled and not on others.

    They must then not run two of them at the same time.
    """
    function = _torch.compile_id().rpartition("/")[0]
    with _lock:
        return len(_verdicts_of.get((claim.participants, function, claim.phase), ())) > 1


def session_of(ranks: Sequence[int]) -> Session | None:
    """The talks with a set of ranks in this life of the default process group; None without one."""
    place = _torch.default_store()
    if place is None:
        return None
    group, store = place
    with _lock:
        sessions = _sessions.setdefault(group, {})
        known = sessions.get(tuple(ranks))
        if known is None:
            known = sessions[tuple(ranks)] = Session(store, _torch.process_rank(), ranks)
        return known


def bounded(session: Session, ballot: Ballot, timeout_s: float) -> Outcome:
    """:func:`settle`, given up when the store blocks: a call into it has no time limit of its own."""
    limit = timeout_s + IN_DOUBT_S + _STALLED_S
    found = within(lambda: settled(session, ballot, timeout_s), limit)
    if found is None:
        session.board.closed = "it did not answer earlier"
        found = Outcome(Kind.TROUBLE, f"the process group's store did not answer within {limit:g} s")
    return found


def settled(session: Session, ballot: Ballot, timeout_s: float) -> Outcome:
    """:func:`settle`; after any error ranks are not known to agree."""
    try:
        return settle(session, ballot, timeout_s)
    except Exception as error:
        log.debug("asking other ranks failed", exc_info=True)
        return Outcome(Kind.TROUBLE, f"asking the other ranks failed: {type(error).__name__}: {error}")


def within(call: Callable[[], T], limit_s: float) -> T | None:
    """The result of ``call``, which does not raise, in a thread of its own; None when it does not come in time."""
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(call()), name="inductor_passes agreement", daemon=True)
    thread.start()
    thread.join(limit_s)
    return result[0] if result else None


def when_forgotten(call: Callable[[], None]) -> None:
    """Have what follows from answers forgotten with them."""
    _follows.append(call)


def forget() -> None:
    """Forget all answers, what followed from them, and the modules that were loaded under them.

    For a program that replaces some of its processes while others go on: call it on all of those, with
    ``torch.compiler.reset()``, when the new process group is there.
    """
    with _lock:
        _answers.clear()
        _asking.clear()
        _verdicts_of.clear()
    for call in _follows:
        call()
    _torch.forget_loaded_modules()
