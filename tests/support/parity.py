"""Does a parallel model train like the same model in one process? Loss, every gradient, and weights after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's full value; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(batch: Batch, index: int, count: int) -> Batch:
    """The ``index``-th of ``count`` equal parts of a global batch."""
    return batch[0].chunk(count)[index], batch[1].chunk(count)[index]


def assert_trains_alike(
    parallel: nn.Module,
    reference: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    index: int,
    count: int,
    backend: str | None = None,
    options: Mapping[str, Any] | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-10,
) -> None:
    """Train both for ``len(batches)`` steps of AdamW and compare loss, gradients and, at the end, weights.

    Args:
        parallel: this rank's model; its parameters have the reference's names.
        reference: the same model, alone, sees every batch whole.
        batches: global batches; this rank's model gets part ``index`` of ``count``, and the losses' mean over the
            ranks is compared.
        backend: compile ``parallel`` (fullgraph, recompiling is an error) with it; None runs eagerly.
        options: of the backend.
    """
    step = parallel
    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(  # type: ignore[assignment]
            parallel, backend=backend, options=dict(options) if options else None, fullgraph=True
        )
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01, foreach=False)
        for m in (reference, parallel)
    ]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches:
            expected = loss(reference(batch[0]), batch[1])
            expected.backward()
            inputs, targets = share(batch, index, count)
            actual = loss(step(inputs), targets)
            actual.backward()
            mean = actual.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / dist.get_world_size(), expected.detach(), rtol=rtol, atol=atol)
            assert_same_gradients(parallel, reference, rtol=rtol, atol=atol)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    named = dict(parallel.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole(named[name]), parameter, rtol=1e-6, atol=1e-7, msg=_labelled(name))


def assert_same_gradients(parallel: nn.Module, reference: nn.Module, *, rtol: float, atol: float) -> None:
    """Every parameter has the reference's gradient, laid out as the parameter itself, or like it none."""
    named = dict(parallel.named_parameters())
    expected = dict(reference.named_parameters())
    assert list(named) == list(expected)
    for name, parameter in named.items():
        gradient = parameter.grad
        if expected[name].grad is None:
            assert gradient is None, f"{name} has a gradient, the reference has none"
            continue
        assert gradient is not None, f"{name} has no gradient"
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor)
            assert gradient.placements == parameter.placements, name
            assert gradient.dtype is parameter.dtype, name
        torch.testing.assert_close(
            whole(gradient), expected[name].grad, rtol=rtol, atol=atol, msg=_labelled(name)
        )


def _labelled(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"
