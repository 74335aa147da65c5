"""Programs that write memory through one view and read it through another around a collective, run on real ranks.

All numbers are small integers, so that every order of adding them gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

ROWS = 32
Views = Callable[[torch.Tensor], Sequence[torch.Tensor]]

#: How to take a (2 * ROWS, ROWS) buffer apart into two (ROWS, ROWS) views.
VIEWS: dict[str, Views] = {
    "split": lambda buffer: buffer.split(ROWS),
    "split_with_sizes": lambda buffer: buffer.split([ROWS, ROWS]),
    "chunk": lambda buffer: buffer.chunk(2),
    "tensor_split": lambda buffer: buffer.tensor_split(2),
    "unbind": lambda buffer: buffer.view(2, ROWS, ROWS).unbind(0),
    "views of a list's elements": lambda buffer: [part.t().view_as(part) for part in buffer.split(ROWS)],
    "list of a view": lambda buffer: buffer.view(2, ROWS, ROWS).transpose(1, 2).unbind(0),
    "list of a list's element": lambda buffer: buffer.view(1, 2 * ROWS, ROWS).unbind(0)[0].chunk(2),
}


def _gathered(w: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor(w, 0, dist.group.WORLD)[:ROWS]


def write_all_of_it(views: Views, buffer: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Read an element behind the wait, then write the whole; the other element is read after."""
    first, second = views(buffer)
    before = first @ _gathered(w)
    buffer.copy_(x.relu())
    return before + second.sum()


def write_the_first(views: Views, buffer: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Read the whole behind the wait, then write one element."""
    first, _ = views(buffer)
    before = buffer @ _gathered(w)
    first.copy_(x[:ROWS].relu())
    return before + buffer.sum()


def write_the_second(views: Views, buffer: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Read and write the same element."""
    first, second = views(buffer)
    before = second @ _gathered(w)
    second.mul_(x[ROWS:])
    return before + second.sum() + first.sum()


def write_each(views: Views, buffer: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Both elements are written, the gathered tensor is read through both in between."""
    first, second = views(buffer)
    gathered = _gathered(w)
    before = first @ gathered - second @ gathered
    for part in views(buffer):
        part.add_(x[:ROWS].abs())
    return before + first.sum() - second.sum()


def _sent(result: torch.Tensor) -> torch.Tensor:
    """What a collective returns; eager waits for it at once, because eager torch lets a write overtake what is sent."""
    return result if torch.compiler.is_compiling() else funcol.wait_tensor(result)


def send_an_element(views: Views, buffer: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An element is what the link reads while the whole is about to be written."""
    first, second = views(buffer)
    gathered = _sent(funcol.all_gather_tensor(first.contiguous(), 0, dist.group.WORLD))
    reduced = _sent(funcol.all_reduce(second.contiguous(), "sum", dist.group.WORLD))
    buffer.copy_(x.abs())
    return gathered[ROWS:] + reduced + second.sum() + w.sum()


PROGRAMS: tuple[Callable[[Views, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    write_all_of_it,
    write_the_first,
    write_the_second,
    write_each,
    send_an_element,
)


def differences(rank: int, size: int, kind: str, options: dict[str, Any]) -> list[str]:
    """Names of the programs whose compiled form differs from eager, in results or in the buffer afterwards."""
    found = []
    generator = torch.Generator().manual_seed(rank)
    for program in PROGRAMS:
        torch._dynamo.reset()
        shapes = (2 * ROWS, ROWS), (ROWS, ROWS), (2 * ROWS, ROWS)
        values = [torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes]
        expected = [v.clone() for v in values]
        result = program(VIEWS[kind], *expected)
        compiled = torch.compile(program, fullgraph=True, backend="inductor_passes", options=options)
        if not torch.equal(compiled(VIEWS[kind], *values), result) or not torch.equal(values[0], expected[0]):
            found.append(program.__name__)
    return found
