"""What a node does, as far as reordering is concerned.

What communicates, and our own operators, are rows of ``operators``; what else is there, schemas and namespaces tell.

Unknown means fence: an operator outside the namespaces that we know to be pure, one of ours that the table does not
have, a host synchronisation, a collective that we do not know, point-to-point communication and a higher-order op with
a body that communicates are all fences, across which nothing that communicates may move. Where whole graphs are
ordered, messages between two ranks have rules of their own, see ``transfers``.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import higher_order, memory
from inductor_passes.ir.higher_order import subgraphs
from inductor_passes.ir.memory import (
    is_getitem,
    is_transfer,
    is_view,
    is_view_op,
    is_wait,
    may_copy,
    mutated_inputs,
    possibly_mutated_inputs,
    received_into,
)
from inductor_passes.operators import BLOCKING_COLLECTIVES, COLLECTIVES, CollectiveKind, Role, role_of

#: In the meta of an input of a backward: (name of the first input that is memory of the same block, the block's bytes).
SAVED_BLOCK = "inductor_passes_saved_block"

__all__ = [
    "BLOCKING_COLLECTIVES",
    "COLLECTIVES",
    "NOT_CROSSED",
    "SAVED_BLOCK",
    "CollectiveKind",
    "Role",
    "collective_kind",
    "communicates",
    "effect_channel",
    "is_transfer",
    "is_view",
    "is_wait",
    "label",
    "may_copy",
    "mutated_inputs",
    "op_channel",
    "op_role",
    "possibly_mutated_inputs",
    "received_into",
    "role",
    "source_line",
    "subgraphs",
]


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
#: Operators that depend on data with some arguments only, see ``_waits_for_data``.
_SOMETIMES_DEPENDENT = frozenset({"aten::index", "aten::repeat_interleave"})
#: Operators that copy between devices. Towards the host a copy waits for the device, or, when it does not, relies on
#: a later one that does.
DEVICE_COPIES = frozenset({"aten::_to_copy", "aten::copy", "aten::copy_", "aten::to", "prims::device_put"})
#: Operators whose arguments decide whether the host needs data to carry them out.
_SOMETIMES_WAITS = frozenset({"aten::index", "aten::repeat_interleave"})
#: Operators that are called for what they check: they keep their order among each other.
_CHECKS = (
    "aten::_assert",
    "aten::_functional_assert",
    "aten::sym_constrain",
    "aten::_functional_sym_constrain",
    "aten::_linalg_check_errors",
    "aten::_validate_",
)
#: Higher-order ops that do what their body and the operator that they call do, and nothing else.
PURE_HIGHER_ORDER = memory.KNOWN_HIGHER_ORDER - {"with_effects"}
#: Higher-order ops that draw from, save or restore a random generator.
RANDOM_HIGHER_ORDER = frozenset(
    {
        "higher_order::run_and_save_rng_state",
        "higher_order::run_with_rng_state",
        "higher_order::graphsafe_run_with_rng_state",
    }
)


#: Effect channel -> channels whose earlier nodes stay in front of it.
NOT_CROSSED = {"random": ("random", "fence"), "fence": ("fence", "random"), "assert": ("assert",)}


def collective_kind(node: torch.fx.Node) -> CollectiveKind | None:
    """The kind of collective that a node starts; None for anything else."""
    return COLLECTIVES.get(_torch.op_name(node.target)) if node.op == "call_function" else None


def communicates(module: torch.fx.GraphModule) -> bool:
    """Whether a graph, or a graph inside it, communicates or has effects that we do not know."""
    return any(
        role(node) in (Role.START, Role.WAIT, Role.FENCE) for node in module.graph.nodes
    )


def role(node: torch.fx.Node) -> Role:
    """The :class:`Role` of a node. Anything that is not recognised is a ``FENCE``."""
    if node.op in ("placeholder", "get_attr"):
        return Role.INPUT
    if node.op == "output":
        return Role.OUTPUT
    if node.op != "call_function":
        return Role.FENCE
    if (always := _role_of_all_calls(node.target)) is not None:
        return always
    name = _torch.op_name(node.target)
    if not name:
        return _python_function_role(node)
    namespace, _, base = name.partition("::")
    if namespace == "higher_order":
        return _higher_order_role(node, base)
    if (name in DEVICE_COPIES and _copies_to_host(node)) or _waits_for_data(node):
        return Role.FENCE
    return op_role(node.target)


@functools.lru_cache(maxsize=4096)
def _role_of_all_calls(target: object) -> Role | None:
    """The role of an operator overload whatever its arguments are; None where they decide, and for anything else."""
    if not _torch.is_op(target) or _torch.op_name(target) in DEVICE_COPIES | _SOMETIMES_WAITS:
        return None
    return op_role(target)


def _waits_for_data(node: torch.fx.Node) -> bool:
    """Whether the host needs data to carry out an operator whose arguments decide that."""
    name = _torch.op_name(node.target)
    if name == "aten::index":
        indices = memory.nodes_in(_torch.op_arguments(node).get("indices"))
        values = [index.meta.get("val") for index in indices]
        return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)
    if name != "aten::repeat_interleave":
        return False
    arguments = _torch.op_arguments(node)
    repeats = memory.nodes_in(arguments.get("repeats"))
    return "output_size" not in arguments and any(isinstance(n.meta.get("val"), torch.Tensor) for n in repeats)


def _copies_to_host(node: torch.fx.Node) -> bool:
    """Whether data go from an accelerator to the host."""
    devices = [v.device.type for n in (node, *node.all_input_nodes) if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return bool(devices) and devices[0] == "cpu" and any(d not in ("cpu", "meta") for d in devices[1:])


def op_role(target: object) -> Role:
    """The :class:`Role` of a call to an operator overload; of anything else we do not know what it calls."""
    if not _torch.is_op(target):
        return Role.FENCE
    name = _torch.op_name(target)
    known = role_of(name)
    if known is not None:
        return known
    if name in HOST_SYNCHRONISATION or name in memory.REBINDING:
        return Role.FENCE
    if name.partition("::")[0] not in PURE_NAMESPACES or (use := _torch.memory_use(target)) is None:
        return Role.FENCE
    if _torch.depends_on_data(target) and name not in _SOMETIMES_DEPENDENT:
        return Role.FENCE
    if _torch.returns_nothing(target) and not use.written and not name.startswith(_CHECKS):
        # Nobody would call it but for something that its schema does not say.
        return Role.FENCE
    if not name.startswith(_CHECKS) and not use.written and not _torch.returns_tensors(target):
        return Role.FREE
    return Role.FREE if is_view_op(target) else Role.COMPUTE


def _higher_order_role(node: torch.fx.Node, base: str) -> Role:
    if base not in PURE_HIGHER_ORDER:
        return Role.FENCE
    called = higher_order.wrapped(node)
    if called is not None and not (_torch.is_op(called) and op_role(called) in (Role.COMPUTE, Role.FREE)):
        return Role.FENCE
    graphs = subgraphs(node)
    return Role.FENCE if graphs is None or any(map(communicates, graphs)) else Role.COMPUTE


#: Builtins that only calculate; the others (``print``, ``exec``, ``setattr``) have effects.
_ARITHMETIC = frozenset({abs, bool, divmod, float, int, len, max, min, pow, range, round, slice, sum})


def _python_function_role(node: torch.fx.Node) -> Role:
    """Plain Python targets: taking results apart and arithmetic on sizes are free, anything else is unknown."""
    module = getattr(node.target, "__module__", "") or ""
    if is_getitem(node):
        return Role.FREE
    if any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes):
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
        if channel := _channel_of_target(node.target):
            return channel
        name = _torch.op_name(node.target)
        if name.startswith(higher_order.PREFIX) and its_role is not Role.FENCE:
            inside = {effect_channel(n, role(n)) for body in subgraphs(node) or [] for n in body.graph.nodes}
            if _torch.is_seeded_random(higher_order.wrapped(node)):
                return "random"
            # A body that draws and checks counts as a draw: its checks come when it runs.
            return next((channel for channel in ("random", "assert") if channel in inside), "")
    return "fence" if its_role is Role.FENCE else ""


def order_channel(node: torch.fx.Node, its_role: Role) -> str:
    """:func:`effect_channel` of a node that keeps its order in it; "" for attention that draws nothing."""
    channel = effect_channel(node, its_role)
    return "" if channel == "random" and draws_nothing(node) else channel


def op_channel(target: object, its_role: Role) -> str:
    """:func:`effect_channel` of a call of which only the operator and its role (:func:`op_role`) are known."""
    return _channel_of_target(target) or ("fence" if its_role is Role.FENCE else "")


def draws_nothing(node: torch.fx.Node) -> bool:
    """Whether a random operator is attention whose dropout is 0: run twice it gives the same bits.

    It stays in the channel ``random``: where checkpointing runs it again torch saves the generator's state around it.
    """
    if node.op != "call_function" or not _torch.is_seeded_random(node.target):
        return False
    name = _torch.op_name(node.target)
    if "attention" not in name or "backward" in name or "dropout_p" not in _torch.argument_names(node.target):
        return False
    dropped = _torch.op_arguments(node).get("dropout_p", 0.0)
    return not isinstance(dropped, torch.fx.Node) and dropped == 0


@functools.lru_cache(maxsize=4096)
def _channel_of_target(target: object) -> str:
    """``random`` or ``assert`` for what always is in that channel, else ""."""
    name = _torch.op_name(target)
    if _torch.is_seeded_random(target) or name in RANDOM_HIGHER_ORDER:
        return "random"
    return "assert" if name.startswith(_CHECKS) else ""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Where frames of torch and of our own data parallelism come from.
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_PACKAGE, "simple_fsdp") + os.sep,
    os.path.join(_PACKAGE, "adoption") + os.sep,
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
