"""Everything that an author of a pass needs, under public names; ``docs/own_pass.md`` teaches it.

A pass gets :class:`Facts` and returns an :class:`Outcome`; :func:`run_passes` runs it on a graph, verified.
"""

from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.compilation import Compilation, Known
from inductor_passes.engine.complain import VerificationError
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.problems.fx import FxProblem, NoHintError, build
from inductor_passes.report import Decision, Finding, GraphReport, PassReport, Reason, Verdict
from inductor_passes.rewriting.arrange import arrange
from inductor_passes.rewriting.contract import Facts, InParts, Outcome, Pass
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.schedule.bounds import lower_bound
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import Timeline, simulate
from inductor_passes.verify.certificate import Certificate, Claim

__all__ = [
    "Certificate",
    "Claim",
    "Collective",
    "Compilation",
    "CostProfile",
    "Decision",
    "Emitter",
    "Facts",
    "Finding",
    "FxProblem",
    "GraphReport",
    "GraphView",
    "InParts",
    "Known",
    "NoHintError",
    "Outcome",
    "Pass",
    "PassConfig",
    "PassReport",
    "Plan",
    "Problem",
    "Reason",
    "Role",
    "Timeline",
    "Verdict",
    "VerificationError",
    "arrange",
    "build",
    "lower_bound",
    "passes_of",
    "plan",
    "run_passes",
    "simulate",
]
