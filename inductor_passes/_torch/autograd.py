"""Collectives with gradients, and what the partitioner is told about them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The tensors of the group of mesh dimension ``dim``, concatenated along dimension 0 in rank order; waited for."""
    started = torch.ops._c10d_functional.all_gather_into_tensor(
        tensor.contiguous(), mesh.size(dim), mesh.get_group(dim).group_name
    )
    return torch.ops._c10d_functional.wait_tensor(started)


def reduce_scatter_sum(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's equal slice along dimension 0 of the sum over the group of mesh dimension ``dim``; waited for."""
    return reduce_scatter_in(tensor, mesh.get_group(dim).group_name, mesh.size(dim))


def all_reduce_sum(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The sum over the group of mesh dimension ``dim``; waited for."""
    return all_reduce_in(tensor, mesh.get_group(dim).group_name, "sum")


def reduce_scatter_in(tensor: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """This rank's equal slice along dimension 0 of the sum over a named group; waited for."""
    started = torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", ranks, group)
    return torch.ops._c10d_functional.wait_tensor(started)


def all_gather_in(tensor: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """The tensors of a named group, concatenated along dimension 0 in rank order; waited for."""
    started = torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), ranks, group)
    return torch.ops._c10d_functional.wait_tensor(started)


def all_reduce_in(tensor: torch.Tensor, group: str, op: str) -> torch.Tensor:
    """The reduction over a named group; waited for."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(tensor.contiguous(), op, group))


def broadcast_in(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The tensor of a named group's first rank; waited for."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(tensor.contiguous(), 0, group))


def write_unseen(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` to ``target`` without autograd taking it for a change of what it has saved, as DDP does.

    Code that Inductor compiles keeps to it too. Where a compiler leaves writes to inputs to AOTAutograd's epilogue
    (``aot_eager``), the write is seen.
    """
    hide = getattr(target, "mark_mutation_hidden_from_autograd", None)
    if hide is None:
        target.data.copy_(value)
        return
    # AOTAutograd traces: what it marks is written in the graph, and no version is counted.
    target.copy_(value)
    hide()


#: What marks nodes that a partitioner of ours may save although they are tagged for recomputation.
_LEFT_TO_PARTITIONER = "inductor_passes_keep"


@contextlib.contextmanager
def recomputed_in_backward(left_to_partitioner: bool = False) -> Iterator[None]:
    """Operations traced by AOTAutograd inside are never saved for backward but run again there.

    Tags the nodes as activation checkpointing does, as the innermost region of its own: its number is above all
    others', so that a checkpointed consumer does not turn the last operation into a saved boundary. Without effect
    outside of tracing.

    Args:
        left_to_partitioner: mark the nodes for :func:`is_left_to_partitioner`, unless they are in a region of
            activation checkpointing: its owner has decided already.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    tags: dict[str, Any] = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": sys.maxsize}
    meta = traceback.current_meta
    if left_to_partitioner and "recompute" not in meta:
        tags["custom"] = {**meta.get("custom", {}), _LEFT_TO_PARTITIONER: True}
    before = {key: meta[key] for key in tags if key in meta}
    meta.update(tags)
    try:
        yield
    finally:
        for key in tags:
            meta.pop(key, None)
        meta.update(before)


def is_left_to_partitioner(node: torch.fx.Node) -> bool:
    """Whether a node was traced under ``recomputed_in_backward(left_to_partitioner=True)``."""
    return bool((node.meta.get("custom") or {}).get(_LEFT_TO_PARTITIONER))


def settle(node: torch.fx.Node) -> None:
    """Take off a node that it is left to a partitioner: it stays as it is tagged."""
    if is_left_to_partitioner(node):
        node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != _LEFT_TO_PARTITIONER}


def is_gathered_again(node: torch.fx.Node) -> bool:
    """Whether a node was traced under :func:`recomputed_in_backward`: backward computes it again where it needs it."""
    return node.meta.get("ac_graph_id") == sys.maxsize and "recompute" in node.meta


def allow_saving(node: torch.fx.Node) -> None:
    """Take what :func:`recomputed_in_backward` put on a node off it."""
    for key in ("recompute", "ac_graph_id"):
        node.meta.pop(key, None)


def is_tagged(node: torch.fx.Node) -> bool:
    """Whether activation checkpointing has said of a node whether it is saved, or has it in a region."""
    return "recompute" in node.meta or "ac_graph_id" in node.meta


def compute_again(node: torch.fx.Node, again: bool) -> None:
    """Have torch's partitioner run a node again in backward, or keep it from doing so (``again=False``).

    Not as part of a region of activation checkpointing: such a tag turns no neighbour into a saved boundary.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


def stored_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """A module's parameter without attribute access, which a subclass may have redirected."""
    return module._parameters[name]


def counts_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which modules take for a parameter from now on: they refuse a computed one instead of copying it."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def module_call_code() -> frozenset[types.CodeType]:
    """The code that runs while a module is called, its hooks included."""
    names = ("_wrapped_call_impl", "_call_impl")
    functions = (getattr(torch.nn.Module, name, torch.nn.Module.__call__) for name in names)
    return frozenset(function.__code__ for function in functions)


def is_recomputing() -> bool:
    """Whether this thread runs activation checkpointing's second forward: in backward, but recording gradients."""
    running = getattr(torch._C, "_current_graph_task_id", None)
    return running is not None and running() != -1 and torch.is_grad_enabled()


def all_to_all_autograd(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all of equal slices of dimension 0 over a process group; the gradient goes back the same way."""
    import torch.distributed._functional_collectives as functional

    return functional.all_to_all_single_autograd(tensor, None, None, group)
