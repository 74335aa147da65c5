"""Arguments and values of nodes as text that is equal on ranks whose graphs mean the same."""

from __future__ import annotations

import re
import types
from collections.abc import Callable

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.agreement.roles import IncomparableError, Roles

#: Names of operator arguments that name a process group by a string.
_GROUPS = frozenset({"group_name", "group", "process_group"})
_SYMBOL = re.compile(r"\b[a-zA-Z]+\d+\b")
_ENUMS = (torch.dtype, torch.layout, torch.memory_format)


class Open(str):
    """Text that is written as it is: a number that ranks compare apart from the digest, see ``literals``."""

    __slots__ = ()


class Texts:
    """Writes arguments down; nodes as ``reference`` names them, groups by their number, symbols by first use."""

    def __init__(self, reference: Callable[[torch.fx.Node], str], roles: Roles) -> None:
        self._reference = reference
        self._roles = roles
        self._symbols: dict[str, str] = {}
        self._devices: dict[torch.device, str] = {}

    def argument(self, name: str, value: object, sizes: bool = True) -> str:
        """One argument of an operator; without ``sizes`` lists of numbers are left out.

        Raises:
            IncomparableError: it holds an object that cannot be described.
        """
        if name in _GROUPS and isinstance(value, str):
            return f"group {self._roles.of(value)}"
        if not sizes and isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            return "[*]"
        return self.text(value)

    def text(self, value: object) -> str:
        """Any argument.

        Raises:
            IncomparableError: it is, or holds, an object that cannot be described.
        """
        if isinstance(value, torch.fx.Node):
            return self._reference(value)
        if isinstance(value, Open):
            return str(value)
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!s}: {self.text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, _ENUMS):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return self._device(value)
        return self._object(value)

    def value(self, value: object, sizes: bool = True) -> str:
        """What a node returns: dtypes, sizes, strides, device; "" for what is no tensor or number."""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if not sizes:
                return f"{dtype} {self._device(value.device)}"
            if value.layout is not torch.strided:
                return f"{dtype} {value.layout} {self._numbers(value.shape)} {self._device(value.device)}"
            return f"{dtype}{self._numbers(value.shape)}{self._numbers(value.stride())} {self._device(value.device)}"
        if isinstance(value, (list, tuple)):
            return f"[{'; '.join(self.value(item, sizes) for item in value)}]"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._symbolic(value)
        return ""

    def _numbers(self, values: object) -> str:
        return f"[{', '.join(str(v) if type(v) is int else self._symbolic(v) for v in values)}]"  # type: ignore[attr-defined]

    def _symbolic(self, value: object) -> str:
        text = _torch.expression(value)
        if text is None:
            return str(value)
        renamed = _SYMBOL.sub(lambda found: self._symbols.setdefault(found[0], f"${len(self._symbols)}"), text)
        return f"{renamed}={_torch.size_hint(value)}"

    def _device(self, device: torch.device) -> str:
        if device.type == "cpu":
            return "cpu"
        # Ranks of one host have different devices: the index does not count.
        return self._devices.setdefault(device, f"{device.type}#{len(self._devices)}")

    def _object(self, value: object) -> str:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._symbolic(value)
        if isinstance(value, torch.Tensor):
            content = _torch.tensor_digest(value)
            if content is None:
                raise IncomparableError(f"a constant tensor of layout {value.layout} cannot be compared between ranks")
            return f"constant {self.value(value)} {content}"
        if isinstance(value, torch.fx.GraphModule):
            raise IncomparableError("a graph is an argument by itself")
        named = self.named_object(value)
        if named is not None:
            return named
        if _torch.is_op(value) or _torch.is_higher_order_op(value):
            return str(value)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and "<" not in value.__qualname__:
            return f"{value.__module__}.{value.__qualname__}"
        try:
            return f"reduce {_torch.reduce_op_name(value)}" if "ReduceOp" in type(value).__name__ else _refused(value)
        except (TypeError, ValueError, AttributeError):
            return _refused(value)

    def named_object(self, value: object) -> str | None:
        """A process group by its number, a device mesh by its shape and its groups; None for other objects."""
        layout = _torch.mesh_layout(value)
        if layout is not None:
            shape, names, groups = layout
            return f"mesh {list(shape)} {list(names)} {[self._roles.of(group) for group in groups]}"
        found = _torch.resolve_group_ranks(value) if not isinstance(value, str) else None
        return None if found is None else f"group {self._roles.of(value)}"


def _refused(value: object) -> str:
    raise IncomparableError(f"an argument of type {type(value).__name__} cannot be compared between ranks")
