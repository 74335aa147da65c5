"""Asking Inductor once more to lower a graph that it lowered before, on another thread and under the same settings.

Settings that Inductor was given for a compilation live in context variables: a copy of the context that is taken while
it compiles is what it was asked. What it keeps per compilation is local to a thread; dynamo's own lock, which Inductor
takes for a backward graph as well, keeps other compilations of the program apart from this one. Random numbers are the
process's: see ``compile_apart``.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from inductor_passes._torch.compile_apart import compile_fx_inner_apart
from inductor_passes._torch.inductor import (
    as_pass_list,
    inductor_config,
    inductor_option,
    inductor_option_names,
    plain_values,
)
from inductor_passes._torch.modules import graph_module
from inductor_passes._torch.node_names import node_names, set_node_names

#: With these a compilation draws random numbers.
_DRAWING = ("max_autotune", "max_autotune_gemm", "benchmark_fusion", "benchmark_combo_kernel")


@dataclass(frozen=True)
class Lowering:
    """How Inductor was asked to lower a graph.

    Attributes:
        context: settings.
        given: arguments of its entry point besides graph and inputs.
        outputs: form, memory layout and device of what the graph returns.
        compile_context: which compilation it was.
        donated: inputs whose memory the graph may use for something else, by number; only backward has such.
    """

    context: contextvars.Context
    given: dict[str, Any]
    outputs: tuple[str, ...]
    compile_context: Any
    donated: tuple[int, ...] = ()


def settings_per_thread() -> bool:
    """Whether Inductor's settings of one thread do not show in another one."""
    entries = getattr(inductor_config(), "_config", None)
    one = next(iter(entries.values()), None) if isinstance(entries, dict) else None
    return isinstance(getattr(one, "user_override", None), contextvars.ContextVar)


def lowering_now() -> Lowering | str:
    """How the current graph is lowered, asked while Inductor orders its kernels; else why it cannot be asked again."""
    from torch._guards import CompileContext
    from torch._inductor.virtualized import V

    graph = V.graph
    if not settings_per_thread():
        return "Inductor's settings in this torch are those of all threads"
    unknown = compile_fx_inner_apart()
    if isinstance(unknown, str):
        return unknown
    if drawing := next((name for name in _DRAWING if inductor_option(name)), ""):
        return f"Inductor's {drawing} measures kernels on random inputs, which the program's generators would draw"
    if getattr(graph, "cpp_wrapper", False) or getattr(graph, "aot_mode", False) or getattr(graph, "fx_wrapper", False):
        return "the generated code is no Python module"
    checked = set(getattr(graph, "inputs_to_check", None) or ())
    placeholders = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    given = {
        "static_input_idxs": tuple(i for i in range(len(placeholders)) if i not in checked),
        "is_backward": bool(graph.is_backward),
        "is_inference": bool(graph.is_inference),
        "graph_id": getattr(graph, "graph_id", None),
        "get_decomp_fn": getattr(graph, "get_decomp_fn", None),
    }
    # Of one function's graphs both have the numbers, which are those of backward's inputs.
    donated = tuple(getattr(graph, "bw_donated_idxs", None) or ()) if graph.is_backward else ()
    return Lowering(contextvars.copy_context(), given, output_layouts(), CompileContext.try_get(), donated)


def output_layouts() -> tuple[str, ...]:
    """Of what the graph that is being lowered returns: size, strides, offset, type and device, as text."""
    from torch._inductor.virtualized import V

    found = []
    for out in V.graph.graph_outputs:
        try:
            layout = out.get_layout()
            found.append(f"{layout.size} {layout.stride} {layout.offset} {layout.dtype} {layout.device}")
        except (AttributeError, NotImplementedError):
            found.append(type(out).__name__)
    return tuple(found)


def copied_module(graph: torch.fx.Graph) -> torch.fx.GraphModule | str:
    """A copy of a graph in a module of its own, which shares constants only; else why there can be none.

    The copy can be traced again for the same sizes only, and keeps no symbols.
    """
    module = graph.owning_module
    if module is None:
        return "the graph is no part of a module"
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), torch.nn.Module):
            return "there are graphs inside of the graph"
        if node.op in ("call_module", "call_method"):
            return "the graph calls modules"
        if _symbolic(node.meta.get("val")):
            return "the graph holds for several sizes"
        if node.op == "placeholder" and not (_plain(node.meta.get("val")) or _opaque(node.meta.get("val"))):
            return f"an input of the graph is a {type(node.meta.get('val')).__name__}, no plain tensor"
    copy = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = (torch.fx.node.map_arg(a, nodes.__getitem__) for a in (node.args, node.kwargs))
        new = nodes[node] = copy.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
    # What is made of the copy has the names that it would have in the graph.
    set_node_names(copy, node_names(graph))
    made = graph_module(module, copy)
    made.meta.update(module.meta)
    return made


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and plain_values([value])


