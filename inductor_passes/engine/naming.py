"""Gives collectives the names of the parameters that they carry, for reports, traces, plan files and findings.

The joint graph gets them: forward and backward take them over. So does every graph that is compiled without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch.fx

from inductor_passes import _torch
from inductor_passes.engine.barrier import Settings, guarded
from inductor_passes.ir import parameters
from inductor_passes.ir.parameters import Named
from inductor_passes.report import NOTHING, Decision, GraphReport, PassReport, Reason
from inductor_passes.simple_fsdp.access import managed_parameters, own_class


def note(graph: torch.fx.Graph, settings: Settings) -> None:
    """Enter the names in a graph; without any where something is not as expected."""
    with guarded("naming the parameters of collectives", "they have no names", settings):
        parameters.note_parameters(graph, _named(graph))


def names(graph: torch.fx.Graph, settings: Settings) -> dict[str, tuple[str, ...]]:
    """Start or wait -> names of the parameters that it carries."""
    found: dict[str, tuple[str, ...]] = {}
    with guarded("naming the parameters of collectives", "they have no names", settings):
        found = parameters.names_by_node(graph)
    return found


def enter(
    report: GraphReport, graph: torch.fx.Graph, before: Mapping[str, tuple[str, ...]], settings: Settings
) -> None:
    """Enter the names in a graph's report.

    Args:
        graph: as the passes left it.
        before: :func:`names` of the graph that came in.
    """
    with guarded("naming the parameters of collectives", "they have no names", settings):
        report.region = parameters.region_of(graph.nodes)
        report.passes = decided(report.passes, {**before, **parameters.names_by_node(graph)})


def decided(passes: Sequence[PassReport], names: Mapping[str, tuple[str, ...]]) -> list[PassReport]:
    """The reports with the names of the parameters that decisions are about, and with what would change them.

    Entered at the end: what passes decide, and what ranks compare, knows no names.

    Args:
        names: by node.
    """

    def completed(one: Decision) -> Decision:
        found = one.parameters or names.get(one.node, ())
        # No setting was named: the costs themselves say no.
        setting = one.setting or (NOTHING if one.reason is Reason.NOT_PROFITABLE else "")
        if (found, setting) == (one.parameters, one.setting):
            return one
        return dataclasses.replace(one, parameters=found, setting=setting)

    return [dataclasses.replace(one, decisions=[completed(d) for d in one.decisions]) for one in passes]


def _named(graph: torch.fx.Graph) -> Mapping[_torch.Key, Named]:
    """The parameters among the arguments of the graph that is being compiled."""
    known = _torch.parameter_sources()
    if not known:
        return {}
    sources: dict[_torch.Key, _torch.Source] = {}
    for node, key in _torch.argument_inputs(graph):
        source = known.get(key)
        if source is None:
            continue
        if source.shape is not None and source.shape != _shape(node, source.shape):
            # Arguments are counted in another way than dynamo counts them: its graph was cut in pieces.
            return {}
        sources[key] = source
    several = len({source.root for source in sources.values()}) > 1
    return {key: _name(source, several) for key, source in sources.items()}


def _shape(node: torch.fx.Node, expected: tuple[int, ...]) -> tuple[int, ...]:
    """An input's shape; what is expected where it is not constant (comparing it would be a guard)."""
    shape = node.meta["val"].shape
    return tuple(shape) if all(type(size) is int for size in shape) else expected


def _name(source: _torch.Source, several: bool) -> Named:
    # Two modules in one function: which one it is belongs to the name.
    path = (source.variable, *source.path) if several else source.path
    owner, region = source.owner, "" if source.module is None else own_class(source.module).__name__
    managed = () if owner is None else managed_parameters(owner)
    ranks = next((one.reader.ranks for one in managed if one.name == source.path[-1]), ())
    return Named(".".join(path), region, source.root, frozenset(ranks))
