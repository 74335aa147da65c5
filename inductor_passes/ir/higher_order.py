"""Higher-order operators as the passes see them: the graphs and the operator that they run."""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch

PREFIX = "higher_order::"
#: Those that call an operator found among their arguments; its position.
WRAPPERS = {
    "higher_order::auto_functionalized": 0,
    "higher_order::auto_functionalized_v2": 0,
    "higher_order::run_and_save_rng_state": 0,
    "higher_order::graphsafe_run_with_rng_state": 0,
    "higher_order::run_with_rng_state": 1,
    "higher_order::with_effects": 1,
}
#: Those that copy what the operator writes to, and return the copies. Inductor may leave the copying out.
FUNCTIONALISED = frozenset({"higher_order::auto_functionalized", "higher_order::auto_functionalized_v2"})
#: Those that return what they were given when their body does not run at all.
MAY_RUN_NOTHING = frozenset({"higher_order::while_loop", "higher_order::while_loop_stack_output"})


def is_higher_order(node: torch.fx.Node) -> bool:
    """Whether a node calls a higher-order operator."""
    return node.op == "call_function" and _torch.op_name(node.target).startswith(PREFIX)


def wrapped(node: torch.fx.Node) -> object:
    """The operator that a wrapper calls, None for any other node."""
    position = WRAPPERS.get(_torch.op_name(node.target), len(node.args)) if node.op == "call_function" else 0
    return node.args[position] if is_higher_order(node) and position < len(node.args) else None


def wrapped_arguments(node: torch.fx.Node) -> dict[str, object]:
    """Arguments of the operator that a wrapper calls, by schema name."""
    target = wrapped(node)
    names = [a.name for a in _torch.op_schema(target).arguments] if _torch.is_op(target) else []
    positional = node.args[WRAPPERS[_torch.op_name(node.target)] + 1 :]
    return {**dict(zip(names, positional)), **{k: v for k, v in node.kwargs.items() if k in names}}


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
