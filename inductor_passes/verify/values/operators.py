"""The signatures of operators that compute, from their documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from inductor_passes import _torch
from inductor_passes.verify.values.access import Access, dim_of
from inductor_passes.verify.values.program import Record
from inductor_passes.verify.values.signatures import (
    ONE,
    Signature,
    Use,
    broadcast,
    einsum,
    is_pure,
    key_of,
    opaque,
    pointwise,
    tensors,
)
from inductor_passes.verify.values.sizes import is_one

Maker = Callable[[Record, tuple[int, ...]], "Signature | None"]


def signature(a: Access) -> Signature | None:
    """Of the operator that ``a`` reads a result of; None when it computes nothing or has effects."""
    cache: dict[tuple[int, ...], Signature | None] = a.record.notes.setdefault("signature", {})
    if a.path not in cache:
        cache[a.path] = _signature(a.record, a.path)
    return cache[a.path]


def _signature(record: Record, path: tuple[int, ...]) -> Signature | None:
    if record.called == "_c10d_functional::all_to_all_single":
        return _exchange(record)
    if not is_pure(record):
        return None
    made = TABLE.get(record.called)
    found = made(record, path) if made is not None else None
    if found is None and _torch.is_pointwise(record.target):
        found = pointwise(record, path)
    return found if found is not None else opaque(record, path)


# -- products ---------------------------------------------------------------------------------------------------


def _mm(record: Record, path: tuple[int, ...]) -> Signature | None:
    return einsum(record, {"self": "ik", "mat2": "kj"}, "ij", "k")


def _bmm(record: Record, path: tuple[int, ...]) -> Signature | None:
    return einsum(record, {"self": "bik", "mat2": "bkj"}, "bij", "k")


def _added(record: Record, names: tuple[str, str], forms: tuple[str, str], out: str) -> Signature | None:
    found = einsum(record, dict(zip(names, forms)), out, "k")
    if found is None:
        return None
    bias = broadcast(record.arguments["self"], record.shape(), found.out)
    return Signature(found.key, found.out, (*found.uses, bias), (), found.summed, sized=True)


def _addmm(record: Record, path: tuple[int, ...]) -> Signature | None:
    return _added(record, ("mat1", "mat2"), ("ik", "kj"), "ij")


def _baddbmm(record: Record, path: tuple[int, ...]) -> Signature | None:
    return _added(record, ("batch1", "batch2"), ("bik", "bkj"), "bij")


def _scaled_mm(record: Record, path: tuple[int, ...]) -> Signature | None:
    found = einsum(record, {"self": "ik", "mat2": "kj"}, "ij", "k")
    if found is None or record.arguments.get("scale_result") is not None:
        return None
    uses, (rows, columns) = list(found.uses), record.shape()
    for name, shape, letters in (("scale_a", (rows, 1), ("i", ONE)), ("scale_b", (1, columns), (ONE, "j"))):
        scale = record.arguments[name]
        if is_one(math.prod(scale.shape())):
            uses.append(Use(scale, (ONE,) * len(scale.shape())))
        elif scale.shape() == shape:
            uses.append(Use(scale, letters))
        else:
            return None
    if isinstance(bias := record.arguments.get("bias"), Record):
        uses.append(broadcast(bias, (rows, columns), found.out))
    # How many rows a scale has says how it is meant, and is no literal.
    return Signature(found.key, found.out, tuple(uses), (), found.summed, sized=True)


def _grouped_mm(record: Record, path: tuple[int, ...]) -> Signature | None:
    left, right = record.arguments["self"], record.arguments["mat2"]
    forms = {(2, 3): ("rk", "gkn", "rn", "rg"), (3, 3): ("gmk", "gkn", "gmn", ""), (2, 2): ("mr", "rn", "gmn", "rg")}
    forms[3, 2] = ("gmk", "kr", "mr", "rg")
    a, b, out, wholes = forms[len(left.shape()), len(right.shape())]
    if record.arguments.get("bias") is not None:
        return None
    extents = {**dict(zip(a, left.shape())), **dict(zip(b, right.shape())), **dict(zip(out, record.shape()))}
    uses = [Use(left, tuple(a)), Use(right, tuple(b))]
    if isinstance(offsets := record.arguments.get("offs"), Record):
        uses.append(Use(offsets, ("g",)))
    summed = (("k", extents["k"]),) if "k" in a else ()
    inner = tuple((letter, extents[letter]) for letter in wholes)
    return Signature(key_of(record, ()), tuple(out), tuple(uses), inner, summed, sized=True)


# -- rows -------------------------------------------------------------------------------------------------------


def _along(record: Record, path: tuple[int, ...]) -> Signature | None:
    """One dimension is looked at as a whole, all tensors have the same shape."""
    source = record.first
    shape = source.shape()
    if not shape or any(o.shape() != shape for o in tensors(record)):
        return None
    dim = dim_of(record.arguments["dim"], len(shape))
    letters = tuple(f"d{i}" for i in range(len(shape)))
    key = key_of(record, path, ("dim",))
    out, inner = letters, [(letters[dim], shape[dim])]
    if record.shape(path) != shape:
        out = (*letters[:dim], "p", *letters[dim + 1 :])
        inner.append(("p", record.shape(path)[dim]))
    return Signature(key, out, tuple(Use(o, letters) for o in tensors(record)), tuple(inner))


def reduced_dims(record: Record) -> set[int]:
    """The dimensions that a reduction leaves out."""
    rank = len(record.first.shape())
    given = record.arguments.get("dim", record.arguments.get("dims"))
    if given is None or given == ():
        return set(range(rank))
    return {dim_of(d, rank) for d in (given if isinstance(given, tuple) else (given,))}


def _reduction(summed: bool) -> Maker:
    def made(record: Record, path: tuple[int, ...]) -> Signature | None:
        source, gone = record.first, reduced_dims(record)
        letters = [f"d{i}" for i in range(len(source.shape()))]
        inner = tuple((letters[d], source.shape()[d]) for d in sorted(gone))
        keep = bool(record.arguments.get("keepdim"))
        out = tuple(ONE if d in gone else letters[d] for d in range(len(letters)) if keep or d not in gone)
        key = key_of(record, path, ("dim", "dims", "keepdim"))
        use = (Use(source, tuple(letters)),)
        return Signature(key, out, use, () if summed else inner, inner if summed else (), sized=True)

    return made


def _normed(names: tuple[str, ...], flat: tuple[str, ...]) -> Maker:
    """Norms of the last dimensions: ``names`` have the input's shape, ``flat`` one value per element of a row."""

    def made(record: Record, path: tuple[int, ...]) -> Signature | None:
        source = record.arguments["input"]
        shape, count = source.shape(), len(record.arguments["normalized_shape"])
        rows = tuple(f"r{i}" for i in range(len(shape) - count))
        inner = tuple(f"w{i}" for i in range(count))
        uses = []
        for operand in tensors(record):
            name = next(n for n, v in record.arguments.items() if v is operand)
            own = operand.shape()
            if name in flat:
                letters = inner
            elif name in names or own == shape:
                letters = (*rows, *inner)
            else:
                letters = (*rows, *(ONE for _ in range(len(own) - len(rows))))
            if len(letters) != len(own):
                return None
            uses.append(Use(operand, letters))
        mine = record.shape(path)
        wholes = tuple(zip(inner, shape[len(rows) :]))
        if mine == shape:
            return Signature(key_of(record, path), (*rows, *inner), tuple(uses), wholes)
        if mine == shape[len(rows) :] and rows:
            # The gradient of a weight: rows are added up.
            return Signature(key_of(record, path), inner, tuple(uses), wholes, tuple(zip(rows, shape)), sized=True)
        return Signature(key_of(record, path), (*rows, *(ONE for _ in mine[len(rows) :])), tuple(uses), wholes)

    return made


