"""Random distributed programs through the passes: same bits on all ranks, nothing that the verifier objects to.

    tools/fuzz --programs 1000 --seed 0 --ranks 4
    tools/fuzz --programs 20000 --seed 0 --jobs 2

Program number i of a seed is the same whenever and wherever it runs; with several jobs, job j takes every program whose
number is j modulo their number. A failure is shrunk and printed as a test. An interrupt ends the run with its counts.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import multiprocessing
import random
import time
from dataclasses import dataclass, replace

import torch
import typer

from tools.fuzzing import cases, judging, training

CAUTIOUS = "passes undone because Inductor might then have worked in place"
NAMES = (
    *("programs", "programs that a pass changed", "passes that changed one", CAUTIOUS),
    *("training steps", "training steps that compute something again", "failures"),
)
#: Every so many programs one is a training step within a budget below its peak: they take ten times as long.
TRAINING = 40


@dataclass(frozen=True)
class _Job:
    """What one process runs."""

    numbers: range
    seed: int
    ranks: int
    async_tp: bool
    failures: int


def _run(job: _Job) -> collections.Counter[str]:
    """Run the programs of a job, printing what fails."""
    logging.getLogger("inductor_passes").setLevel(logging.ERROR)
    # Tensors are tiny, and jobs share the cores.
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    with cases.world(job.ranks) as groups, contextlib.suppress(KeyboardInterrupt):
        for number in job.numbers:
            if number % TRAINING == TRAINING - 1:
                _train(job, number, groups, counts)
                continue
            case = cases.random_case(random.Random(f"{job.seed}/{number}"), job.ranks)
            if not job.async_tp:
                case = replace(case, async_tp=False)
            cautious: list[str] = []
            said, changed = _judged(case, groups, cautious)
            counts[CAUTIOUS] += len(cautious)
            counts["programs"] += 1
            counts["programs that a pass changed"] += changed > 0
            counts["passes that changed one"] += changed
            if said:
                counts["failures"] += 1
                smaller = judging.shrink(case, groups)
                why = _judged(smaller, groups, [])[0] or said
                typer.echo(judging.as_test(smaller, groups, why, f"seed_{job.seed}_program_{number}"))
            if counts["programs"] % 1000 == 0:
                typer.echo(f"# {counts['programs']} programs, {counts['failures']} failures")
            judging.quiet()
            if counts["failures"] >= job.failures:
                break
    return counts


def _train(job: _Job, number: int, groups: tuple[str, ...], counts: collections.Counter[str]) -> None:
    """One training step."""
    case = training.random_training(random.Random(f"{job.seed}/{number}"), job.ranks)
    said, again = training.judge_training(case, groups)
    counts["training steps"] += 1
    counts["training steps that compute something again"] += again > 0
    if said:
        counts["failures"] += 1
        smaller = training.shrink_training(case, groups)
        why = training.judge_training(smaller, groups)[0] or said
        typer.echo(training.training_as_test(smaller, why, f"seed_{job.seed}_program_{number}"))
    judging.quiet()


def _judged(case: cases.Case, groups: tuple[str, ...], cautious: list[str]) -> tuple[str, int]:
    """One program; an exception while it is built or run is a failure too, and the others still run."""
    try:
        return judging.judge(case, groups, cautious)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0


def run(
    programs: int = typer.Option(1000, help="How many programs."),
    seed: int = typer.Option(0, help="Program i depends on the seed and i only."),
    ranks: int = typer.Option(4, help="Size of the world: 4 or 8."),
    first: int = typer.Option(0, help="Number of the first program."),
    async_tp: bool = typer.Option(True, help="Whether async TP is among the passes."),
    failures: int = typer.Option(5, help="Stop a job after so many failures."),
    jobs: int = typer.Option(1, help="How many processes share the programs."),
) -> None:
    """Run programs; exits with 1 when one failed."""
    if ranks not in (4, 8):
        raise typer.BadParameter(f"--ranks {ranks}: expected 4 or 8")
    if programs < 1 or first < 0 or failures < 1 or jobs < 1:
        raise typer.BadParameter("--programs, --failures and --jobs are at least 1, --first is at least 0")
    began = time.monotonic()
    shares = [_Job(range(first + j, first + programs, jobs), seed, ranks, async_tp, failures) for j in range(jobs)]
    if jobs == 1:
        found = [_run(shares[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            found = pool.map(_run, shares, chunksize=1)
    counts = sum(found, collections.Counter())
    for name in NAMES:
        typer.echo(f"{counts[name]:8d} {name}")
    typer.echo(f"{time.monotonic() - began:8.0f} seconds")
    raise typer.Exit(int(counts["failures"] > 0))


if __name__ == "__main__":
    typer.run(run)
