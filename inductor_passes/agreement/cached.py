"""Verdicts of graphs that come out of a cache.

Generated code is right only under the verdict that it was compiled under. So it starts with a statement that runs when
the code is loaded: the rank asks the others as if it compiled the graph, because they may be compiling it and waiting
for this rank's vote. If the verdict is now different, loading raises the error of a missing file. Torch takes that for
a cache miss and compiles the graph again.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from inductor_passes import _torch
from inductor_passes.agreement.asking import ask, nobody_to_ask
from inductor_passes.agreement.claim import Claim
from inductor_passes.agreement.reach import Agreement

log = logging.getLogger("inductor_passes")


class StaleVerdictError(OSError):
    """Code from a cache that was compiled under another verdict than the ranks come to now: a cache miss."""


def statement(agreement: Agreement) -> str:
    """A Python statement for the generated module, "" where no other rank is concerned.

    It has to run whenever the module is loaded: code under a verdict must not be cached without it.
    """
    if agreement.claim is None:
        return ""
    return f"__import__('inductor_passes.agreement', fromlist=['loaded']).loaded({agreement.claim.text()!r})"


def loaded(text: str) -> None:
    """Called by a generated module while it is loaded.

    Raises:
        StaleVerdictError: the code must not be used.
    """
    try:
        why = _objection(text)
    except Exception as error:  # after any error it is not known what the others do
        log.debug("a stored verdict cannot be checked", exc_info=True)
        why = f"{type(error).__name__}: {error}"
    if why:
        refuse(why)


def refuse(why: str) -> NoReturn:
    """Called while a generated module is loaded: its code must not be used.

    Raises:
        StaleVerdictError: always.
    """
    _torch.forget_cached_entry()
    message = f"inductor_passes: compiling a graph anew instead of taking it from the cache: {why}"
    log.warning("%s", message)
    raise StaleVerdictError(message)


def _objection(text: str) -> str:
    """Why code must not be used, "" when it may."""
    claim = Claim.parse(text)
    if _torch.default_store() is None:
        return "there is no process group to ask"
    place = _torch.process_rank(), _torch.rank_and_world_size()[1]
    if (claim.rank, claim.world_size) != place:
        return f"it was compiled by rank {claim.rank} of {claim.world_size}, and this is rank {place[0]} of {place[1]}"
    if not claim.participants:
        # Nobody could be asked then, nor now: every rank goes on by itself.
        return "its graph cannot be compared between ranks" if claim.agreed and not nobody_to_ask() else ""
    outcome, _ = ask(claim)
    if claim.agreed is None or outcome.agreed == claim.agreed:
        return ""
    if outcome.agreed:
        return "it was compiled while ranks were not known to agree, and now they do"
    return f"ranks are not known to agree: {outcome.why}"
