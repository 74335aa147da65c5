"""Plans and compiles a graph again, while its code runs, with another cost profile.

The passes run over the graph as it came to them, without asking the other ranks: these compare afterwards what came of
it (``tuning.swap``). Then Inductor lowers it as it did before.
"""

from __future__ import annotations

import gc
import hashlib
import json
from dataclasses import replace
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import following, gloo, variants
from inductor_passes.engine.compilation import Compilation, new_report
from inductor_passes.engine.kept import Kept, text_of, with_costs
from inductor_passes.engine.kernels import order_kernels
from inductor_passes.engine.ours import is_ours
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.engine.sums import arithmetic
from inductor_passes.engine.written import plan_of
from inductor_passes.ir.view import GraphView
from inductor_passes.replay import order_check
from inductor_passes.report import PassReport
from inductor_passes.rewriting import cpu_calls
from inductor_passes.rewriting.messages import messages
from inductor_passes.tuning import again
from inductor_passes.tuning.again import New, UnfitError

#: In a plan: what was decided, beside what it describes and predicts.
_DECIDED = ("buckets", "kept", "order", "kernels")


def compile_again(kept: Kept, profile: CostProfile) -> New:
    """The second plan of a graph, compiled; without code where it is the plan that runs.

    Raises:
        UnfitError: it cannot be done.
    """
    assert kept.lowering is not None
    if kept.conflict():
        # A graph that torch threw away counts for as long as Python has not collected it.
        gc.collect()
    if why := kept.conflict():
        raise UnfitError(why)
    work = _Again(kept, profile)
    compiled: Any = None
    with again.caught() as loaded, _torch.beside_a_program():
        try:
            compiled = _torch.lower_again(kept.module, kept.lowering, work.plan, work.order, is_ours)
        except Exception:
            # With the program or its process groups any pass may fail.
            work.why = work.why or work.over()
            if work.why:
                raise UnfitError(work.why) from None
            if not work.same:
                raise
    if work.same:
        return New(None, {}, lambda inputs: None, "", {}, kept.plan, lambda used: None, unwritten=_unwritten(kept))
    return work.made(compiled, loaded)


class _StopError(Exception):
    """Ends a compilation that nobody needs."""


class _Again:
    """One compilation.

    Attributes:
        same: the plan is the one that runs.
        why: why the graph cannot be planned again.
    """

    def __init__(self, kept: Kept, profile: CostProfile) -> None:
        self._kept = kept
        self._profile = profile
        self._compilation: Compilation | None = None
        self._outputs: tuple[str, ...] = ()
        self._sent: tuple[str, ...] = ()
        self._buckets: following.Buckets = ()
        self._left_out: tuple[str, ...] = ()
        self.same = False
        self.why = ""

    def _stop(self, why: str) -> None:
        self.why = why
        raise _StopError(why)

    def _look_up(self) -> None:
        """Stop where nobody needs the result any more. Between two looks torch is not left: its state would stay."""
        if over := self.over():
            self._stop(over)

    def over(self) -> str:
        """Why nobody needs the result any more; "" where somebody does."""
        if again.ending.is_set():
            return again.ENDED
        return "" if self._kept.lives() else "its process groups were destroyed"

    def plan(self, graph: torch.fx.Graph) -> None:
        """In place of our graph pass.

        The program runs meanwhile, so Python's garbage collector is left as the program has it.
        """
        kept = self._kept
        self._look_up()
        if text_of(graph) != kept.lines:
            self._stop("traced again it is another graph")
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        output.meta.update(kept.output)
        assert kept.report is not None
        report = new_report(graph, kept.known.phase, kept.settings, self._profile)
        report.graph_index, report.compile_id = kept.report.graph_index, kept.report.compile_id
        view = GraphView(graph)
        # The plan that runs: numbers do not change in the middle of a run.
        known = replace(kept.known, pins=None, sums=tuple(map(tuple, kept.report.plan.get("buckets") or ())))
        # A pass that fails ends it. The code that runs is not touched, so there is nothing to warn of.
        settings = replace(kept.settings, verify="strict")
        done = run_passes(graph, passes_of(settings), settings, self._profile, known=known, report=report)
        if done.narrowed:
            # The program would go on with other numbers than it began with.
            self._stop("with the corrected profile its messages would be narrowed")
        done.again = True
        done.participants = kept.participants
        planned = GraphView(graph)
        if arithmetic(planned, kept.settings.tier) != kept.arithmetic:
            self._stop("with the corrected profile it would add up in another order")
        self._sent = messages(planned)
        self._buckets = following.places(view.collectives, done.buckets)
        self._left_out = done.left_out
        gloo.respell(graph, kept.settings)
        cpu_calls.lower(graph)
        report.plan = plan_of(done, kept.collectives, kept.names)
        self._compilation = done

    def order(self, nodes: list[Any]) -> list[Any]:
        """In place of our hook at the end of scheduling."""
        done, before = self._compilation, self._kept.report
        assert done is not None and before is not None
        self._look_up()
        report = PassReport("replay")
        done.report.passes.append(report)
        planned = order_kernels(nodes, done, report)
        self._outputs = _torch.output_layouts()
        if all(done.report.plan.get(key) == before.plan.get(key) for key in _DECIDED):
            self.same = True
            raise _StopError("the plan is the one that runs")
        self._look_up()
        return planned

    def made(self, compiled: Any, loaded: list[tuple[dict[str, Any], Any]]) -> New:
        """The code, where everything about it is as it has to be."""
        kept, done = self._kept, self._compilation
        assert kept.lowering is not None and kept.variant is not None
        if done is None or len(loaded) != 1:
            raise UnfitError("the generated code cannot be found")
        if self._outputs != kept.lowering.outputs:
            raise UnfitError("what it returns would lie differently in memory")
        report = done.report
        if not report.order_check.startswith(order_check.CONFIRMED):
            raise UnfitError(f"its code is not in the planned order: {report.order_check}")
        module, planned = loaded[0]
        run = module["call"]

        def call(inputs: list[Any], alive: Any = compiled) -> Any:
            return run(inputs)

        variant = replace(kept.variant, sent=self._sent, buckets=self._buckets, left_out=self._left_out)
        # Nodes and kernels are not called the same on all ranks: places, and the plan's digest, are what ranks share.
        content = json.dumps([self._sent, self._buckets, planned.about.digest], default=str)
        digest = hashlib.sha256(content.encode()).hexdigest()

        def use(used: bool) -> None:
            assert kept.about is not None and kept.variant is not None
            variants.use(kept.about, variant if used else kept.variant)

        plan = with_costs(report, self._profile)
        peak = report.schedules[-1].peak_after_bytes if report.schedules else 0
        return New(planned, module, call, digest, plan, kept.plan, use, unwritten=_unwritten(kept), peak_bytes=peak)


def _unwritten(kept: Kept) -> str:
    """Why no plan file can be given to the next run."""
    if not kept.settings.budget.shrinks:
        return ""
    budget = f'memory_budget="{kept.settings.memory_budget}"'
    return f"no plan file: {budget} takes none, because it would not say what is computed again"
