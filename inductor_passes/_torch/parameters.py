"""Which parameters a graph's inputs are, and which outputs are their gradients.

AOTAutograd describes the inputs and outputs of its graphs (``meta["desc"]``): an input is a part of argument number k
of dynamo's graph, an output its gradient. Where argument k came from, dynamo knows while it compiles. A graph that
dynamo did not make, a backward that is compiled later and a torch without descriptors have no sources.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from inductor_passes._torch.tracing import compilation

#: An argument's number in dynamo's graph, or the name of an attribute of the module that AOTAutograd got.
Key = int | str

#: One step of a source's name: ``._modules['layers']``, ``.weight``, ``['a']``, ``[0]``.
_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\.(\w+)|\['([^']*)'\]|\[(\d+)\]")
#: Where an attribute of a module begins.
_MEMBER = re.compile(r"\._(?:modules|parameters)\['")
#: By the compilation that a graph and its specialised forms are part of. Modules end when nobody else has them.
_of_compilation: weakref.WeakKeyDictionary[
    Any, Mapping[Key, tuple[Source, weakref.ref[torch.nn.Module] | None]]
] = weakref.WeakKeyDictionary()
#: Where dynamo keeps the modules that a node was traced in; of a backward node's forward one, too.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
#: How dynamo writes an attribute whose name is no identifier.
_GETATTR = re.compile(r"getattr\(([^()]*), '([^']*)'\)")
#: A variable of the compiled function, or of its file.
_VARIABLE = re.compile(r"([LG])\['([^']*)'\]")


@dataclass(frozen=True)
class Source:
    """Where an argument of dynamo's graph comes from.

    Attributes:
        path: names of the modules on the way, and the attribute, e.g. ``("layers", "0", "weight")``.
        root: the object that the path begins at, as dynamo writes it, e.g. ``L['self']``.
        module: the module that the path begins at, None where it was not found.
        shape: of this rank's part, None where it is not known or not a constant.
    """

    path: tuple[str, ...]
    root: str
    module: torch.nn.Module | None = field(compare=False)
    shape: tuple[int, ...] | None

    @property
    def variable(self) -> str:
        """The variable that holds the root, e.g. ``self``; how dynamo writes it where it is no plain variable."""
        found = _VARIABLE.fullmatch(self.root)
        return found[2] if found else self.root

    @property
    def owner(self) -> torch.nn.Module | None:
        """The module that holds the attribute, None where it was not found."""
        found: Any = self.module
        for name in self.path[:-1]:
            found = getattr(found, "_modules", {}).get(name)
        return found if isinstance(found, torch.nn.Module) else None


def parameter_sources() -> Mapping[Key, Source]:
    """The parameters among the arguments of the graph that is compiled now; empty where dynamo did not make it."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
    except (ImportError, AttributeError):
        return _specialised()
    scopes = {"L": getattr(output, "local_scope", {}), "G": getattr(output, "global_scope", {})}
    found: dict[Key, Source] = {}
    placeholders = (node for node in output.graph.nodes if node.op == "placeholder")
    for number, node in enumerate(placeholders):
        source = _source(getattr(node, "_dynamo_source", None), scopes, node.meta.get("example_value"))
        if source is not None:
            found[number] = source
    for name, given in (getattr(output, "param_name_to_source", None) or {}).items():
        source = _source(given, scopes, None)
        if source is not None:
            found[name] = source
    _remember(found)
    return found


def _remember(sources: Mapping[Key, Source]) -> None:
    """Keep them for graphs that are compiled when a size of ``specialize_on`` is met: dynamo is over by then."""
    running = compilation()
    shapes = getattr(getattr(running, "fake_mode", None), "shape_env", None)
    if getattr(shapes, "specializations", None):
        _of_compilation[running] = {
            key: (dataclasses.replace(source, module=None), source.module and weakref.ref(source.module))
            for key, source in sources.items()
        }


def _specialised() -> Mapping[Key, Source]:
    """The parameters of the graph that dynamo had made, for one that is compiled for a size of ``specialize_on``."""
    running = compilation()
    return {} if running is None else {
        key: dataclasses.replace(source, module=module and module())
        for key, (source, module) in _of_compilation.get(running, {}).items()
    }


def _source(source: Any, scopes: Mapping[str, Any], value: Any) -> Source | None:
    """A parameter's source; None of anything else."""
    name = getattr(source, "name", "")
    name = str(name() if callable(name) else name)
    while "getattr(" in name and (plain := _GETATTR.sub(r"\1._modules['\2']", name)) != name:
        name = plain
    member = _MEMBER.search(name)
    if member is None:
        return None
    root, rest = name[: member.start()], name[member.start() :]
    path = tuple(next(filter(None, step.groups()), "") for step in _STEP.finditer(rest))
    variable = _VARIABLE.fullmatch(root)
    module = scopes[variable[1]].get(variable[2]) if variable else None
    return Source(path, root, module if isinstance(module, torch.nn.Module) else None, _constant_shape(value))


def _constant_shape(value: Any) -> tuple[int, ...] | None:
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, torch.Tensor) or any(type(size) is not int for size in local.shape):
        return None
    return tuple(local.shape)


def argument_inputs(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, Key]]:
    """Inputs of a graph that are tensors, or parts of tensors, of dynamo's graph."""
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            key = _argument(node.meta.get("desc"))
            if key is not None:
                yield node, key


def argument_gradients(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, Key]]:
    """Outputs of a graph that are gradients of arguments, with the argument."""
    output = next((node for node in reversed(graph.nodes) if node.op == "output"), None)
    if output is None or not output.args:
        return
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    descriptions = output.meta.get("desc")
    if not isinstance(descriptions, (tuple, list)) or len(descriptions) != len(values):
        return
    for value, description in zip(values, descriptions):
        if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            key = _argument(_without_subclass(description), "grad_of")
            if key is not None:
                yield value, key


def _without_subclass(description: Any) -> Any:
    while hasattr(description, "attr") and hasattr(description, "base"):
        description = description.base
    return description


def _argument(description: Any, of: str = "") -> Key | None:
    """The argument that a description is about."""
    found = _without_subclass(getattr(description, of, None) if of else description)
    name = type(found).__name__
    if name == "PlainAOTInput":
        return int(found.idx)
    return str(found.target) if name == "ParamAOTInput" else None


def module_path(node: torch.fx.Node) -> str:
    """The module whose forward made a node, or whose gradient it belongs to, as dynamo writes it, or ""."""
    for key in _STACKS:
        stack = node.meta.get(key)
        if isinstance(stack, Mapping) and stack:
            last = list(stack.values())[-1]
            return str(last[0]) if isinstance(last, (tuple, list)) and last else ""
    return ""


def traced_modules(graph: torch.fx.Graph) -> set[int]:
    """``id`` of the modules that a graph's nodes were traced in; the one that was compiled itself is not among them."""
    stacks = (node.meta.get(key) or () for node in graph.nodes for key in _STACKS)
    # A module that is called again has a number behind its id.
    names = {str(name).partition("@")[0] for stack in stacks for name in stack}
    return {int(name) for name in names if name.isdecimal()}
