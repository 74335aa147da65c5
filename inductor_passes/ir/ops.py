"""What a node does, as far as reordering is concerned.

Unknown means fence: an operator outside the namespaces that we know to be pure, a host synchronisation, a collective
that we do not know, point-to-point communication and a higher-order op with a body that communicates are all fences,
across which nothing that communicates may move.
"""

from __future__ import annotations

import functools
import operator
import os
from enum import Enum

import torch
import torch.fx

from inductor_passes import _torch


class Role(Enum):
    """The part a node plays in a schedule."""

    INPUT = "input"
    """placeholder or get_attr"""
    OUTPUT = "output"
    FREE = "free"
    """a view, getitem or symbolic-size op: takes no time and no memory"""
    COMPUTE = "compute"
    START = "start"
    """issues a collective that we know"""
    WAIT = "wait"
    FENCE = "fence"
    """unknown effects: nothing that communicates crosses it"""


#: op name -> collective kind
COLLECTIVES: dict[str, str] = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
}
WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"})
#: Point-to-point operators: asynchronous like collectives, and fences for everything that communicates.
TRANSFERS = frozenset(
    {"_c10d_functional::isend", "_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops"}
)

#: Collectives that block inside: they run on the compute lane and keep their place among the communication.
BLOCKING_COLLECTIVES = frozenset(
    {
        "_dtensor::shard_dim_alltoall",
        "inductor_passes::gathered_mm",
        "inductor_passes::mm_scattered",
        "inductor_passes::symm_gathered_mm",
        "inductor_passes::symm_mm_scattered",
        "inductor_passes::all_reduce_residual_rms_norm",
        "symm_mem::fused_all_gather_matmul",
        "symm_mem::fused_all_gather_scaled_matmul",
        "symm_mem::fused_matmul_reduce_scatter",
        "symm_mem::fused_scaled_matmul_reduce_scatter",
    }
)

#: Namespaces whose operators have no effects beyond their schema.
PURE_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "_prims",
        "rngprims",
        "inductor",
        "inductor_prims",
        "quantized",
        "quantized_decomposed",
        "mkldnn",
        "mkl",
        "onednn",
        "torchao",
        "torchvision",
        "fbgemm",
        "higher_order",
        "inductor_passes",
    }
)
#: Operators that make the host wait for the device or print, assert, call back.
HOST_SYNCHRONISATION = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::masked_select",
        "aten::is_nonzero",
        "aten::equal",
    }
)
#: Operators that copy between devices. Towards the host a copy waits for the device, or, when it does not, relies on
#: a later one that does.
DEVICE_COPIES = frozenset({"aten::_to_copy", "aten::copy", "aten::copy_", "aten::to", "prims::device_put"})
#: Higher-order ops whose body only computes, whatever it holds.
PURE_HIGHER_ORDER = frozenset(
    {
        "flex_attention",
        "flex_attention_backward",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
        "auto_functionalized",
        "auto_functionalized_v2",
        "associative_scan",
        "scan",
        "map_impl",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "graphsafe_run_with_rng_state",
    }
)
#: Higher-order ops that draw from, save or restore a random generator.
RANDOM_HIGHER_ORDER = frozenset(
    {
        "higher_order::run_and_save_rng_state",
        "higher_order::run_with_rng_state",
        "higher_order::graphsafe_run_with_rng_state",
    }
)
#: Higher-order ops that run sub-graphs: pure when no sub-graph communicates or has unknown effects.
CONTAINER_HIGHER_ORDER = frozenset(
    {"cond", "while_loop", "invoke_subgraph", "checkpoint", "tag_activation_checkpoint", "wrap", "switch"}
)


