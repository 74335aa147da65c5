"""What an operator does to memory, seen by running it, without trusting its schema.

The operator runs on tensors without data (device ``meta``, or fake tensors) that each have a storage of their own. Then
storages are compared: a result that lives in an argument's storage is that argument's memory, an argument whose
version counter went up was written to, one whose storage is another one than before was rebound (``set_``).

Strides decide whether some operators copy (``reshape``, ``contiguous``), and a compiler may choose other strides than
the ones in a graph. So the operator runs several times: with the strides given, with dense rows and with dense columns.
What aliases in one run may alias, what does not in another may copy.

Operators whose result depends on data cannot run without any, nor can those that need a device, a file or another rank.
Some crash instead of saying so: these are not run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inductor_passes._torch.operators import registered_op
from inductor_passes._torch.sizes import size_hint

#: Room behind every tensor: an ``as_strided`` may reach further than its operand's elements.
_ROOM = 2**48
#: What sizes without any hint may count as; the first is divisible by what sizes usually are divided by.
UNKNOWN_SIZES = (48, 1, 2, 4, 8, 16, 0)
#: Operators that read their arguments' data without a look at where they are.
_CRASHING = frozenset(
    {
        "aten::_nnpack_spatial_convolution",
        "aten::_thnn_differentiable_gru_cell_backward",
        "aten::fractional_max_pool2d_backward",
    }
)

#: Per result the indices of the tensor arguments whose memory it may be, None for what is no tensor; lists as tuples.
Aliases = Any


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument, by what decides an operator's behaviour; sizes by hint."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """What some runs of an operator did; tensor arguments count in the order in which they are met.

    Attributes:
        results: per result the arguments that it aliased in any run.
        own: per result whether it had memory of its own with the strides given; same form as ``results``.
        copies: whether a result aliased in one run and not in another.
        written, rebound: arguments that were written to, that have another storage than before.
        reshaped: whether an argument has another shape or strides than before.
    """

    results: Aliases
    own: Any
    copies: bool
    written: frozenset[int]
    rebound: frozenset[int]
    reshaped: bool


def tensor_argument(tensor: torch.Tensor, unknown: int = UNKNOWN_SIZES[0]) -> TensorArgument | None:
    """A (fake) tensor as an argument; None for one that has no strides (sparse, nested)."""
    plain = plain_sizes(tensor)
    if plain is not None:
        return _argument(*plain)
    if tensor.layout is not torch.strided:
        return None
    try:
        sizes = tuple(known_size(size, unknown) for size in tensor.shape)
        strides = tuple(known_size(stride, unknown) for stride in tensor.stride())
    except (RuntimeError, TypeError):
        # a quantised tensor, or a subclass that keeps its strides to itself
        return None
    return TensorArgument(tensor.dtype, sizes, strides)


@functools.lru_cache(maxsize=8192)
def _argument(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorArgument:
    return TensorArgument(dtype, tuple(sizes), strides)


def plain_sizes(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Dtype, sizes and strides of a (fake) tensor; None when some are symbols, or it has no strides."""
    if tensor.layout is not torch.strided:
        return None
    try:
        shape, strides = tensor.shape, tensor.stride()
    except RuntimeError:
        return None
    for size in (*shape, *strides):
        if type(size) is not int:
            return None
    return tensor.dtype, shape, strides


def known_size(value: Any, unknown: int = UNKNOWN_SIZES[0]) -> int:
    """A size as an int: by hint, else with ``unknown`` for every symbol without one, wherever it occurs."""
    if type(value) is int:
        return value
    hint = size_hint(value)
    if hint is not None:
        return hint
    expression = value.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, unknown)))


