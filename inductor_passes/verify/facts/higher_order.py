"""Higher-order operators, by what they run: bodies, or an operator found among their arguments.

Of a body it is found out whether it communicates, draws random numbers, asserts, and writes to its arguments or returns
them. What cannot be inspected (an operator of an unknown name, a body that is no graph) has unknown effects.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch

_PREFIX = "higher_order::"
#: Those that do what their bodies do.
_BODIES = frozenset(
    {
        *("cond", "switch", "while_loop", "while_loop_stack_output", "scan", "map_impl", "associative_scan"),
        *("invoke_subgraph", "checkpoint", "tag_activation_checkpoint", "wrap"),
        *("flex_attention", "flex_attention_backward"),
    }
)
#: Those that call an operator: position of the operator among the arguments. Its own arguments follow.
_CALLS = {
    "auto_functionalized": 0,
    "auto_functionalized_v2": 0,
    "run_and_save_rng_state": 0,
    "graphsafe_run_with_rng_state": 0,
    "run_with_rng_state": 1,
    "with_effects": 1,
}
#: Those that return what they were given when their body never runs.
_LOOPS = frozenset({"while_loop", "while_loop_stack_output"})
_KERNELS = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})


@dataclass
class Inside:
    """What happens in the graphs that a node runs.

    Attributes:
        opaque: one of them communicates, has unknown effects or cannot be looked into.
        channels: of effects in them.
        writes, returns: whether one writes to memory that it was given, may return it.
    """

    opaque: bool = False
    channels: set[str] = field(default_factory=set)
    writes: bool = False
    returns: bool = False


def name_of(node: torch.fx.Node) -> str:
    """Name of the higher-order operator that a node calls, "" for anything else."""
    name = _torch.op_name(node.target) if node.op == "call_function" else ""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""


def is_known(name: str) -> bool:
    """Whether we know what a higher-order operator runs."""
    return name in _BODIES or name in _CALLS or name in _KERNELS


def is_kernel(name: str) -> bool:
    """Whether it launches a Triton kernel of the user's."""
    return name in _KERNELS


def is_functionalised(name: str) -> bool:
    """Whether it calls an operator on copies of what that writes to, a copying that Inductor may leave out."""
    return name.startswith("auto_functionalized")


def is_loop(name: str) -> bool:
    """Whether its results may be what it was given because its body never ran."""
    return name in _LOOPS


def called(node: torch.fx.Node, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """(operator, args, kwargs) that a node calls, None when it calls none or something else than an operator."""
    position = _CALLS.get(name)
    if position is None or position >= len(node.args) or not _torch.is_op(node.args[position]):
        return None
    target = node.args[position]
    names = {argument.name for argument in _torch.op_schema(target).arguments}
    kwargs = {key: value for key, value in node.kwargs.items() if key in names}
    return target, tuple(node.args[position + 1 :]), kwargs


def calls_something(name: str) -> bool:
    """Whether a node with this operator calls an operator."""
    return name in _CALLS


def bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule] | None:
    """The graphs among a node's arguments, in order; None when something there runs and is no graph."""
    found: dict[int, torch.fx.GraphModule] = {}
    for value in _leaves((node.args, node.kwargs)):
        if isinstance(value, torch.fx.Node) and value.op == "get_attr":
            held = attribute(value)
            if held is None:
                return None
            value = held
        if isinstance(value, torch.fx.GraphModule):
            found[id(value)] = value
        elif isinstance(value, (torch.nn.Module, types.FunctionType, types.MethodType)):
            return None
    return list(found.values())


def attribute(node: torch.fx.Node) -> Any:
    """What a ``get_attr`` node stands for; None when the graph's module does not hold it."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]
