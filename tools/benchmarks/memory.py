"""The peak of a step as the allocator sees it: ours under several budgets against default Inductor.

Ranks are simulated and kernels compute nothing: what is allocated and freed, and in which order, is the generated
wrapper's doing. So the figures are the same in every run.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import inductor_passes
from inductor_passes.settings.budget import MemoryBudget
from tests.support.compiled import without_kernels
from tests.support.measured import LAYOUTS, SHAPES, build, measured_peaks, one_thread
from tests.support.world import fake_world
from tools.shared.record import RESULTS, markdown_table, write

#: How far the measured peak may be above what the budget allows, relative to default Inductor's.
TOLERANCE = 0.02
BUDGETS = ("0", "+5%", "+25%")
#: Behind a name: the step has no gradients.
INFERENCE = ", inference"
STEPS = (*LAYOUTS, *SHAPES, *(f"{name}{INFERENCE}" for name in ("fsdp", *SHAPES)))


def memory(
    layout: Annotated[list[str] | None, typer.Option(help=f"Of {'; '.join(STEPS)}; default: all.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help=f"Values of memory_budget; default: {BUDGETS}.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = RESULTS,
) -> None:
    """Measured peaks of a training step, relative to default Inductor's."""
    chosen, budgets = layout or list(STEPS), budget or list(BUDGETS)
    unknown = [name for name in chosen if name not in STEPS]
    if unknown:
        raise typer.BadParameter(f"--layout is {unknown[0]!r}; expected one of {'; '.join(STEPS)}")
    peaks = {name: {one: max(_measured(name, one)) for one in (None, *budgets)} for name in chosen}
    body = _body(peaks, budgets)
    Console().print("\n".join(body), markup=False)
    data = {name: {one or "default Inductor": peak for one, peak in row.items()} for name, row in peaks.items()}
    write("memory", "Measured peaks", body, data, folder=out)


def _measured(layout: str, budget: str | None) -> tuple[int, int]:
    """Peaks of forward and backward in bytes, above what is there before the step; None: default Inductor."""
    torch._dynamo.reset()
    name, inference = layout.removesuffix(INFERENCE), layout.endswith(INFERENCE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread())
        stack.enter_context(fake_world(4))
        stack.enter_context(without_kernels())
        stack.enter_context(torch.set_grad_enabled(not inference))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model, given = build(name)

        def loss(given: torch.Tensor) -> torch.Tensor:
            return model(given).square().mean()  # type: ignore[no-any-return]

        options = None if budget is None else inductor_passes.options(memory_budget=budget)
        compiled = torch.compile(loss, fullgraph=True, options=options)
        stack.callback(torch._dynamo.reset)
        first = compiled(given)
        if first.requires_grad:
            first.backward()
        return measured_peaks(compiled, model, given, Path(folder))


def _body(peaks: dict[str, dict[str | None, int]], budgets: Sequence[str]) -> list[str]:
    rows = []
    for name, row in peaks.items():
        default = row[None]
        cells = []
        for one in budgets:
            allowed = MemoryBudget.parse(one).limit_bytes(default)
            mark = " (above)" if allowed is not None and row[one] > allowed * (1 + TOLERANCE) else ""
            cells.append(f"{row[one] / default:.3f}{mark}")
        rows.append([name, f"{default:,}", *cells])
    return [
        "The higher of forward's and backward's peak in bytes, above what is allocated before the step, and ours",
        f"relative to it. *above*: more than {TOLERANCE:.0%} over what the budget allows of default Inductor's peak.",
        "The first rows are layouts of a small Llama on four ranks, the others other models under FSDP. Default",
        "Inductor fuses another graph, so measured peaks can be above. A simulated collective is over at once: what",
        "real ones hold while they are in flight comes on top, for both.",
        "",
        *markdown_table(["step", "default Inductor", *(f'ours, "{one}"' for one in budgets)], rows),
    ]