def observe(target: Any, args: Sequence[Any], kwargs: dict[str, Any], *, trusted: bool) -> Observed | None:
    """Run an operator overload; None when it cannot be run.

    Args:
        target: the overload.
        args, kwargs: its arguments, a :class:`TensorArgument` in the place of every tensor.
        trusted: its kernels may run as they are; others only run in the form that tracing runs (their fake kernels).
    """
    if target._schema.name in _CRASHING:
        return None
    runs = []
    layouts: list[Callable[[TensorArgument], Sequence[int]]] = [lambda t: t.strides, _rows, _columns]
    seen: set[tuple[Any, ...]] = set()
    for layout in layouts:
        key = tuple(tuple(layout(t)) for t in _tensors((args, kwargs)))
        if key in seen:
            continue
        seen.add(key)
        run = _run(target, args, kwargs, layout, trusted)
        if run is not None:
            runs.append(run)
    if not runs or any(_form(run.results) != _form(runs[0].results) for run in runs):
        return None
    results = _merge([run.results for run in runs])
    return Observed(
        results=results,
        own=runs[0].own,
        copies=any(_flat(run.results) != _flat(results) for run in runs),
        written=frozenset().union(*(run.written for run in runs)),
        rebound=frozenset().union(*(run.rebound for run in runs)),
        reshaped=any(run.reshaped for run in runs),
    )


@functools.lru_cache(maxsize=8192)
def declared_writes(target: Any, flags: tuple[tuple[str, bool], ...] = ()) -> frozenset[str]:
    """Names of the arguments that torch's own reading of a schema says an operator overload writes to.

    It knows operators that write more than their schema says (``batch_norm`` its running statistics when training).

    Args:
        flags: boolean arguments and their values, which may decide that.
    """
    reader = getattr(torch._C, "_SchemaInfo", None)
    schema = target._schema
    if reader is None:
        return frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    # What it knows about an operator it does not know about the same operator with buffers for its results.
    namespace, _, name = schema.name.partition("::")
    plain = registered_op(namespace, name, "default")
    known = [schema] if plain is None or plain is target else [schema, plain._schema]
    found: set[str] = set()
    for one in known:
        info = reader(one)
        for flag, value in flags:
            if info.has_argument(flag):
                info.add_argument_value(flag, value)
        found.update(a.name for a in one.arguments if info.is_mutable(a.name))
    return frozenset(a.name for a in schema.arguments if a.name in found)


def _rows(tensor: TensorArgument) -> list[int]:
    """Strides of a dense tensor whose last dimension is contiguous."""
    strides, step = [0] * len(tensor.sizes), 1
    for d in reversed(range(len(tensor.sizes))):
        strides[d] = step
        step *= max(1, tensor.sizes[d])
    return strides


def _columns(tensor: TensorArgument) -> list[int]:
    """Strides of a dense tensor whose first dimension is contiguous."""
    strides, step = [0] * len(tensor.sizes), 1
    for d in range(len(tensor.sizes)):
        strides[d] = step
        step *= max(1, tensor.sizes[d])
    return strides


def _run(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layout: Callable[[TensorArgument], Sequence[int]],
    trusted: bool,
) -> Observed | None:
    try:
        with isolated(), _silent():
            return (_on_meta if trusted else _on_fakes)(target, args, kwargs, layout)
    except Exception:  # an operator that cannot run without data says so in as many ways as there are operators
        return None


_thread = threading.local()


