"""Which memory a node reads and writes when it runs.

Stricter than the roles that passes plan with: what only *may* write (an unknown Python function, a functionalised
custom op that Inductor turns back into a mutation) counts as a write, what only may copy (``reshape``) as a read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role

#: Operators whose schema promises an alias but that copy when the strides ask for it.
MAY_COPY = frozenset(
    {
        "aten::reshape",
        "aten::reshape_as",
        "aten::contiguous",
        "aten::flatten",
        "aten::ravel",
        "aten::to",
        "aten::type_as",
    }
)
#: Functional operators that Inductor may turn into their in-place form once nobody reads the first argument any more.
REINPLACED = frozenset(
    {
        "aten::index_put",
        "aten::_unsafe_index_put",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_reduce_coalesced",
    }
)
_FUNCTIONALISED = frozenset({"higher_order::auto_functionalized", "higher_order::auto_functionalized_v2"})


def nodes_in(value: object) -> list[torch.fx.Node]:
    """All nodes inside an argument, in order, repeated as often as they occur."""
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in nodes_in(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in nodes_in(v)]
    if isinstance(value, slice):
        return [n for v in (value.start, value.stop, value.step) for n in nodes_in(v)]
    return []


def is_tensor(node: torch.fx.Node) -> bool:
    """Whether the node's value is, or holds, a tensor; unknown values count as tensors."""
    value = node.meta.get("val", node)
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value)
    return value is node or isinstance(value, (torch.Tensor, dict))


def reads(node: torch.fx.Node, role: Role) -> Iterable[torch.fx.Node]:
    """Operands whose memory the node touches. A view, ``getitem`` or size query touches none."""
    if role in (Role.INPUT, Role.OUTPUT, Role.WAIT):
        return ()
    if role is not Role.FREE:
        return node.all_input_nodes
    if _torch.op_name(node.target):
        return node.all_input_nodes if _torch.op_name(node.target) in MAY_COPY else ()
    if node.target is operator.getitem and not nodes_in(node.args[1]):
        source = node.args[0]
        holds_many = isinstance(source, torch.fx.Node) and isinstance(source.meta.get("val"), (list, tuple, dict))
        # getitem on a list picks an element; on a tensor it is a view unless the index is a list (gather)
        return () if holds_many or not isinstance(node.args[1], (list, tuple)) else node.all_input_nodes
    return [n for n in node.all_input_nodes if is_tensor(n)]


def writes(node: torch.fx.Node, role: Role) -> list[torch.fx.Node]:
    """Operands whose memory the node writes, or may write."""
    if node.op == "call_method":
        in_place = str(node.target).endswith("_") and not str(node.target).endswith("__")
        return nodes_in(node.args[0]) if in_place and node.args else []
    if node.op == "call_module":
        return list(node.all_input_nodes)
    if node.op != "call_function":
        return []
    written = ops.mutated_inputs(node)
    name = _torch.op_name(node.target)
    if name in _FUNCTIONALISED:
        return written + _functionalised_writes(node)
    if name.startswith("higher_order::"):
        bodies = ops.subgraphs(node) or []
        if any(_writes_its_inputs(body) for body in bodies):
            return list(node.all_input_nodes)
        return written
    if name:
        return written
    return _python_writes(node, role)


def reinplaced(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Operands that Inductor may write to although the operator does not, when nobody reads them later."""
    if node.op != "call_function":
        return []
    name = _torch.op_name(node.target)
    if name in REINPLACED:
        return nodes_in(next(iter(_torch.op_arguments(node).values()), None))
    if name == "higher_order::triton_kernel_wrapper_functional":
        return nodes_in(node.kwargs.get("kwargs"))
    return []


def _functionalised_writes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Arguments of the wrapped op that it mutates: Inductor writes to them in place when nobody reads them later."""
    wrapped = node.args[0] if node.args else None
    if "_all_bases" in node.kwargs:
        return nodes_in(node.kwargs["_all_bases"])
    if not _torch.is_op(wrapped):
        return list(node.all_input_nodes)
    return [n for name in _torch.mutated_argument_names(wrapped) for n in nodes_in(node.kwargs.get(name))]


def _python_writes(node: torch.fx.Node, role: Role) -> list[torch.fx.Node]:
    name = getattr(node.target, "__name__", "")
    module = getattr(node.target, "__module__", "") or ""
    if module in ("_operator", "operator"):
        # iadd, imul ... and setitem; not `index`, `inv`, `invert`, `is_`, `indexOf`, `itemgetter`
        in_place = name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
        plain = name in ("index", "inv", "invert", "is_", "is_not")
        return [n for n in nodes_in(node.args[:1]) if is_tensor(n)] if in_place and not plain else []
    return [n for n in node.all_input_nodes if is_tensor(n)] if role is Role.FENCE else []


def _writes_its_inputs(body: torch.fx.GraphModule) -> bool:
    """Whether a sub-graph writes to memory that it was given."""
    given = {n for n in body.graph.nodes if n.op == "placeholder"}
    for node in body.graph.nodes:
        role = ops.role(node)
        if any(n in given for n in writes(node, role)):
            return True
        if role is Role.FREE and any(n in given for n in node.all_input_nodes):
            given.add(node)
    return False
