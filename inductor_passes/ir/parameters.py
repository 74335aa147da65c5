"""What people call the tensors that collectives carry: names of parameters and paths of modules.

A gather carries a parameter when its input is an input of the graph that is one, a reduction when its result is an
output of the graph that is a parameter's gradient, with nothing between them but casts, copies, views and divisions.
Names are for people: no decision, digest or key depends on them, and where they are not known there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.memory import is_getitem, is_view, is_wait
from inductor_passes.ir.view import behind
from inductor_passes.report import Parameter

#: Where a start keeps what it carries. Plain data: graphs are copied, pickled and cached.
META_KEY = "inductor_passes_parameters"

#: Operators that change where a value lies, its dtype or its scale.
_CARRYING = frozenset(
    {
        "aten::_to_copy",
        "aten::clone",
        "aten::constant_pad_nd",
        "aten::contiguous",
        "aten::div",
        "aten::mul",
        "aten::reshape",
        "prims::convert_element_type",
    }
)
#: Operators that join what belongs to one parameter: a gradient's parts, a tensor's pieces.
_JOINING = frozenset({"aten::add", "aten::cat"})


class Carried(NamedTuple):
    """One parameter that a collective carries.

    Attributes:
        name: below the region's root, e.g. ``layers.0.attention.wq.weight``.
        module: the module that reads it there, e.g. ``layers.0.attention.wq``; "" is the root.
        region: class of the root: the module that was compiled.
        managed: whether the collective is one that data parallelism issues for this parameter.
    """

    name: str
    module: str = ""
    region: str = ""
    managed: bool = False


class Named(NamedTuple):
    """A parameter among the arguments of a graph.

    Attributes:
        name, region: see :class:`Carried`.
        root: what the module paths of nodes begin with, e.g. ``L['self']``.
        ranks: the global ranks that share it by data parallelism; none where it is not managed.
    """

    name: str
    region: str = ""
    root: str = ""
    ranks: frozenset[int] = frozenset()


def carried(start: torch.fx.Node) -> tuple[Carried, ...]:
    """The parameters that a start carries, in the order of the message; those without a name left out."""
    found: tuple[Carried, ...] = start.meta.get(META_KEY, ())
    return found


def names_of(starts: Iterable[torch.fx.Node]) -> tuple[str, ...]:
    """Names of the parameters that some starts carry, each once."""
    return tuple(dict.fromkeys(one.name for start in starts for one in carried(start)))


def reported(starts: Iterable[torch.fx.Node]) -> tuple[Parameter, ...]:
    """What some starts carry, for reports."""
    return tuple(dict.fromkeys(Parameter(one.name, one.module) for start in starts for one in carried(start)))


def names_at(node: torch.fx.Node) -> tuple[str, ...]:
    """Names of the parameters that a start carries, or that a wait or a view of a result in flight waits for."""
    found: torch.fx.Node | None = node
    while found is not None and not carried(found):
        near = found.all_input_nodes
        onward = len(near) == 1 and (is_wait(found) or is_getitem(found))
        found = near[0] if onward else None
    return () if found is None or ops.role(found) is not ops.Role.START else names_of([found])


def names_by_node(graph: torch.fx.Graph) -> dict[str, tuple[str, ...]]:
    """Start or wait -> names of the parameters that it carries."""
    near = [node for node in graph.nodes if META_KEY in node.meta or is_wait(node) or is_getitem(node)]
    return {node.name: names for node in near if (names := names_at(node))}


def region_of(nodes: Iterable[torch.fx.Node]) -> str:
    """Class of the module that the names of parameters are relative to; "" when there are none."""
    return next((one.region for node in nodes for one in carried(node) if one.region), "")


def is_managed(start: torch.fx.Node) -> bool:
    """Whether data parallelism issues the collective for parameters that it manages, and for nothing else."""
    found = carried(start)
    return bool(found) and all(one.managed for one in found)


def note_merged(started: torch.fx.Node, starts: Sequence[torch.fx.Node]) -> None:
    """Enter in a start what the starts that it stands for carried."""
    found = tuple(dict.fromkeys(one for start in starts for one in carried(start)))
    if found:
        started.meta[META_KEY] = found


def note_parameters(graph: torch.fx.Graph, parameters: Mapping[Any, Named]) -> None:
    """Enter in the graph's starts which parameters they carry; those that know already are left alone.

    O(nodes + edges): what a chain of views leads to is found once.

    Args:
        parameters: by the argument that the descriptions of inputs and outputs name.
    """
    if not parameters:
        return
    gathered: dict[torch.fx.Node, Named] = {
        node: parameters[key] for node, key in _torch.argument_inputs(graph) if key in parameters
    }
    found: dict[torch.fx.Node, dict[Named, None]] = {}
    for node in graph.nodes:
        operands = _operands(node)
        if ops.role(node) is ops.Role.START:
            found[node] = {gathered[one]: None for one in operands if one in gathered}
        distinct = {gathered.get(one) for one in operands}
        named = distinct.pop() if len(distinct) == 1 else None
        if named is not None:
            gathered[node] = named
    reduced: dict[torch.fx.Node, dict[Named, None]] = {}
    for value, key in _torch.argument_gradients(graph):
        if key in parameters:
            reduced.setdefault(value, {})[parameters[key]] = None
    for node in reversed(graph.nodes):
        names = reduced.get(node)
        if names is None:
            continue
        if node in found:
            found[node] |= names
        operands = _operands(node)
        # A call with a list of tensors: which is whose, its results say only by number.
        for one in operands if len(operands) == 1 or node not in found else ():
            reduced.setdefault(one, {}).update(names)
    for node, names in found.items():
        if names and META_KEY not in node.meta:
            node.meta[META_KEY] = tuple(_carried(node, named) for named in names)


def _operands(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """What a node passes on; nothing when it computes anything."""
    if node.op != "call_function":
        return ()
    operands = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), (torch.Tensor, list, tuple))]
    name = _torch.op_name(node.target)
    if name in _JOINING or ops.role(node) is ops.Role.START:
        return operands
    if len(operands) == 1 and (name in _CARRYING or is_wait(node) or is_getitem(node) or is_view(node)):
        return operands
    return ()


def _carried(start: torch.fx.Node, named: Named) -> Carried:
    path = _torch.module_path(start)
    module = named.name.rpartition(".")[0]
    if named.root and (path == named.root or path.startswith(f"{named.root}.")):
        module = path[len(named.root) + 1 :]
    arguments = _torch.op_arguments(start)
    group = resolve(behind(arguments.get("group_name", arguments.get("group", ""))))
    managed = bool(group.ranks) and named.ranks.issuperset(group.ranks)
    return Carried(named.name, module, named.region, managed)
