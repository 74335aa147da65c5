"""What Inductor makes of packs and unpacks: kernels, buffers, time; against multi-tensor copies and one flat kernel.

Each case is what the passes emit around a message: a bucket of parameters with the cast to bfloat16, gradients of
matmuls, exchanges before and behind a matmul, a gathered bucket that matmuls read. Contenders run in turn in one
process; times are medians.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.shared.record import RESULTS, markdown_table, write

#: Of a transformer's parameters: matrices, vectors, an odd one.
SHAPES = (
    *((256, 1024), (1024,), (512, 512), (1024, 256)),
    *((256,), (512, 384), (768, 512), (768,), (128, 1024), (333, 77), (1024, 1), (64, 64)),
)
RANKS = 4
#: How many independent ones are in one compiled graph: a graph's own price, its guards above all, is shared out.
REPEATS = 8
HEADER = ("case", "kernels", "buffers", "MB moved", "Inductor us", "foreach us", "one buffer us", "operators us")
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One pack or unpack.

    Attributes:
        run: as the passes emit it.
        inputs: of ``run``.
        foreach: the same by ``torch._foreach_copy_`` into slices of a new message, or out of one.
        flat: an unpack whose results share one buffer, so that it is one kernel; None for packs.
        moved: bytes read and written when every element is touched once each way, matmuls aside.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    foreach: Callable[..., Any]
    moved: int
    flat: Callable[..., Any] | None = None


def cases() -> list[Case]:
    """All of them."""
    return [
        _bucket(4),
        _bucket(12),
        _gradients(),
        _exchange_behind(),
        _exchange_before(),
        _gathered(4),
        _gathered(12),
    ]


def _copied_into(message: torch.Tensor, parts: Tensors) -> torch.Tensor:
    """One multi-tensor copy of ``parts`` into the columns of ``message``, in order."""
    column, views = 0, []
    for part in parts:
        views.append(message[:, column : column + part.shape[1]])
        column += part.shape[1]
    torch._foreach_copy_(views, list(parts))
    return message


def _bucket(count: int) -> Case:
    parameters = tuple(torch.randn(shape) for shape in SHAPES[:count])
    total = sum(p.numel() for p in parameters)

    def run(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([p.to(torch.bfloat16).reshape(1, -1) for p in parts], 1)

    def foreach(*parts: torch.Tensor) -> torch.Tensor:
        message = torch.empty(1, total, dtype=torch.bfloat16)
        return _copied_into(message, [p.reshape(1, -1) for p in parts])

    return Case(f"bucket of {count} parameters, cast to bf16", run, parameters, foreach, 6 * total)


def _gradients() -> Case:
    x, a, b = torch.randn(64, 512), torch.randn(64, 256), torch.randn(64, 384)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = (x.t() @ a, x.t() @ b)
        return torch.cat([g.to(torch.bfloat16).reshape(RANKS, -1) for g in found], 1)

    def foreach(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = [(x.t() @ a).view(RANKS, -1), (x.t() @ b).view(RANKS, -1)]
        message = torch.empty(RANKS, sum(g.shape[1] for g in found), dtype=torch.bfloat16)
        return _copied_into(message, found)

    return Case("two gradients of matmuls, cast to bf16", run, (x, a, b), foreach, 6 * 512 * (256 + 384))


def _exchange_behind() -> Case:
    x, w = torch.randn(512, 1024), torch.randn(1024, 64)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        grid = y.view(512, RANKS, 16).permute(1, 0, 2)
        return grid.clone(memory_format=torch.contiguous_format).view(RANKS * 512, 16)

    def foreach(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        message = torch.empty(RANKS, 512, 16)
        torch._foreach_copy_(list(message.unbind()), list((x @ w).split(16, 1)))
        return message.view(RANKS * 512, 16)

    return Case("exchange behind a matmul", run, (x, w), foreach, 8 * 512 * 64)


def _exchange_before() -> Case:
    received, w = torch.randn(RANKS * 128, 1024), torch.randn(RANKS * 1024, 16)

    def run(received: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        grid = received.view(RANKS, 128, 1024).permute(1, 0, 2)
        return grid.clone(memory_format=torch.contiguous_format).view(128, RANKS * 1024) @ w

    def foreach(received: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(128, RANKS * 1024)
        torch._foreach_copy_(list(whole.split(1024, 1)), list(received.split(128)))
        return whole @ w

    return Case("exchange before a matmul", run, (received, w), foreach, 8 * 128 * 4096)


def _gathered(count: int) -> Case:
    """A bucket of square weights, gathered, each read by a matmul."""
    width = 192 * 192 // RANKS
    message, x = torch.randn(RANKS, count * width), torch.randn(8, 192)

    def used(weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x @ weight.view(192, 192)
        return x

    def run(message: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = [message[:, k * width : (k + 1) * width] for k in range(count)]
        return used([p.clone(memory_format=torch.contiguous_format) for p in parts], x)

    def flat(message: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = [message[:, k * width : (k + 1) * width].reshape(-1) for k in range(count)]
        return used(torch.cat(parts).split(RANKS * width), x)

    def foreach(message: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weights = [torch.empty(RANKS, width) for _ in range(count)]
        torch._foreach_copy_(weights, list(message.split(width, 1)))
        return used(weights, x)

    moved = 8 * message.numel()
    return Case(f"{count} gathered weights before matmuls", run, (message, x), foreach, moved, flat)


def generated(function: Callable[..., Any], inputs: Tensors) -> tuple[int, int]:
    """How many kernels the compiled function calls, and buffers it allocates."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function, dynamic=False)
    _, sources = run_and_get_code(compiled, *inputs)
    code = "\n".join(sources)
    kernels = len(re.findall(r"^ +(?:cpp_fused|triton_)\w*(?:\.run)?\(", code, re.MULTILINE))
    return kernels, len(re.findall(r"= empty_strided_\w+\(", code))


