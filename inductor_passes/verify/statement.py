"""What a report says about one optimised graph: which properties were proven, which are assumed."""

from __future__ import annotations

import torch.fx

from inductor_passes.verify import graph as rules
from inductor_passes.verify.deadlock import certify
from inductor_passes.verify.events import Action, events
from inductor_passes.verify.facts.view import View


def statement(graph: torch.fx.Graph, *, compared: bool) -> list[str]:
    """``Proven: ...`` and ``Assumed: ...`` about a graph that every rank compiles for itself; O(nodes + edges).

    Args:
        compared: whether the ranks compared their collectives at compile time (``rank_check``).
    """
    view = View(graph)
    found = rules.waits_and_flight(view)
    program = events(view)
    certification = certify([[e for e in program if e.action not in (Action.SEND, Action.RECEIVE)]])
    proven = list(certification.proven)
    assumed = [a for a in certification.assumed if not (compared and "every rank runs this program" in a)]
    if not found:
        proven.insert(0, "every result is waited for, and nothing in flight is written to or read before its wait")
    else:
        assumed.insert(0, f"the program was right as it came ({len(found)} findings, first {found[0].message})")
    if compared:
        proven.append("the order per group is equal on all ranks")
        assumed.append("ranks differ in nothing but what rank_check warned of")
    if len([e for e in program if e.action in (Action.SEND, Action.RECEIVE)]):
        assumed.append("every transfer has its counterpart on the other rank (verify.check_ranks pairs whole programs)")
    return [f"Proven: {'; '.join(proven)}", f"Assumed: {'; '.join(assumed)}"]