@contextlib.contextmanager
def beside_a_program() -> Iterator[None]:
    """On this thread, while a program runs on others: what Python keeps per process stays as it is."""
    before, _thread.beside = getattr(_thread, "beside", False), True
    try:
        yield
    finally:
        _thread.beside = before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without warnings, and without what torch logs about a fake kernel that fails: here that is an answer.

    Filters of warnings are the process's: beside a program its own ones would be lost meanwhile, so there are none.
    """
    logger, mine = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    logger.addFilter(of_others)
    try:
        if getattr(_thread, "beside", False):
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(of_others)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Nothing that is going on around us sees what is done inside: no mode, no autocast, no inference mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for name in ("DisableTorchFunction", "_DisableAutocast"):
            if (guard := getattr(torch._C, name, None)) is not None:
                stack.enter_context(guard())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _on_meta(target: Any, args: Any, kwargs: Any, layout: Callable[[TensorArgument], Sequence[int]]) -> Observed:
    made: list[torch.Tensor] = []

    def make(argument: TensorArgument) -> torch.Tensor:
        made.append(_roomy(argument, layout))
        return made[-1]

    device = torch.device("meta")
    return _compare(target, _filled(args, make, device), _filled(kwargs, make, device), made)


def _on_fakes(target: Any, args: Any, kwargs: Any, layout: Callable[[TensorArgument], Sequence[int]]) -> Observed:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    # No fallback: it would run the real kernel. No cache: it would answer in the place of the operator.
    mode = FakeTensorMode(allow_fallback_kernels=False)
    mode.cache_enabled = False
    made: list[torch.Tensor] = []

    def make(argument: TensorArgument) -> torch.Tensor:
        made.append(FakeTensor(mode, _roomy(argument, layout), torch.device("cpu")))
        return made[-1]

    device = torch.device("cpu")
    positional, named = _filled(args, make, device), _filled(kwargs, make, device)
    with mode:
        return _compare(target, positional, named, made)


def _roomy(argument: TensorArgument, layout: Callable[[TensorArgument], Sequence[int]]) -> torch.Tensor:
    tensor = torch.empty(0, dtype=argument.dtype, device="meta")
    return tensor.set_(torch.UntypedStorage(_ROOM, device="meta"), 0, argument.sizes, tuple(layout(argument)))


def _filled(value: Any, make: Callable[[TensorArgument], torch.Tensor], device: torch.device) -> Any:
    """Arguments with tensors in place, on one device, without what only a real device has."""
    if isinstance(value, TensorArgument):
        return make(value)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, dict):
        return {k: False if k == "pin_memory" else _filled(v, make, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(v, make, device) for v in value]) if type(value) in (list, tuple) else value
    return value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _compare(target: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> Observed:
    before = [(_storage(t), t._version) for t in made]
    shapes = [(t.shape, t.stride()) for t in made]
    index = {storage: i for i, (storage, _) in enumerate(before)}
    outcome = target(*args, **kwargs)
    after = [_storage(t) for t in made]
    rebound = {i for i, (storage, _) in enumerate(before) if storage != after[i]}
    # What was rebound lives where it lives now: with whatever shares that storage.
    places: dict[int, set[int]] = {}
    for i, storage in enumerate(after):
        places.setdefault(storage, set()).add(i)
    for storage, i in index.items():
        places.setdefault(storage, set()).add(i)

    def aliases(value: Any) -> Aliases:
        if isinstance(value, torch.Tensor):
            return frozenset(places.get(_storage(value), ()))
        return tuple(map(aliases, value)) if isinstance(value, (list, tuple)) else None

    def own(value: Any) -> Any:
        return tuple(map(own, value)) if isinstance(value, tuple) else value is not None and not value

    results = aliases(outcome)
    written = frozenset(i for i, (_, version) in enumerate(before) if made[i]._version != version)
    shared = {i for i in rebound for i in places[after[i]]}
    reshaped = any((t.shape, t.stride()) != shape for t, shape in zip(made, shapes))
    return Observed(results, own(results), False, written, frozenset(rebound | shared), reshaped)


def _tensors(value: Any) -> Iterator[TensorArgument]:
    if isinstance(value, TensorArgument):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _form(results: Aliases) -> Any:
    return tuple(map(_form, results)) if isinstance(results, tuple) else results is None


def _flat(results: Any) -> list[Any]:
    return [x for r in results for x in _flat(r)] if isinstance(results, tuple) else [results]


def _merge(runs: list[Aliases]) -> Aliases:
    if isinstance(runs[0], tuple):
        return tuple(_merge([run[i] for run in runs]) for i in range(len(runs[0])))
    return None if runs[0] is None else frozenset().union(*runs)