def _opaque(value: Any) -> bool:
    """Whether it stands for an object that graphs hand on, such as a process group."""
    return type(value).__name__ == "FakeScriptObject"


def _symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_symbolic, value))
    if isinstance(value, torch.Tensor):
        try:
            sizes = (*value.shape, *value.stride(), value.storage_offset())
        except (RuntimeError, NotImplementedError):
            return True
        return any(type(size) is not int for size in sizes)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def fresh_inputs(module: torch.fx.GraphModule) -> list[Any]:
    """Fake inputs for a graph, of a mode of their own: the one that the graph was traced with belongs to its thread."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[Any] = []
    with FakeTensorMode(shape_env=ShapeEnv()):
        for node in module.graph.nodes:
            one = node.meta.get("val")
            if node.op == "placeholder" and _opaque(one):
                found.append(one)
            elif node.op == "placeholder":
                reach = sum((n - 1) * s for n, s in zip(one.shape, one.stride())) + 1 if one.numel() else 0
                flat = torch.empty(one.storage_offset() + reach, dtype=one.dtype, device=one.device)
                made = flat.as_strided(one.shape, one.stride(), one.storage_offset())
                found.append(made.requires_grad_(one.requires_grad))
    return found


def lower_again(
    module: torch.fx.GraphModule,
    lowering: Lowering,
    graph_pass: Callable[[torch.fx.Graph], None],
    order: Callable[[list[Any]], list[Any]],
    is_ours: Callable[[Any], bool],
) -> Any:
    """Compile a graph as it came to our graph pass, without caches; what Inductor makes of it, to be kept alive.

    Torch's passes before ours have had the graph: of those only what changes nothing twice is run.

    Args:
        graph_pass, order: in place of our own graph pass and hook at the end of scheduling.
        is_ours: tells our hook from those of others.
    """
    compile_fx_inner = compile_fx_inner_apart()
    if isinstance(compile_fx_inner, str):
        raise RuntimeError(compile_fx_inner)

    # Settings are copied with all that hangs on them; functions are not.
    def planned(graph: torch.fx.Graph) -> None:
        graph_pass(graph)

    def ordered(nodes: list[Any]) -> list[Any]:
        return order(nodes)

    def run() -> Any:
        orders = as_pass_list(inductor_option("reorder_for_compute_comm_overlap_passes"))
        wanted = {
            "post_grad_custom_pre_pass": None,
            "post_grad_custom_post_pass": planned,
            "reorder_for_compute_comm_overlap_passes": [ordered if is_ours(one) else one for one in orders],
            "pattern_matcher": False,
            "reorder_for_locality": False,
            "fx_graph_cache": False,
            "fx_graph_remote_cache": False,
        }
        known = inductor_option_names()
        accepted = _parameters(compile_fx_inner)
        given = {k: v for k, v in lowering.given.items() if v is not None and (accepted is None or k in accepted)}
        with contextlib.ExitStack() as stack:
            for one in (_compile_lock(), _no_bundles(), _compilation(lowering.compile_context), _donating(lowering)):
                stack.enter_context(one)
            stack.enter_context(inductor_config().patch({k: v for k, v in wanted.items() if k in known}))
            return compile_fx_inner(module, fresh_inputs(module), **given)

    return lowering.context.run(run)


def _parameters(function: Any) -> frozenset[str] | None:
    """What a function takes by name; None where it takes everything, by a typed dictionary that cannot be asked."""
    try:
        from torch._inductor.compile_fx import _CompileFxKwargs

        return frozenset(_CompileFxKwargs.__annotations__)
    except (ImportError, AttributeError):
        known = inspect.signature(function).parameters.values()
        return None if any(p.kind is p.VAR_KEYWORD for p in known) else frozenset(p.name for p in known)


def _compile_lock() -> contextlib.AbstractContextManager[Any]:
    from torch._dynamo import convert_frame

    found: contextlib.AbstractContextManager[Any] = convert_frame.compile_lock
    return found


def _no_bundles() -> contextlib.AbstractContextManager[Any]:
    from torch._functorch import config

    known = getattr(config, "bundled_autograd_cache", None)
    return contextlib.nullcontext() if known is None else config.patch(bundled_autograd_cache=False)  # type: ignore[no-any-return]


def _donating(lowering: Lowering) -> contextlib.AbstractContextManager[Any]:
    """What Inductor asks AOTAutograd's notes on the forward graph for, which are kept per thread."""
    from torch._guards import TracingContext, tracing

    context = TracingContext(None)
    notes: Any = types.SimpleNamespace(
        bw_donated_idxs=list(lowering.donated), static_input_indices=list(lowering.given["static_input_idxs"])
    )
    context.fw_metadata = notes
    return tracing(context)


def _compilation(context: Any) -> contextlib.AbstractContextManager[Any]:
    from torch._guards import compile_context

    return contextlib.nullcontext() if context is None else compile_context(context)
