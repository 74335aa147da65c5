"""Models compiled in a fake or a real process group with our backend, and what came of it, for tests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code

from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint
from inductor_passes.report import GraphReport, PassReport
from inductor_passes.rewriting import cpu_calls
from inductor_passes.trace.collector import collect


def save_profile(path: Path, *cost: float, ranks: int = 2) -> str:
    """A cost profile in which every collective between ``ranks`` ranks costs ``cost``, see ``CollectiveCost``."""
    made = CostProfile(
        "made up",
        "CPU",
        measured=True,
        ranks_per_host=ranks,
        matmul=(MatmulPoint("float32", 1e6, 20_000), MatmulPoint("float32", 1e8, 2_000_000)),
        memory_bytes_per_s=1e10,
        kernel_ns=3000,
        groups=(
            GroupCost(
                GroupLayout.of(tuple(range(ranks)), ranks),
                "gloo",
                "link",
                tuple(CollectiveCost(k, *cost) for k in KINDS),
            ),
        ),
    )
    made.save(path)
    return str(path)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inductor's C++ kernels do nothing, so that nobody compiles them: for tests that look at no number.

    Everything else is as always: the generated wrapper allocates, calls, frees and communicates.
    """

    def nothing(*_: Any) -> None:
        """Stands for a kernel."""

    def kernel(self: AsyncCompile, argument_types: list[str], source: str) -> Callable[..., None]:
        assert argument_types and "kernel" in source
        return nothing

    with mock.patch.object(AsyncCompile, "cpp_pybinding", kernel):
        try:
            yield
        finally:
            # Loaded wrappers are known by their text; equal ones of other tests have kernels.
            PyCodeCache.cache_clear()


def dotted(**settings: Any) -> dict[str, Any]:
    return {f"inductor_passes.{k}": v for k, v in {"codegen": "aot_eager", "verify": "strict", **settings}.items()}


def compiled_reports(model: nn.Module, tokens: torch.Tensor, **settings: Any) -> list[GraphReport]:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="inductor_passes", options=dotted(**settings))
    with collect(what_if=False) as reports:
        compiled(tokens).sum().backward()
    return reports


def kept(reports: list[GraphReport]) -> PassReport | None:
    return next((p for r in reports for p in r.passes if p.name == "keep"), None)


def compiled_with_calls(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, str]:
    """What compiled code gives in which our operators are calls of C++ functions, and the code."""
    cpu_calls.register()
    torch._dynamo.reset()
    found, (code,) = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *inputs)
    return found, code


def calls(code: str, function: str) -> int:
    """How often generated code calls a function whose name begins so."""
    return len(re.findall(rf"^ +{function}\w*\(", code, re.MULTILINE))
