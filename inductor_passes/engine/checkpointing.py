"""Mends two things that torch's partitioners leave wrong where activation checkpointing runs random operators again.

Attention on a CPU counts as random, too. torch saves the state of the random generator in forward and wraps the
operators of both graphs.

- torch 2.12 and 2.13 put the state behind the opaque values, where the runtime expects no tensor: "expected all
  tensors_saved_with_vc_check to be Tensors". Parameters that are DTensors bring such a value with them, their mesh. So
  checkpointing would fail with simple_fsdp and with tensor parallelism. Where the order is right nothing is changed.
  Where it is wrong the compiled forward cannot run without :func:`put_right`.
- The wrapped operators have no example value, so that what reads them would count as unknown.
"""

from __future__ import annotations

import itertools

import torch.fx

from inductor_passes import _torch
from inductor_passes.engine.backup import Backup
from inductor_passes.ir import ops


def put_right(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> bool:
    """Move opaque values behind all tensors: in forward's outputs and, likewise, in backward's inputs.

    After an error both graphs are as they were.

    Args:
        outputs: how many results of ``forward`` are not saved values.

    Returns:
        Whether anything was wrong.

    Raises:
        ValueError: backward's inputs are not what forward saves.
    """
    saved = list(_result(forward).args[0])[outputs:]  # type: ignore[arg-type]
    kinds = [_torch.saved_kind(value) for value in saved]
    wrong = any(a is _torch.Saved.OPAQUE and b < a for a, b in itertools.pairwise(kinds))
    if not wrong or not _torch.takes_opaque_before_symbols():
        return False
    order = sorted(range(len(saved)), key=kinds.__getitem__)
    inputs = _inputs(backward, kinds)
    backups = Backup(forward.graph), Backup(backward.graph)
    try:
        _reorder(forward, backward, outputs, order, inputs)
    except Exception:
        for backup in backups:
            backup.restore()
        raise
    finally:
        for module in (forward, backward):
            module.recompile()
    return True


def describe(graph: torch.fx.Graph) -> None:
    """Give wrapped random operators the example values of their results."""
    for node in graph.nodes:
        if "val" not in node.meta and _torch.op_name(node.target) in ops.RANDOM_HIGHER_ORDER:
            node.meta["val"] = _torch.example_result(node)


def unwrap(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> int:
    """Take the generator's state away from operators that run again and draw nothing: attention without dropout.

    The state is a saved value of symbolic size, and makes both graphs wait for their place among random operators.
    After an error both graphs are as they were.

    Args:
        outputs: how many results of ``forward`` are not saved values.

    Returns:
        How many operators were unwrapped in forward.

    Raises:
        ValueError: backward's inputs are not what forward saves.
    """
    backups = Backup(forward.graph), Backup(backward.graph)
    try:
        states = _unwrapped(forward.graph, "higher_order::run_and_save_rng_state", 1)
        if states:
            result = _result(forward)
            everything = list(result.args[0])  # type: ignore[arg-type]
            saved = everything[outputs:]
            inputs = _inputs(backward, [_torch.saved_kind(value) for value in saved])
            taken = {number: inputs[number] for number, value in enumerate(saved) if value in states}
            result.args = ((*everything[:outputs], *(v for n, v in enumerate(saved) if n not in taken)),)
            for state in states:
                whole = state.all_input_nodes[0]
                forward.graph.erase_node(state)
                forward.graph.erase_node(whole)
            _unwrapped(backward.graph, "higher_order::run_with_rng_state", 2)
            for node in taken.values():
                backward.graph.erase_node(node)
    except Exception:
        for backup in backups:
            backup.restore()
        raise
    finally:
        for module in (forward, backward):
            module.recompile()
    return len(states)


def _unwrapped(graph: torch.fx.Graph, wrapper: str, leading: int) -> list[torch.fx.Node]:
    """Replace the results of wrapped operators that draw nothing; the nodes that hold the states, in forward.

    Args:
        leading: number of the wrapper's arguments up to the operator, with it.
    """
    states = []
    for node in list(graph.nodes):
        if _torch.op_name(node.target) != wrapper:
            continue
        called, given = node.args[leading - 1], node.args[leading:]
        with graph.inserting_before(node):
            plain = graph.create_node("call_function", called, given, dict(node.kwargs))
        if not ops.draws_nothing(plain):
            graph.erase_node(plain)
        elif leading == 1:
            # (state, results)
            held, results = ([u for u in node.users if u.args[1] == k] for k in (0, 1))
            for one in results:
                plain.meta = dict(one.meta)
                one.replace_all_uses_with(plain)
                graph.erase_node(one)
            states += held
        else:
            plain.meta = dict(node.meta)
            node.replace_all_uses_with(plain)
            graph.erase_node(node)
    return states


def _result(module: torch.fx.GraphModule) -> torch.fx.Node:
    return next(node for node in reversed(module.graph.nodes) if node.op == "output")


def _inputs(backward: torch.fx.GraphModule, kinds: list[_torch.Saved]) -> dict[int, torch.fx.Node]:
    """Number of a saved value -> backward's input for it, symbols left out: they come first and stay there."""
    inputs = backward.graph.find_nodes(op="placeholder")
    symbols = kinds.count(_torch.Saved.SYMBOL)
    others = [number for number, kind in enumerate(kinds) if kind is not _torch.Saved.SYMBOL]
    mine = inputs[symbols : len(kinds)]
    matching = len(mine) == len(others) and all(
        (kinds[number] is _torch.Saved.OPAQUE) == (_torch.saved_kind(node) is _torch.Saved.OPAQUE)
        for number, node in zip(others, mine)
    )
    if not matching or any(_torch.saved_kind(node) is not _torch.Saved.SYMBOL for node in inputs[:symbols]):
        raise ValueError("the backward graph's inputs are not what the forward graph saves")
    return dict(zip(others, mine))


def _reorder(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    outputs: int,
    order: list[int],
    inputs: dict[int, torch.fx.Node],
) -> None:
    result = _result(forward)
    everything = tuple(result.args[0])  # type: ignore[arg-type]
    result.args = ((*everything[:outputs], *(everything[outputs + number] for number in order)),)
    # No input moves behind one of its readers: all take places from the first one's on.
    last = next(iter(inputs.values())).prev
    for number in order:
        if number in inputs:
            last.append(inputs[number])
            last = inputs[number]
