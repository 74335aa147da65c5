"""Lower captured graphs through Inductor up to the generated code, with a scheduling hook of the test's choice.

Code generation is what the tests look at; compiling the C++ would cost seconds per order, so the lowering is stopped
by an exception once the wrapper has been written.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner

from inductor_passes import _torch
from inductor_passes.engine.options import SIMPLE_OVERLAP, has_simple_overlap
from inductor_passes.schedule.problem import Problem

Statements = list[tuple[str, tuple[str, ...]]]


class Generated(Exception):
    """The wrapper is written; carries what it executes."""

    def __init__(self, statements: Statements) -> None:
        super().__init__("generated")
        self.statements = statements


def lower(gm: torch.fx.GraphModule, hook: Callable[[list[Any]], list[Any]]) -> Statements:
    """The statements of the wrapper that Inductor generates for ``gm`` when ``hook`` decides the order."""
    gm = copy.deepcopy(gm)
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    fake_mode = detect_fake_mode(values)

    def last_hook(nodes: list[Any]) -> list[Any]:
        def stop(statements: Iterator[tuple[str, tuple[str, ...]]]) -> str:
            raise Generated(list(statements))

        order = hook(nodes)
        assert _torch.when_generated(stop)
        return order

    options: dict[str, Any] = {
        "fx_graph_cache": False,
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [last_hook],
    }
    if has_simple_overlap():
        options[SIMPLE_OVERLAP] = False
    with tracing(TracingContext(fake_mode)), torch._inductor.config.patch(options):
        try:
            compile_fx_inner(gm, values)
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, Generated):
                found = found.__cause__ or getattr(found, "inner_exception", None)
            if found is None:
                raise
            return found.statements
    raise AssertionError("Inductor generated no wrapper")


def random_order(problem: Problem, rng: random.Random) -> list[int]:
    """A uniformly drawn next task at every step: a random legal order."""
    edges = problem.edges()
    successors: list[list[int]] = [[] for _ in edges]
    missing = [len(p) for p in edges]
    for i, preds in enumerate(edges):
        for p in preds:
            successors[p].append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(i)
        for s in successors[i]:
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
    return order


def illegal_order(problem: Problem, rng: random.Random) -> list[int]:
    """The input order with one task moved in front of one of its predecessors."""
    candidates: Sequence[tuple[int, int]] = [(i, p) for i, preds in enumerate(problem.edges()) for p in preds]
    task, before = rng.choice(candidates)
    order = [i for i in range(len(problem)) if i != task]
    order.insert(order.index(before), task)
    return order
