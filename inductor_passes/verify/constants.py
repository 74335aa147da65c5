"""Literals of a graph as text: equal texts mean equal values.

Numbers are exact (``-0.0`` differs from ``0.0``, ``nan`` equals ``nan``, ``1`` differs from ``True``). Tensors are
compared by content up to ``MAX_TENSOR_BYTES``. Larger ones, and fake ones, are equal if they have one dtype and shape
and are the same memory at the same version. Objects of unknown kinds are equal only to themselves.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.verify.facts.higher_order import attribute

MAX_TENSOR_BYTES = 64 * 2**10
_MAX_DEPTH = 16
_MAX_REPR = 200
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...))
_COMMON = frozenset({type(None), int, str})
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool)


#: What is the same for as long as it is the same object.
_LASTING = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Literals:
    """Texts of the literals of one graph.

    Attributes:
        held: what is compared by identity; it must live for as long as the texts, so that nothing takes its address.
        passing: how many texts were of what may change: tensors, generators, symbols, graphs and unknown objects.
    """

    def __init__(self) -> None:
        self.held: list[object] = []
        self.passing = 0

    def text(self, value: object) -> str:
        """A literal that is no node, list, tuple, dict or slice."""
        if type(value) in _COMMON:
            return repr(value)
        if type(value) is float:
            return repr(value) if value == value else f"nan {struct.pack('>d', value).hex()}"
        if not isinstance(value, _LASTING):
            self.passing += 1
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (*_PLAIN, *_TORCH, enum.Enum)) or _torch.is_op(value) or _torch.is_higher_order_op(value):
            return f"{type(value).__name__}:{_shown(value)}" if isinstance(value, (bool, enum.Enum)) else _shown(value)
        if type(value).__module__.startswith("sympy."):
            return _shown(value)
        if isinstance(value, torch.fx.GraphModule):
            return self.attribute(value)
        seed = f" seed {value.initial_seed()}" if isinstance(value, torch.Generator) else ""
        return f"{type(value).__qualname__} {_shown(value)[:_MAX_REPR]}{seed} at {self._identity(value)}"

    def tensor(self, tensor: torch.Tensor) -> str:
        """A tensor that is no node's value: a constant."""
        about = f"{tensor.dtype}{list(tensor.shape)} {tensor.device}"
        content = self._content(tensor)
        if content is not None:
            return f"tensor {about} {content}"
        if tensor.layout is not torch.strided:
            return f"tensor {about} {tensor.layout} at {self._identity(tensor)}"
        self.held.append(tensor)
        place = (_torch.storage_identity(tensor), tensor.storage_offset(), tuple(tensor.stride()), _version(tensor))
        return f"tensor {about} {place}"

    def attribute(self, held: object, depth: int = 0) -> str:
        """What a ``get_attr`` node stands for."""
        if isinstance(held, torch.fx.GraphModule):
            return self.body(held.graph, depth + 1) if depth < _MAX_DEPTH else f"graph at {self._identity(held)}"
        return self.text(held)

    def body(self, graph: torch.fx.Graph, depth: int = 0) -> str:
        """A graph among the arguments, by what its nodes compute; names do not count."""
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        lines = []
        for node in graph.nodes:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Number(numbers.get(n, -1)))
            value = node.meta.get("val")
            about = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            target = self.attribute(attribute(node), depth) if node.op == "get_attr" else str(node.target)
            lines.append(f"{node.op} {target} {self._nested(arguments)} {about}")
        return f"graph {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"

    def _nested(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self._nested, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._nested(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{self._nested((value.start, value.stop, value.step))}"
        return f"%{value.number}" if isinstance(value, _Number) else self.text(value)

    def _identity(self, value: object) -> int:
        self.held.append(value)
        return id(value)

    def _content(self, tensor: torch.Tensor) -> str | None:
        """Hash of a tensor's elements; None when there are none to be had, or too many."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            return None
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        size = tensor.numel() * tensor.element_size()
        if size > MAX_TENSOR_BYTES:
            return None
        with _torch.isolated():
            dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            return hashlib.sha256(dense.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class _Number:
    """A node of a body, by its position."""

    def __init__(self, number: int) -> None:
        self.number = number


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # an object's own repr may do anything
        return object.__repr__(value)
