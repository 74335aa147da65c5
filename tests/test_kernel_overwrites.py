"""Kernels that write over an operand because its other readers come before them: under a tight budget they stay so."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol

import inductor_passes
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.world import fake_world

Results = list[torch.Tensor]


def program(seed: int) -> Callable[[torch.Tensor, torch.Tensor, str], Results]:
    """A product that several operators read, and messages of whole results and of what was reduced."""
    rng = random.Random(seed)
    chosen = [(rng.randrange(8), rng.randrange(1, 5)) for _ in range(rng.randrange(2, 6))]

    def run(x: torch.Tensor, w: torch.Tensor, group: str) -> Results:
        values, results = [x @ w], Results()
        for kind, back in chosen:
            value = values[-min(back, len(values))]
            if kind == 0:
                values.append(value.sin())
            elif kind == 1:
                values.append(value * 2 + 1)
            elif kind == 2:
                results.append(funcol.all_reduce(value.mean(), "sum", group))
            elif kind == 3:
                results.append(funcol.all_reduce(value.cos(), "sum", group))
            elif kind == 4:
                values.append(funcol.all_reduce(value * 3, "sum", group) + 1)
            elif kind == 5:
                values.append(torch.softmax(value, -1))
            elif kind == 6:
                values.append(value @ w)
            else:
                results.append(funcol.all_reduce(value.sum(0), "sum", group) / 2)
        if len(results) < 2:
            results.append(values[-1].sum())
        return results

    return run


# Of seeds 0 to 119 these 13 failed; ten others.
@pytest.mark.parametrize("seed", [*range(10), 12, 22, 33, 43, 58, 70, 84, 85, 90, 103, 109, 110, 113])
def test_no_order_is_undone_for_memory_that_inductors_order_does_not_need(seed: int) -> None:
    """Found: a matmul's result that a message and a mean are made of. The planned order read it in another order, so
    that the message could not be written over it, and ``verify="strict"`` ended the compilation at budget "0".
    """
    torch._dynamo.reset()
    run = program(seed)
    options = inductor_passes.options(memory_budget="0", verify="strict", inductor={"fx_graph_cache": False})
    with fake_world(2) as group, without_kernels(), collect(what_if=False) as reports, torch.no_grad():
        compiled = torch.compile(lambda x, w: run(x, w, group), options=options)
        compiled(torch.ones(256, 64), torch.ones(64, 64))
    for report in reports:
        assert not any(p.findings for p in report.passes)
        for schedule in report.schedules:
            # The budget is relative to the graph's own peak on FX, which can be some bytes more.
            assert schedule.peak_after_bytes <= schedule.peak_before_bytes * 1.01
