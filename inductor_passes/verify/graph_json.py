"""FX graphs as JSON files that are safe to open: data only, no pickle, no eval, no code generation.

``{"schema_version": 1, "groups": {name: [ranks]}, "nodes": [...], "bodies": {attribute: graph}}``. A node has
``name``, ``op``, ``target``, ``args``, ``kwargs``, and where known ``value`` (dtypes and shapes of its result) and
``source`` (file:line). Targets are names of registered operators, looked up in torch's registry, or of a few Python
operators; whatever is not found there becomes an op that does nothing and that the verifier treats as unknown.
Graphs inside higher-order ops are separate ``bodies``. Symbolic sizes are stored at their hints.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import groups, ops

SCHEMA_VERSION = 1
MAX_BYTES = 512 * 2**20
MAX_NODES = 2_000_000
MAX_DEPTH = 16
_OPS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,999}")
_OPERATOR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)::([A-Za-z_][A-Za-z0-9_.]*?)(?:\.([A-Za-z0-9_]+))?")
_PYTHON: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        *("getitem", "setitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "lshift", "rshift"),
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    )
}
_PYTHON_NAME = {function: name for name, function in _PYTHON.items()}


class GraphFileError(ValueError):
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


# -- writing -------------------------------------------------------------------------------------------------


def to_json(graph: torch.fx.Graph) -> dict[str, Any]:
    """A graph as plain data."""
    named: dict[str, list[int]] = {}
    bodies: dict[str, Any] = {}
    nodes = []
    for node in graph.nodes:
        row: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_name(node)}
        row["args"] = [_plain(a) for a in node.args]
        if node.kwargs:
            row["kwargs"] = {k: _plain(v) for k, v in node.kwargs.items()}
        if (value := _value(node.meta.get("val"))) is not None:
            row["value"] = value
        if source := ops.source_line(node):
            row["source"] = source
        nodes.append(row)
        _collect(graph, node, named, bodies)
    data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "groups": named, "nodes": nodes}
    if bodies:
        data["bodies"] = bodies
    return data


def save(graph: torch.fx.Graph, path: str | Path) -> None:
    """Write a graph to a JSON file."""
    Path(path).write_text(json.dumps(to_json(graph), separators=(",", ":")))


def _collect(graph: torch.fx.Graph, node: torch.fx.Node, named: dict[str, list[int]], bodies: dict[str, Any]) -> None:
    if node.op == "get_attr" and str(node.target) not in bodies:
        body: object = graph.owning_module
        for part in str(node.target).split("."):
            body = getattr(body, part, None)
        if isinstance(body, torch.fx.GraphModule):
            bodies[str(node.target)] = to_json(body.graph)
    if node.op == "call_function" and _torch.is_op(node.target):
        argument = _torch.op_arguments(node).get("group_name")
        if isinstance(argument, torch.fx.Node):
            argument = argument.meta.get("val")
        if argument is not None:
            group = groups.resolve(argument)
            named[group.name] = list(group.ranks)


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
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape, "storage": size}


# -- reading -------------------------------------------------------------------------------------------------


def load(path: str | Path) -> GraphFile:
    """Read a graph from a JSON file.

    Raises:
        GraphFileError: the file is too large, no JSON, of another version or malformed.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    if path.stat().st_size > MAX_BYTES:
        raise GraphFileError(f"{path.name}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise GraphFileError(f"{path.name}: not a JSON file: {error}") from error
    try:
        return from_json(data)
    except GraphFileError as error:
        raise GraphFileError(f"{path.name}: {error}") from error


def from_json(data: object) -> GraphFile:
    """Inverse of :func:`to_json`, as far as the verifier looks.

    Raises:
        GraphFileError: another version, or malformed.
    """
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        version = data.get("schema_version") if isinstance(data, dict) else None
        raise GraphFileError(f"schema_version is {version!r}; expected {SCHEMA_VERSION}")
    rows = data.get("nodes")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_NODES:
        raise GraphFileError(f"nodes must be a list of 1 to {MAX_NODES} nodes")
    named = data.get("groups", {})
    if not isinstance(named, dict) or not all(
        isinstance(r, list) and all(type(x) is int and x >= 0 for x in r) for r in named.values()
    ):
        raise GraphFileError("groups must map names to lists of ranks")
    bodies = data.get("bodies", {})
    if not isinstance(bodies, dict):
        raise GraphFileError("bodies must map attribute names to graphs")
    try:
        loaded = {str(name): from_json(body) for name, body in bodies.items()}
    except RecursionError as error:
        raise GraphFileError("bodies are nested too deeply") from error
    inner = {f"{name}.{k}": g for name, body in loaded.items() for k, g in body.bodies.items()}
    every = {**{n: tuple(r) for n, r in named.items()}, **{n: r for b in loaded.values() for n, r in b.groups.items()}}
    return GraphFile(_Reader().graph(rows), every, {**{n: b.graph for n, b in loaded.items()}, **inner})


class _Reader:
    def __init__(self) -> None:
        self.nodes: dict[str, torch.fx.Node] = {}

    def graph(self, rows: list[object]) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        names: list[str] = []
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise GraphFileError(f"node {number} is no object")
            name, op, target = row.get("name"), row.get("op"), row.get("target")
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in self.nodes:
                raise GraphFileError(f"node {number}: name {str(name)[:80]!r} is not allowed or not unique")
            if op not in _OPS or not isinstance(target, str) or len(target) > 1000:
                raise GraphFileError(f"node {name}: op {str(op)[:80]!r} or its target is not allowed")
            # Arguments come in a second step: a file may hold a graph that uses what is not there yet.
            self.nodes[name] = graph.create_node(op, _target(op, target), (), {}, name=name)
            names.append(name)
        for name, row in zip(names, rows):
            assert isinstance(row, dict)
            self._fill(self.nodes[name], row)
        return graph

    def _fill(self, node: torch.fx.Node, row: dict[str, Any]) -> None:
        args, kwargs = row.get("args", []), row.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise GraphFileError(f"node {node.name}: args must be a list, kwargs an object")
        node.args = tuple(self._argument(node, a, 0) for a in args)
        node.kwargs = {str(k): self._argument(node, v, 0) for k, v in kwargs.items()}
        if "value" in row:
            node.meta["val"] = _tensor(node, row["value"])
        source = row.get("source")
        if isinstance(source, str) and source:
            file, _, line = source.rpartition(":")
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
                    raise GraphFileError(f"node {node.name} uses {content[:80]!r}, which is not there")
                return self.nodes[content]
            if kind == "text" and isinstance(content, str):
                return _Literal(content)
            if kind == "operator" and isinstance(content, str):
                return _target("call_function", content)
            if kind == "slice" and isinstance(content, list) and len(content) == 3:
                return slice(*(self._argument(node, v, depth + 1) for v in content))
            if kind == "dict" and isinstance(content, list):
                return {str(k): self._argument(node, v, depth + 1) for k, v in map(_pair, content)}
        raise GraphFileError(f"node {node.name} has an argument of an unknown form: {str(value)[:80]}")


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise GraphFileError(f"expected a pair of key and value, found {str(item)[:80]}")
    return item[0], item[1]


def _target(op: str, name: str) -> Any:
    if op != "call_function":
        if op in ("get_attr", "placeholder", "output", "call_method", "call_module") and not _NAME.fullmatch(name):
            raise GraphFileError(f"target {name[:80]!r} is not allowed")
        return name
    if name in _PYTHON:
        return _PYTHON[name]
    if match := _OPERATOR.fullmatch(name):
        found = _torch.registered_op(match[1], match[2], match[3] or "")
        if found is not None:
            return found
    return UnknownTarget(name)


def _tensor(node: torch.fx.Node, value: object) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_tensor(node, v) for v in value]
    if isinstance(value, dict):
        dtype = getattr(torch, str(value.get("dtype")), None)
        shape, size = value.get("shape"), value.get("storage")
        if (
            isinstance(dtype, torch.dtype)
            and isinstance(shape, list)
            and all(type(d) is int and d >= 0 for d in shape)
            and type(size) is int
            and size >= 0
        ):
            try:
                # Without data: strides are not kept, the storage may be larger or smaller than the shape.
                flat = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
                result = torch.empty(0, dtype=dtype, device="meta")
                result.set_(flat, 0, (0,), (1,))
                return result.as_strided(shape, [0] * len(shape)) if size else torch.empty(
                    shape, dtype=dtype, device="meta"
                )
            except (RuntimeError, OverflowError) as error:
                raise GraphFileError(f"node {node.name}: {shape} is no shape: {str(error)[:200]}") from error
    raise GraphFileError(f"node {node.name}: value must have dtype, shape and storage")
