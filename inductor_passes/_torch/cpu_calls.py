"""Generated code for a CPU that calls one function where Inductor would write a loop for each size.

A loop has its sizes and places in its code. Every message has others, so that equal layers in two messages were two C++
functions to compile, at most of a second each. A call is told them.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_passes._torch.lowering import generates_python
from inductor_passes._torch.snodes import COPY_COLUMNS, DIVIDE

#: Copies ``rows`` pieces of ``width`` bytes that begin ``stride`` bytes apart to places ``onto`` bytes apart; one
#: function for all of them.
_COPY_COLUMNS = """
_copy_columns = async_compile.cpp_pybinding(
    ['const char*', 'char*', 'const int64_t', 'const int64_t', 'const int64_t', 'const int64_t'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const char* from, char* to, const int64_t rows, const int64_t stride, const int64_t onto,
                         const int64_t width)
{
    constexpr int64_t piece = 1 << 16;
    const int64_t pieces = (width + piece - 1) / piece;
    #pragma omp parallel for collapse(2) if (rows * width > (1 << 18))
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k = 0; k < pieces; ++k) {
            const int64_t begin = k * piece, length = width - begin < piece ? width - begin : piece;
            std::memcpy(to + row * onto + begin, from + row * stride + begin, length);
        }
    }
}
''')
def _copied_columns(columns, *sizes, out):
    _copy_columns(columns, out, *sizes)
"""

#: Divides ``rows`` of ``width`` elements that begin ``stride`` elements apart by a whole number. As in Inductor's
#: loops, what is narrower than float is divided as float and rounded once.
_DIVIDE = """
_divide_DTYPE = async_compile.cpp_pybinding(
    ['const CTYPE*', 'CTYPE*', 'const int64_t', 'const int64_t', 'const int64_t', 'const int64_t'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const CTYPE* from, CTYPE* to, const int64_t rows, const int64_t stride, const int64_t width,
                         const int64_t divisor)
{
    constexpr int64_t piece = 1 << 14;
    const int64_t pieces = (width + piece - 1) / piece;
    const auto by = static_cast<WIDE>(divisor);
    #pragma omp parallel for collapse(2) if (rows * width > (1 << 16))
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t part = 0; part < pieces; ++part) {
            const int64_t begin = part * piece, length = width - begin < piece ? width - begin : piece;
            const CTYPE* in = from + row * stride + begin;
            CTYPE* out = to + row * width + begin;
            #pragma omp simd
            for (int64_t k = 0; k < length; ++k) {
                out[k] = static_cast<CTYPE>(static_cast<WIDE>(in[k]) / by);
            }
        }
    }
}
''')
def _divided_DTYPE(part, *numbers, out):
    _divide_DTYPE(part, out, *numbers)
