"""Says once why nothing is planned: graphs are compiled, ranks communicate, and no collective is in a graph.

The line is a warning on rank 0, an artifact in every rank's trace and a part of ``inductor_passes.explain``. What
wraps the model (FSDP2, DDP) is told with the first graph. That nothing distributed was found is told with the first
backward or inference graph: the collectives of a training step may all be in backward.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.compilation import graph_index, phase_of
from inductor_passes.engine.complain import warn_once
from inductor_passes.report import GraphReport, NothingPlanned
from inductor_passes.simple_fsdp.apply import applications
from inductor_passes.trace import nothing

#: Where a graph module carries the statement for the generated code.
META_KEY = "inductor_passes_nothing"

_HEAD = "nothing to plan, no collective is in the compiled graphs: "
_IN_HOOKS = (
    "{} runs its collectives in hooks, outside of compiled graphs. "
    "After wrapping and before torch.compile, add: model = inductor_passes.adopt(model)"
)
_LINES = {
    NothingPlanned.FSDP2: _HEAD + _IN_HOOKS.format("FSDP2 (fully_shard)"),
    NothingPlanned.DDP: _HEAD
    + _IN_HOOKS.format("DDP (DistributedDataParallel)")
    + ". It takes no communication hook (register_comm_hook): the setting compress narrows messages instead",
    NothingPlanned.REPLICATE: _HEAD + _IN_HOOKS.format("replicate"),
    NothingPlanned.FSDP1: _HEAD
    + "FSDP1 (FullyShardedDataParallel) runs its collectives in hooks and is not supported. Use fully_shard and "
    "inductor_passes.adopt(model), or inductor_passes.simple_fsdp",
    NothingPlanned.GRAPH_BREAKS: _HEAD
    + "nothing distributed was found in them, and there were graph breaks. A collective at a graph break runs outside "
    "of compiled graphs; TORCH_LOGS=graph_breaks shows where they are",
    NothingPlanned.NOTHING_DISTRIBUTED: _HEAD
    + "nothing distributed was found in them. That is right for a function that does not communicate; a model is "
    "sharded with fully_shard and inductor_passes.adopt(model), inductor_passes.simple_fsdp or DTensor",
    NothingPlanned.MANAGED: "nothing to plan, no collective is in the graphs that were compiled so far. A model is "
    "managed by inductor_passes.adopt or simple_fsdp, but these graphs read none of its shards and reduce none of its "
    "gradients: they are of another function, of ddp.module, of an evaluation of DDP, or of batches whose gradients "
    "are held (no_sync), which are reduced after backward",
    NothingPlanned.ONE_RANK: "nothing to plan: there was one rank when the graphs were compiled. With several, "
    "initialise the process group before the first compilation",
    NothingPlanned.LEFT_TO_INDUCTOR: "nothing was planned: Inductor's own communication passes were on, and "
    'in_tree_passes="warn" leaves graphs to them',
}

#: What may be right, or was said elsewhere.
_NOT_WARNED = (NothingPlanned.MANAGED, NothingPlanned.ONE_RANK, NothingPlanned.LEFT_TO_INDUCTOR)


def left_alone(graph: torch.fx.Graph, is_inference: bool, settings: PassConfig, collectives: bool) -> None:
    """A graph was not planned: say why, unless that is known, and leave it with the graph for the compile cache.

    Args:
        collectives: whether it has some; then it was left to Inductor's own passes.
    """
    with guarded("saying why nothing is planned", "it is not said", settings):
        phase = phase_of(graph, is_inference)
        if not collectives and _torch.rank_and_world_size()[1] > 1 and graph.owning_module is not None:
            graph.owning_module.meta[META_KEY] = _statement(phase, graph_index())
        _say(phase, graph_index(), collectives)


def state() -> None:
    """Write what was left with the graph that is being lowered into its generated code."""
    module: Any = _torch.current_graph_module()
    text = None if module is None else module.meta.pop(META_KEY, None)
    if text is not None and _torch.generates_python():
        _torch.add_module_statement(text)


def _statement(phase: str, index: int) -> str:
    return f"__import__({__name__!r}, fromlist=['loaded']).loaded({phase!r}, {index})"


def loaded(phase: str, index: int) -> None:
    """Called by a generated module of a graph without collectives while it is loaded; on a warm cache no pass runs."""
    with guarded("saying why nothing is planned", "it is not said"):
        _say(phase, index)


def _say(phase: str, index: int, collectives: bool = False) -> None:
    if nothing.is_settled():
        return
    rank, world = _torch.rank_and_world_size()
    reason = NothingPlanned.LEFT_TO_INDUCTOR if collectives else _reason(phase, world)
    if reason is None:
        return
    about = GraphReport(phase, index, _torch.compile_id(), rank, world)
    new = nothing.say(about, reason, _LINES[reason])
    if new and rank == 0 and reason not in _NOT_WARNED:
        warn_once(f"inductor_passes: {_LINES[reason]}")


def _reason(phase: str, world: int) -> NothingPlanned | None:
    """None where a later graph may still have collectives."""
    if world == 1:
        return NothingPlanned.ONE_RANK
    wrapper = _torch.wrapper_being_called()
    if wrapper:
        return NothingPlanned(wrapper)
    if phase == "forward":
        return None
    if _torch.graph_breaks():
        return NothingPlanned.GRAPH_BREAKS
    return NothingPlanned.MANAGED if applications() else NothingPlanned.NOTHING_DISTRIBUTED
