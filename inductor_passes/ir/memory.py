"""Which memory a node writes to, and whose memory its results may be: by schemas, for what has one.

What has none (a Python function on tensors, a method, a module, a higher-order op that we do not know) may write to
everything that it is given, and its results may be that memory or their own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import higher_order
from inductor_passes.operators import REINPLACED, TRANSFERS, WAITS

#: Higher-order operators of which we know what they do to memory.
KNOWN_HIGHER_ORDER = frozenset(
    {
        *("cond", "while_loop", "while_loop_stack_output", "switch", "scan", "map_impl", "associative_scan"),
        *("invoke_subgraph", "checkpoint", "tag_activation_checkpoint", "wrap"),
        *("flex_attention", "flex_attention_backward"),
        *("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"),
        *(name.removeprefix(higher_order.PREFIX) for name in higher_order.WRAPPERS),
    }
)
#: Operators after which an argument has other memory: that of another argument, or of another size.
REBINDING = frozenset({"aten::set_", "aten::set_data", "inductor::resize_storage_bytes_"})
#: Operators that copy when the strides ask for it, whatever their schema promises.
MAY_COPY: frozenset[str] = frozenset(
    {
        *("aten::reshape", "aten::reshape_as", "aten::contiguous", "aten::flatten", "aten::ravel", "aten::to"),
    }
)


@dataclass(frozen=True)
class Sources:
    """Whose memory the results of a node may be.

    Attributes:
        each: per return of the operator the nodes whose memory it may be; None when one list is for all of the results.
        all: that list.
        own: whether a result with sources may have memory of its own as well.
    """

    each: tuple[tuple[torch.fx.Node, ...], ...] | None
    all: tuple[torch.fx.Node, ...] = ()
    own: bool = False


def nodes_in(value: object) -> list[torch.fx.Node]:
    """All nodes inside an argument, in order, as often as they occur."""
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in nodes_in(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in nodes_in(v)]
    return []


def is_transfer(node: torch.fx.Node) -> bool:
    """Whether a node sends to or receives from a single rank."""
    return node.op == "call_function" and _torch.op_name(node.target) in TRANSFERS


def is_wait(node: torch.fx.Node) -> bool:
    """Whether the node waits for one or several collectives."""
    return node.op == "call_function" and _torch.op_name(node.target) in WAITS


def received_into(node: torch.fx.Node) -> list[torch.fx.Node | None]:
    """Per result of a transfer the buffer that it receives into and returns (its schema does not say so), else None."""
    arguments = _torch.op_arguments(node)
    if _torch.op_name(node.target).endswith("::batch_p2p_ops"):
        rows = zip(arguments["op_list"], arguments["tensors"])
        return [tensor if "recv" in str(op) else None for op, tensor in rows]
    return [arguments["tensor"] if _torch.op_name(node.target).endswith("::irecv") else None]


def is_unknown(node: torch.fx.Node) -> bool:
    """Whether nothing says what a node does to memory."""
    if node.op in ("call_method", "call_module"):
        return True
    if node.op != "call_function":
        return False
    if _torch.is_op(node.target):
        return _torch.memory_use(node.target) is None
    name = _torch.op_name(node.target)
    if name:
        return name.removeprefix(higher_order.PREFIX) not in KNOWN_HIGHER_ORDER
    return not is_getitem(node) and any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def is_getitem(node: torch.fx.Node) -> bool:
    """Whether a node takes an element out of several results; an index into a tensor is something else."""
    if node.op != "call_function" or node.target is not operator.getitem or len(node.args) != 2:
        return False
    source = node.args[0]
    return isinstance(source, torch.fx.Node) and not isinstance(source.meta.get("val"), torch.Tensor)


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node returns memory of one of its inputs and writes nothing."""
    return _torch.is_op(node.target) and is_view_op(node.target)


def is_view_op(target: object) -> bool:
    """Whether every result of an operator overload is memory of its inputs, and it writes nothing."""
    use = _torch.memory_use(target)
    return use is not None and use.views


def may_copy(node: torch.fx.Node) -> bool:
    """Whether a view may turn out to be a copy, and so reads what it views."""
    return node.op == "call_function" and _torch.op_name(node.target) in MAY_COPY


@functools.lru_cache(maxsize=4096)
def makes_one_result(target: object) -> bool:
    """Whether a call makes one result in memory of its own and writes to nothing, by the operator's schema."""
    if not _torch.is_op(target) or _torch.op_name(target) in TRANSFERS | WAITS | REBINDING:
        return False
    use = _torch.memory_use(target)
    return use is not None and not use.written and use.results == ((),)


