"""The graph that Inductor is lowering: inputs, outputs, generated code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from inductor_passes._torch.snodes import COPY_COLUMNS, _hint


def current_graph_module() -> Any:
    """The FX graph module that Inductor is lowering, None outside of lowering."""
    from torch._inductor.virtualized import V

    graph = V.graph
    return getattr(graph, "module", None) if type(graph).__name__ != "NullHandler" else None


def lowered_inputs() -> dict[str, int]:
    """Graph inputs of the graph being lowered: name -> bytes by hint (0 for inputs that are no tensors)."""
    from torch._inductor.virtualized import V

    sizes: dict[str, int] = {}
    for name, value in V.graph.graph_inputs.items():
        size = 0
        layout_of = getattr(value, "get_layout", None)
        if layout_of is not None and hasattr(value, "get_dtype"):
            try:
                size = _hint(V.graph.sizevars, value.get_layout().storage_size()) * value.get_dtype().itemsize
            except (NotImplementedError, AttributeError):
                size = 0
        sizes[str(name)] = size
    return sizes


def lowered_outputs() -> list[str]:
    """Names of the buffers and inputs that the graph being lowered returns."""
    from torch._inductor.virtualized import V

    return [str(n) for n in V.graph.get_output_names()]


def generates_python() -> bool:
    """Whether the graph being lowered becomes a Python wrapper (not C++, not an ahead-of-time package)."""
    from torch._inductor.virtualized import V

    return not (getattr(V.graph, "cpp_wrapper", False) or getattr(V.graph, "aot_mode", False))


def lower_as_collective(operator: Any) -> None:
    """Make Inductor lower a functional operator of ours as it lowers torch's collectives: it starts one, and a
    ``wait_tensor`` ends it. Its first argument is the tensor that is sent. Twice is harmless."""
    from torch._inductor import ir, lowering

    if operator in lowering.lowerings:
        return

    def lowered(sent: Any, *given: Any) -> Any:
        started = ir._CollectiveKernel.create_out_of_place(operator.default, sent, *given)
        return ir.TensorBox.create(started)

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator)(lowered)


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


#: From so many bytes on an input of a graph is copied into a message by a call: a small one is cheaper in a loop.
_FEWEST_BYTES = 1 << 15


def lower_as_copies(unpack: Any, pack: Any) -> None:
    """Make Inductor lower ``inductor_passes::unpack`` and ``pack`` on a CPU to a call per tensor.

    All calls are of one C++ function that is told the places. Loops have them in their code, so every place in a
    message is another function to compile. Twice is harmless.

    What is unpacked is memory that Inductor allocates; one call of the operator would make all results at once. What is
    packed is written into the message, as for ``cat``: by the loop that computes it where there is one, and where it is
    in memory already, by a call.
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

    lowering.add_needs_realized_inputs(unpack.default)
    lowering.add_layout_constraint(unpack.default, lowering.constrain_to_fx_strides)
    lowering.register_lowering(unpack.default, type_promotion_kind=None)(unpacked)
    lowering.register_lowering(pack.default, type_promotion_kind=None)(packed)


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
    from torch._inductor.virtualized import V

    class Copy(ir.ExternKernelOut):  # type: ignore[misc,name-defined]
        def codegen(self, wrapper: Any) -> None:
            if not getattr(wrapper, "copies_columns", False):
                wrapper.copies_columns = True
                wrapper.header.splice(_COPY_COLUMNS)
            super().codegen(wrapper)

    (rows, width), size = part.get_size(), layout.dtype.itemsize
    copied: Any = Copy(
        layout=layout,
        inputs=[part],
        constant_args=[rows, part.get_stride()[0] * size, onto * size, width * size],
        python_kernel_name="_copied_columns",
        op_overload=COPY_COLUMNS,
    )
    # Inductor notes it only for operators that return one tensor.
    copied.origin_node = V.graph.current_node
    return ir.TensorBox.create(copied)


def add_module_statement(statement: str) -> None:
    """Add a statement to the top level of the generated Python module: runs whenever the module is loaded."""
    from torch._inductor.virtualized import V

    V.graph.wrapper_code.header.writeline(statement)


def add_closing_statement(statement: str) -> bool:
    """Add a statement to the end of the generated Python module, behind the function that runs the graph.

    Returns False where this torch has no such place.
    """
    from torch._inductor.virtualized import V

    suffix = getattr(V.graph.wrapper_code, "suffix", None)
    if suffix is None or not generates_python():
        return False
    suffix.writeline(statement)
    return True


def generated_calls() -> list[tuple[str, str, tuple[str, ...]]]:
    """The calls of the generated code that run something, in their order, while the code is being generated.

    Each is (what is called, as the code writes it; ``extern`` or ``kernel``; buffer names), see :func:`when_generated`.
    """
    from torch._inductor.codegen import wrapper as w
    from torch._inductor.virtualized import V

    found: list[tuple[str, str, tuple[str, ...]]] = []
    for line in V.graph.wrapper_code.lines:
        if isinstance(line, _extern_lines(w)):
            name = getattr(line.node, "python_kernel_name", None) or line.node.get_kernel_name()
            found.append((str(name), "extern", (str(line.node.get_name()),)))
        elif isinstance(line, w.KernelCallLine):
            name = f"{line.kernel_name}.run" if line.triton else line.kernel_name
            found.append((str(name), "kernel", tuple(str(a) for a in line.call_args)))
    return found


def lowered_device() -> str:
    """Type of the device that the graph being lowered computes on: the accelerator where there is one."""
    from torch._inductor.virtualized import V

    kinds = sorted(str(kind) for kind in getattr(V.graph, "device_types", ()))
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")


def when_generated(callback: Callable[[Iterator[tuple[str, tuple[str, ...]]]], str]) -> bool:
    """Call ``callback`` with the emitted statements when the wrapper of the current graph is generated.

    The statements are those that run something: ``(kind, buffer names)`` where kind is ``extern`` (one kernel, its
    output buffer) or ``kernel`` (a generated kernel, the buffers among its arguments). They are read while ``callback``
    asks for them, so that it can handle an error of reading. The text that it returns becomes a comment in the wrapper.
    Returns False where this torch has no such place.
    """
    try:
        from torch._inductor.codegen import wrapper as w
        from torch._inductor.virtualized import V
    except ImportError:
        return False
    code = V.graph.wrapper_code
    if not hasattr(w, "WrapperLine") or not hasattr(code, "lines") or not generates_python():
        return False

    class _Witness(w.WrapperLine):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.wrapper = code

        def codegen(self, text: Any) -> None:
            for line in callback(_emitted(w, code.lines)).splitlines():
                text.writeline(f"# {line}")

        @staticmethod
        def codegen_fx(converter: Any) -> Any:
            return lambda line: None

    code.lines.append(_Witness())
    return True


def _extern_lines(w: Any) -> Any:
    names = ("ExternKernelAllocLine", "ExternKernelOutLine", "ExternKernelMultiOutLine", "ScatterFallbackLine")
    return tuple(getattr(w, name) for name in names if hasattr(w, name))


def _emitted(w: Any, lines: Iterable[Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    extern = _extern_lines(w)
    for line in lines:
        if isinstance(line, extern):
            yield "extern", (str(line.node.get_name()),)
        elif isinstance(line, w.KernelCallLine):
            yield "kernel", tuple(str(a) for a in line.call_args)