def collective_kind(node: torch.fx.Node) -> str | None:
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``; None for anything else."""
    return COLLECTIVES.get(_torch.op_name(node.target)) if node.op == "call_function" else None


def is_wait(node: torch.fx.Node) -> bool:
    """Whether the node waits for one or several collectives."""
    return node.op == "call_function" and _torch.op_name(node.target) in WAITS


def is_transfer(node: torch.fx.Node) -> bool:
    """Whether a node sends to or receives from a single rank."""
    return node.op == "call_function" and _torch.op_name(node.target) in TRANSFERS


def received_into(node: torch.fx.Node) -> list[torch.fx.Node | None]:
    """Per result of a transfer the buffer that it receives into and returns (its schema does not say so), else None."""
    arguments = _torch.op_arguments(node)
    if _torch.op_name(node.target).endswith("::batch_p2p_ops"):
        rows = zip(arguments["op_list"], arguments["tensors"])
        return [tensor if "recv" in str(op) else None for op, tensor in rows]
    return [arguments["tensor"] if _torch.op_name(node.target).endswith("::irecv") else None]


def communicates(module: torch.fx.GraphModule) -> bool:
    """Whether a graph, or a graph inside it, communicates or has effects that we do not know."""
    return any(
        role(node) in (Role.START, Role.WAIT, Role.FENCE) for node in module.graph.nodes
    )


def subgraphs(node: torch.fx.Node) -> list[torch.fx.GraphModule] | None:
    """The graphs that a container op runs, None when one of them cannot be looked up."""
    owner = node.graph.owning_module
    found = []
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            target = owner
            for part in str(arg.target).split("."):
                target = getattr(target, part, None)
            if isinstance(target, torch.fx.GraphModule):
                found.append(target)
            elif not isinstance(target, torch.Tensor):
                return None
    return found


def role(node: torch.fx.Node) -> Role:
    """The :class:`Role` of a node. Anything that is not recognised is a ``FENCE``."""
    if node.op in ("placeholder", "get_attr"):
        return Role.INPUT
    if node.op == "output":
        return Role.OUTPUT
    if node.op != "call_function":
        return Role.FENCE
    name = _torch.op_name(node.target)
    if not name:
        return _python_function_role(node)
    namespace, _, base = name.partition("::")
    if namespace == "higher_order":
        return _higher_order_role(node, base)
    if name in DEVICE_COPIES and _copies_to_host(node):
        return Role.FENCE
    return op_role(node.target)


def _copies_to_host(node: torch.fx.Node) -> bool:
    """Whether data go from an accelerator to the host."""
    devices = [v.device.type for n in (node, *node.all_input_nodes) if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return bool(devices) and devices[0] == "cpu" and any(d not in ("cpu", "meta") for d in devices[1:])


def op_role(target: object) -> Role:
    """The :class:`Role` of a call to an operator overload."""
    name = _torch.op_name(target)
    if name in COLLECTIVES:
        return Role.START
    if name in WAITS:
        return Role.WAIT
    if name in HOST_SYNCHRONISATION or name in BLOCKING_COLLECTIVES:
        return Role.FENCE
    if name.partition("::")[0] not in PURE_NAMESPACES:
        return Role.FENCE
    if name.startswith("aten::sym_"):
        return Role.FREE
    return Role.FREE if _is_view_op(target) else Role.COMPUTE


def _higher_order_role(node: torch.fx.Node, base: str) -> Role:
    if base in PURE_HIGHER_ORDER:
        return Role.COMPUTE
    if base in CONTAINER_HIGHER_ORDER:
        graphs = subgraphs(node)
        if graphs is not None and not any(communicates(g) for g in graphs):
            return Role.COMPUTE
    return Role.FENCE


#: Builtins that only calculate; the others (``print``, ``exec``, ``setattr``) have effects.
_ARITHMETIC = frozenset({abs, bool, divmod, float, int, len, max, min, pow, range, round, slice, sum})


def _python_function_role(node: torch.fx.Node) -> Role:
    """Plain Python targets: getitem and arithmetic on symbolic sizes are free, anything else is unknown."""
    module = getattr(node.target, "__module__", "") or ""
    if node.target is not operator.getitem and any(
        isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes
    ):
        # Python arithmetic on tensors computes, and may write (operator.iadd)
        return Role.FENCE
    if node.target in _ARITHMETIC or module in ("_operator", "operator", "math", "sympy") or module.startswith(
        ("torch.fx.experimental.sym_node", "torch.utils._sympy", "torch.sym_")
    ):
        return Role.FREE
    if getattr(node.target, "__name__", "").startswith("sym_"):
        return Role.FREE
    return Role.FENCE


def effect_channel(node: torch.fx.Node, its_role: Role) -> str:
    """``random``, ``fence``, ``assert`` or "": nodes of one channel keep their order among each other."""
    if node.op == "call_function":
        name = _torch.op_name(node.target)
        if _torch.is_seeded_random(node.target) or name in RANDOM_HIGHER_ORDER:
            return "random"
        if name.startswith("aten::_assert"):
            return "assert"
        if name.startswith("higher_order::") and its_role is not Role.FENCE:
            bodies = subgraphs(node) or []
            if any(effect_channel(n, role(n)) == "random" for body in bodies for n in body.graph.nodes):
                return "random"
    return "fence" if its_role is Role.FENCE else ""


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node returns memory of one of its inputs and writes nothing."""
    return _torch.is_op(node.target) and _is_view_op(node.target)