@functools.lru_cache(maxsize=4096)
def views_its_first(target: object) -> bool:
    """Whether a call returns the memory of its first argument and writes to nothing, by the operator's schema."""
    if not _torch.is_op(target) or _torch.op_name(target) in TRANSFERS | WAITS | REBINDING:
        return False
    use = _torch.memory_use(target)
    first = _torch.argument_names(target)[:1]
    return use is not None and not use.written and bool(first) and use.results == (first,)


def mutated_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes whose memory the node writes to: by schema, by its body, and what receives; everything for the unknown."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if is_transfer(node):
        return [buffer for buffer in received_into(node) if buffer is not None]
    if is_unknown(node):
        return list(node.all_input_nodes)
    if _torch.is_op(node.target):
        return _of_arguments(_torch.op_arguments(node), _torch.mutated_argument_names(node.target))
    if not higher_order.is_higher_order(node):
        return []
    name = _torch.op_name(node.target)
    if name == "higher_order::triton_kernel_wrapper_mutation":
        # Which arguments the kernel writes is not in the graph: all of its tensors count.
        return nodes_in(node.kwargs.get("kwargs"))
    if name in higher_order.WRAPPERS:
        target = higher_order.wrapped(node)
        if name in higher_order.FUNCTIONALISED or not _torch.is_op(target):
            return []
        return _of_arguments(higher_order.wrapped_arguments(node), _torch.mutated_argument_names(target))
    bodies = higher_order.subgraphs(node)
    return list(node.all_input_nodes) if bodies is None or any(map(_writes_its_inputs, bodies)) else []


def result_sources(node: torch.fx.Node) -> Sources:
    """Whose memory the results of a ``call_*`` node may be; transfers, waits and ``getitem`` are not asked."""
    nothing = Sources(None)
    if is_unknown(node):
        return Sources(None, tuple(node.all_input_nodes), own=True)
    if _torch.is_op(node.target):
        return _by_schema(node.target, _torch.op_arguments(node))
    if not higher_order.is_higher_order(node):
        return nothing
    name = _torch.op_name(node.target)
    target = higher_order.wrapped(node)
    if name in higher_order.WRAPPERS:
        if name in higher_order.FUNCTIONALISED or not _torch.is_op(target):
            return nothing
        sources = _by_schema(target, higher_order.wrapped_arguments(node))
        # What comes beside the operator's results (a token, a state) has memory of its own.
        return Sources(None, tuple(dict.fromkeys(n for nodes in sources.each or () for n in nodes)), own=True)
    bodies = higher_order.subgraphs(node)
    if name in higher_order.MAY_RUN_NOTHING or bodies is None or any(map(_returns_its_inputs, bodies)):
        return Sources(None, tuple(node.all_input_nodes), own=True)
    return nothing


def _by_schema(target: object, arguments: dict[str, object]) -> Sources:
    use = _torch.memory_use(target)
    assert use is not None
    return Sources(tuple(tuple(_of_arguments(arguments, names)) for names in use.results))


def _of_arguments(arguments: dict[str, object], names: Iterable[str]) -> list[torch.fx.Node]:
    return [n for name in names for n in nodes_in(arguments.get(name))]


def _inside(body: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Nodes of a graph that may hold memory that it was given."""
    given: set[torch.fx.Node] = set()
    for node in body.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            given.add(node)
        elif node.op != "output":
            sources = result_sources(node) if not is_getitem(node) else Sources(None, tuple(node.all_input_nodes))
            if is_wait(node) or is_transfer(node):
                sources = Sources(None, tuple(node.all_input_nodes))
            if any(n in given for nodes in (sources.each or (), (sources.all,)) for one in nodes for n in one):
                given.add(node)
    return given


def _writes_its_inputs(body: torch.fx.GraphModule) -> bool:
    """Whether a graph writes to memory that it was given."""
    given = _inside(body)
    return any(written in given for node in body.graph.nodes for written in mutated_inputs(node))


def _returns_its_inputs(body: torch.fx.GraphModule) -> bool:
    """Whether a graph may return memory that it was given."""
    given = _inside(body)
    return any(n in given for node in body.graph.nodes if node.op == "output" for n in node.all_input_nodes)


#: Functional operators that Inductor turns into their in-place form when nobody reads the first argument any more.
_REINPLACED = REINPLACED | {"aten::index_put", "aten::_unsafe_index_put"}


def possibly_mutated_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes whose memory Inductor may let a functional node write to, when it is their last use."""
    if node.op != "call_function":
        return []
    name = _torch.op_name(node.target)
    if name in _REINPLACED:
        return nodes_in(next(iter(_torch.op_arguments(node).values()), None))
    if name == "higher_order::triton_kernel_wrapper_functional" or name in higher_order.FUNCTIONALISED:
        return list(node.all_input_nodes)
    return []
