"""Results of operators for fake tensors, asked of torch once per signature.

torch dispatches every call in Python, which takes 0.2 to 0.5 ms even where its own cache knows the result, and a large
graph makes thousands of equal calls. What a call returned is remembered as sizes, strides and whose memory it is, and
made anew as torch makes it from its cache (``FakeTensorMode._get_output_tensor_from_cache_entry``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from inductor_passes._torch.observation import plain_sizes

#: Kept per fake tensor mode.
_MOST = 4096


class _Form(NamedTuple):
    """A tensor that a call returned.

    Attributes:
        owner: which of the tensors among the arguments has its memory; None: memory of its own.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device
    owner: int | None


class _Unlike(Exception):
    """An argument is like no other: nothing can be known of the call."""


class Results:
    """Results of calls on the tensors of one fake tensor mode; a list of forms stands for a list of tensors."""

    def __init__(self) -> None:
        self._forms: dict[Any, _Form | list[_Form] | None] = {}

    def of(self, mode: Any, args: Any, kwargs: Any, call: Callable[..., Any], ask: Callable[[], Any]) -> Any:
        """What a call returns.

        Args:
            mode: of all tensors among the arguments.
            args, kwargs: of the call.
            call: the operator, or another function whose result depends on nothing but the arguments.
            ask: calls it.
        """
        tensors: list[torch.Tensor] = []
        try:
            key = (call, _key(args, tensors, mode), _key(kwargs, tensors, mode))
            known = key in self._forms
        except (_Unlike, TypeError):  # or a literal that has no hash
            return ask()
        form = self._forms[key] if known else None
        if isinstance(form, _Form):
            return _made(mode, form, tensors)
        if form is not None:
            return [_made(mode, one, tensors) for one in form]
        found = ask()
        if not known and len(self._forms) < _MOST:
            forms = [_form(mode, one, tensors) for one in (found if isinstance(found, list) else [found])]
            plain = [one for one in forms if one is not None]
            whole = len(plain) == len(forms) > 0
            self._forms[key] = None if not whole else plain if isinstance(found, list) else plain[0]
        return found


_of_mode: weakref.WeakKeyDictionary[Any, Results] = weakref.WeakKeyDictionary()


def fake_result(tensor: torch.Tensor, args: Any, kwargs: Any, call: Callable[..., Any], ask: Callable[[], Any]) -> Any:
    """What ``call(*args, **kwargs)`` returns for fake tensors of the mode of ``tensor``, see :meth:`Results.of`."""
    mode: Any = getattr(tensor, "fake_mode", None)
    if mode is None or getattr(mode, "propagate_real_tensors", False) or _mutates(call):
        return ask()
    known = _of_mode.get(mode)
    if known is None:
        known = _of_mode[mode] = Results()
    return known.of(mode, args, kwargs, call, ask)


def _mutates(call: Any) -> bool:
    schema = getattr(call, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _key(value: Any, tensors: list[torch.Tensor], mode: Any) -> Any:
    """A key for an argument, equal for arguments that operators treat alike."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        sizes = plain_sizes(value)
        offset = None if sizes is None else value.storage_offset()
        if type(offset) is not int or getattr(value, "fake_mode", None) is not mode or value.requires_grad:
            raise _Unlike
        return sizes, offset, value.device
    if isinstance(value, (list, tuple)):
        return (type(value), *[_key(v, tensors, mode) for v in value])
    if isinstance(value, dict):
        return (dict, *[(k, _key(v, tensors, mode)) for k, v in value.items()])
    # 1, 1.0 and True are told apart.
    return type(value), value


def _form(mode: Any, found: Any, tensors: list[torch.Tensor]) -> _Form | None:
    """What has to be known to make ``found`` again; None where it is not one plain tensor."""
    if not isinstance(found, torch.Tensor) or any(found is tensor for tensor in tensors):
        return None
    sizes = plain_sizes(found)
    if sizes is None or getattr(found, "fake_mode", None) is not mode or found.requires_grad:
        return None
    if found.is_conj() or found.is_neg() or getattr(found, "constant", None) is not None:
        return None
    offset, storage = found.storage_offset(), found.untyped_storage()
    owners = [k for k, t in enumerate(tensors) if t.untyped_storage()._cdata == storage._cdata]
    if len(owners) > 1:
        return None  # another call's arguments need not share memory
    form = _Form(sizes[0], sizes[1], sizes[2], offset, found.device, owners[0] if owners else None)
    try:
        again = _made(mode, form, tensors)
    except (TypeError, RuntimeError):  # another torch makes them in another way
        return None
    same = type(again) is type(found) and plain_sizes(again) == sizes and again.storage_offset() == offset
    if not same or again.device != found.device or again.untyped_storage().nbytes() != storage.nbytes():
        return None
    return form


def _made(mode: Any, form: _Form, tensors: list[torch.Tensor]) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    with _disable_current_modes():
        if form.owner is None:
            plain = torch.empty_strided(form.sizes, form.strides, dtype=form.dtype, device="meta")
        else:
            plain = torch.empty(0, dtype=form.dtype, device="meta")
            storage: Any = tensors[form.owner].untyped_storage()
            plain.set_(storage, form.offset, form.sizes, form.strides)
        return FakeTensor(mode, plain, form.device)
