"""What fused operators compute, in primitive operators: this table is their specification.

Each entry gives, for one result of a node, a chain of steps that has the same value. The steps are read like nodes of
the graph. They are written from the operators' documentation, and nothing here calls the operators.

``rounds_freely`` marks steps of an operator that is documented not to round between them (such as a norm of a sum that
was not rounded before). Everywhere else each step rounds to its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inductor_passes import _torch
from inductor_passes.verify.values.program import Meta, Record, sizes

aten = torch.ops.aten
prims = torch.ops.prims


class Steps:
    """Steps in the place of one node."""

    def __init__(self, record: Record, rounds_freely: bool = False) -> None:
        self.record, self.rounds_freely = record, rounds_freely
        self.given = record.arguments
        self.count = 0

    def call(self, target: Any, shape: tuple[int, ...], dtype: torch.dtype, *args: Any) -> Record:
        """One more step."""
        self.count += 1
        of = self.record
        name, value = f"{of.name}/{self.count}", Meta(shape, dtype)
        return Record(of.program, name, "call_function", target, args, {}, value, of.position, self.rounds_freely)

    def cast(self, source: Record, dtype: torch.dtype) -> Record:
        """To another type, where it is another one."""
        if source.dtype() == dtype:
            return source
        return self.call(prims.convert_element_type.default, source.shape(), dtype, source, dtype)

    def gathered(self, shard: Record) -> Record:
        """all_gather along dimension 0."""
        world, shape = self.world, shard.shape()
        op = _torch.collective_op("all_gather_into_tensor")
        return self.call(op, (world * shape[0], *shape[1:]), shard.dtype(), shard, world, self.group)

    def scattered(self, whole: Record, reduce_op: str) -> Record:
        """reduce_scatter along dimension 0."""
        world, shape = self.world, whole.shape()
        op = _torch.collective_op("reduce_scatter_tensor")
        rows = (shape[0] // world, *shape[1:])
        return self.call(op, rows, whole.dtype(), whole, reduce_op, world, self.group)

    def scattered_wide(self, whole: Record, reduce_op: str) -> Record:
        """reduce_scatter that adds in float32 or wider and rounds once."""
        wide = torch.promote_types(whole.dtype(), torch.float32)
        return self.cast(self.scattered(self.cast(whole, wide), reduce_op), whole.dtype())

    def product(self, left: Record, right: Record, bias: Record | None = None) -> Record:
        """``left @ right``, plus a bias."""
        shape, dtype = (left.shape()[0], right.shape()[1]), left.dtype()
        if bias is None:
            return self.call(aten.mm.default, shape, dtype, left, right)
        return self.call(aten.addmm.default, shape, dtype, bias, left, right)

    @property
    def group(self) -> Any:
        """The name of the group."""
        return self.given["group_name"]

    @property
    def world(self) -> int:
        """Number of ranks."""
        if "world" in self.given:
            return int(self.given["world"])
        from inductor_passes.ir.groups import resolve

        return resolve(self.group).size or 2


Meaning = Callable[[Record, tuple[int, ...]], "Record | None"]


def _gathered_mm(record: Record, path: tuple[int, ...]) -> Record:
    s = Steps(record)
    return s.product(s.gathered(s.given["shard"]), s.given["right"])


def _mm_scattered(record: Record, path: tuple[int, ...]) -> Record:
    s = Steps(record)
    return s.scattered_wide(s.product(s.given["left"], s.given["right"]), s.given["reduce_op"])


def _symm_gathered_mm(record: Record, path: tuple[int, ...]) -> Record:
    s, number = Steps(record), path[0]
    whole, rights = s.gathered(s.given["shard"]), s.given["rights"]
    return whole if number == len(rights) else s.product(whole, rights[number], s.given["biases"][number])


def _rms_normed(s: Steps, x: Record, weight: Record, eps: float) -> Record:
    """``x * rsqrt(mean(x * x, -1) + eps) * weight`` in float32."""
    shape, wide = x.shape(), torch.float32
    rows = (*shape[:-1], 1)
    mean = s.call(aten.mean.dim, rows, wide, s.call(aten.mul.Tensor, shape, wide, x, x), [len(shape) - 1], True)
    root = s.call(aten.rsqrt.default, rows, wide, s.call(aten.add.Tensor, rows, wide, mean, eps))
    return s.call(aten.mul.Tensor, shape, wide, s.call(aten.mul.Tensor, shape, wide, x, root), s.cast(weight, wide))


def _residual_rms_norm(record: Record, path: tuple[int, ...]) -> Record:
    """``h = residual + all_reduce(x)`` and its norm, all of it in float32."""
    s = Steps(record, rounds_freely=True)
    wide = torch.float32
    x, residual = s.cast(s.given["x"], wide), s.cast(s.given["residual"], wide)
    total = s.call(_torch.collective_op("all_reduce"), x.shape(), wide, x, "sum", s.group)
    h = s.call(aten.add.Tensor, x.shape(), wide, total, residual)
    if path == (0,):
        return s.cast(h, s.given["residual"].dtype())
    return s.cast(_rms_normed(s, h, s.given["weight"], s.given["eps"]), s.given["y_dtype"])


#: Norms of the last dimension that are one operator, for comparison with the above.
NORMS = frozenset({"aten::_fused_rms_norm"})


def norm_steps(record: Record) -> Record:
    """The first result of one of :data:`NORMS`."""
    s = Steps(record, rounds_freely=True)
    x, eps = s.given["input"], s.given["eps"]
    eps = torch.finfo(x.dtype()).eps if eps is None else eps
    return s.cast(_rms_normed(s, s.cast(x, torch.float32), s.given["weight"], float(eps)), record.dtype((0,)))


def _flat(record: Record, dim: str, name: str) -> bool:
    """Matrices along rows: the only form of torch's operators that is described here."""
    return len(record.arguments[name].shape()) == 2 and record.arguments[dim] == 0


