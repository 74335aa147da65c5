"""Kernels that are compiled together compute what they compute alone."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from tests.support.joint_kernels import folder, kernels_together


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Several kernels: matmuls stand between."""
    return torch.softmax((x.sin() + 3.25) @ w, -1) @ (w * 0.375) - x.tanh()


def trained(joint: bool) -> list[torch.Tensor]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(13, 13, generator=generator, requires_grad=True) for _ in range(2))
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    steps = torch._functorch.config.patch(enable_autograd_cache=False)
    with graphs, steps, kernels_together() if joint else contextlib.nullcontext():
        found = torch.compile(program, fullgraph=True)(x, w)
        found.sum().backward()
    assert x.grad is not None and w.grad is not None
    return [found.detach(), x.grad, w.grad]


def libraries() -> dict[str, str]:
    """Kernel -> the library that has it."""
    return {path.name: json.loads(path.read_text()) for path in folder().glob("*")}


def test_the_same_bits_from_few_libraries_that_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other workers fill the run's own folder meanwhile.
    monkeypatch.setenv("PASSES_TEST_CACHE", str(tmp_path))
    together = trained(joint=True)
    new = libraries()
    # One for forward and one for backward, at most.
    assert len(new) >= 4 and len(set(new.values())) <= 2
    again, alone = trained(joint=True), trained(joint=False)
    for one, *others in zip(together, again, alone):
        assert all(torch.equal(one, other) for other in others)
    assert libraries() == new


def test_kernels_that_do_not_fit_into_one_file_are_compiled_alone() -> None:
    source = 'static float own() { return %d; }\nextern "C" void kernel(float* out) { out[0] = own(); }'
    out = torch.zeros(1)
    with kernels_together():
        one, two = (AsyncCompile().cpp_pybinding(["float*"], source % number) for number in (1, 2))
        for kernel, expected in ((one, 1.0), (two, 2.0)):
            kernel(out)
            assert out.item() == expected
