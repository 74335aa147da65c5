"""What tests of training frameworks share: ranks that look launched, data, and a comparison of two runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted
from tests.support.wrapped import OUT, WIDTH

#: How far losses and parameters may be from the framework alone after a few steps in float32. Our backend decomposes
#: operators as Inductor does, and that rounds.
ROUNDING = {"off": 0.0, "aot_eager": 0.0, "planned": 1e-5, "inductor": 2e-5}


def as_launched(rank: int, world_size: int) -> None:
    """Environment variables of ``torchrun``."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", NODE_RANK="0", ACCELERATE_USE_CPU="true")


def documents(count: int) -> list[dict[str, torch.Tensor]]:
    """Tokens and labels for a language model; every rank makes the same, and samplers share them out."""
    drawn = torch.Generator().manual_seed(3)
    tokens = [torch.randint(64, (16,), generator=drawn) for _ in range(count)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of ``wrapped.Net``; every rank makes the same."""
    drawn = torch.Generator().manual_seed(4)
    return [(torch.randn(WIDTH, generator=drawn), torch.randn(OUT, generator=drawn)) for _ in range(count)]


def how(mode: str) -> dict[str, Any]:
    """Arguments of ``torch.compile`` for the integrations.

    Args:
        mode: ``off`` (adopted, not compiled), ``aot_eager`` (torch's), ``planned`` (our passes without code generation)
            or ``inductor`` (the integrations' default).
    """
    if mode == "planned":
        return {"backend": "inductor_passes", "options": dotted()}
    return {"off": {"disable": True}, "aot_eager": {"backend": "aot_eager"}, "inductor": {}}[mode]


def whole(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A state dict with gathered values."""
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in values.items()}


def off(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two state dicts that have to have the same names."""
    assert list(one) == list(other)
    return max((one[k].double() - other[k].double()).abs().max().item() for k in one)


def differences(expected: list[float], losses: list[float], plain: nn.Module, ours: nn.Module) -> tuple[float, float]:
    """The largest differences of (losses, parameters) between the framework alone and with us."""
    worst = off(whole(plain.state_dict()), whole(ours.state_dict()))
    return max(abs(a - b) for a, b in zip(expected, losses, strict=True)), worst


def near(found: list[tuple[float, float]], mode: str) -> None:
    """Check each rank's ``differences``; for ``mode`` see ``how``."""
    assert all(max(one) <= ROUNDING[mode] for one in found), found


@contextlib.contextmanager
def planned(mode: str) -> Iterator[None]:
    """Where our passes are on, what is compiled inside holds collectives: two runs without us are not compared."""
    with collect(what_if=False) as reports:
        yield
    if mode in ("planned", "inductor"):
        # Bucketing merges most of them.
        found = {report.phase: len(report.collectives) for report in reports}
        assert found.get("backward", 0) >= 1, found


def together(path: Any) -> None:
    """Wait until all ranks are here, so that what one wrote can be read."""
    dist.barrier()
    assert os.path.exists(path), path


def forget_accelerate(fsdp: bool) -> None:
    """Have the next ``Accelerator`` of this process start anew, on CPUs.

    Accelerate switches FSDP on only where it finds accelerators. Told that there are some, it does on CPUs what it
    does there; nothing else is changed.

    Args:
        fsdp: whether to tell it so.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