def _fused_gather(record: Record, path: tuple[int, ...]) -> Record | None:
    """symm_mem::fused_all_gather_matmul: (gathered, [gathered @ B for B in Bs])."""
    if not _flat(record, "gather_dim", "A"):
        return None
    s = Steps(record)
    whole = s.gathered(s.given["A"])
    return whole if path == (0,) else s.product(whole, s.given["Bs"][path[1]])


def _fused_scatter(record: Record, path: tuple[int, ...]) -> Record | None:
    """symm_mem::fused_matmul_reduce_scatter."""
    if not _flat(record, "scatter_dim", "A"):
        return None
    s = Steps(record)
    return s.scattered(s.product(s.given["A"], s.given["B"]), s.given["reduce_op"])


def _scaled(s: Steps, left: Record, right: Record, scales: tuple[Record, Record], rest: tuple[Any, ...]) -> Record:
    bias, result_scale, out_dtype, fast = rest
    shape, dtype = (left.shape()[0], right.shape()[1]), out_dtype or left.dtype()
    return s.call(aten._scaled_mm.default, shape, dtype, left, right, *scales, bias, result_scale, out_dtype, fast)


def _fused_scaled_gather(record: Record, path: tuple[int, ...]) -> Record | None:
    """symm_mem::fused_all_gather_scaled_matmul; a scale of the shard's rows is gathered with them."""
    if not _flat(record, "gather_dim", "A"):
        return None
    s = Steps(record)
    given, shard = s.given, s.given["A"]
    whole, scale = s.gathered(shard), s.given["A_scale"]
    if path == (0,):
        return whole
    if scale.shape() == (shard.shape()[0], 1):
        scale = s.gathered(scale)
    n = path[1]
    rest = (given["biases"][n], given["result_scales"][n], given["out_dtypes"][n], given["use_fast_accum"][n])
    return _scaled(s, whole, given["Bs"][n], (scale, given["B_scales"][n]), rest)


def _fused_scaled_scatter(record: Record, path: tuple[int, ...]) -> Record | None:
    """symm_mem::fused_scaled_matmul_reduce_scatter."""
    dims = record.arguments["orig_scatter_dim"], record.arguments["scatter_dim_after_maybe_reshape"]
    if dims != (0, 0) or len(record.arguments["A"].shape()) != 2:
        return None
    s = Steps(record)
    given = s.given
    rest = (given["bias"], given["result_scale"], given["out_dtype"], given["use_fast_accum"])
    product = _scaled(s, given["A"], given["B"], (given["A_scale"], given["B_scale"]), rest)
    return s.scattered(product, given["reduce_op"])


def _unpacked(record: Record, path: tuple[int, ...]) -> Record:
    """inductor_passes::unpack: columns ``[first, first + width)`` of a message."""
    s, n = Steps(record), path[0]
    message = s.given["message"]
    first, width = sizes((s.given["firsts"][n], s.given["widths"][n]), record.name)
    shape = (message.shape()[0], width)
    return s.call(aten.slice.Tensor, shape, message.dtype(), message, 1, first, first + width)


def _sum_of_one(s: Steps, values: Record, columns: Record, index: Record) -> Record:
    """``where(columns == index, values, 0)`` added up over the last dimension, which is kept."""
    shape = (*index.shape()[:-1], values.shape()[-1])
    here = s.call(aten.eq.Tensor, shape, torch.bool, columns, index)
    zero = s.call(aten.scalar_tensor.default, (), values.dtype(), 0)
    chosen = s.call(aten.where.self, shape, values.dtype(), here, values, zero)
    return s.call(aten.sum.dim_IntList, index.shape(), values.dtype(), chosen, [len(shape) - 1], True)


def _gathered_elements(record: Record, path: tuple[int, ...]) -> Record | None:
    """aten::gather of one element per row: the sum of a row of which all others are left out.

    Equal to it but for the sign of zero. An index out of range is an error, and no number.
    """
    s = Steps(record)
    values, index = s.given["self"], s.given["index"]
    shape, last = values.shape(), len(values.shape()) - 1
    if s.given["dim"] not in (-1, last) or index.shape() != (*shape[:-1], 1) or not values.dtype().is_floating_point:
        return None
    columns = s.call(prims.iota.default, (shape[-1],), index.dtype(), shape[-1])
    return _sum_of_one(s, values, columns, index)


