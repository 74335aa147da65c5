"""Fake tensors: their sizes, symbolic ones by their hints, and calls on them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.fx


def size_hint(value: object) -> int | None:
    """An int for an int or symbolic int, by its hint; None when it has none."""
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        node = value.node
        hint = getattr(node, "hint", None) if getattr(node, "has_hint", lambda: False)() else None
        if hint is None:
            hint = _shape_env_hint(value)
        return None if hint is None else int(hint)
    return None


def _shape_env_hint(value: torch.SymInt) -> int | None:
    shape_env = getattr(value.node, "shape_env", None)
    if shape_env is None:
        return None
    try:
        return int(shape_env.size_hint(value.node.expr))
    except Exception:  # a symbol without a hint raises one of several private error types
        return None


def storage_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a (fake) tensor's storage, by hint; None when a symbolic size has no hint."""
    return size_hint(tensor.untyped_storage().nbytes())


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that tensors of the same storage share, for as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a (fake) tensor's elements, by hint; None when a symbolic size has no hint."""
    total = tensor.element_size()
    for dim in tensor.shape:
        hint = size_hint(dim)
        if hint is None:
            return None
        total *= hint
    return total


def fake_mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake tensor mode that made ``tensor``.

    Raises:
        TypeError: it is no fake tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, FakeTensor):
        raise TypeError(f"expected a fake tensor, got {type(tensor).__name__}")
    return tensor.fake_mode


def example_result(node: torch.fx.Node) -> Any:
    """What a call gives for the example values of its inputs."""
    from torch._guards import detect_fake_mode

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta["val"] for n in node.graph.nodes if "val" in n.meta])
    with mode or contextlib.nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]
