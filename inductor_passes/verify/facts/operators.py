"""What a call to an operator overload does, found out by running it once per signature.

A signature is the overload with its literal arguments and the dtypes, sizes and strides of its tensors, by hint. The
result of ``_torch.observe`` for a signature is kept for the process. Writes are also taken from torch's own reading of
the schema (``SchemaInfo``), because a custom operator's fake kernel need not write.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.operators import SENT
from inductor_passes.verify.facts import communication

#: Namespaces of torch, of compilers and of ours whose kernels do what their schema says and may be run to see it.
TRUSTED = frozenset(
    {
        *("aten", "prims", "prim", "_prims", "rngprims", "inductor", "inductor_prims", "inductor_passes"),
        *("quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn", "torchao", "torchvision", "fbgemm"),
    }
)
#: Of our own operators, those that nothing but compute. Another one may do anything, whatever its schema says.
_OWN_COMPUTE = frozenset(
    {
        *("inductor_passes::unpack", "inductor_passes::pack", "inductor_passes::divide", "inductor_passes::pick"),
        *("inductor_passes::measure_rounding", SENT),
    }
)
#: Operators that are called for what they check.
_CHECKS = (
    *("_assert", "_functional_assert", "sym_constrain", "_functional_sym_constrain"),
    *("_linalg_check_errors", "_validate_"),
)
_HOST = frozenset({"cpu", "meta"})
_MAX_KEPT = 65_536
_lock = threading.Lock()
_kept: dict[Any, Signature] = {}


class Unknown(Exception):
    """An argument has no value that the operator could be run with."""


@dataclass(frozen=True, eq=False)
class Operator:
    """What an operator overload is, whatever it is called with.

    Attributes:
        name: ``namespace::name``.
        arguments: names of its arguments.
        trusted: it does nothing but what it returns and writes.
        checks: it is called for what it checks.
        returns: it has results.
        draws: from a random generator.
    """

    name: str
    arguments: tuple[str, ...]
    trusted: bool
    checks: bool
    returns: bool
    draws: bool


@functools.lru_cache(maxsize=4096)
def operator_of(target: Any) -> Operator:
    """What an overload is."""
    schema, name = _torch.op_schema(target), _torch.op_name(target)
    base = name.partition("::")[2]
    return Operator(
        name,
        tuple(argument.name for argument in schema.arguments),
        _is_trusted(name) and not communication.takes_a_group(target),
        base.startswith(_CHECKS),
        bool(schema.returns),
        torch.Tag.nondeterministic_seeded in target.tags,
    )


def _is_trusted(name: str) -> bool:
    namespace = name.partition("::")[0]
    return namespace in TRUSTED and (namespace != "inductor_passes" or name in _OWN_COMPUTE)


@dataclass(frozen=True, eq=False)
class Signature:
    """What calls of one signature do; tensors among the arguments are counted in order.

    Attributes:
        observed: what running it showed; None when it cannot be run.
        written: the tensors that it writes to, observed or declared.
        draws: from a random generator.
        view: every tensor that it returns may be an argument's memory.
        certain: an operator that may draw, and does not with these arguments.
    """

    observed: _torch.Observed | None
    written: tuple[int, ...]
    draws: bool
    view: bool
    certain: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A tensor among the arguments: a node's value, or an element of it at a path of indices."""

    node: torch.fx.Node
    path: tuple[object, ...] = ()


@dataclass(eq=False, slots=True)
class Value:
    """A node's value as operators can be run with it.

    Attributes:
        runnable: the value, tensors as :class:`TensorArgument`; ``Unknown`` when it cannot be had.
        key: equal for values that operators treat alike.
        paths: of its tensors.
        devices: kinds of device that they are on.
        source: what it was taken from.
        sizes: dtype, sizes and strides of a tensor; None for anything else, and when some are symbols.
    """

    runnable: Any
    key: Any
    paths: tuple[tuple[object, ...], ...]
    devices: frozenset[str]
    source: Any
    sizes: tuple[Any, ...] | None

    @property
    def lasting(self) -> bool:
        """Whether what is known of it can be checked, and so be kept for another look."""
        return self.sizes is not None


