"""The driver: work in proportion to the graph, best first, to a fixpoint, the memory budget kept."""

from __future__ import annotations

import pytest
import torch

from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir import view as ir_view
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.rewrites.applications import Applications
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewrites.work import Work
from inductor_passes.rewriting.contract import Outcome
from tests.support.redistribute_programs import Program, facts_for, run_pass, text, world


def many_pairs(groups, pairs, filler):
    """``pairs`` nested reductions, each followed by ``filler`` pointwise nodes."""
    program = Program((4, 2))
    node = program.inputs[0]
    for _ in range(pairs):
        node = program.collective("all_reduce", node, "max", groups[(0,)])
        node = program.collective("all_reduce", node, "max", groups[(1,)])
        for _ in range(filler):
            node = program.call(torch.ops.aten.relu.default, node)
    return program.output(node)


def test_work_is_linear_in_the_graph(monkeypatch):
    built = []
    original = ir_view.GraphView.__init__
    monkeypatch.setattr(ir_view.GraphView, "__init__", lambda self, graph: (built.append(1), original(self, graph))[1])
    visits = {}
    with world() as groups:
        for pairs in (60, 600):
            graph = many_pairs(groups, pairs, 12)
            nodes = len(graph.nodes)
            facts = facts_for(graph)
            built.clear()
            report = RewriteCollectives().run(graph, facts).report
            assert report.metrics["applied"] == pairs
            # One look at the graph as it goes, for the report and for whoever comes next; none per application.
            assert len(built) == 1
            visits[nodes] = report.metrics["visits"]
    (small, few), (large, many) = sorted(visits.items())
    assert large > 9_000
    assert many <= 8 * large
    assert many / few <= 1.05 * large / small


def test_one_view_serves_all_passes_until_one_changes_the_graph():
    seen = []

    class Looks:
        name, group_order = "looks", "kept"

        def __init__(self, changes):
            self.changes = changes

        def run(self, graph, facts):
            seen.append(facts.view)
            report = PassReport("looks")
            if self.changes == "raises":
                raise RuntimeError("no")
            if self.changes:
                node = next(n for n in graph.nodes if n.target is torch.ops.aten.relu.default)
                with graph.inserting_before(node):
                    new = graph.call_function(torch.ops.aten.view.default, (node.args[0], [4, 2]))
                new.meta["val"] = node.args[0].meta["val"]
                node.args = (new,)
                report.changed = True
            return Outcome(report)

    with world() as groups:
        graph = many_pairs(groups, 1, 2)
        run_passes(graph, [Looks(False), Looks(False), Looks("raises"), Looks(True), Looks(False)])
    a, b, c, d, e = seen
    assert a is b is c
    # One that failed was undone, one that changed something was kept: both times the graph is another.
    assert c is not d and d is not e


def test_what_saves_most_is_applied_first():
    with world() as groups:
        program = Program((4, 2), (1024, 64))
        for x in program.inputs:
            inner = program.collective("all_reduce", x, "max", groups[(0,)])
            program.results.append(program.collective("all_reduce", inner, "max", groups[(1,)]))
        graph = program.output(*program.results)
        report = run_pass(RewriteCollectives(), graph).report.passes[0]
    gains = [d.gain_ns for d in report.decisions if d.verdict is Verdict.APPLIED]
    assert len(gains) == 2 and gains == sorted(gains, reverse=True) and gains[0] > gains[1]


def test_rewrites_enable_each_other():
    """A sum of nested reductions: R5 makes one of two, R2 merges its levels; nothing is left to do."""
    with world() as groups:
        program = Program((8, 6), (8, 6))
        sides = []
        for x in program.inputs:
            inner = program.collective("all_reduce", x, "sum", groups[(0,)])
            sides.append(program.collective("all_reduce", inner, "sum", groups[(1,)]))
        graph = program.output(program.call(torch.ops.aten.add.Tensor, *sides))
        report = run_pass(RewriteCollectives("reassociate"), graph).report.passes[0]
        assert text(graph) == "add all_reduce[8]"
        again = run_pass(RewriteCollectives("reassociate"), graph).report.passes[0]
    assert report.changed and not again.changed and {d.subject for d in report.decisions} == {"R2", "R5"}


