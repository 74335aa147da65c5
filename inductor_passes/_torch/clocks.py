"""What timing generated code needs: which values of its globals are operators, and events of a device."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def callable_kind(value: object) -> str:
    """``namespace`` (``torch.ops``, ``torch.ops.aten``), ``packet``, ``overload``, or "" for anything else."""
    ops = torch._ops
    for kind, names in (
        ("namespace", ("_Ops", "_OpNamespace")),
        ("packet", ("OpOverloadPacket",)),
        ("overload", ("OpOverload",)),
    ):
        known = tuple(found for name in names if (found := getattr(ops, name, None)) is not None)
        if isinstance(value, known):
            return kind
    return ""


def device_name(device: torch.device) -> str:
    """A device as its driver calls it, e.g. ``NVIDIA H100 80GB HBM3``; its type where it has no name."""
    try:
        return str(importlib.import_module(f"torch.{device.type}").get_device_name(device))
    except (ImportError, AttributeError, RuntimeError):
        return device.type


def accelerator() -> tuple[str, str]:
    """Name and type of this process's accelerator; twice ``cpu`` without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu", "cpu") if device is None else (device_name(device), device.type)


def timing_events(device: str, count: int) -> list[Any] | None:
    """``count`` events that can be recorded on the current stream of ``device``; None where it has no such events."""
    try:
        module = importlib.import_module(f"torch.{device}")
        if not module.is_available():
            return None
        return [module.Event(enable_timing=True) for _ in range(count)]
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return None


def event_times_ns(base: Any, events: list[Any]) -> list[int]:
    """When events of one device were reached, in ns after ``base``; waits, asleep, for the last one."""
    if events:
        events[-1].synchronize()
    return [round(base.elapsed_time(one) * 1e6) for one in events]