class Values:
    """Values of nodes; each is taken apart once.

    Args:
        kept: values of earlier looks at the graph, of which those that have not changed are used; filled.

    Attributes:
        accelerated: whether one of them was on a device that is not the host.
    """

    def __init__(self, kept: dict[torch.fx.Node, Value] | None = None) -> None:
        self.accelerated = False
        self._kept: dict[torch.fx.Node, Value] = {} if kept is None else kept
        self._known: dict[torch.fx.Node, Value] = {}

    def of(self, node: torch.fx.Node) -> Value:
        """A node's value."""
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = self._found(node)
            self.accelerated = self.accelerated or not found.devices <= _HOST
        return found

    def _found(self, node: torch.fx.Node) -> Value:
        value = node.meta.get("val", Unknown)
        kept = self._kept.get(node)
        if kept is not None and kept.source is value and kept.sizes is not None and kept.sizes == _sizes(value):
            return kept
        if isinstance(value, torch.Tensor):
            paths: tuple[tuple[object, ...], ...] = ((),)
            devices = frozenset((value.device.type,))
        else:
            places = list(_places(value))
            paths, devices = tuple(path for path, _ in places), frozenset(tensor.device.type for _, tensor in places)
        runnable = _runnable(value, _torch.UNKNOWN_SIZES[0])
        found = self._kept[node] = Value(runnable, _frozen(runnable), paths, devices, value, _sizes(value))
        return found


def _sizes(value: Any) -> tuple[Any, ...] | None:
    """Dtype, sizes and strides of a tensor; None for anything else, and when some are symbols."""
    return _torch.plain_sizes(value) if isinstance(value, torch.Tensor) else None


def call(target: Any, args: Any, kwargs: Any, values: Values) -> tuple[Signature, list[Part]]:
    """(what a call does, the tensors among its arguments); nodes stand among the arguments."""
    parts: list[Part] = []
    try:
        key = (target, _key(args, parts, values), _key(kwargs, parts, values))
        with _lock:
            found = _kept.get(key)
    except Unknown:
        return _unseen(target), [Part(node) for node in nodes_in((args, kwargs))]
    except TypeError:  # a literal that has no hash
        key, found = None, None
    if found is None:
        found = _signature(target, args, kwargs, values)
        with _lock:
            if len(_kept) >= _MAX_KEPT:
                _kept.clear()
            if key is not None:
                _kept[key] = found
    return found, parts


