"""Random training steps within budgets below their peak: the same bits, and what is said about memory is so.

A step is a differentiable function of sharded weights and of activations. Its joint graph is separated twice, as
Inductor would and within the budget; forward and backward of both run on all ranks, through the passes or as they come.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx
from functorch.compile import aot_function
from torch.distributed import _functional_collectives as funcol

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.engine.shrinking import Shrinking, Shrunk, copied
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.report import Reason, Verdict
from inductor_passes.rewriting.step_facts import StepFacts
from inductor_passes.schedule.memory import peak_bytes
from tools.fuzzing.running import differs, execute_ranks

Split = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
BUDGETS = ("-5%", "-15%", "-30%", "-50%", "-80%", "=4KiB", "=16KiB", "=1GiB")
#: Steps of the function: what is done to one or two of the values so far.
STEPS = (
    *("linear", "linear", "linear", "gate", "add", "norm", "softmax", "gelu", "relu", "tanh", "dropout"),
    *("rows_gathered", "rows_scattered", "exchanged", "view"),
)
WIDTH = 16


@dataclass(frozen=True)
class TrainingCase:
    """A step and how it is compiled.

    Attributes:
        steps: names and two numbers each, which count modulo what there is.
        budget: ``memory_budget``.
        passes: whether forward and backward go through the passes too.
        codegen: whether the budget is about what every value takes, or what generated code is expected to take.
    """

    steps: tuple[tuple[str, int, int], ...]
    budget: str
    passes: bool = True
    ranks: int = 4
    codegen: Literal["inductor", "aot_eager"] = "inductor"


def random_training(rng: random.Random, ranks: int = 4) -> TrainingCase:
    """A case; every choice from ``rng``."""
    names = rng.choices(STEPS, k=rng.randint(3, 14))
    steps = tuple((name, rng.randrange(64), rng.randrange(64)) for name in names)
    budget, passes = rng.choice(BUDGETS), rng.random() < 0.7
    return TrainingCase(steps, budget, passes, ranks, rng.choice(("inductor", "aot_eager")))


def function(case: TrainingCase, groups: Sequence[str]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The step and example arguments: an activation, then a shard of a weight per linear layer."""
    shards = sum(name == "linear" for name, _, _ in case.steps)
    rows = 2 * case.ranks * case.ranks
    arguments = [torch.zeros(rows, WIDTH, requires_grad=True)]
    arguments += [torch.zeros(WIDTH // case.ranks, WIDTH, requires_grad=True) for _ in range(shards)]
    everybody = groups[0]

    def step(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        values, left = [x], list(weights)
        for name, a, b in case.steps:
            y = values[-1 - a % len(values)]
            if name == "linear":
                whole = _gather(left.pop(), everybody)
                values.append(y @ whole)
            elif name in ("rows_gathered", "rows_scattered", "exchanged"):
                values.append(_communicated(name, y, groups[b % 3], rows))
            else:
                values.append(_local(name, y, _like(values, y, b)))
        total = values[-1].sum()
        return total + sum(v.mean() for v in values[:-1])

    return step, arguments


def _like(values: Sequence[torch.Tensor], y: torch.Tensor, index: int) -> torch.Tensor:
    found = [v for v in values if v.shape == y.shape]
    return found[index % len(found)]


def _local(name: str, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if name == "gate":
        return y * torch.sigmoid(other)
    if name == "add":
        return y + other
    if name == "norm":
        return torch.nn.functional.layer_norm(y, (WIDTH,))
    if name == "softmax":
        return torch.softmax(y, -1)
    if name == "dropout":
        return torch.nn.functional.dropout(y, 0.5)
    if name == "view":
        return y.view(-1, 2, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    return {"gelu": torch.nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh}[name](y)


def _communicated(name: str, y: torch.Tensor, group: str, rows: int) -> torch.Tensor:
    size = torch.distributed.get_world_size(torch.distributed.distributed_c10d._resolve_process_group(group))
    if name == "rows_gathered":
        return y if y.shape[0] * size > 2 * rows else _gather(y, group)
    if name == "rows_scattered":
        return y if y.shape[0] % (2 * size) else _scatter(y, group)
    split = [y.shape[0] // size] * size
    return y if y.shape[0] % size else funcol.all_to_all_single_autograd(y, split, split, group)


def _gather(y: torch.Tensor, group: str) -> torch.Tensor:
    newer = getattr(funcol, "all_gather_single_autograd", None)
    return (newer or funcol.all_gather_tensor_autograd)(y, 0, group)  # type: ignore[no-any-return]


def _scatter(y: torch.Tensor, group: str) -> torch.Tensor:
    newer = getattr(funcol, "reduce_scatter_single_autograd", None)
    return (newer or funcol.reduce_scatter_tensor_autograd)(y, "sum", 0, group)  # type: ignore[no-any-return]


class _JointError(Exception):
    """The joint graph is there, and nothing else is wanted."""


@dataclass(frozen=True)
class Joint:
    """A joint graph and how torch separates it."""

    gm: torch.fx.GraphModule
    outputs: int
    split: Callable[[torch.fx.GraphModule], Split]


def joint(case: TrainingCase, groups: Sequence[str]) -> Joint:
    """The joint graph of a step."""
    made: list[Joint] = []

    def partition(gm: torch.fx.GraphModule, inputs: Sequence[object], **kwargs: Any) -> Split:
        def split(another: torch.fx.GraphModule) -> Split:
            both: Split = _torch.default_partitioner()(another, inputs, **kwargs)
            return both

        made.append(Joint(gm, kwargs["num_fwd_outputs"], split))
        raise _JointError

    step, arguments = function(case, groups)
    with contextlib.suppress(_JointError):
        aot_function(step, lambda gm, _: gm, partition_fn=partition)(*arguments)
    (found,) = made
    return found


def judge_training(case: TrainingCase, groups: Sequence[str]) -> tuple[str, int]:
    """(what is wrong, "" when nothing is; how many operators run again). An exception is wrong."""
    try:
        return _judged(case, groups)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0


def _judged(case: TrainingCase, groups: Sequence[str]) -> tuple[str, int]:
    step = joint(case, groups)
    settings = PassConfig(
        memory_budget=case.budget, rank_agreement="trust", verify="strict", codegen=case.codegen
    )
    profile = CostProfile.default("cpu")
    base, other = step.split(copied(step.gm)), step.split(copied(step.gm))
    done = Shrinking(step.gm, step.split, step.outputs, settings, profile).run(other)
    again = 0 if done.recompute is None else sum(d.verdict is Verdict.APPLIED for d in done.recompute.decisions)
    if said := _wrong_memory(base, done, settings, profile):
        return said, again
    if case.passes and (said := _through_passes(done, settings, profile)):
        return said, again
    expected = _run(base, step.outputs, case.ranks)
    for timing in ("prompt", "late"):
        found = _run(done.both, step.outputs, case.ranks, timing)
        for rank, (was, now) in enumerate(zip(expected, found)):
            if said := differs(was, now):
                return f"other results within {case.budget} ({timing}): rank {rank}, {said[:300]}", again
    return "", again


def shrink_training(case: TrainingCase, groups: Sequence[str]) -> TrainingCase:
    """A step that fails too: its parts are left out one by one, as long as it does."""
    place = 0
    while place < len(case.steps):
        smaller = replace(case, steps=case.steps[:place] + case.steps[place + 1 :])
        if judge_training(smaller, groups)[0]:
            case = smaller
        else:
            place += 1
    return case


def training_as_test(case: TrainingCase, said: str, name: str) -> str:
    """A failure as the source of a test."""
    return (
        f"def test_{name}() -> None:\n    # {said[:300]!r}\n"
        f"    case = training.{case!r}\n"
        f"    with cases.world({case.ranks}) as groups:\n"
        f'        assert training.judge_training(case, groups)[0] == ""\n'
    )


def _peaks(both: Split, profile: CostProfile, codegen: str) -> list[int]:
    problems = [build(GraphView(gm.graph), profile) for gm in both]
    generated = [one.generated for one in problems]
    if codegen == "inductor" and None not in generated:
        return [peak_bytes(one) for one in generated if one is not None]
    return [peak_bytes(one.problem) for one in problems]


def _wrong_memory(base: Split, done: Shrunk, settings: PassConfig, profile: CostProfile) -> str:
    """What is said about memory and is not so."""
    if done.recompute is None:
        return ""
    if done.recompute.rolled_back in (Reason.EXCEPTION, Reason.VERIFIER):
        return f"{done.recompute.rolled_back.value}: {done.recompute.detail}"
    whole = max(_peaks(base, profile, settings.codegen))
    if done.step_peak_bytes != whole:
        return f"the step's peak is said to be {done.step_peak_bytes} bytes and is {whole}"
    limit = settings.budget.limit_bytes(whole)
    assert limit is not None
    least = min((peak for peak, _ in done.curve), default=whole)
    if least <= limit < whole and not done.recompute.decisions:
        return f"{least} bytes are possible, {limit} allowed, and nothing was decided"
    return ""


def _through_passes(done: Shrunk, settings: PassConfig, profile: CostProfile) -> str:
    """Forward and backward as they are compiled: within their caps, and nothing is undone by the verifier."""
    peaks, plain = _peaks(done.both, profile, settings.codegen), _peaks(done.both, profile, "aot_eager")
    for gm, peak, came, phase, proposed in zip(done.both, peaks, plain, ("forward", "backward"), done.proposed):
        facts = StepFacts(
            *(peak, done.step_peak_bytes or max(peaks), done.keep, done.recompute, done.notes, done.curve),
            *(proposed, done.reached_bytes),
        )
        known = Known(phase, step=facts)
        found = run_passes(gm.graph, passes_of(settings), settings, profile, known=known)
        gm.recompile()
        for one in found.report.passes:
            if one.rolled_back in (Reason.EXCEPTION, Reason.VERIFIER):
                return f"pass {one.name} was undone: {one.detail}"
        left, limit = peak_bytes(build(GraphView(gm.graph), profile).problem), found.cap.limit_bytes
        if limit is not None and left > max(limit, 0 if found.scheduled is not None else came):
            return f"{phase} has a peak of {left} bytes, the cap is {limit}"
    return ""


def _run(both: Split, outputs: int, ranks: int, timing: Any = "prompt") -> list[list[torch.Tensor]]:
    """Results of forward and gradients, per rank."""
    forward, backward = both
    generator = torch.Generator().manual_seed(0)

    def drawn(gm: torch.fx.GraphModule, names: Iterator[torch.fx.Node]) -> list[list[torch.Tensor]]:
        return [[_number(n.meta["val"], generator) for _ in range(ranks)] for n in names]

    first = execute_ranks([forward] * ranks, drawn(forward, iter(forward.graph.find_nodes(op="placeholder"))), timing)
    count = len(list(forward.graph.output_node().args[0]))  # type: ignore[arg-type]
    saved = [one[outputs:count] for one in first]
    places = backward.graph.find_nodes(op="placeholder")
    tangents = drawn(backward, iter(places[len(saved[0]) :]))
    given = [[one[k] for one in saved] for k in range(len(saved[0]))] + tangents
    second = execute_ranks([backward] * ranks, given, timing)
    wanted = len(list(backward.graph.output_node().args[0]))  # type: ignore[arg-type]
    return [[*a[:outputs], *b[:wanted]] for a, b in zip(first, second)]


def _number(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(fake.shape, generator=generator).to(fake.dtype)
