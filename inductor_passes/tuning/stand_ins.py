"""Stand-ins for the globals of a generated module that run something, each of which times its calls.

Generated code calls operators (``torch.ops...``, ``aten...``), library kernels (``extern_kernels.mm``) and its own
kernels (``cpp_fused_add_0(...)``, ``triton_poi_0.run(...)``) through its globals. Only what is called is replaced: a
stand-in hands on everything else of what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inductor_passes import _torch
from inductor_passes.tuning.tape import Tape

_OPERATORS = ("aten", "inductor_ops", "_quantized", "prims")


class _StandIn:
    """Hands on the attributes of ``real``; those that run something are timed. What was found is kept."""

    def __init__(self, real: Any, name: str, tape: Tape) -> None:
        self._real = real
        self._name = name
        self._tape = tape

    def __getattr__(self, key: str) -> Any:
        found = getattr(self._real, key)
        result = self._stand_in(key, found)
        self.__dict__[key] = result
        return result

    def _stand_in(self, key: str, found: Any) -> Any:
        return found


class _Torch(_StandIn):
    """The module ``torch``: only its operators."""

    def _stand_in(self, key: str, found: Any) -> Any:
        return _Operators(found, f"{self._name}.ops", self._tape) if key == "ops" else found


class _Operators(_StandIn):
    """A name space of operators, or an operator with its overloads."""

    def _stand_in(self, key: str, found: Any) -> Any:
        name, kind = f"{self._name}.{key}", _torch.callable_kind(found)
        if kind == "overload":
            return self._tape.timed(found, name)
        if kind == "packet":
            return _Packet(found, name, self._tape)
        return _Operators(found, name, self._tape) if kind == "namespace" else found


class _Packet(_Operators):
    """An operator that can be called without naming an overload."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        timed = self.__dict__.get("_timed")
        if timed is None:
            timed = self.__dict__["_timed"] = self._tape.timed(self._real, self._name)
        return timed(*args, **kwargs)


class _Library(_StandIn):
    """``extern_kernels``: all that can be called."""

    def _stand_in(self, key: str, found: Any) -> Any:
        return self._tape.timed(found, f"{self._name}.{key}") if callable(found) else found


class _Launcher(_StandIn):
    """A Triton kernel: its ``run``."""

    def _stand_in(self, key: str, found: Any) -> Any:
        return self._tape.timed(found, f"{self._name}.run") if key == "run" else found


def stand_ins(known: Mapping[str, Any], called: Iterable[str], tape: Tape) -> dict[str, Any]:
    """What to put into a module's globals while it is timed.

    Args:
        known: the globals.
        called: what the code calls, as it writes it.
    """
    found: dict[str, Any] = {}
    if "torch" in known:
        found["torch"] = _Torch(known["torch"], "torch", tape)
    if "extern_kernels" in known:
        found["extern_kernels"] = _Library(known["extern_kernels"], "extern_kernels", tape)
    for name in _OPERATORS:
        if name in known:
            found[name] = _Operators(known[name], name, tape)
    for name in called:
        first, _, method = name.partition(".")
        if first in found or first not in known:
            continue
        if method == "run":
            found[first] = _Launcher(known[first], first, tape)
        elif not method:
            found[first] = tape.timed(known[first], first)
    return found
