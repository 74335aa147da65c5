"""The only module that touches private torch API: thin wrappers, feature-detected for torch 2.11 to 2.15.

Everything else in the package imports from here, so that a new torch release is one file's work. Private modules are
imported inside the functions: importing this module stays cheap.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

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
