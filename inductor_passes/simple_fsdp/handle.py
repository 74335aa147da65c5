"""What a managed parameter's attribute gives outside of forward: the parameter without its values.

``model.head.weight`` has to work on one rank alone, so it must not gather, and it must not compute: an operation on a
sharded tensor may communicate, and ``DTensor.item()`` even returns one rank's part of a sum as if it were the whole.
The handle therefore passes on what concerns the stored parameter itself (shape, dtype, device, gradient, hooks, writing
in place, an optimizer's update) and refuses what would need values, with an error that says how to get them.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from inductor_passes import _torch
from inductor_passes.simple_fsdp.arrival import meet
from inductor_passes.simple_fsdp.settings import ranks_of

#: Attributes of a tensor that are other tensors made of its values.
_VALUE_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
#: Functions that look at a tensor, not at its values, or concern its place in the autograd graph.
_METADATA = frozenset(
    (
        *("size", "stride", "numel", "nelement", "dim", "ndimension", "__len__", "element_size", "storage_offset"),
        *("is_contiguous", "dim_order", "get_device", "is_floating_point", "is_complex", "is_signed", "is_inference"),
        *("is_conj", "is_neg", "is_shared", "is_pinned", "is_same_size", "has_names", "__dir__"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"),
    )
)
#: Functions that exchange or reshape the storage, which a sharded tensor does not own; the first crashes on a DTensor.
_STORAGE = frozenset({"share_memory_", "set_", "resize_", "resize_as_", "as_strided_"})
#: Whether a tensor compared with itself gives True: sets and dicts ask, and take both for one key.
_COMPARISONS = {torch.Tensor.__eq__: True, torch.Tensor.eq: True, torch.Tensor.__ne__: False, torch.Tensor.ne: False}
#: Functions that give another handle of the same values.
_ALIASES = frozenset({"detach", "requires_grad_"})


class ShardedValueError(RuntimeError):
    """The values of a parameter that simple_fsdp manages were used outside of forward without being gathered."""


class ParameterHandle(torch.Tensor):
    """A managed parameter, seen from outside of forward; counts as ``nn.Parameter`` if what is stored does.

    Has the stored DTensor's attributes (``placements``, ``to_local()`` ...) and, among tensors of Python's sets and
    dicts, is the same key. ``full_tensor()`` and ``redistribute()`` are collective: a rank that calls them alone gets a
    :class:`~inductor_passes.simple_fsdp.arrival.MissingRanksError`.
    """

    _stored: DTensor
    _label: str

    @staticmethod
    def of(stored: DTensor, label: str) -> ParameterHandle:
        """The handle of a DTensor: always the same one while anybody holds it.

        Args:
            label: what the user calls the parameter, for messages.
        """
        known = _HANDLES.get(id(stored))
        if known is not None and known._stored is stored:
            return known
        handle: ParameterHandle = torch.Tensor._make_wrapper_subclass(
            ParameterHandle, stored.shape, strides=stored.stride(), dtype=stored.dtype, device=stored.device
        )
        own = object.__getattribute__(handle, "__dict__")
        own["_stored"], own["_label"] = stored, label
        _HANDLES[id(stored)] = handle
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on what is stored, or refuse."""
        if len(args) == 1 and isinstance(args[0], ParameterHandle) and _reads_metadata(func):
            return func(args[0]._stored)
        keywords = dict(kwargs or {})
        first = next(one for one in pytree.tree_leaves((args, keywords)) if isinstance(one, ParameterHandle))
        kind = _kind(func, args, keywords)
        if kind == "same":
            return _COMPARISONS[func]
        if kind == "refused":
            raise ShardedValueError(first._refusal(_name(func)))
        plain_args, plain_keywords = pytree.tree_map(stored_of, (args, keywords))
        try:
            with _torch.without_implicit_communication():
                result = func(*plain_args, **plain_keywords)
        except RuntimeError as error:
            if _torch.is_refusal(error):
                raise ShardedValueError(first._refusal(_name(func))) from error
            raise
        if result is first._stored:
            return first
        return ParameterHandle.of(result, first._label) if kind == "alias" and isinstance(result, DTensor) else result

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse: only code that goes around ``__torch_function__`` comes here, and it wants values."""
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ParameterHandle))
        raise ShardedValueError(first._refusal(str(func)))

    def __tensor_flatten__(self) -> Any:
        """Refuse: compiled code that gets a handle as an argument would compute with it."""
        raise ShardedValueError(self._refusal("torch.compile"))

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """The whole values, gathered; as ``DTensor.full_tensor``. Every rank has to call it."""
        self._meet("full_tensor()")
        return self._stored.full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """In another layout; as ``DTensor.redistribute``. Every rank has to call it."""
        self._meet("redistribute()")
        return self._stored.redistribute(*args, **kwargs)

    def data_ptr(self) -> int:
        """Where this rank's shard lies; different for different parameters, unlike a DTensor's own, which is 0."""
        return self._stored.to_local().data_ptr()

    def _meet(self, method: str) -> None:
        ranks = ranks_of(self._stored.device_mesh)
        meet(ranks, f"{method} of {self._label}, shape {tuple(self._stored.shape)},")

    def _refusal(self, name: str) -> str:
        return (
            f"{self._label} of shape {tuple(self._stored.shape)}, managed by simple_fsdp, was used by {name!r} outside "
            f"of forward, where nothing gathers it: its values lie on {self._stored.device_mesh.size()} ranks, and all "
            "of them would have to take part. Let every rank gather: `.full_tensor()` gives the values; inside `with "
            "inductor_passes.simple_fsdp.gathered_parameters(module):` reads gather as in forward, gradients included. "
            "This rank's part alone is `.to_local()`. Initialisation belongs inside `sharded_parameters()`, where "
            "reads give the stored DTensors, as module.parameters() does."
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("_stored", "_label"):
            raise AttributeError(name)
        return getattr(self._stored, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stored, name, stored_of(value))

    def __delattr__(self, name: str) -> None:
        delattr(self._stored, name)

    def __hash__(self) -> int:
        return hash(self._stored)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self._label}, not gathered: {self._stored!r}"

    def __format__(self, spec: str) -> str:
        try:
            return format(repr(self), spec)
        except ValueError as error:  # a number's format, such as ".3f"
            raise ShardedValueError(self._refusal(f"format {spec}")) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._stored, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._stored.__reduce_ex__(protocol)


#: id of what is stored -> its handle, which keeps it alive.
_HANDLES: weakref.WeakValueDictionary[int, ParameterHandle] = weakref.WeakValueDictionary()


def stored_of(value: Any) -> Any:
    """What a handle stands for; anything else as it is."""
    return value._stored if isinstance(value, ParameterHandle) else value


def _name(func: Callable[..., Any]) -> str:
    """A function's name; of an attribute's getter or setter that of the attribute."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in _ACCESSORS else name


