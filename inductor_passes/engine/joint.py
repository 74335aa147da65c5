"""Rewrites that need forward and backward in one graph, before AOTAutograd separates them.

What forward saves for backward is a result of the forward graph. A rewrite that saves activations in another order of
rows (R9) must change their readers in backward too, and only the joint graph has both. What is done on shares of rows
(R16), or of columns (R18), is saved as shares if backward reads shares.
"""

from __future__ import annotations

import dataclasses
import time

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.engine import agreeing, garbage, identity
from inductor_passes.engine.backup import Backup
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.engine.waiting import Waiting
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.rewrites.pass_ import RewriteCollectives

#: Rewrites that profit from seeing both directions.
ONLY = ("R9", "R16", "R18")
#: What is tried where all of them together are undone: each may have been proven alone. R16 has a second chance in
#: forward and backward.
FEWER = (("R9", "R18"), ("R9", "R16"))
#: Reports for the forward graph.
REPORTS: Waiting[PassReport] = Waiting()


def _given_up(decision: Decision) -> Decision:
    """What is said of a decision when its attempt is over: what was applied here was undone on another rank."""
    if decision.verdict is Verdict.REFUSED:
        return decision
    why = "another rank had no proof of what is done together"
    return dataclasses.replace(decision, verdict=Verdict.REFUSED, reason=Reason.RANKS_DIFFER, detail=why)


@garbage.paused()
def run(graph: torch.fx.Graph, settings: PassConfig) -> None:
    """Rewrite one joint graph; what happened waits in :data:`REPORTS`."""
    view = GraphView(graph)
    if not view.collectives:
        return
    profile = identity.load_profile(settings)
    found = agreeing.reach(view, settings, profile, "joint")
    agreeing.remember(found)
    backup, began = Backup(graph), time.perf_counter_ns()
    said: dict[str, Decision] = {}
    for names in (ONLY, *FEWER):
        passes = [RewriteCollectives("reassociate", names, name="redistribute (joint)")]
        done = run_passes(graph, passes, settings, profile, known=Known("joint", agreed=found.agreed), view=view)
        did = agreeing.confirm(found, graph, done.report.passes, settings, time.perf_counter_ns() - began, str(names))
        if did is not found:
            agreeing.remember(did)
        undone = any(one.rolled_back is not None for one in done.report.passes)
        for one in done.report.passes:
            # What was undone together with others is said of those that are left out now.
            one.decisions += [d for d in said.values() if d.subject not in names]
        if not found.agreed or (did.agreed and not undone):
            REPORTS.put(*done.report.passes)
            return
        said |= {f"{d.subject} {d.node}": _given_up(d) for one in done.report.passes for d in one.decisions}
        # All ranks know by now that one of them has no proof, and go on alike.
        backup.restore()
        view = GraphView(graph)
    if did.agreed:
        REPORTS.put(*done.report.passes)