def adds_one(record: Record) -> bool:
    """Whether a sum adds up what :func:`_sum_of_one` does over the columns of a whole row.

    Columns are numbered differently, so at most one of its terms is not 0: it rounds nothing, and neither does any
    other sum of the same terms, in whatever order.
    """
    if record.called != "aten::sum" or record.first.called != "aten::where":
        return False
    chosen = record.first
    here, zero = (chosen.arguments[name] for name in ("condition", "other"))
    if not isinstance(here, Record) or here.called != "aten::eq" or not isinstance(zero, Record):
        return False
    columns, index = here.arguments["self"], here.arguments["other"]
    if zero.called != "aten::scalar_tensor" or zero.arguments["s"] != 0 or not isinstance(index, Record):
        return False
    if not isinstance(columns, Record) or columns.called != "prims::iota":
        return False
    # In a smaller type numbers would come again.
    step = columns.arguments.get("step", 1)
    differ = type(step) is int and step != 0 and columns.dtype() in (torch.int32, torch.int64)
    last = len(chosen.shape()) - 1
    along = list(record.arguments["dim"] or ()) in ([last], [-1]) and record.dtype() == chosen.dtype()
    return differ and along and columns.shape() == chosen.shape()[last:] and index.shape()[-1] == 1


def _picked(record: Record, path: tuple[int, ...]) -> Record:
    """inductor_passes::pick: a gather by a rank that holds some columns, 0 where the index names another one."""
    s = Steps(record)
    return _sum_of_one(s, s.given["values"], s.given["columns"], s.given["index"])


def _of_truth(record: Record, path: tuple[int, ...]) -> Record | None:
    """aten::any and aten::all of truth values: the largest and the smallest of 0 and 1."""
    s = Steps(record)
    source, dims = s.given["self"], s.given.get("dim")
    # Without any dimension torch reduces nothing, and a maximum reduces all.
    if source.dtype() is not torch.bool or (isinstance(dims, (list, tuple)) and not dims):
        return None
    extreme = aten.amax.default if record.called == "aten::any" else aten.amin.default
    over = [] if dims is None else list(dims) if isinstance(dims, (list, tuple)) else [dims]
    kept = bool(s.given.get("keepdim", False))
    numbers = s.cast(source, torch.int32)
    return s.cast(s.call(extreme, record.shape(), torch.int32, numbers, over, kept), torch.bool)


#: Operators that are documented to leave out roundings between their steps.
ROUND_FREELY = frozenset({"inductor_passes::all_reduce_residual_rms_norm"})
DEFINED: dict[str, Meaning] = {
    "inductor_passes::gathered_mm": _gathered_mm,
    "inductor_passes::mm_scattered": _mm_scattered,
    "inductor_passes::symm_gathered_mm": _symm_gathered_mm,
    "inductor_passes::symm_mm_scattered": _mm_scattered,
    "inductor_passes::all_reduce_residual_rms_norm": _residual_rms_norm,
    "inductor_passes::unpack": _unpacked,
    "inductor_passes::pick": _picked,
    "aten::gather": _gathered_elements,
    "aten::any": _of_truth,
    "aten::all": _of_truth,
    "symm_mem::fused_all_gather_matmul": _fused_gather,
    "symm_mem::fused_matmul_reduce_scatter": _fused_scatter,
    "symm_mem::fused_all_gather_scaled_matmul": _fused_scaled_gather,
    "symm_mem::fused_scaled_matmul_reduce_scatter": _fused_scaled_scatter,
}


def product_of(record: Record) -> Record | None:
    """The product of a matmul that adds something of its own type to it once; None for all others."""
    if "product" not in record.notes:
        record.notes["product"] = _unbiased(record)
    found: Record | None = record.notes["product"]
    return found


def _unbiased(record: Record) -> Record | None:
    if record.called not in _BIASED:
        return None
    target, *names = _BIASED[record.called]
    given = record.arguments
    operands = [given[name] for name in names]
    scaled = given.get("beta", 1) != 1 or given.get("alpha", 1) != 1
    if scaled or any(one.dtype() != record.dtype() for one in (given["self"], *operands)):
        return None
    return Steps(record).call(target, record.shape(), record.dtype(), *operands)


#: operator -> (the product alone, names of its operands)
_BIASED: dict[str, tuple[Any, str, str]] = {
    "aten::addmm": (aten.mm.default, "mat1", "mat2"),
    "aten::baddbmm": (aten.bmm.default, "batch1", "batch2"),
}


def meaning(record: Record, path: tuple[int, ...]) -> Record | None:
    """The last step of what one result of a node is; None for a form that is not described."""
    cache: dict[tuple[int, ...], Record | None] = record.notes.setdefault("meaning", {})
    if path not in cache:
        cache[path] = DEFINED[record.called](record, path)
    return cache[path]
