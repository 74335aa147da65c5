"""A text that one rank makes and all participants of an agreement get, through the store."""

from __future__ import annotations

from collections.abc import Callable

from inductor_passes.agreement.asking import session_of, within
from inductor_passes.agreement.board import StoreError
from inductor_passes.agreement.reach import Agreement
from inductor_passes.agreement.session import Session

#: A store that blocks for longer than the wait is given up.
_STALLED_S = 5.0


def share(found: Agreement, make: Callable[[], str], limit_s: float) -> str | None:
    """The text of the first participant; None where it does not come, or holds nothing.

    What was shared about one agreement stands: asked again, every rank gets the same text.

    Args:
        found: the participants agree on what the text is about.
        make: makes the text; called on the first participant only.
        limit_s: how long the others wait, in seconds.

    Raises:
        Exception: what ``make`` raises, after the others were told that nothing comes, if nothing was there before.
    """
    claim = found.claim
    session = session_of(found.participants) if found.agreed and claim is not None else None
    if claim is None or session is None or session.token is None:
        return None
    key = session.key(claim.digest, "shared")
    if claim.rank != found.participants[0]:
        return within(lambda: _awaited(session, key, limit_s), limit_s + _STALLED_S) or None
    try:
        text = make()
    except Exception:
        # What was shared before stands: the others take it.
        if before := within(lambda: _put(session, key, ""), _STALLED_S):
            return before
        raise
    return within(lambda: _put(session, key, text), _STALLED_S) or None


def _awaited(session: Session, key: str, limit_s: float) -> str:
    try:
        deadline = session.board.clock.now() + limit_s
        if session.board.until(lambda: session.board.has([key]) or None, deadline) is None:
            return ""
        return session.board.read([key])[0].decode().removeprefix(_MARK)
    except (StoreError, UnicodeDecodeError):
        return ""


#: Stores cannot tell an empty text from none.
_MARK = "="


def _put(session: Session, key: str, text: str) -> str:
    try:
        return session.board.put_once(key, _MARK + text).removeprefix(_MARK)
    except StoreError:
        return ""
