"""What torch's own pass fuses in a graph, with its gate held open: for comparison only."""

from __future__ import annotations

import logging
from unittest import mock

import torch
import torch.fx


def in_tree_fused(gm: torch.fx.GraphModule) -> str:
    """``"1 of 2"`` collectives of the graph fused by ``micro_pipeline_tp``, or ``raises <error>``.

    The graph is left as it is. Nothing is run: the fused operators need CUDA.
    """
    from torch._inductor.fx_passes import micro_pipeline_tp

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    owner = torch.fx.GraphModule(gm, graph)
    graph = owner.graph
    total = _count(graph, names)
    logging.getLogger(micro_pipeline_tp.__name__).setLevel(logging.ERROR)
    with (
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
        torch._inductor.config.patch(_micro_pipeline_tp=True),
    ):
        try:
            micro_pipeline_tp.micro_pipeline_tp_pass(graph)
        except Exception as error:
            return f"raises {type(error).__name__}"
    graph.eliminate_dead_code()
    return f"{_count(graph, ('fused_',))} of {total}"


def _count(graph: torch.fx.Graph, names: tuple[str, ...]) -> int:
    return sum(
        isinstance(n.target, torch._ops.OpOverload) and n.target._opname.startswith(names) for n in graph.nodes
    )


