"""Tensors as bytes and back, for messages of several dtypes and for dtypes that not every backend carries."""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes.rewriting.emit import Emitter


def to_bytes(emit: Emitter, tensor: torch.fx.Node) -> torch.fx.Node:
    """The elements of a dense tensor as ``uint8``; its last dimension grows by the element's size."""
    return _reinterpreted(emit, tensor, torch.uint8)


def from_bytes(emit: Emitter, tensor: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """Inverse of :func:`to_bytes`."""
    return _reinterpreted(emit, tensor, dtype)


def _reinterpreted(emit: Emitter, tensor: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    own = tensor.meta["val"].dtype
    if own is dtype:
        return tensor
    empty = any(isinstance(size, int) and not size for size in tensor.meta["val"].shape[-1:])
    if empty or torch.bool in (own, dtype):
        # False and True are the bytes 0 and 1, and Inductor's code for CPUs cannot reinterpret them in vectors. Where
        # rows are empty there is nothing to reinterpret, and torch refuses their strides.
        return emit.call(torch.ops.prims.convert_element_type.default, tensor, dtype)
    return emit.call(torch.ops.aten.view.dtype, tensor, dtype)
