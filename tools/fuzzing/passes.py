"""Random distributed programs through the passes: same bits on all ranks, nothing that the verifier objects to.

    tools/fuzz --programs 1000 --seed 0 --ranks 4
    tools/fuzz --programs 1000 --seed 0 --no-async-tp

Program number i of a seed is the same whenever and wherever it runs. A failure is shrunk and printed as a test. An
interrupt ends the run with its counts.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import time
from dataclasses import replace

import typer

from tools.fuzzing import programs as fuzz_programs

CAUTIOUS = "passes undone because Inductor might then have worked in place"


def run(
    programs: int = typer.Option(1000, help="How many programs."),
    seed: int = typer.Option(0, help="Program i depends on the seed and i only."),
    ranks: int = typer.Option(4, help="Size of the world: 4 or 8."),
    first: int = typer.Option(0, help="Number of the first program."),
    async_tp: bool = typer.Option(True, help="Whether async TP is among the passes."),
    failures: int = typer.Option(5, help="Stop after so many failures."),
) -> None:
    """Run programs; exits with 1 when one failed."""
    if ranks not in (4, 8):
        raise typer.BadParameter(f"--ranks {ranks}: expected 4 or 8")
    if programs < 1 or first < 0 or failures < 1:
        raise typer.BadParameter("--programs and --failures are at least 1, --first is at least 0")
    logging.getLogger("inductor_passes").setLevel(logging.ERROR)
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    with fuzz_programs.world(ranks) as groups, contextlib.suppress(KeyboardInterrupt):
        for number in range(first, first + programs):
            case = fuzz_programs.random_case(random.Random(f"{seed}/{number}"), ranks)
            if not async_tp:
                case = replace(case, async_tp=False)
            cautious: list[str] = []
            said, changed = fuzz_programs.judge(case, groups, cautious)
            counts[CAUTIOUS] += len(cautious)
            counts["programs"] += 1
            counts["programs that a pass changed"] += changed > 0
            counts["passes that changed one"] += changed
            if said:
                counts["failures"] += 1
                smaller = fuzz_programs.shrink(case, groups)
                why = fuzz_programs.judge(smaller, groups)[0] or said
                typer.echo(fuzz_programs.as_test(smaller, groups, why, f"seed_{seed}_program_{number}"))
                if counts["failures"] >= failures:
                    break
            if counts["programs"] % 1000 == 0:
                typer.echo(f"# {counts['programs']} programs, {counts['failures']} failures")
            fuzz_programs.quiet()
    for name in ("programs", "programs that a pass changed", "passes that changed one", CAUTIOUS, "failures"):
        typer.echo(f"{counts[name]:8d} {name}")
    typer.echo(f"{time.monotonic() - began:8.0f} seconds")
    raise typer.Exit(int(counts["failures"] > 0))


if __name__ == "__main__":
    typer.run(run)
