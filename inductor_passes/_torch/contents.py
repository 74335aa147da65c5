"""What stands behind references in a graph: constants, kernels, symbolic expressions, calls of the user's program."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
import torch.fx


def tensor_digest(tensor: torch.Tensor) -> str | None:
    """16 hex digits of a constant's elements, "fake" for one without any; None where they cannot be read as bytes."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "fake"
    try:
        # Passes run while fake tensors are traced; this one is real.
        with _disable_current_modes(), torch.no_grad():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


def expression(value: object) -> str | None:
    """The expression of a symbolic number as text, None for anything else."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(getattr(value.node, "expr", value))
    return None


def kernel_identity(index: object) -> str | None:
    """Name and source of the user's Triton kernel that a graph names by its index in torch's table; None without it."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    try:
        kernel = kernel_side_table.get_kernel(index)
    except (AssertionError, KeyError):
        return None
    function = kernel
    while hasattr(function, "fn") and not hasattr(function, "src"):
        function = function.fn  # an autotuner or a heuristic around the kernel
    source = str(getattr(function, "src", ""))
    configs = str(getattr(kernel, "configs", ""))
    text = hashlib.blake2b((source + configs).encode(), digest_size=8).hexdigest()
    return f"{getattr(function, '__name__', type(function).__name__)} {text}"


def kernel_constants(index: object) -> dict[str, Any] | None:
    """The constant arguments that a graph names by their index in torch's table; None without them."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    try:
        return dict(kernel_side_table.get_constant_args(index))
    except (AssertionError, KeyError):
        return None


def traced_call(node: torch.fx.Node) -> str:
    """What the user's program called when the node was traced (``redistribute``, ``add`` ...), "" when not known."""
    for key in ("source_fn_stack", "fwd_source_fn_stack"):
        stack = node.meta.get(key)
        if stack:
            return _named(stack[-1][1])
    sources = node.meta.get("from_node")
    return _named(str(sources[-1].target)) if sources else ""


def called_name(call: object) -> str:
    """The name of what a node calls in Dynamo's graph: torch 2.11 may trace a method of DTensor as a local function."""
    name = call if isinstance(call, str) else getattr(call, "__name__", str(call))
    method = re.search(r"method_(\w+)\.<locals>", call if isinstance(call, str) else getattr(call, "__qualname__", ""))
    return method[1] if method else name.removeprefix("prim_")


def _named(call: object) -> str:
    text = call if isinstance(call, str) else getattr(call, "__qualname__", "") or type(call).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def input_description(node: torch.fx.Node) -> str:
    """What AOTAutograd says that a placeholder is, "" when it says nothing."""
    found = node.meta.get("desc")
    return "" if found is None else re.sub(r" at 0x[0-9a-f]+", "", str(found))
