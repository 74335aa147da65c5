"""FX graphs as JSON files that are safe to open: data only, no pickle, no eval, no code generation.

``{"schema_version": 1, "groups": {name: [ranks]}, "nodes": [...], "bodies": {attribute: graph}}``. A node has
``name``, ``op``, ``target``, ``args``, ``kwargs``, and where known ``value`` (dtypes and shapes of its result) and
``source`` (file:line). Targets are names of registered operators, looked up in torch's registry, or of a few Python
operators. Any other target becomes an op that does nothing and that the verifier treats as unknown. Graphs inside
higher-order ops are separate ``bodies``. Symbolic sizes are stored at their hints.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.fx
from msgspec import UNSET, Meta, Struct, UnsetType

import inductor_passes._torch.gather_op  # noqa: F401  an operator that graphs may name
from inductor_passes import _torch
from inductor_passes.ir import groups, ops
from inductor_passes.records import json_text
from inductor_passes.records.convert import check_version, convert, plain, shown
from inductor_passes.records.json_text import RecordError
from inductor_passes.records.limits import Count
from inductor_passes.records.text import printable
from inductor_passes.settings.errors import ConfigError

SCHEMA_VERSION = 1
MAX_BYTES = json_text.MAX_BYTES
MAX_NODES = 300_000
MAX_DEPTH = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,999}")
_OPERATOR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)::([A-Za-z_][A-Za-z0-9_.]*?)(?:\.([A-Za-z0-9_]+))?")
_DEVICE = re.compile(r"(cpu|cuda|xpu|hpu|mps|meta)(:\d{1,3})?")
_PYTHON: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        *("getitem", "setitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "lshift", "rshift"),
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    )
}
_PYTHON_NAME = {function: name for name, function in _PYTHON.items()}


class GraphFileError(RecordError):
    """A graph file that cannot be read; the message says where and what was expected."""


class UnknownTarget:
    """Stands for something that this process does not know; the verifier treats it as unknown."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(f"{self.name} comes from a graph file and cannot run")

    def __repr__(self) -> str:
        return f"unknown:{self.name}"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownTarget) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Literal(str):
    """An argument that is neither a node nor plain data, as text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class GraphFile:
    """What a file holds: a graph, its process groups, and the graphs of its higher-order ops by attribute name."""

    graph: torch.fx.Graph
    groups: Mapping[str, tuple[int, ...]]
    bodies: Mapping[str, torch.fx.Graph] = field(default_factory=dict)


# -- the file ------------------------------------------------------------------------------------------------


class TensorRecord(Struct, omit_defaults=True):
    """What is known of a tensor: ``storage`` is the size of its memory in bytes."""

    dtype: str
    shape: list[Count]
    storage: Count
    strides: list[Count] | UnsetType = UNSET


Tensors: TypeAlias = TensorRecord | list[TensorRecord | list[TensorRecord | None] | None] | None


class NodeRecord(Struct, omit_defaults=True):
    """One node of an FX graph. Arguments are plain values or objects of one key, see :func:`_plain`."""

    name: str
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    target: Annotated[str, Meta(max_length=1000)]
    args: list[Any]
    kwargs: dict[str, Any] | UnsetType = UNSET
    value: Tensors | UnsetType = UNSET
    source: str | UnsetType = UNSET


class GraphRecord(Struct):
    """A graph file."""

    schema_version: Literal[1]
    groups: dict[str, tuple[Count, ...]]
    nodes: Annotated[list[NodeRecord], Meta(min_length=1, max_length=MAX_NODES)]
    bodies: dict[str, GraphRecord] | UnsetType = UNSET


# -- writing -------------------------------------------------------------------------------------------------


def to_json(graph: torch.fx.Graph) -> dict[str, Any]:
    """A graph as plain data."""
    return plain(_record(graph))  # type: ignore[no-any-return]


def _record(graph: torch.fx.Graph) -> GraphRecord:
    named: dict[str, tuple[int, ...]] = {}
    bodies: dict[str, GraphRecord] = {}
    nodes = []
    for node in graph.nodes:
        value = _value(node.meta.get("val"))
        nodes.append(
            NodeRecord(
                node.name,
                node.op,
                _target_name(node),
                [_plain(a) for a in node.args],
                {k: _plain(v) for k, v in node.kwargs.items()} if node.kwargs else UNSET,
                UNSET if value is None else value,
                ops.source_line(node) or UNSET,
            )
        )
        _collect(graph, node, named, bodies)
    return GraphRecord(1, named, nodes, bodies or UNSET)


def save(graph: torch.fx.Graph, path: str | Path = "") -> None:
    """Write a graph to a JSON file.

    Raises:
        ConfigError: no graph, or no path.
    """
    if not isinstance(graph, torch.fx.Graph):
        raise ConfigError("graph", graph, "a torch.fx.Graph; a GraphModule has one as its attribute graph")
    if not isinstance(path, (str, Path)) or not str(path):
        raise ConfigError("path", path, "the path of the file to write: save(graph, path)")
    Path(path).write_text(json.dumps(to_json(graph), separators=(",", ":")))


def _collect(
    graph: torch.fx.Graph, node: torch.fx.Node, named: dict[str, tuple[int, ...]], bodies: dict[str, GraphRecord]
) -> None:
    if node.op == "get_attr" and str(node.target) not in bodies:
        body: object = graph.owning_module
        for part in str(node.target).split("."):
            body = getattr(body, part, None)
        if isinstance(body, torch.fx.GraphModule):
            bodies[str(node.target)] = _record(body.graph)
    if node.op == "call_function" and _torch.is_op(node.target):
        argument = _torch.op_arguments(node).get("group_name")
        if isinstance(argument, torch.fx.Node):
            argument = argument.meta.get("val")
        if argument is not None:
            group = groups.resolve(argument)
            named[group.name] = tuple(group.ranks)


def _target_name(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if _torch.is_op(node.target):
        return f"{_torch.op_name(node.target)}.{_torch.op_overload_name(node.target)}"
    return _torch.op_name(node.target) or _PYTHON_NAME.get(node.target) or str(
        getattr(node.target, "__name__", node.target)
    )


def _plain(value: object) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[str(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_plain(v) for v in (value.start, value.stop, value.step)]}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, torch.SymInt)):
        hint = _torch.size_hint(value)
        return {"text": str(value)} if hint is None else hint
    if isinstance(value, float) and math.isfinite(value):
        return value
    if _torch.is_op(value):
        return {"operator": f"{_torch.op_name(value)}.{_torch.op_overload_name(value)}"}
    return {"text": str(value)}


def _value(value: object) -> Any:
    """dtype, shape and storage size of tensors; None when there is none or a size has no hint."""
    if isinstance(value, (list, tuple)):
        parts = [_value(v) for v in value]
        return None if all(p is None for p in parts) else parts
    if not isinstance(value, torch.Tensor):
        return None
    shape = [_torch.size_hint(d) for d in value.shape]
    size = _torch.storage_bytes(value)
    if None in shape or size is None:
        return None
    strides = [_torch.size_hint(s) for s in value.stride()] if value.layout is torch.strided else [None]
    kept: Any = UNSET if None in strides else strides
    return TensorRecord(str(value.dtype).removeprefix("torch."), shape, size, kept)  # type: ignore[arg-type]


# -- reading -------------------------------------------------------------------------------------------------


def load(path: str | Path) -> GraphFile:
    """Read a graph from a JSON file.

    Raises:
        GraphFileError: the file cannot be read, is too large, no JSON, of another version or malformed.
    """
    try:
        data = json_text.content(Path(path), "a graph", max_bytes=MAX_BYTES)
        # Arguments are compared with those of other graphs, so texts stay as they are: only names and places are shown.
        return from_json(json_text.parse(data, "a graph", verbatim=True))
    except RecordError as error:
        raise GraphFileError(f"{Path(path).name}: {error}") from None


def from_json(data: object) -> GraphFile:
    """Inverse of :func:`to_json`, as far as the verifier looks.

    Raises:
        GraphFileError: another version, or malformed.
    """
    try:
        return _graph_file(convert(check_version(data, SCHEMA_VERSION, "graph"), GraphRecord, "a graph"))
    except GraphFileError:
        raise
    except RecordError as error:
        raise GraphFileError(str(error)) from None


def _graph_file(record: GraphRecord) -> GraphFile:
    bodies = {} if record.bodies is UNSET else record.bodies
    loaded = {name: _graph_file(body) for name, body in bodies.items()}
    inner = {f"{name}.{k}": g for name, body in loaded.items() for k, g in body.bodies.items()}
    every = {**record.groups, **{n: r for b in loaded.values() for n, r in b.groups.items()}}
    return GraphFile(_Reader().graph(record.nodes), every, {**{n: b.graph for n, b in loaded.items()}, **inner})


class _Reader:
    def __init__(self) -> None:
        self.nodes: dict[str, torch.fx.Node] = {}

    def graph(self, rows: list[NodeRecord]) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        for number, row in enumerate(rows):
            if not _NAME.fullmatch(row.name) or row.name in self.nodes:
                raise GraphFileError(f"nodes[{number}].name is {shown(row.name)}; expected another identifier for each")
            # Arguments come in a second step: a file may hold a graph that uses what is not there yet.
            self.nodes[row.name] = graph.create_node(row.op, _target(row.op, row.target), (), {}, name=row.name)
        for row in rows:
            self._fill(self.nodes[row.name], row)
        return graph

    def _fill(self, node: torch.fx.Node, row: NodeRecord) -> None:
        node.args = tuple(self._argument(node, a, 0) for a in row.args)
        if row.kwargs is not UNSET:
            node.kwargs = {k: self._argument(node, v, 0) for k, v in row.kwargs.items()}
        if misfit := _misfit(node):
            raise GraphFileError(f"node {node.name}: {misfit}")
        if row.value is not UNSET:
            node.meta["val"] = _tensor(node, row.value)
        if row.source:
            file, _, line = printable(row.source).rpartition(":")
            node.meta["stack_trace"] = f'File "{file}", line {line}, in file'

    def _argument(self, node: torch.fx.Node, value: object, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise GraphFileError(f"node {node.name}: arguments are nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self._argument(node, v, depth + 1) for v in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            if kind == "node" and isinstance(content, str):
                if content not in self.nodes:
                    raise GraphFileError(f"node {node.name} uses {shown(content)}, which is not there")
                return self.nodes[content]
            if kind == "text" and isinstance(content, str):
                return _constant(content)
            if kind == "operator" and isinstance(content, str):
                return _target("call_function", content)
            if kind == "slice" and isinstance(content, list) and len(content) == 3:
                return slice(*(self._argument(node, v, depth + 1) for v in content))
            if kind == "dict" and isinstance(content, list):
                return {str(k): self._argument(node, v, depth + 1) for k, v in map(_pair, content)}
        raise GraphFileError(f"node {node.name} has an argument of an unknown form: {shown(value)}")


def _constant(text: str) -> Any:
    """What was saved as text: torch's constants and devices come back as they were, anything else stays text."""
    if text in ("inf", "-inf", "nan"):
        return float(text)
    if _DEVICE.fullmatch(text):
        return torch.device(text)
    found = getattr(torch, text.removeprefix("torch."), None) if text.startswith("torch.") else None
    return found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else _Literal(text)


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise GraphFileError(f"expected a pair of key and value, found {shown(item)}")
    return item[0], item[1]