_ACCESSORS = ("__get__", "__set__", "__delete__")


@functools.lru_cache(maxsize=256)
def _reads_metadata(func: Callable[..., Any]) -> bool:
    """Whether a function of one tensor only looks at it: the getter of ``shape``, ``numel`` ..."""
    name = _name(func)
    if getattr(func, "__name__", "") == "__get__":
        return name != "data" and name not in _VALUE_ATTRIBUTES
    return name in _METADATA


def _kind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``plain``: run it; ``alias``: give back a handle of the result; ``same``: compared with itself; ``refused``."""
    name = _name(func)
    if getattr(func, "__name__", "") in _ACCESSORS:
        return "alias" if name == "data" else "refused" if name in _VALUE_ATTRIBUTES else "plain"
    if func in _COMPARISONS and len({id(stored_of(one)) for one in args}) == 1:
        return "same"
    if name in _ALIASES:
        return "alias"
    if name in _METADATA or name.endswith("_like") or name.startswith("new_"):
        return "plain"
    if name == "type" and len(args) == 1 and not kwargs:
        return "plain"
    if name in _STORAGE:
        return "refused"
    return "plain" if _writes(name, (*args, *kwargs.values())) or _has_dtensor((args, kwargs)) else "refused"


def _writes(name: str, values: tuple[Any, ...]) -> bool:
    """Whether a function writes in place, into a handle: ``normal_``, ``_foreach_add_``, ``__imul__`` ..."""
    in_place = name.endswith("_") if not name.endswith("__") else name.startswith("__i") and name not in _NOT_IN_PLACE
    return in_place and any(isinstance(one, ParameterHandle) for one in pytree.tree_leaves(values[:1]))


_NOT_IN_PLACE = frozenset({"__int__", "__index__", "__invert__", "__iter__"})


def _has_dtensor(values: Any) -> bool:
    """Whether the caller also gives DTensors: then it knows what it deals with, as optimizers do."""
    return any(isinstance(one, DTensor) for one in pytree.tree_leaves(values))
