"""Calls of operator overloads with generated arguments: enough tries that most overloads take one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes._torch import TensorArgument

#: Operators that would do something to this process.
NEVER = frozenset(
    {
        *("aten::set_grad_enabled", "aten::manual_seed", "aten::_cufft_set_plan_cache_max_size", "aten::save"),
        *("aten::_cufft_clear_plan_cache", "aten::from_file", "aten::_print", "aten::warn", "aten::input"),
    }
)


@dataclass(frozen=True)
class Try:
    """One way to fill in arguments: shape and dtype of tensors, the value of ints, whether flags are set."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int
    flag: bool
    optional: bool


TRIES = [
    Try((4, 4), torch.float32, 1, False, True),
    Try((4, 4), torch.float32, 0, True, False),
    Try((2, 4, 4), torch.float32, 1, False, True),
    Try((2, 4, 4, 4), torch.float32, 1, False, False),
    Try((2, 4, 4, 4), torch.float32, 2, True, True),
    Try((2, 4, 4, 4, 4), torch.float32, 1, False, False),
    Try((4,), torch.float32, 0, False, True),
    Try((4,), torch.int64, 2, False, False),
    Try((4, 4), torch.int64, 1, True, True),
    Try((4, 4), torch.complex64, 1, False, False),
    Try((4, 2), torch.float32, 1, False, True),
    Try((), torch.float32, 1, False, False),
    Try((4, 4), torch.bool, 0, False, False),
    Try((1, 4, 1), torch.float32, 0, True, True),
    Try((4, 4), torch.float64, 4, True, True),
    Try((4, 4), torch.uint8, 1, False, True),
    Try((4, 4), torch.float16, 1, False, True),
    Try((4, 4), torch.int32, 1, False, False),
]
_WORDS = {"reduce": "sum", "reduce_op": "sum", "padding_mode": "constant", "mode": "constant", "equation": "ij,jk->ik"}
_INDEX = ("index", "indices", "target", "offsets", "bin", "tokens", "idx", "labels")
_MASK = ("mask", "condition", "where")
_NO_VALUE = object()


def overloads(namespaces: tuple[str, ...]) -> list[Any]:
    """Every overload registered in some namespaces, by name."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace in namespaces and (target := _torch.registered_op(namespace, base, overload)) is not None:
            found[name] = target
    return [found[name] for name in sorted(found)]


def calls(target: Any) -> Iterator[dict[str, Any]]:
    """Arguments by name to try, tensors as :class:`TensorArgument`."""
    if _torch.op_name(target) in NEVER:
        return
    for one, defaults in itertools.product(TRIES, (True, False)):
        given: dict[str, Any] = {}
        for argument in _torch.op_schema(target).arguments:
            if defaults and argument.has_default_value():
                continue
            value = _value(argument, one)
            if value is _NO_VALUE:
                return
            given[argument.name] = value
        yield given


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> TensorArgument:
    """A dense tensor."""
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d] = step
        step *= max(1, shape[d])
    return TensorArgument(dtype, shape, tuple(strides))


def _value(argument: Any, one: Try) -> Any:
    kind, name = str(argument.type), argument.name
    if kind.startswith("Optional["):
        if not one.optional:
            return None
        kind = kind[len("Optional[") : -1]
    if kind == "Tensor":
        return _tensor(name, one)
    if kind == "List[Tensor]":
        return [_tensor(name, one), _tensor(name, one)]
    if kind == "List[Optional[Tensor]]":
        return [tensor((4,), torch.int64)]
    if kind == "List[int]":
        return _ints(argument, name, one)
    plain = {
        "int": torch.float32 if name == "dtype" else one.number,
        "float": 0.5,
        "number": 1,
        "Scalar": 1,
        "bool": one.flag,
        "str": _WORDS.get(name, "mean"),
        "Device": torch.device("cpu"),
        "List[float]": [2.0, 2.0],
        "List[bool]": [True] * (argument.N or 3),
        "List[number]": [1, 1],
        "Generator": None,
    }
    return plain.get(kind, _NO_VALUE)


def _tensor(name: str, one: Try) -> TensorArgument:
    if name in _INDEX or name.endswith("indices"):
        return tensor(one.shape, torch.int64)
    if name in _MASK or name.endswith("_mask"):
        return tensor(one.shape, torch.bool)
    vectors = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "mean", "rstd", "var")
    if name in vectors and one.optional and len(one.shape) > 2:
        return tensor((one.shape[1],), one.dtype)
    return tensor(one.shape, one.dtype)


def _ints(argument: Any, name: str, one: Try) -> list[int]:
    rank = len(one.shape)
    if name == "shape" or ("size" in name and "split" not in name and "kernel" not in name):
        return list(one.shape)
    if name in ("split_sizes", "split_size"):
        return [2, 2]
    if name == "dims" and rank:
        return list(range(rank))
    if "stride" in name and rank and not argument.N:
        return list(tensor(one.shape, one.dtype).strides)
    if name in ("pad", "padding") and not argument.N:
        return [1, 1]
    return [max(1, one.number)] * argument.N if argument.N else [0]