def _is_view_op(target: object) -> bool:
    return not _torch.mutated_argument_names(target) and bool(_torch.aliased_argument_names(target))


def mutated_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes whose memory the node writes to: by schema, for Triton kernels by argument list, and what receives."""
    if node.op != "call_function":
        return []
    if is_transfer(node):
        return [buffer for buffer in received_into(node) if buffer is not None]
    if _torch.is_op(node.target):
        names = _torch.mutated_argument_names(node.target)
        if not names:
            return []
        arguments = _torch.op_arguments(node)
        return [n for name in names for n in _nodes_in(arguments.get(name))]
    if _torch.op_name(node.target) == "higher_order::triton_kernel_wrapper_mutation":
        # Which arguments the kernel writes is not in the graph: all of its tensors count.
        return _nodes_in(node.kwargs.get("kwargs"))
    return []


#: Functional operators that Inductor turns into their in-place form when nobody reads the first argument any more.
_REINPLACED = frozenset(
    {
        "aten::index_put",
        "aten::_unsafe_index_put",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_reduce_coalesced",
    }
)


def possibly_mutated_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes whose memory Inductor may let a functional node write to, when it is their last use."""
    if node.op != "call_function":
        return []
    name = _torch.op_name(node.target)
    if name in _REINPLACED:
        return _nodes_in(next(iter(_torch.op_arguments(node).values()), None))
    if name in (
        "higher_order::triton_kernel_wrapper_functional",
        "higher_order::auto_functionalized",
        "higher_order::auto_functionalized_v2",
    ):
        return list(node.all_input_nodes)
    return []


def _nodes_in(value: object) -> list[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in _nodes_in(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _nodes_in(v)]
    return []


#: Where frames of torch and of our own data parallelism come from.
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "simple_fsdp") + os.sep,
    "<",
)


def source_line(node: torch.fx.Node) -> str:
    """``file:line`` of the user's code that made the node: the innermost frame outside of torch and of us, or ""."""
    return _users_line(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _users_line(stack_trace: str) -> str:
    found = ""
    for line in stack_trace.splitlines():
        line = line.strip()
        if line.startswith('File "'):
            path, _, rest = line[6:].partition('", line ')
            if not path.startswith(_NOT_THE_USERS):
                found = f"{path}:{rest.split(',')[0].strip()}"
    return found


def label(node: torch.fx.Node) -> str:
    """Short label for nodes that carry weight in a schedule string: matmuls, attention, convolutions, fences."""
    name = _torch.op_name(node.target).partition("::")[2]
    for known in ("addmm", "baddbmm", "bmm", "mm", "convolution_backward", "convolution"):
        if name in (known, f"_scaled_{known}", f"_grouped_{known}"):
            return known
    if "attention" in name:
        return "attn"
    return ""