# -- by index ---------------------------------------------------------------------------------------------------


def _looked_up(table: str, by: str, dim: Callable[[Record], int]) -> Maker:
    """Whole slices of ``table``, chosen by numbers: ``index_select``, ``embedding``."""

    def made(record: Record, path: tuple[int, ...]) -> Signature | None:
        source, chosen = record.arguments[table], record.arguments[by]
        at = dim(record)
        letters = [f"d{i}" for i in range(len(source.shape()))]
        numbers = tuple(f"n{i}" for i in range(len(chosen.shape())))
        out = (*letters[:at], *numbers, *letters[at + 1 :])
        inner = ((letters[at], source.shape()[at]),)
        uses = (Use(source, tuple(letters)), Use(chosen, numbers))
        return Signature(key_of(record, path, ("dim",)), out, uses, inner)

    return made


def _exchange(record: Record) -> Signature:
    """An exchange of unequal parts: which rows a rank gets is not in its graph, that whole rows travel is."""
    shape, source = record.shape(), record.first
    rows = (("o0", shape[0]), ("w0", source.shape()[0]))
    rest = tuple(f"d{i}" for i in range(1, len(shape)))
    uses = (Use(source, ("w0", *rest)),)
    return Signature(key_of(record, ()), ("o0", *rest), uses, rows, opaque=True)