def by_name(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by their names in the schema."""
    return {**dict(zip(operator_of(target).arguments, args)), **kwargs}


def nodes_in(value: Any) -> list[torch.fx.Node]:
    """All nodes inside an argument, in order, repeated as often as they occur."""
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in nodes_in(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in nodes_in(v)]
    if isinstance(value, slice):
        return [n for v in (value.start, value.stop, value.step) for n in nodes_in(v)]
    return []


#: Without tensors among the arguments no memory can be shared or written to.
_NOTHING = _torch.Observed((), (), False, frozenset(), frozenset(), False)


def _unseen(target: Any) -> Signature:
    return Signature(None, (), operator_of(target).draws, False)


def _signature(target: Any, args: Any, kwargs: Any, values: Values) -> Signature:
    what = operator_of(target)
    filled = _named(target, args, kwargs, values, _torch.UNKNOWN_SIZES[0])
    owners = [name for name, argument in filled.items() for _ in _tensors(argument)]
    declared = _torch.declared_writes(target, tuple((n, v) for n, v in filled.items() if type(v) is bool))
    seen: _torch.Observed | None = _NOTHING
    if owners or declared:
        seen = _observed(target, filled, len(args))
        for unknown in _torch.UNKNOWN_SIZES[1:] if seen is None else ():
            other = _named(target, args, kwargs, values, unknown)
            if other == filled:
                # No size is unknown: it is something else that keeps it from running.
                break
            seen = seen or _observed(target, other, len(args))
    written = {i for i, name in enumerate(owners) if name in declared} | (set() if seen is None else seen.written)
    results = [] if seen is None else flat_results(seen.results)
    draws = what.draws or any(isinstance(leaf, torch.Generator) for leaf in _leaves(filled))
    view = bool(results) and all(results)
    return Signature(seen, tuple(sorted(written)), draws, view, draws and _drops_nothing(target, filled))


def _drops_nothing(target: Any, filled: dict[str, Any]) -> bool:
    """Whether an operator is random by its dropout alone, and has none here: attention while nobody trains.

    Of an operator that torch does not own its name for an argument says nothing.
    """
    if not operator_of(target).name.startswith("aten::"):
        return False
    defaults = {a.name: a.default_value for a in _torch.op_schema(target).arguments if a.has_default_value()}
    return {**defaults, **filled}.get("dropout_p") == 0


def _named(target: Any, args: Any, kwargs: Any, values: Values, unknown: int) -> dict[str, Any]:
    """Arguments to run with, by name, sizes without hints as ``unknown``."""
    names = operator_of(target).arguments
    given = {**{names[i] if i < len(names) else f"#{i}": a for i, a in enumerate(args)}, **kwargs}
    return {name: _filled(argument, values, unknown) for name, argument in given.items()}


def _observed(target: Any, filled: dict[str, Any], positional: int) -> _torch.Observed | None:
    names = list(filled)
    trusted = operator_of(target).name.partition("::")[0] in TRUSTED
    args = [filled[name] for name in names[:positional]]
    return _torch.observe(target, args, {name: filled[name] for name in names[positional:]}, trusted=trusted)


def flat_results(results: Any) -> list[frozenset[int]]:
    """Aliases of every tensor among the results of an operator."""
    if isinstance(results, tuple):
        return [r for inner in results for r in flat_results(inner)]
    return [] if results is None else [results]


def _key(value: Any, parts: list[Part], values: Values) -> Any:
    """A key for an argument: 1, 1.0 and True are told apart."""
    if isinstance(value, torch.fx.Node):
        known = values.of(value)
        if known.runnable is Unknown:
            raise Unknown
        parts.extend([Part(value, path) for path in known.paths])
        return known.key
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return (list, *[_key(v, parts, values) for v in value])
    if isinstance(value, dict):
        return (dict, *[(k, _key(v, parts, values)) for k, v in value.items()])
    if isinstance(value, torch.SymInt):
        return _torch.known_size(value)
    if isinstance(value, torch.Tensor):
        # A tensor literal is memory that no node stands for.
        raise Unknown
    return kind, value


def _filled(value: Any, values: Values, unknown: int) -> Any:
    """An argument to run with."""
    if isinstance(value, torch.fx.Node):
        if unknown == _torch.UNKNOWN_SIZES[0]:
            return values.of(value).runnable
        return _runnable(value.meta.get("val"), unknown)
    if isinstance(value, (list, tuple)):
        return [_filled(v, values, unknown) for v in value]
    if isinstance(value, dict):
        return {k: _filled(v, values, unknown) for k, v in value.items()}
    return _runnable(value, unknown)


def _runnable(value: Any, unknown: int) -> Any:
    """A value to run with; ``Unknown`` when there is none."""
    if isinstance(value, torch.Tensor):
        argument = _torch.tensor_argument(value, unknown)
        return Unknown if argument is None else argument
    if isinstance(value, torch.SymInt):
        return _torch.known_size(value, unknown)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        # Which number it is does not decide whose memory a result is.
        return 1.0 if isinstance(value, torch.SymFloat) else True
    if isinstance(value, (list, tuple)):
        filled = [_runnable(v, unknown) for v in value]
        return Unknown if any(v is Unknown for v in filled) else filled
    return value


def _places(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """(path, tensor) of every tensor in a value."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _places(item, (*path, i))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return (list, *map(_frozen, value))
    if isinstance(value, _torch.TensorArgument):
        return _interned(value)
    return value if type(value) is int else (type(value), value)


_interned_arguments: dict[_torch.TensorArgument, _Tensor] = {}


class _Tensor:
    """Stands for a tensor argument in keys: compared by identity."""


def _interned(argument: _torch.TensorArgument) -> _Tensor:
    with _lock:
        if len(_interned_arguments) >= _MAX_KEPT:
            # Signatures that are kept refer to these.
            _interned_arguments.clear()
            _kept.clear()
        return _interned_arguments.setdefault(argument, _Tensor())


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, _torch.TensorArgument)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]
