"""Asks whether all ranks that take part in a graph's collectives compile this graph, before any decision about it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inductor_passes import _torch
from inductor_passes.agreement.asking import ask, is_mixed, nobody_to_ask
from inductor_passes.agreement.claim import Claim, packed_lines
from inductor_passes.agreement.consensus import Kind, refusal
from inductor_passes.agreement.difference import OF_ONE_QUESTION, SOURCE
from inductor_passes.agreement.lines import Description, concerned, describe, used_groups
from inductor_passes.agreement.roles import IncomparableError
from inductor_passes.ir.groups import Group
from inductor_passes.ir.view import GraphView

log = logging.getLogger("inductor_passes")

#: How long a rank waits for the others, in seconds, unless it is told otherwise.
TIMEOUT_S = 10.0
#: What is asked about graphs that differ.
COLLECTIVES = "collectives"
MIXED = (
    "ranks agree on some graphs of this function and not on others (sizes that differ between ranks make such graphs): "
    "ranks that run two of them at the same time may hang"
)


@dataclass(frozen=True)
class Agreement:
    """The verdict on one graph.

    Attributes:
        agreed: every rank of ``participants`` has this graph, and takes this verdict.
        why: why not, in one sentence; "" when they agree.
        digest: of the graph, "" where it has none.
        participants: the ranks that were asked; this rank alone for a graph without collectives, nobody where the graph
            cannot be compared.
        differs: it is known that another rank has another graph.
        settings_differ: it is known that what another rank decides by is something else, whatever its graph is.
        again: the verdict was known in this process: other ranks may not be compiling this graph now.
        mixed: ranks agree on some graphs of the function that is being compiled and not on others. What becomes of the
            collectives of the two kinds of graphs may differ: ranks must not run them at the same time.
        waited_ns / operations: what it took, the description of the graph not included.
        described_ns: time to describe the graph.
        claim: what goes into generated code, None for a graph that concerns no other rank.
    """

    agreed: bool
    why: str
    digest: str
    participants: tuple[int, ...]
    mixed: bool = False
    differs: bool = False
    settings_differ: bool = False
    again: bool = False
    waited_ns: int = 0
    operations: int = 0
    described_ns: int = 0
    claim: Claim | None = field(default=None, repr=False)

    @property
    def note(self) -> str:
        """One sentence for a report."""
        count = len(self.participants)
        text = f"ranks are not known to agree, collectives stay as they are: {self.why}"
        if self.agreed:
            text = f"ranks agree: {count} rank{'s' * (count != 1)}, digest {self.digest[:16] or 'none'}"
        return f"{text}; {MIXED}" if self.mixed else text


def reach(
    view: GraphView,
    facts: Mapping[str, str],
    *,
    timeout_s: float = TIMEOUT_S,
    name: str = "",
    describe_group: Callable[[Group], str] | None = None,
    made_alike: bool = False,
) -> Agreement:
    """Ask the ranks that take part in a graph's collectives whether they have the same graph; never raises.

    Every rank of the answer's ``participants`` that asks gets the same verdict, and keeps it: asked again in this
    process, the answer comes at once.

    Args:
        view: the graph before anything is changed that depends on the answer.
        facts: everything besides the graph that decisions depend on: settings, versions, costs. Equal text on ranks
            that decide alike; nothing of one rank's own.
        timeout_s: how long to wait for the others in seconds; a tenth of it after they have not answered once about
            a graph of the same kind (the first of a function, or a further one).
        name: of the graph within its compilation: its phase; equal on all ranks.
        describe_group: what decisions depend on about a process group besides its size and shape, e.g. the link that it
            is charged for.
        made_alike: see :func:`~inductor_passes.agreement.pieces.opened`; equal on all ranks.
    """
    began = time.perf_counter_ns()
    rank, world_size = _torch.rank_and_world_size()
    if not used_groups(view):
        return Agreement(True, "", "", (rank,))
    try:
        rank = _torch.process_rank() if _torch.default_store() is not None else rank
        description = describe(view, facts, rank, world_size, describe_group, made_alike=made_alike)
    except Exception as error:
        if not isinstance(error, IncomparableError):
            log.debug("a graph cannot be described", exc_info=True)
        why = str(error) if isinstance(error, IncomparableError) else f"{type(error).__name__}: {error}"
        described_ns, asked, agreed = _since(began), time.perf_counter_ns(), nobody_to_ask()
        claim = _claim(None, rank, world_size, timeout_s, name, agreed)
        if not agreed:
            claim = _refused(claim, view, why)
        return Agreement(
            agreed, "" if agreed else why, "", (), waited_ns=_since(asked), described_ns=described_ns, claim=claim
        )
    described_ns = _since(began)
    claim = _claim(description, rank, world_size, timeout_s, name, False, _settings(facts))
    asked = time.perf_counter_ns()
    outcome, session = ask(claim, description.lines)
    return Agreement(
        agreed=outcome.agreed,
        why=outcome.why,
        digest=claim.digest,
        participants=claim.participants,
        mixed=is_mixed(claim),
        differs=outcome.kind in (Kind.DIFFERS, Kind.LITERAL),
        settings_differ=outcome.kind is Kind.SETTINGS,
        again=outcome.again,
        waited_ns=_since(asked),
        operations=session.board.operations if session is not None else 0,
        described_ns=described_ns,
        claim=replace(claim, agreed=outcome.agreed),
    )


def _refused(claim: Claim, view: GraphView, why: str) -> Claim:
    """Tell the ranks that take part in a graph that this one cannot describe it; what its code says when it is loaded.

    Those that can would wait for this rank's vote, on the graph and then on what else they have in common.
    """
    try:
        grid = concerned(view, claim.rank, claim.world_size)
    except IncomparableError:
        return claim  # which ranks to tell is not known either
    digest = refusal(why, claim.rank)
    refused = replace(claim, participants=grid.ranks, corners=grid.corners, digest=digest, lines=packed_lines([why]))
    for phase in (claim.phase, _about(claim, COLLECTIVES)):
        ask(replace(refused, phase=phase), [why])
    return refused


def confirm(before: Agreement, lines: Sequence[str], longer_s: float = 0.0) -> Agreement:
    """Ask the ranks that agreed on a graph whether all of them did the same to it; never raises.

    A pass may fail on one rank alone. Then all ranks have to go back to the graph that they agreed on.

    Args:
        before: their verdict on the graph as it was; where it is no, or concerns this rank alone, it is returned.
        lines: what was done, equal on ranks that did the same.
        longer_s: what to wait on top for, in seconds: ranks do not need equally long for the graph.
    """
    if before.claim is None or not before.agreed or before.claim.participants in ((), (before.claim.rank,)):
        return before
    # Numbers that say which piece is a rank's own stay open, as in the digest of the graph.
    return _ask_on(
        before.claim,
        json.dumps([before.claim.digest, *lines]),
        lines,
        phase=_about(before.claim, "outcome"),
        timeout_s=before.claim.timeout_s + longer_s,
    )


def compare(before: Agreement, lines: Sequence[str]) -> Agreement:
    """Ask ranks that are known to have different graphs whether they have the same collectives; never raises.

    Args:
        before: their verdict on the graphs.
        lines: what they may have in common.
    """
    if before.claim is None or not before.differs:
        return before
    return _ask_on(
        replace(before.claim, values=(), kinds="", roles=(), places=()),
        json.dumps([COLLECTIVES, *lines]),
        lines,
        phase=_about(before.claim, COLLECTIVES),
    )


def _about(claim: Claim, what: str) -> str:
    """The name of a further question about a graph."""
    return f"{claim.phase} {what}"


def _ask_on(claim: Claim, content: str, lines: Sequence[str], **fields: Any) -> Agreement:
    """Ask a claim's participants about something else than the graph."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    # A bar would set off the user's source line, which does not count as a difference.
    lines = [line.replace(SOURCE, ", ") for line in lines]
    claim = replace(claim, digest=digest, lines=packed_lines(lines), agreed=False, **fields)
    asked = time.perf_counter_ns()
    outcome, session = ask(claim, lines)
    return Agreement(
        agreed=outcome.agreed,
        why=outcome.why,
        digest=claim.digest,
        participants=claim.participants,
        waited_ns=_since(asked),
        operations=session.board.operations if session is not None else 0,
        claim=replace(claim, agreed=outcome.agreed),
    )


def _settings(facts: Mapping[str, str]) -> str:
    """A digest of what all questions of a compilation rest on."""
    shared = {name: value for name, value in facts.items() if name not in OF_ONE_QUESTION}
    return hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=16).hexdigest() if shared else ""


def _claim(
    found: Description | None,
    rank: int,
    world_size: int,
    timeout_s: float,
    name: str,
    agreed: bool,
    settings: str = "",
) -> Claim:
    return Claim(
        rank=rank,
        world_size=world_size,
        participants=found.grid.ranks if found is not None else (),
        corners=found.grid.corners if found is not None else (),
        digest=found.digest if found is not None else "",
        values=found.literals.values if found is not None else (),
        kinds=found.literals.kinds if found is not None else "",
        roles=found.literals.roles if found is not None else (),
        places=found.literals.places if found is not None else (),
        graph=_torch.aot_graph_name(),
        phase=name,
        lines=packed_lines(found.lines) if found is not None else "",
        timeout_s=timeout_s,
        agreed=agreed,
        settings=settings,
    )


def _since(began_ns: int) -> int:
    return time.perf_counter_ns() - began_ns