def in_turn(functions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median microseconds of each."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for times, function in zip(taken, functions):
            began = time.perf_counter()
            function()
            times.append(1e6 * (time.perf_counter() - began))
    return [median(times) for times in taken]


def repeated(function: Callable[..., Any], count: int) -> Callable[..., list[Any]]:
    """The function for ``REPEATS`` sets of ``count`` inputs each."""

    def run(*inputs: torch.Tensor) -> list[Any]:
        return [function(*inputs[k : k + count]) for k in range(0, len(inputs), count)]

    return run


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    kernels, buffers = generated(case.run, case.inputs)
    row: dict[str, Any] = {"case": case.name, "kernels": kernels, "buffers": buffers, "moved": case.moved}
    if case.flat is not None:
        row["flat_kernels"], row["flat_buffers"] = generated(case.flat, case.inputs)
    torch._dynamo.reset()
    plain = {"inductor": case.run, "foreach": case.foreach, "flat": case.flat, "operators": case.run}
    many = {name: repeated(one, len(case.inputs)) for name, one in plain.items() if one is not None}
    contenders = {
        name: torch.compile(one, dynamic=False) if name in ("inductor", "flat") else one for name, one in many.items()
    }
    inputs = [torch.randn_like(t) for _ in range(REPEATS) for t in case.inputs]
    wanted = many["operators"](*inputs)
    for contender in contenders.values():
        torch.testing.assert_close(contender(*inputs), wanted, rtol=1e-3, atol=1e-2)
    times = in_turn([lambda f=f: f(*inputs) for f in contenders.values()], rounds)  # type: ignore[misc]
    return {**row, "us": {name: round(us / REPEATS, 1) for name, us in zip(contenders, times)}}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, by ``HEADER``."""
    us = row["us"]
    flat = f"{us['flat']:.0f} ({row['flat_kernels']} kernel{'s'[: row['flat_kernels'] != 1]})" if "flat" in us else ""
    return [
        row["case"],
        str(row["kernels"]),
        str(row["buffers"]),
        f"{row['moved'] / 1e6:.2f}",
        f"{us['inductor']:.0f}",
        f"{us['foreach']:.0f}",
        flat,
        f"{us['operators']:.0f}",
    ]


def packs(
    rounds: Annotated[int, typer.Option(min=1, help="How often each contender runs.")] = 200,
    out: Annotated[Path, typer.Option(help="Where results go.")] = RESULTS,
) -> None:
    """Kernels, buffers and times of packs and unpacks on this machine's CPU."""
    torch.set_num_threads(1)
    rows = [measure(case, rounds) for case in cases()]
    body = [
        "Kernels (those of matmuls aside) and buffers of the code that Inductor generates; MB that a pack or unpack",
        f"reads and writes at least. Times are of the whole case with its matmuls, {REPEATS} of them in one graph;",
        "contenders run in turn, on one thread.",
        "",
        *markdown_table(HEADER, [cells(row) for row in rows]),
    ]
    page = write("packs", "Packs and unpacks", body, rows, folder=out)
    Console().print("\n".join(body))
    Console().print(f"written to {page}")

