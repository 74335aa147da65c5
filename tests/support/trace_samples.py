"""Planned graphs as the pipeline hands them to the trace, and programs that write them under TORCH_TRACE."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from inductor_passes.config import PassConfig
from inductor_passes.report import Decision, GraphReport, PassReport, Reason, ScheduleReport, Verdict
from inductor_passes.schedule.plan import Plan, plan
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.trace.verdict import explain
from tests.support.scripts import Ended, run_script


def fsdp_problem(
    layers: int,
    *,
    gather_us: int = 100,
    compute_us: int = 80,
    gathered_bytes: int = 1000,
    name: str = "forward_0",
    tasks_per_layer: int = 1,
) -> Problem:
    """Gather, wait and compute, layer by layer: the input order hides nothing."""
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []
    storages: list[Storage] = []

    def add(task: Task, *needs: int) -> int:
        tasks.append(task)
        preds.append(tuple(sorted(needs)))
        return len(tasks) - 1

    last: tuple[int, ...] = ()
    for k in range(layers):
        source = f"m.py:{k + 1}"
        start = add(Task(f"ag{k}", Kind.START, gather_us * 1000, 0, -1, 1000, gathered_bytes, f"AG{k}", source))
        wait = add(Task(f"w{k}", Kind.WAIT, 0, 0, start, 500, 0, f"W{k}"), start)
        first = len(tasks)
        for part in range(tasks_per_layer):
            needs = (wait, *last) if part == 0 else last
            last = (add(Task(f"mm{k}_{part}", Kind.COMPUTE, compute_us * 1000 // tasks_per_layer, label="mm"), *needs),)
        storages.append(Storage(gathered_bytes, start, (wait, first), name=f"full{k}"))
        storages.append(Storage(gathered_bytes // 10, last[0], (), pinned=True, name=f"saved{k}"))
    return Problem(
        tuple(tasks), tuple(preds), (Lane("dp"),), tuple(storages), base_bytes=5 * gathered_bytes, name=name
    )


def planned(
    problem: Problem, *, phase: str = "forward", budget: str = "+25%", rank: int = 0, world_size: int = 1
) -> tuple[GraphReport, Plan]:
    """The report that a pipeline would write after planning ``problem``."""
    config = PassConfig(memory_budget=budget)
    before = simulate(problem)
    limit = config.budget.limit_bytes(before.peak_bytes)
    answer = plan(problem, limit)
    after = simulate(problem, answer.order)
    schedule = ScheduleReport(
        level="scheduler",
        tasks=len(problem),
        makespan_before_ns=before.makespan_ns,
        makespan_after_ns=after.makespan_ns,
        compute_ns=after.compute_ns,
        communication_ns=after.communication_ns,
        lower_bound_ns=answer.lower_bound_ns,
        gap=answer.gap,
        bound_on=answer.bound_on,
        exposed_before_ns=before.total_exposed_ns,
        exposed_after_ns=after.total_exposed_ns,
        peak_before_bytes=before.peak_bytes,
        peak_after_bytes=after.peak_bytes,
        budget_bytes=limit,
        digest=problem.digest(answer.order),
        schedule_before=problem.schedule_text(),
        schedule_after=problem.schedule_text(answer.order),
        method=answer.method,
        contention_before_ns=before.contention_ns,
        contention_after_ns=after.contention_ns,
    )
    kept = PassReport("reorder", True, duration_ns=2_000_000)
    kept.decisions.append(Decision("reorder", "ag1", Verdict.APPLIED, Reason.PROFITABLE, source="m.py:2", group="dp"))
    refused = PassReport("bucket", rolled_back=Reason.SLOWER, detail="3 us slower", duration_ns=1_000_000)
    refused.decisions.append(
        Decision("bucket", "ag2", Verdict.REFUSED, Reason.MIXED_DTYPE, "bf16 and fp32", setting='bucket="bytes"')
    )
    groups = {lane.name: tuple(range(world_size)) for lane in problem.lanes}
    report = GraphReport(
        phase=phase,
        graph_index=0,
        rank=rank,
        world_size=world_size,
        torch_version="test",
        config=config.to_json(),
        nodes=len(problem),
        passes=[kept, refused],
        schedules=[schedule],
        collectives=explain(problem, answer.order, before, after, limit, ranks=groups),
        order_check="wrapper equals plan",
        digest=schedule.digest,
        cost_profile="datasheet defaults",
    )
    return report, answer


def moved(report: GraphReport, *, digest: str) -> GraphReport:
    """The same report with another plan digest, as on a rank that planned differently."""
    return dataclasses.replace(report, digest=digest)


#: Compiles one small function for training; a post-grad pass emits a planned graph for forward and for backward.
PROGRAM = """
import sys
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from tests.support.trace_samples import fsdp_problem, planned
from inductor_passes._torch import compile_id
from inductor_passes.schedule.problem import Kind
from inductor_passes.trace.artifacts import emit, emit_failure
from inductor_passes.trace.spans import span

torch.compiler.config.force_disable_caches = True
rank, world, layers = (int(x) for x in sys.argv[1:4])
if world > 1:
    from contextlib import ExitStack
    from tests.support.world import fake_world
    for_good = ExitStack()
    for_good.enter_context(fake_world(world, rank))


class Emit(CustomGraphPass):
    def __call__(self, graph):
        backward = any(n.name.startswith("tangents") for n in graph.nodes)
        phase = "backward" if backward else "forward"
        problem = fsdp_problem(layers + backward, name=phase + "_0")
        with span("plan", tasks=len(problem)) as attach:
            report, answer = planned(problem, phase=phase, rank=rank, world_size=world)
            attach(gap=report.schedule.gap)
        report.compile_id = compile_id()
        emit(report, problem=problem, order_before=problem.input_order, order_after=answer.order,
             graph_before=str(graph), graph_after=str(graph))
        emit_failure(report, report.passes[1], lambda: str(graph))

    def uuid(self):
        return None


# Matmuls only: they call the library, so nothing has to go through the C++ compiler.
fn = torch.compile(lambda x, w: x @ w, options={"post_grad_custom_post_pass": Emit()})
x = torch.ones(4, 4, requires_grad=True)
fn(x, torch.ones(4, 4, requires_grad=True)).backward(torch.ones(4, 4))
print("done")
"""


def run_traced(directory: Path, *, rank: int = 0, world_size: int = 1, layers: int = 4, **variables: str) -> Ended:
    """Run :data:`PROGRAM` with ``directory`` as TORCH_TRACE."""
    return run_script(PROGRAM, rank, world_size, layers, TORCH_TRACE=str(directory), **variables)
