"""The only module that touches private torch API: thin wrappers, feature-detected for torch 2.11 to 2.15.

Everything else in the package imports from here, so that a new torch release is one file's work. Private modules are
imported inside the functions: importing this module stays cheap.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

# Structured trace (TORCH_TRACE) and compile-time spans. Same names and signatures from 2.11 to 2.15.


def trace_enabled() -> bool:
    """Whether torch writes a structured trace in this process, i.e. whether an artifact would reach a file.

    True with ``TORCH_TRACE`` set, and before torch's first own record; False afterwards without a trace directory.
    """
    return bool(logging.getLogger("torch.__trace").handlers)


def trace_artifact(name: str, encoding: str, payload_fn: Callable[[], str]) -> None:
    """Write one artifact into the structured trace under the current compile id.

    ``encoding`` is ``json`` or ``string``, the two that tlparse renders. ``payload_fn`` is called only when a trace
    is being written. Errors of the payload and of the file system pass through to the caller.
    """
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload_fn,
        expect_trace_id=False,
    )


def compile_id() -> str:
    """The current compile id as torch prints it (``0/0``), or "" outside of a compilation."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


@contextlib.contextmanager
def compile_span(name: str) -> Iterator[Callable[..., None]]:
    """A span in the compile-time trace (chromium events); yields a function that attaches ``key=value`` to it.

    Keys go to the span only: the record of compilation metrics has a fixed set of columns and breaks on others.
    """
    from torch._dynamo.utils import CompileEventLogger, dynamo_timed

    def attach(**values: object) -> None:
        CompileEventLogger.pt2_compile(name, **values)

    with dynamo_timed(name, log_pt2_compile_event=True):
        yield attach


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


# -- ops --------------------------------------------------------------------------------------------------------------


def is_op(target: object) -> bool:
    """Whether an FX target is a registered operator overload (it has a schema)."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order_op(target: object) -> bool:
    """Whether an FX target is a higher-order operator (``cond``, ``while_loop``, ``flex_attention`` ...)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def op_name(target: object) -> str:
    """``namespace::name`` of an operator overload or higher-order operator (no overload name), "" for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target._name}"
    return ""


def op_schema(target: Any) -> Any:
    """The schema of an operator overload."""
    return target._schema


def mutated_argument_names(target: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator overload writes to."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def aliased_argument_names(target: Any) -> tuple[str, ...]:
    """Names of the arguments that some output of an operator overload may share memory with."""
    out: set[str] = set()
    for ret in target._schema.returns:
        if ret.alias_info is None:
            continue
        names = ret.alias_info.before_set | ret.alias_info.after_set
        for arg in target._schema.arguments:
            if arg.alias_info is not None and (arg.alias_info.before_set | arg.alias_info.after_set) & names:
                out.add(arg.name)
    return tuple(a.name for a in target._schema.arguments if a.name in out)


def op_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments of a call to an operator overload by schema name, whether given as args or kwargs (defaults left out)."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args)), **node.kwargs}


def is_seeded_random(target: object) -> bool:
    """Whether an operator draws from a random generator: its calls must keep their order."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


# -- process groups ----------------------------------------------------------------------------------------------------


def resolve_group_ranks(group: object) -> tuple[str, tuple[int, ...]] | None:
    """(group name, global ranks in group order) of a group argument (name or object), None when it does not exist."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not dist.is_available():
        return None
    try:
        process_group: Any = c10d._resolve_process_group(group) if isinstance(group, str) else group
        name = group if isinstance(group, str) else str(process_group.group_name)
        return name, tuple(int(r) for r in dist.get_process_group_ranks(process_group))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def group_backend(name: str) -> str:
    """Backend of the named group (``gloo``, ``nccl``, ``fake`` ...), "" when the group does not exist."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    try:
        return str(dist.get_backend(c10d._resolve_process_group(name)))
    except (RuntimeError, ValueError, KeyError, TypeError):
        return ""


# -- sizes --------------------------------------------------------------------------------------------------------------


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


def tensor_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a (fake) tensor's elements, by hint; None when a symbolic size has no hint."""
    total = tensor.element_size()
    for dim in tensor.shape:
        hint = size_hint(dim)
        if hint is None:
            return None
        total *= hint
    return total


# Functional collectives, device meshes and parameters for data parallelism. Same from 2.11 to 2.15.


def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The tensors of the group of mesh dimension ``dim``, concatenated along dimension 0 in rank order; waited for."""
    started = torch.ops._c10d_functional.all_gather_into_tensor(
        tensor.contiguous(), mesh.size(dim), mesh.get_group(dim).group_name
    )
    return torch.ops._c10d_functional.wait_tensor(started)


def reduce_scatter_sum(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's equal slice along dimension 0 of the sum over the group of mesh dimension ``dim``; waited for."""
    started = torch.ops._c10d_functional.reduce_scatter_tensor(
        tensor.contiguous(), "sum", mesh.size(dim), mesh.get_group(dim).group_name
    )
    return torch.ops._c10d_functional.wait_tensor(started)


def all_reduce_sum(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The sum over the group of mesh dimension ``dim``; waited for."""
    started = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), "sum", mesh.get_group(dim).group_name)
    return torch.ops._c10d_functional.wait_tensor(started)


@contextlib.contextmanager
def recomputed_in_backward() -> Iterator[None]:
    """Operations traced by AOTAutograd inside are never saved for backward but run again there.

    Tags the nodes as activation checkpointing does, as the innermost region of its own: its number is above all
    others', so that a checkpointed consumer does not turn the last operation into a saved boundary. Without effect
    outside of tracing.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    tags = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": sys.maxsize}
    meta = traceback.current_meta
    before = {key: meta[key] for key in tags if key in meta}
    meta.update(tags)
    try:
        yield
    finally:
        for key in tags:
            meta.pop(key, None)
        meta.update(before)


def concatenate_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh with ``outer``'s dimensions followed by ``inner``'s; both must be slices of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharding of ``dim`` by an outer mesh dimension AFTER inner ones have split it into ``split_factor`` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Placement) -> bool:
    """Whether a placement is a :func:`strided_shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def stored_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """A module's parameter without attribute access, which a subclass may have redirected."""
    return module._parameters[name]


# -- process groups in Python ------------------------------------------------------------------------------------------


def gloo_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A process group that moves CPU tensors with gloo, outside of ``torch.distributed``'s registry of groups.

    Args:
        store: rendezvous store, with a prefix of the group's own.
        rank / size: within the group.
        timeout: ``datetime.timedelta`` for each collective.
    """
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    group = ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Make ``_c10d_functional.wait_tensor(tensor)`` wait for ``work``."""
    from torch._C._distributed_c10d import _register_work

    _register_work(tensor, work)


def process_group(group: Any) -> Any:
    """The process group that a functional collective's group argument (a name or the group itself) means."""
    if not isinstance(group, str):
        return group
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)


def group_method(group: Any, *names: str) -> Callable[..., Any]:
    """The first of ``names`` that ``group`` has: collectives were renamed in 2.13, newest name first."""
    for name in names:
        method = getattr(group, name, None)
        if method is not None:
            return method  # type: ignore[no-any-return]
    raise AttributeError(f"{type(group).__name__} has none of {', '.join(names)}")