"""

#: The element types that Inductor's loops divide: in C++, and what they are divided as.
_DIVIDED = {
    torch.float64: ("double", "double"),
    torch.float32: ("float", "float"),
    torch.bfloat16: ("at::BFloat16", "float"),
    torch.float16: ("at::Half", "float"),
}


#: From so many bytes on an input of a graph is copied into a message by a call: a small one is cheaper in a loop.
_FEWEST_BYTES = 1 << 15


def lower_as_calls(unpack: Any, pack: Any, divide: Any) -> None:
    """Make Inductor lower ``inductor_passes::unpack``, ``pack`` and ``divide`` on a CPU to a call per tensor.

    Twice is harmless.

    What is unpacked or divided is memory that Inductor allocates; one call of the operator would make all results at
    once. What is packed is written into the message, as for ``cat``: by the loop that computes it where there is one,
    and where it is in memory already, by a call.
    """
    from torch._inductor import ir, lowering

    if unpack.default in lowering.lowerings:
        return
    as_it_is = lowering.fallback_handler(unpack.default, add_to_fallback_set=False)

    def unpacked(message: Any, firsts: Any, widths: Any) -> Any:
        if message.get_device().type != "cpu" or not generates_python():
            return as_it_is(message, firsts, widths)
        return [_column(ir, message, first, width) for first, width in zip(firsts, widths, strict=True)]

    def packed(parts: Any) -> Any:
        if all(_can_be_called_for(part) for part in parts) and len(parts) > 1 and generates_python():
            columns = sum(int(part.get_size()[1]) for part in parts)
            placed = [_placed(ir, part, columns) for part in parts]
            return ir.TensorBox(ir.ConcatKernel.create(placed, 1))
        return lowering.lowerings[torch.ops.aten.cat.default](parts, 1)

    def divided(part: Any, divisor: int) -> Any:
        called = part.get_device().type == "cpu" and generates_python()
        if called and (rows := _rows_in_memory(ir, part)) is not None:
            return _divided(ir, part, rows, divisor)
        return lowering.lowerings[torch.ops.aten.div.Tensor](part, divisor)

    lowering.add_needs_realized_inputs(unpack.default)
    lowering.add_layout_constraint(unpack.default, lowering.constrain_to_fx_strides)
    lowering.register_lowering(unpack.default, type_promotion_kind=None)(unpacked)
    lowering.register_lowering(pack.default, type_promotion_kind=None)(packed)
    lowering.register_lowering(divide.default, type_promotion_kind=None)(divided)


def _rows_in_memory(ir: Any, part: Any) -> tuple[int, int, int] | None:
    """(rows, from one to the next, elements of one) of a tensor that is in memory; None where a loop divides it."""
    if not ir.is_storage_and_layout(part) or part.get_dtype() not in _DIVIDED:
        return None
    storage, layout = ir.as_storage_and_layout(part, freeze=False)
    known = all(getattr(size, "is_Integer", type(size) is int) for size in (*part.get_size(), *layout.stride))
    if not known or isinstance(storage.data, ir.ComputedBuffer):
        return None
    return _rows(list(map(int, part.get_size())), list(map(int, layout.stride)))


def _rows(sizes: list[int], strides: list[int]) -> tuple[int, int, int] | None:
    """(rows, stride, width) of a tensor whose last dimensions are dense and whose other ones are evenly apart."""
    dims = [(size, stride) for size, stride in zip(sizes, strides) if size != 1]
    if 0 in sizes:
        return 0, 0, 0
    width = 1
    while dims and dims[-1][1] == width:
        width *= dims.pop()[0]
    rows, stride = 1, width
    for number, (size, apart) in enumerate(reversed(dims)):
        stride = apart if number == 0 else stride
        if apart != stride * rows:
            return None
        rows *= size
    return rows, stride, width


def _can_be_called_for(part: Any) -> bool:
    known = all(getattr(size, "is_Integer", type(size) is int) for size in part.get_size())
    # Bytes are concatenated in one call already.
    return part.get_device().type == "cpu" and known and part.get_dtype() not in (torch.int8, torch.uint8)


def _column(ir: Any, message: Any, first: Any, width: Any) -> Any:
    """Columns of a matrix, as a tensor of its own."""
    from torch._inductor.lowering import lowerings

    rows = message.get_size()[0]
    part = ir.ExternKernel.realize_input(lowerings[torch.ops.aten.slice.Tensor](message, 1, first, first + width))
    layout = ir.FixedLayout(message.get_device(), message.get_dtype(), [rows, width], [width, 1])
    return _copied_columns(ir, part, layout, width)


def _placed(ir: Any, part: Any, columns: int) -> Any:
    """A part of a message of so many columns: a call that copies it there, or itself where a loop writes it there."""
    if not ir.is_storage_and_layout(part):
        return part
    storage, layout = ir.as_storage_and_layout(part, freeze=False)
    if ir.ConcatKernel.can_realize_into_without_copy(storage):
        return part
    rows, width = (int(size) for size in part.get_size())
    strides = [int(stride) for stride in layout.stride]
    if (width > 1 and strides[1] != 1) or rows * width == 0:
        return part
    if rows == 1 and isinstance(storage.data, ir.ComputedBuffer):
        # Its loop and that of the copy are one then, which keeps nothing of it elsewhere.
        return part
    if storage.is_input_buffer() and rows * width * part.get_dtype().itemsize < _FEWEST_BYTES:
        # Loops over inputs become one function, which costs less than a call for each.
        return part
    realized = ir.ExternKernel.realize_input(part)
    return _copied_columns(ir, realized, ir.FlexibleLayout(part.get_device(), part.get_dtype(), [rows, width]), columns)


def _copied_columns(ir: Any, part: Any, layout: Any, onto: Any) -> Any:
    """A copy of a matrix to where rows begin ``onto`` elements apart."""
    (rows, width), size = part.get_size(), layout.dtype.itemsize
    places = [rows, part.get_stride()[0] * size, onto * size, width * size]
    return _called(ir, part, layout, places, "_copied_columns", _COPY_COLUMNS, COPY_COLUMNS)


def _divided(ir: Any, part: Any, rows: tuple[int, int, int], divisor: int) -> Any:
    """The elements of a tensor by a whole number.

    Args:
        rows: see :func:`_rows_in_memory`.
    """
    device, dtype, size = part.get_device(), part.get_dtype(), part.get_size()
    name, (element, wide) = str(dtype).removeprefix("torch."), _DIVIDED[dtype]
    function = _DIVIDE.replace("DTYPE", name).replace("CTYPE", element).replace("WIDE", wide)
    realized = ir.ExternKernel.realize_input(part)
    layout = ir.FixedLayout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(size))
    return _called(ir, realized, layout, [*rows, divisor], f"_divided_{name}", function, DIVIDE)


def _called(ir: Any, part: Any, layout: Any, numbers: Any, name: str, source: str, operator: Any) -> Any:
    """What a call of the function ``name`` writes to memory of ``layout``; its source is written into the module once.

    Args:
        operator: by whose name the call is known to the scheduler.
    """
    from torch._inductor.virtualized import V

    class Call(ir.ExternKernelOut):  # type: ignore[misc,name-defined]
        def codegen(self, wrapper: Any) -> None:
            written = wrapper.__dict__.setdefault("written_functions", set())
            if name not in written:
                written.add(name)
                wrapper.header.splice(source)
            super().codegen(wrapper)

    called: Any = Call(
        layout=layout,
        inputs=[part],
        constant_args=numbers,
        python_kernel_name=name,
        op_overload=operator,
    )
    # Inductor notes it only for operators that return one tensor.
    called.origin_node = V.graph.current_node
    return ir.TensorBox.create(called)
