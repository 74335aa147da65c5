"""The only module that touches private torch API: thin wrappers, feature-detected for torch 2.11 to 2.15.

Everything else in the package imports from here, so that a new torch release is one file's work. Private modules are
imported inside the functions: importing this module stays cheap.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


# -- ops -----------------------------------------------------------------------------------------------------


def is_op(target: object) -> bool:
    """Whether an FX target is a registered operator overload (it has a schema)."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order_op(target: object) -> bool:
    """Whether an FX target is a higher-order operator (``cond``, ``while_loop``, ``flex_attention`` ...)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


@functools.lru_cache(maxsize=4096)
def op_name(target: object) -> str:
    """``namespace::name`` of an operator overload or higher-order operator (no overload name), "" for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target._name}"
    return ""


def op_overload_name(target: Any) -> str:
    """Overload name of an operator overload; ``default`` for the unnamed one."""
    return str(target._overloadname)


def registered_op(namespace: str, name: str, overload: str) -> Any:
    """The operator overload or (namespace ``higher_order``) higher-order operator, None when none is registered."""
    space = getattr(torch.ops, namespace, None)
    if namespace == "higher_order":
        found = torch._ops._higher_order_ops.get(name)
        return found if is_higher_order_op(found) else None
    try:
        found = getattr(getattr(space, name), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return found if is_op(found) else None


def op_schema(target: Any) -> Any:
    """The schema of an operator overload."""
    return target._schema


@functools.cache
def mutated_argument_names(target: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator overload writes to."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
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
    """Arguments of an operator call by schema name and in its order, given as args or kwargs (defaults left out)."""
    names = _argument_names(node.target)
    if not node.kwargs:
        return dict(zip(names, node.args))
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return {name: given[name] for name in names if name in given}


@functools.cache
def _argument_names(target: Any) -> tuple[str, ...]:
    return tuple(a.name for a in target._schema.arguments)


def is_seeded_random(target: object) -> bool:
    """Whether an operator draws from a random generator: its calls must keep their order."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


# -- process groups ------------------------------------------------------------------------------------------


def resolve_group_ranks(group: object) -> tuple[str, tuple[int, ...]] | None:
    """(group name, global ranks in group order) of a group argument (name or object), None when it does not exist."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not dist.is_available():
        return None
    try:
        process_group: Any = c10d._resolve_process_group(group) if isinstance(group, str) else _unwrapped(group)
        name = group if isinstance(group, str) else str(process_group.group_name)
        return name, tuple(int(r) for r in dist.get_process_group_ranks(process_group))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def reduce_op_name(value: object) -> str:
    """``sum``, ``avg`` ... of a reduction's argument: a name, a ``ReduceOp``, one of its values, or such a number.

    A pre-multiplied sum carries its factor: reductions of equal name reduce alike.
    """
    import torch.distributed as dist

    if isinstance(value, str):
        return value.lower()
    value = _unwrapped(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = dist.ReduceOp.RedOpType(value)
    # A ReduceOp holds its kind; a kind is its own.
    name = str(getattr(value, "op", value)).rsplit(".", 1)[-1].lower()
    if not name.startswith("premul"):
        return name
    state = value.__getstate__() if hasattr(value, "__getstate__") else None
    factor = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    # A factor that is a tensor, or not to be had, is like no other one.
    return f"{name}({factor if isinstance(factor, (int, float)) else id(value)})"


def _unwrapped(value: object) -> Any:
    """What stands behind an object that torch wraps to trace through it."""
    for name in ("real_obj", "wrapped_obj"):
        inner = getattr(value, name, None)
        if inner is not None:
            return inner
    return value


def group_backend(name: str) -> str:
    """Backend of the named group (``gloo``, ``nccl``, ``fake`` ...), "" when the group does not exist."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    try:
        return str(dist.get_backend(c10d._resolve_process_group(name)))
    except (RuntimeError, ValueError, KeyError, TypeError):
        return ""


def group_store(name: str) -> tuple[Any, int, tuple[int, ...]] | None:
    """(key-value store, own global rank, global ranks) of the named group, None when this process is not in it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    found = resolve_group_ranks(name)
    if found is None:
        return None
    entry = c10d._world.pg_map.get(c10d._resolve_process_group(name))
    rank = dist.get_rank()
    return None if entry is None or rank not in found[1] else (entry[1], rank, found[1])


# -- sizes ---------------------------------------------------------------------------------------------------


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


def allow_saving(node: torch.fx.Node) -> None:
    """Take what :func:`recomputed_in_backward` put on a node off it."""
    for key in ("recompute", "ac_graph_id"):
        node.meta.pop(key, None)


def partitioner_base() -> type:
    """Base class of what Inductor takes as ``custom_partitioner_fn``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def default_partitioner() -> Callable[..., Any]:
    """Inductor's own partitioner: ``(joint module, joint inputs, **kwargs) -> (forward module, backward module)``."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


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


# -- process groups in Python --------------------------------------------------------------------------------


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


# -- Inductor: custom passes, configuration, cache keys ------------------------------------------------------


def graph_pass_base() -> type:
    """Base class of a post-grad graph pass; from 2.12 on one that is told whether it compiles for inference."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return aware or custom_graph_pass.CustomGraphPass


def accepts_pass_lists() -> bool:
    """Whether a custom-pass option takes a list of passes (from torch 2.12 on)."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def pass_uuid(graph_pass: object) -> Any:
    """Cache id of a custom graph pass or partitioner, None for a plain function."""
    uuid = getattr(graph_pass, "uuid", None)
    return uuid() if callable(uuid) else None


def as_pass_list(value: Any) -> list[Any]:
    """A custom-pass option (None, a pass, a list or a tuple of passes) as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def inductor_config() -> Any:
    """Inductor's config module."""
    import torch._inductor.config as config

    return config


def inductor_option_names() -> frozenset[str]:
    """All keys that ``torch.compile(options=...)`` accepts for Inductor."""
    return frozenset(inductor_config().shallow_copy_dict())


def inductor_option(name: str, default: Any = None) -> Any:
    """Current value of a (possibly nested) Inductor option; ``default`` where this torch does not have it."""
    value: Any = inductor_config()
    for part in name.split("."):
        if not hasattr(value, part):
            return default
        value = getattr(value, part)
    return value


def set_inductor_option(name: str, value: Any) -> None:
    """Set a (possibly nested) Inductor option for the whole process."""
    target: Any = inductor_config()
    *parents, last = name.split(".")
    for part in parents:
        target = getattr(target, part)
    setattr(target, last, value)


def expand_mode(mode: str) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for.

    Raises:
        ValueError: an unknown mode, with the known ones.
    """
    import torch._inductor

    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise ValueError(f"mode={mode!r} is not allowed; expected one of {', '.join(sorted(known))}")
    return dict(known[mode])


def compile_fx(module: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    """Compile a dynamo graph with Inductor under ``options``."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    return inductor_compile_fx(module, example_inputs, config_patches=options)


def compile_aot_eager(
    module: Any,
    example_inputs: Any,
    graph_pass: Callable[[torch.fx.Graph, bool], None],
    partition: Callable[..., Any],
) -> Any:
    """Trace forward and backward ahead of time as Inductor would, run a pass on each, execute them op by op."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def compiler(is_inference: bool) -> Callable[[Any, Any], Any]:
        def run(graph_module: Any, _: Any) -> Any:
            graph_pass(graph_module.graph, is_inference)
            graph_module.recompile()
            return make_boxed_func(graph_module.forward)

        return run

    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(False),
        inference_compiler=compiler(True),
        decompositions=select_decomp_table(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(module, example_inputs)


def group_layout() -> dict[str, tuple[int, ...]]:
    """Every process group of this process: name -> global ranks in group order; empty without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    import torch.distributed.distributed_c10d as c10d

    world = c10d._world
    names = dict(world.pg_names)
    ranks = dict(world.pg_group_ranks)
    return {
        str(names[group]): tuple(sorted(members, key=members.__getitem__))
        for group, members in ranks.items()
        if group in names
    }


def aot_graph_name() -> str:
    """Name of the graph that AOTAutograd is compiling, e.g. ``model__0_forward_1``; "" outside of it."""
    try:
        from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

        return str(get_aot_graph_name())
    except (ImportError, AttributeError):
        return ""


# -- Inductor: scheduler nodes and generated code ------------------------------------------------------------


def current_graph_module() -> Any:
    """The FX graph module that Inductor is lowering, None outside of lowering."""
    from torch._inductor.virtualized import V

    graph = V.graph
    return getattr(graph, "module", None) if type(graph).__name__ != "NullHandler" else None


def snode_name(node: Any) -> str:
    """Unique name of a scheduler node."""
    return str(node.get_name())


def snode_kind(node: Any) -> str:
    """``start``, ``wait``, ``group`` (nodes that must stay together), ``extern``, ``nop`` or ``fused``."""
    from torch._inductor.scheduler import (
        ExternKernelSchedulerNode,
        GroupedSchedulerNode,
        NopKernelSchedulerNode,
    )
    from torch._inductor.utils import is_collective, is_wait

    if isinstance(node, GroupedSchedulerNode):
        return "group"
    if isinstance(node, NopKernelSchedulerNode):
        return "nop"
    if not isinstance(node, ExternKernelSchedulerNode):
        return "fused"
    if is_wait(node.node):
        return "wait"
    if is_collective(node.node):
        return "start"
    return "extern"


def snode_output_names(node: Any) -> list[str]:
    """Names of the buffers that a scheduler node (or the nodes fused into it) defines."""
    return [str(buffer.get_name()) for buffer in node.get_outputs()]


def snode_dependencies(node: Any) -> list[tuple[str, bool]]:
    """(buffer name, whether it only orders) for everything that must run before a scheduler node.

    A dependency that only orders (a fake weak dependency) does not keep the buffer alive.
    """
    from torch._inductor.dependencies import WeakDep

    return [
        (str(dep.name), isinstance(dep, WeakDep) and bool(getattr(dep, "is_fake", False)))
        for dep in node.unmet_dependencies
    ]


def snode_reads(node: Any) -> list[str]:
    """Names of buffers and graph inputs that a scheduler node reads or needs alive."""
    from torch._inductor.dependencies import WeakDep

    return [
        str(dep.name)
        for dep in node.read_writes.reads
        if not (isinstance(dep, WeakDep) and getattr(dep, "is_fake", False))
    ]


def snode_data_reads(node: Any) -> list[str]:
    """Names of buffers and graph inputs whose contents a scheduler node reads, not what only orders or keeps alive."""
    from torch._inductor.dependencies import WeakDep

    return [str(dep.name) for dep in node.read_writes.reads if not isinstance(dep, WeakDep)]


def snode_mutations(node: Any) -> list[str]:
    """Names of existing buffers and graph inputs that a scheduler node writes to."""
    return [str(name) for buffer in node.get_outputs() for name in buffer.get_mutations()]


def snode_parts(node: Any) -> list[Any]:
    """The nodes of a group that must stay together, in order; any other node alone."""
    return [p for part in node.snodes for p in snode_parts(part)] if snode_kind(node) == "group" else [node]


def snode_origins(node: Any) -> list[torch.fx.Node]:
    """FX nodes that a scheduler node computes, in no particular order; may be empty."""
    found: dict[torch.fx.Node, None] = {}
    for part in node.get_nodes():
        ir_node = part.node
        if ir_node is None:
            continue
        for origin in ir_node.get_origins() if hasattr(ir_node, "get_origins") else ():
            found[origin] = None
    return list(found)


def snode_origin(node: Any) -> torch.fx.Node | None:
    """The FX node that an extern kernel stands for, None when Inductor does not say."""
    ir_node = node.node
    origin = getattr(ir_node, "origin_node", None) if ir_node is not None else None
    if origin is None and ir_node is not None and hasattr(ir_node, "get_origin_node"):
        origin = ir_node.get_origin_node()
    return origin if isinstance(origin, torch.fx.Node) else None


def snode_op(node: Any) -> Any:
    """The operator overload that an extern kernel calls, None when it is no operator call."""
    return getattr(node.node, "op_overload", None)


def snode_waited_buffers(node: Any) -> list[str]:
    """Buffers that a wait waits for."""
    return [str(buffer.get_name()) for buffer in node.node.inputs if hasattr(buffer, "get_name")]


def snode_is_template(node: Any) -> bool:
    """Whether a scheduler node is a template (a matmul with fused epilogues, for instance)."""
    return bool(node.is_template())


def snode_bytes(node: Any) -> int:
    """Bytes that a scheduler node reads and writes, by hints."""
    return int(node.get_read_write_buffers_sizes())


def snode_buffers(node: Any) -> list[tuple[str, int, list[str], str]]:
    """What a scheduler node defines: (name, bytes, names of buffers whose memory it shares, allocated with) each.

    The last is the name of the multi-output buffer whose kernel allocates this one, "" when the node itself does.
    """
    from torch._inductor.ir import MultiOutput, MultiOutputLayout, NoneLayout
    from torch._inductor.virtualized import V

    out = []
    for buffer in node.get_outputs():
        shared = [str(n) for n in (*buffer.get_mutations(), *buffer.get_aliases())]
        layout = buffer.node.layout
        if shared or isinstance(layout, (NoneLayout, MultiOutputLayout)) or _stays_in_kernel(node, buffer):
            size = 0
        else:
            size = _hint(V.graph.sizevars, layout.storage_size()) * layout.dtype.itemsize
        allocated_with = ""
        if isinstance(buffer.node, MultiOutput) and not shared:
            allocated_with = str(buffer.node.inputs[0].get_name())
        out.append((str(buffer.get_name()), size, shared, allocated_with))
    return out


def _hint(sizevars: Any, expression: Any) -> int:
    if hasattr(sizevars, "optimization_hint"):
        return int(sizevars.optimization_hint(expression, fallback=0))
    return int(sizevars.size_hint(expression, fallback=0))


def _stays_in_kernel(node: Any, buffer: Any) -> bool:
    """Whether a buffer is read by the kernel that computes it only: it never gets memory of its own."""
    if snode_kind(node) != "fused":
        return False
    own = {part.get_name() for part in node.get_nodes()}
    return bool(node.scheduler.can_buffer_be_removed_through_fusion(buffer.get_name(), own))


def snode_overwrites(node: Any, done: Collection[str] = ()) -> list[tuple[str, str]]:
    """(input, output) buffers of a fused kernel of which the output will be stored in the input's memory.

    Holds when everything else that reads the input has run: what the node depends on, and the operations ``done``.
    Inductor looks at uses in its own graph: it does not know how long a collective reads.

    Source: ``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py.
    """
    from torch._inductor import config
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.ir import MultiOutputLayout, MutationLayoutSHOULDREMOVE, NoneLayout
    from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    if snode_kind(node) != "fused" or not config.inplace_buffers:
        return []
    if not V.graph.has_feature(node.get_device(), BackendFeature.INPLACE_BUFFERS):
        return []
    scheduler = node.scheduler
    parts = node.get_nodes()
    found: list[tuple[str, str]] = []
    taken: set[str] = set()
    for part in parts:
        if not isinstance(part, SchedulerNode):
            continue
        for output in part.get_outputs():
            if not output.node.should_allocate() or output.get_aliases() or output.get_mutations():
                continue
            for read in part.read_writes.reads:
                name = str(read.name)
                source = scheduler.name_to_donated_buffer.get(name) or scheduler.name_to_buf.get(name)
                if source is None or source.node is None or name in taken or name in V.graph.never_reuse_buffers:
                    continue
                if isinstance(getattr(source, "defining_op", None), NopKernelSchedulerNode):
                    continue
                layout = source.node.get_output_spec()
                if isinstance(layout, (NoneLayout, MultiOutputLayout, MutationLayoutSHOULDREMOVE)):
                    continue
                rest = [
                    u for u in source.users if u.node.get_name() not in part.ancestors and u.node.get_name() not in done
                ]
                if len(rest) != 1 or rest[0].node is not part or not rest[0].can_inplace:
                    continue
                accesses = {
                    access for other in parts for access in other.read_writes.reads_and_writes() if access.name == name
                }
                if len(accesses) == 1 and _same_memory(source.node, output.node):
                    found.append((name, str(output.get_name())))
                    taken.add(name)
                    break
    return found


def _same_memory(a: Any, b: Any) -> bool:
    """Whether two IR buffers have equal device, dtype and size in memory, also symbolically."""
    if a.get_device() != b.get_device() or a.get_dtype() != b.get_dtype():
        return False
    return str(a.get_layout().storage_size()) == str(b.get_layout().storage_size())


def snode_operations(node: Any) -> list[str]:
    """Names of the operations that a scheduler node carries out."""
    return [str(part.get_name()) for part in node.get_nodes()]


def snode_follows(node: Any, other: Any) -> bool:
    """Whether a scheduler node depends on another one, directly or not."""
    return any(part.get_name() in node.ancestors for part in other.get_nodes())


def lowered_inputs() -> dict[str, int]:
    """Graph inputs of the graph being lowered: name -> bytes by hint (0 for inputs that are no tensors)."""
    from torch._inductor.virtualized import V

    sizes: dict[str, int] = {}
    for name, value in V.graph.graph_inputs.items():
        size = 0
        layout_of = getattr(value, "get_layout", None)
        if layout_of is not None and hasattr(value, "get_dtype"):
            try:
                size = _hint(V.graph.sizevars, value.get_layout().storage_size()) * value.get_dtype().itemsize
            except (NotImplementedError, AttributeError):
                size = 0
        sizes[str(name)] = size
    return sizes


def lowered_outputs() -> list[str]:
    """Names of the buffers and inputs that the graph being lowered returns."""
    from torch._inductor.virtualized import V

    return [str(n) for n in V.graph.get_output_names()]


def lowered_is_inference() -> bool:
    """Whether the graph being lowered was traced without a backward."""
    from torch._inductor.virtualized import V

    return bool(getattr(V.graph, "is_inference", False))


def unwaited_names(names: Sequence[str]) -> list[str]:
    """Names with Inductor's renames by mutation undone, so that a mutated buffer and its memory have one name."""
    from torch._inductor.virtualized import V

    real = getattr(V.graph.scheduler, "mutation_real_name", {}) if getattr(V.graph, "scheduler", None) else {}
    return [str(real.get(n, n)) for n in names]


def generates_python() -> bool:
    """Whether the graph being lowered becomes a Python wrapper (not C++, not an ahead-of-time package)."""
    from torch._inductor.virtualized import V

    return not (getattr(V.graph, "cpp_wrapper", False) or getattr(V.graph, "aot_mode", False))


def add_module_statement(statement: str) -> None:
    """Add a statement to the top level of the generated Python module: runs whenever the module is loaded."""
    from torch._inductor.virtualized import V

    V.graph.wrapper_code.header.writeline(statement)


def when_generated(callback: Callable[[list[tuple[str, tuple[str, ...]]]], str]) -> bool:
    """Call ``callback`` with the emitted statements when the wrapper of the current graph is generated.

    The statements are those that run something: ``(kind, buffer names)`` where kind is ``extern`` (one kernel, its
    output buffer) or ``kernel`` (a generated kernel, the buffers among its arguments). The text that ``callback``
    returns becomes a comment in the wrapper. Returns False where this torch has no such place.
    """
    try:
        from torch._inductor.codegen import wrapper as w
        from torch._inductor.virtualized import V
    except ImportError:
        return False
    code = V.graph.wrapper_code
    if not hasattr(w, "WrapperLine") or not hasattr(code, "lines") or not generates_python():
        return False

    class _Witness(w.WrapperLine):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.wrapper = code

        def codegen(self, text: Any) -> None:
            for line in callback(list(_emitted(w, code.lines))).splitlines():
                text.writeline(f"# {line}")

        @staticmethod
        def codegen_fx(converter: Any) -> Any:
            return lambda line: None

    code.lines.append(_Witness())
    return True


def _emitted(w: Any, lines: Iterable[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    extern = tuple(
        getattr(w, name)
        for name in ("ExternKernelAllocLine", "ExternKernelOutLine", "ExternKernelMultiOutLine", "ScatterFallbackLine")
        if hasattr(w, name)
    )
    for line in lines:
        if isinstance(line, extern):
            yield "extern", (str(line.node.get_name()),)
        elif isinstance(line, w.KernelCallLine):
            yield "kernel", tuple(str(a) for a in line.call_args)


# -- building graphs ---------------------------------------------------------------------------------------------------


def collective_op(name: str) -> Any:
    """The functional collective ``name`` (``all_gather_into_tensor``, ``wait_tensor`` ...) as an operator overload."""
    import torch.distributed._functional_collectives  # registers the operators

    return getattr(torch.ops._c10d_functional, name).default


def fake_mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake tensor mode that made ``tensor``.

    Raises:
        TypeError: it is no fake tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, FakeTensor):
        raise TypeError(f"expected a fake tensor, got {type(tensor).__name__}")
    return tensor.fake_mode


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# -- redistribution without compiling ----------------------------------------------------------------------------------


def per_rank(callback: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``callback(rank, *local tensors)`` for this rank, or for every simulated rank under ``LocalTensorMode``."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
    from torch.utils._python_dispatch import _disable_current_modes

    mode = local_tensor_mode()
    if mode is None or not tensors or not isinstance(tensors[0], LocalTensor):
        return callback(dist.get_rank(), *tensors)
    # A disabled mode still sees every operation; on plain tensors none of them concerns it.
    with mode.disable(), _disable_current_modes():
        results = {r: callback(r, *(t._local_tensors[r] for t in tensors)) for r in sorted(mode.ranks)}
    with mode.disable():
        return LocalTensor(results)


def per_rank_sizes(callback: Callable[[int], list[int]], like: torch.Tensor) -> list[Any]:
    """Sizes that depend on the rank: ``callback(rank)``; rank-valued integers when ``like`` is simulated for all."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalIntNode, LocalTensor, local_tensor_mode

    mode = local_tensor_mode()
    if mode is None or not isinstance(like, LocalTensor):
        return callback(dist.get_rank())
    ranks = sorted(mode.ranks)
    columns = zip(*(callback(r) for r in ranks))
    return [torch.SymInt(LocalIntNode(dict(zip(ranks, column)))) for column in columns]


def call_collective(name: str, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """A functional collective (``all_gather_into_tensor``, ``all_to_all_single`` ...), waited for."""
    return collective_op("wait_tensor")(collective_op(name)(tensor, *args))


def group_name_of(ranks: tuple[int, ...]) -> str | None:
    """Name of the first created process group of exactly these ranks that this process belongs to; None without one."""
    import torch.distributed.distributed_c10d as c10d

    wanted = set(ranks)
    for group, members in c10d._world.pg_group_ranks.items():
        if set(members) == wanted:
            return str(group.group_name)
    return None


def dtensor_of(local: torch.Tensor, like: Any, placements: list[Any], shard_order: Any) -> Any:
    """A ``DTensor`` of ``like``'s mesh, shape and stride around ``local``, with a shard order where torch has it.

    Raises:
        NotImplementedError: a shard order on a torch without one.
    """
    from torch.distributed.tensor import DTensor

    if not shard_order:
        return DTensor.from_local(
            local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
    except ImportError:
        raise NotImplementedError(f"torch {torch.__version__} has no shard order; plan to a _StridedShard") from None
    default = {e.tensor_dim: e for e in DTensorSpec.compute_default_shard_order(tuple(placements))}
    for dim, dims in shard_order:
        default[dim] = ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(dims))
    order = tuple(default[dim] for dim in sorted(default))
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=like._spec.tensor_meta, shard_order=order)
    return DTensor(local, spec, requires_grad=local.requires_grad)


def create_groups(partition: tuple[tuple[int, ...], ...]) -> None:
    """Create one process group for each tuple of ranks; every process of the default group must call it alike."""
    import torch.distributed as dist

    for ranks in partition:
        dist.new_group(list(ranks))


def default_group() -> Any:
    """The default process group object.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_group()


# What this torch offers, for people (`inductor-passes doctor`).


_SIMPLE_OVERLAP = "aten_distributed_optimizations.enable_simple_overlap"


def features() -> dict[str, bool]:
    """Feature -> whether this torch build has it; every one is looked for, none is inferred from the version."""
    import importlib.util

    def module(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    missing = object()
    available = torch.distributed.is_available()
    return {
        "graph passes": inductor_option("post_grad_custom_post_pass", missing) is not missing,
        "scheduler hook": inductor_option("reorder_for_compute_comm_overlap_passes", missing) is not missing,
        "structured trace": module("torch._logging"),
        "distributed": available,
        "gloo": available and torch.distributed.is_gloo_available(),
        "nccl": available and torch.distributed.is_nccl_available(),
        "mpi": available and torch.distributed.is_mpi_available(),
        "fake process group": module("torch.testing._internal.distributed.fake_pg"),
        "symmetric memory": available and module("torch.distributed._symmetric_memory"),
        "simple_overlap": inductor_option(_SIMPLE_OVERLAP, missing) is not missing,
        "triton": module("triton"),
    }


def compile_cache_dir() -> str:
    """The directory of Inductor's caches; it is not created."""
    import os

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def cpp_compiler() -> str:
    """The C++ compiler that Inductor would use for CPU code.

    Raises:
        RuntimeError: there is none (torch's own error type derives from it).
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def process_rank() -> int:
    """Rank of this process in the default group: an int, also under ``LocalTensorMode`` (symbolic from 2.15 on)."""
    return int(default_group().rank())


def all_to_all_autograd(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all of equal slices of dimension 0 over a process group; the gradient goes back the same way."""
    import torch.distributed._functional_collectives as functional

    return functional.all_to_all_single_autograd(tensor, None, None, group)


def is_pointwise(target: object) -> bool:
    """Whether an operator overload acts on every element alone (its operands broadcast)."""
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return tagged or op_name(target) == "prims::convert_element_type"


# -- compiling without running -------------------------------------------------------------------------------


def everything_compiled_at_once() -> contextlib.AbstractContextManager[Any]:
    """While it is entered a backward is compiled together with its forward, and neither comes out of AOT's cache."""
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)  # type: ignore[no-any-return]


def output_examples(module: torch.fx.GraphModule) -> list[Any]:
    """What a graph that dynamo captured returns: fake tensors and plain values, in order."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    found = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    return [n.meta.get("example_value", n.meta.get("val")) if isinstance(n, torch.fx.Node) else n for n in found]


def plain_values(values: Sequence[Any]) -> bool:
    """Whether all tensors among fake values are plain ones: no DTensor or other subclass."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return all(
        not isinstance(v, torch.Tensor)
        or (type(v) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and not is_traceable_wrapper_subclass(v))
        for v in values
    )


# -- symmetric memory and what a group can do ----------------------------------------------------------------


def group_descriptions() -> dict[str, str]:
    """Group name -> what it was described as when it was made (``mesh_tp`` for a mesh dimension), where it was."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    import torch.distributed.distributed_c10d as c10d

    names = dict(c10d._world.pg_names)
    return {str(name): str(getattr(group, "group_desc", "") or "") for group, name in names.items()}


def exchange(name: str, key: str, value: str) -> list[str]:
    """Every rank's ``value``, in group order, through the group's store: nothing is issued on the group itself.

    Collective: all ranks of the group call it alike, with a ``key`` that is used once. Waits for the slowest rank, at
    most as long as the store's timeout.

    Raises:
        ValueError: this process is not in the group.
    """
    found = group_store(name)
    if found is None:
        raise ValueError(f"this process is not in the process group {name!r}")
    store, own, ranks = found
    store.set(f"{key}/{own}", value)
    return [bytes(store.get(f"{key}/{rank}")).decode() for rank in ranks]


def enable_symmetric_memory(name: str) -> None:
    """Make torch's symmetric memory know a group; nothing to do from 2.15 on."""
    import warnings

    import torch.distributed._symmetric_memory as symmetric

    known = getattr(symmetric, "is_symm_mem_enabled_for_group", None)
    enable = getattr(symmetric, "enable_symm_mem_for_group", None)
    if enable is not None and not (known is not None and known(name)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable(name)


def symmetric_buffer(size_bytes: int, name: str, device: torch.device) -> tuple[torch.Tensor, list[int], Any]:
    """(own bytes, address of every rank's bytes as this rank sees them, handle that keeps them mapped). Collective."""
    from torch._C._distributed_c10d import _SymmetricMemory

    enable_symmetric_memory(name)
    # An allocation of its own: within a pool's block the addresses would be those of the block.
    own = _SymmetricMemory.empty_strided_p2p((size_bytes,), [1], torch.uint8, device, name)
    handle = _SymmetricMemory.rendezvous(own)
    return own, [int(pointer) for pointer in handle.buffer_ptrs], handle


def symmetric_op(name: str) -> Any:
    """``torch.ops.symm_mem.<name>`` as an operator overload, None where this torch lacks it."""
    if torch.distributed.is_available():
        from torch.distributed import _symmetric_memory  # noqa: F401  registers the operators

    return registered_op("symm_mem", name, "default")