# -- attention --------------------------------------------------------------------------------------------------

_SAVED = ("query", "key", "value", "out", "logsumexp", "grad_out", "grad_out_")


def _attention(record: Record, path: tuple[int, ...]) -> Signature | None:
    """Batches are independent, and heads where keys and values have as many; what is in a head is one whole."""
    given = record.arguments
    batch, heads = given["query"].shape()[:2]
    if given.get("dropout_p") or not path:
        return None
    if given["key"].shape()[1] != heads or given["value"].shape()[1] != heads or given["key"].shape()[0] != batch:
        return None
    value = record.value[path[0]]
    if not hasattr(value, "dtype") or record.shape(path)[:2] != (batch, heads):
        # A generator's state, which nothing is drawn from: any will do.
        return Signature((str(record.target), path, "unused"), tuple(f"o{i}" for i in range(_rank(value))), ())
    uses, wholes = [], []
    for number, (name, operand) in enumerate((n, v) for n, v in given.items() if isinstance(v, Record)):
        shape = operand.shape()
        leading: tuple[str, ...] = ("b", "h") if name in _SAVED else ()
        rest = tuple(f"w{number}.{i}" for i in range(len(shape) - len(leading)))
        if name in ("attn_mask", "attn_bias"):
            letters = tuple(ONE if s == 1 else c for s, c in zip(shape, (("b", "h") + rest[-2:])[-len(shape) :]))
        elif leading and shape[:2] != (batch, heads):
            return None
        else:
            letters = (*leading, *rest)
        wholes += [(c, s) for c, s in zip(letters, shape) if c not in ("b", "h", ONE)]
        uses.append(Use(operand, letters))
    out = ("b", "h", *(f"o{i}" for i in range(_rank(value) - 2)))
    wholes += zip(out[2:], record.shape(path)[2:])
    return Signature(key_of(record, path), out, tuple(uses), tuple(wholes), sized=True)


def _rank(value: Any) -> int:
    return len(value.shape) if hasattr(value, "dtype") else 0


def _numbers(record: Record, path: tuple[int, ...]) -> Signature | None:
    """``prims::iota``: what is at a position depends on nothing else."""
    given = record.arguments
    key = (record.called, given["length"], given.get("start", 0), given.get("step", 1), str(record.dtype()))
    return Signature(key, ("o0",), (), (("o0", record.shape()[0]),))


_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
TABLE: dict[str, Maker] = {
    "aten::mm": _mm,
    "aten::_int_mm": _mm,
    "aten::bmm": _bmm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _baddbmm,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_grouped_mm": _grouped_mm,
    **{f"aten::{name}": _along for name in ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort")},
    **{f"aten::{name}": _along for name in ("_softmax_backward_data", "_log_softmax_backward_data", "topk")},
    **{f"aten::{name}": _reduction(True) for name in ("sum", "mean")},
    **{f"aten::{name}": _reduction(False) for name in ("amax", "amin", "var", "var_mean", "std", "any", "all", "prod")},
    **{f"aten::{name}": _reduction(False) for name in ("logsumexp", "argmax", "argmin", "linalg_vector_norm")},
    "aten::native_layer_norm": _normed(("input",), ("weight", "bias")),
    "aten::native_layer_norm_backward": _normed(("grad_out", "input"), ("weight", "bias")),
    "aten::_fused_rms_norm": _normed(("input",), ("weight",)),
    "aten::_fused_rms_norm_backward": _normed(("grad_out", "input"), ("weight",)),
    "prims::iota": _numbers,
    "aten::embedding": _looked_up("weight", "indices", lambda record: 0),
    "aten::index_select": _looked_up(
        "self", "index", lambda record: dim_of(record.arguments["dim"], len(record.first.shape()))
    ),
    **{f"aten::_scaled_dot_product_{kind}": _attention for kind in _KINDS},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention for kind in _KINDS},
}
