"""The graph that Inductor is lowering: inputs, outputs, generated code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from inductor_passes._torch.snodes import _hint


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
