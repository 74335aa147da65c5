"""What torch says about an operator: its name, its schema, its class."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from inductor_passes.operators import SINGLE, CollectiveKind


def is_op(target: object) -> bool:
    """Whether an FX target is a registered operator overload (it has a schema)."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order_op(target: object) -> bool:
    """Whether an FX target is a higher-order operator (``cond``, ``while_loop``, ``flex_attention`` ...)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


@functools.lru_cache(maxsize=4096)
def op_name(target: object) -> str:
    """``namespace::name`` of an operator overload or higher-order operator (no overload name), "" for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target._name}"
    return ""


def op_overload_name(target: Any) -> str:
    """Overload name of an operator overload; ``default`` for the unnamed one."""
    return str(target._overloadname)


def registered_op(namespace: str, name: str, overload: str) -> Any:
    """The operator overload or (namespace ``higher_order``) higher-order operator, None when none is registered."""
    space = getattr(torch.ops, namespace, None)
    if namespace == "higher_order":
        found = torch._ops._higher_order_ops.get(name)
        return found if is_higher_order_op(found) else None
    try:
        found = getattr(getattr(space, name), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return found if is_op(found) else None


def op_schema(target: Any) -> Any:
    """The schema of an operator overload."""
    return target._schema


def misfit(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why these arguments of an FX node cannot be those of an operator overload, or "".

    Looks at their number and names, and at what is a tensor, a list or a text; other values may be text that stands for
    a dtype, a device or a size.
    """
    arguments = _arguments(target)
    positional = [name for name, one in arguments.items() if not one.kwarg_only]
    if len(args) > len(positional):
        return f"{target} takes {len(positional)} arguments by position, found {len(args)}"
    given = dict(zip(positional, args))
    for name in kwargs:
        if name in given or name not in arguments:
            return f"{target} takes no further argument {name[:80]!r}"
    given |= kwargs
    for name, one in arguments.items():
        if name not in given:
            if not one.has_default_value():
                return f"{target} needs the argument {name!r}"
        elif not _fits(one.type, given[name]):
            return f"{target} takes a {one.type} as {name!r}, found a {_kind(given[name])}"
    return ""


@functools.cache
def _arguments(target: Any) -> dict[str, Any]:
    return {a.name: a for a in target._schema.arguments}


def _fits(type_: Any, value: Any) -> bool:
    kind = type_.kind()
    if kind == "OptionalType":
        return value is None or _fits(type_.getElementType(), value)
    if kind == "TensorType":
        # A number stands for a tensor of it.
        return isinstance(value, (torch.fx.Node, int, float))
    if kind == "ListType":
        inner = type_.getElementType()
        if isinstance(value, (list, tuple)):
            return all(_fits(inner, one) for one in value)
        # One number stands for a list of it.
        return inner.kind() != "TensorType" and _fits(inner, value)
    if kind in _SCALARS:
        return isinstance(value, (str, int, float, torch.fx.Node, *_CONSTANTS))
    return True


#: Schemas write them as integers, or as devices.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.device)
#: What is of any type is a process group: its name, or a node that stands for it.
_SCALARS = {"StringType", "IntType", "FloatType", "BoolType", "NumberType", "SymIntType", "DeviceObjType", "AnyType"}


def _kind(value: Any) -> str:
    known = ((torch.fx.Node, "tensor"), (list, "list"), (dict, "dict"), (str, "text"))
    return next((name for type_, name in known if isinstance(value, type_)), type(value).__name__)


def op_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments of an operator call by schema name and in its order, given as args or kwargs (defaults left out)."""
    names = argument_names(node.target)
    if not node.kwargs:
        return dict(zip(names, node.args))
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return {name: given[name] for name in names if name in given}


@functools.cache
def argument_names(target: Any) -> tuple[str, ...]:
    """Names of an operator overload's arguments, in order."""
    return tuple(a.name for a in target._schema.arguments)


def is_seeded_random(target: object) -> bool:
    """Whether an operator draws from a random generator: its calls must keep their order."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def depends_on_data(target: object) -> bool:
    """Whether the size or value of a result depends on data (``nonzero``, ``item``): the host waits for them."""
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return isinstance(target, torch._ops.OpOverload) and any(tag in target.tags for tag in tags)


def returns_nothing(target: Any) -> bool:
    """Whether an operator overload has no results."""
    return not target._schema.returns


@functools.lru_cache(maxsize=4096)
def returns_tensors(target: Any) -> bool:
    """Whether a result of an operator overload is, or may hold, a tensor."""
    plain = ("int", "float", "bool", "number", "str", "Device", "Layout", "QScheme", "List[int]", "List[bool]")
    return any(str(result.type) not in plain for result in target._schema.returns)


def changes_metadata(target: object) -> bool:
    """Whether an operator changes its argument's shape or strides in place (``t_``, ``squeeze_``)."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view in target.tags


def collective_op(name: str) -> Any:
    """The functional collective ``name`` (``all_gather_into_tensor``, ``wait_tensor`` ...) as an operator overload."""
    import torch.distributed._functional_collectives  # registers the operators

    return getattr(torch.ops._c10d_functional, name).default


#: dtypes that neither ``cat`` nor every backend handles as numbers: where data only move, they travel as bytes.
BYTE_TRAVELLERS = frozenset(
    dtype
    for name in ("bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (dtype := getattr(torch, name, None)) is not None
)


def call_collective(kind: CollectiveKind, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """The functional collective of a kind, waited for."""
    dtype = tensor.dtype
    if not kind.reduces and dtype in BYTE_TRAVELLERS:
        return call_collective(kind, tensor.view(torch.uint8), *args).view(dtype)
    return collective_op("wait_tensor")(collective_op(SINGLE[kind])(tensor, *args))


@functools.lru_cache(maxsize=4096)
def is_pointwise(target: object) -> bool:
    """Whether an operator overload acts on every element alone (its operands broadcast)."""
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return tagged or op_name(target) == "prims::convert_element_type"
