"""Rewrites that need forward and backward in one graph, before AOTAutograd separates them.

What forward saves for backward is a result of the forward graph. A rewrite that saves activations in another order of
rows (R9) must change their readers in backward too, and only the joint graph has both. What is done on shares of rows
(R16), or of columns (R18), is saved as shares if backward reads shares.
"""

from __future__ import annotations

import time

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.engine import agreeing, garbage, identity
from inductor_passes.engine.backup import Backup
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.engine.waiting import Waiting
from inductor_passes.ir.view import GraphView
from inductor_passes.report import PassReport
from inductor_passes.rewrites.pass_ import RewriteCollectives

#: Rewrites that profit from seeing both directions.
ONLY = ("R9", "R16", "R18")
#: Reports for the forward graph.
REPORTS: Waiting[PassReport] = Waiting()


@garbage.paused()
def run(graph: torch.fx.Graph, settings: PassConfig) -> None:
    """Rewrite one joint graph; what happened waits in :data:`REPORTS`."""
    view = GraphView(graph)
    if not view.collectives:
        return
    passes = [RewriteCollectives("reassociate", ONLY, name="redistribute (joint)")]
    profile = identity.load_profile(settings)
    found = agreeing.reach(view, settings, profile, "joint")
    agreeing.remember(found)
    backup, began = Backup(graph), time.perf_counter_ns()
    done = run_passes(graph, passes, settings, profile, known=Known("joint", agreed=found.agreed), view=view)
    did = agreeing.confirm(found, graph, done.report.passes, settings, time.perf_counter_ns() - began)
    if did is not found:
        agreeing.remember(did)
    if found.agreed and not did.agreed:
        backup.restore()
    else:
        REPORTS.put(*done.report.passes)
