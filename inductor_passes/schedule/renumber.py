"""A problem whose program came in another order: the rules that keep close to the input find other orders of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.schedule.problem import INPUT, Kind, Problem
from inductor_passes.schedule.tables import of_any_numbering, tables


def renumbered(problem: Problem, order: Sequence[int]) -> Problem:
    """The same tasks, numbered by a legal ``order``: task ``k`` of the result is ``order[k]`` of ``problem``.

    What is known of any numbering is known of the result.
    """
    number = [0] * len(order)
    for k, i in enumerate(order):
        number[i] = k
    tasks = []
    for i in order:
        task = problem.tasks[i]
        tasks.append(dataclasses.replace(task, start=number[task.start]) if task.kind is Kind.WAIT else task)
    storages = []
    for one in problem.storages:
        producer = one.producer if one.producer == INPUT else number[one.producer]
        readers = tuple(sorted(number[r] for r in one.readers))
        storages.append(dataclasses.replace(one, producer=producer, readers=readers))
    result = dataclasses.replace(
        problem,
        tasks=tuple(tasks),
        preds=tuple(tuple(sorted(number[p] for p in problem.preds[i])) for i in order),
        storages=tuple(storages),
    )
    tables(result).known.update(of_any_numbering(tables(problem)))
    return result