@pytest.mark.parametrize("budget, shared", [("unlimited", True), ("0", False)])
def test_the_memory_budget_decides_about_longer_lives(budget, shared):
    with world() as groups:
        program = Program((64, 64))
        whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        first = program.call(torch.ops.aten.sum.default, whole)
        # Between the two uses the peak is higher when the first gather is still alive.
        big = program.collective("all_gather_into_tensor", program.inputs[0], 8, groups[(0, 1)])
        second = program.call(torch.ops.aten.sum.default, big)
        # No other order avoids that: the last use follows from what comes between.
        program.call(torch.ops.aten.add_.Tensor, first, second)
        whole = program.collective("all_gather_into_tensor", program.inputs[0], 4, groups[(1,)])
        third = program.call(torch.ops.aten.mul.Tensor, program.call(torch.ops.aten.sum.default, whole), second)
        graph = program.output(first, second, third)
        report = run_pass(RewriteCollectives(), graph, memory_budget=budget).report.passes[0]
    assert report.changed is shared and report.rolled_back is None
    if not shared:
        assert [d.reason for d in report.decisions if d.subject == "R14"] == [Reason.MEMORY_BUDGET]


def test_off_decides_but_changes_nothing():
    with world() as groups:
        graph = many_pairs(groups, 2, 1)
        report = run_pass(RewriteCollectives("off"), graph).report.passes[0]
    assert not report.changed and {d.reason for d in report.decisions} == {Reason.DISABLED}


def test_a_write_between_keeps_the_pair():
    with world() as groups:
        program = Program((16, 3))
        (x,) = program.inputs
        copy = program.call(torch.ops.aten.clone.default, x)
        inner = program.collective("all_gather_into_tensor", copy, 4, groups[(1,)])
        program.call(torch.ops.aten.add_.Tensor, copy, 1)
        outer = program.collective("all_gather_into_tensor", inner, 2, groups[(0,)])
        graph = program.output(outer, copy)
        report = run_pass(RewriteCollectives(only=("R1",)), graph).report.passes[0]
    assert [d.reason for d in report.decisions] == [Reason.DATA_DEPENDENCY] and not report.changed


def test_maps_follow_the_graph():
    """After an application the maps equal those of a fresh look."""
    with world() as groups:
        graph = many_pairs(groups, 3, 1)
        work = Work(graph, facts_for(graph), "exact")
        rewrite = RewriteCollectives().rewrites[[r.name for r in RewriteCollectives().rewrites].index("R2")]
        for root in list(rewrite.roots(work)):
            match = rewrite.match(work, root) if work.alive(root) else None
            if match is not None:
                match.apply()
        fresh = ir_view.GraphView(graph)
        assert {s: (c.inputs, c.waits) for s, c in work._by_start.items()} == {
            s: (c.inputs, c.waits) for s, c in fresh.by_start.items()
        }
        assert set(work._of_wait) == set(fresh.collectives_of_wait)


def test_certificates_of_rewritten_rewrites_are_one_step():
    """a becomes b, b becomes c, c turns out to be d, which exists: readers of a may read d."""
    steps = Applications()
    steps.add("R1", ["a"], ["b"], [("a", "b")])
    steps.add("R2", ["x"], ["y"], [("x", "y")])
    steps.add("R4", ["b"], ["c"], [("b", "c")])
    steps.add("R14", ["c"], [], [("c", "d")])
    first, second = sorted(steps.certificates(), key=lambda c: c.removed)
    assert first.rewrite == "R1+R14+R4" and first.removed == ("a",) and first.added == ()
    assert ("a", "d") in first.replaced
    assert (second.removed, second.added) == (("x",), ("y",))
    # d goes in turn: what was a, c and d is e.
    steps.add("R3", ["d"], ["e"], [("d", "e")])
    joined = next(c for c in steps.certificates() if "a" in c.removed)
    assert set(joined.removed) >= {"a", "d"} and joined.added == ("e",)