def _target(op: str, name: str) -> Any:
    if op != "call_function":
        if op in ("get_attr", "placeholder", "output", "call_method", "call_module") and not _NAME.fullmatch(name):
            raise GraphFileError(f"target {shown(name)} is not allowed; expected an identifier")
        return name
    if name in _PYTHON:
        return _PYTHON[name]
    if match := _OPERATOR.fullmatch(name):
        found = _torch.registered_op(match[1], match[2], match[3] or "")
        if found is not None:
            return found
    return UnknownTarget(name)


def _misfit(node: torch.fx.Node) -> str:
    """Why the arguments cannot be those of what the node calls, or "": the verifier may then rely on them."""
    if node.op == "output" and (len(node.args) != 1 or node.kwargs):
        return f"an output has one argument, found {len(node.args)} and {len(node.kwargs)} by name"
    if node.op != "call_function":
        return ""
    if node.target in _PYTHON_NAME:
        try:
            inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except TypeError as error:
            return f"{_PYTHON_NAME[node.target]}: {error}"
        if node.target in (operator.getitem, operator.setitem) and not isinstance(node.args[0], torch.fx.Node):
            return f"{_PYTHON_NAME[node.target]} takes a node, found {shown(node.args[0])}"
        return ""
    return _torch.misfit(node.target, node.args, node.kwargs) if _torch.is_op(node.target) else ""


def _tensor(node: torch.fx.Node, value: Any) -> Any:
    """A tensor without data for a :class:`TensorRecord`; lists of them alike."""
    if value is None or isinstance(value, list):
        return None if value is None else [_tensor(node, v) for v in value]
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise GraphFileError(f"node {node.name}: dtype is {shown(value.dtype)}; expected one of torch's, e.g. float32")
    try:
        # Without data. Older files keep no strides; the storage may then be larger or smaller than the shape.
        flat = torch.empty(value.storage, dtype=torch.uint8, device="meta").untyped_storage()
        result = torch.empty(0, dtype=dtype, device="meta")
        result.set_(flat, 0, (0,), (1,))
        if value.storage:
            strides = [0] * len(value.shape) if value.strides is UNSET else value.strides
            return result.as_strided(value.shape, strides)
        return torch.empty(value.shape, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError) as error:
        first = str(error).partition("\n")[0]
        raise GraphFileError(f"node {node.name}: {shown(value.shape)} is no shape: {first[:200]}") from error
