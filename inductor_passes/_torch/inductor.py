"""Inductor's configuration, hooks and entry points."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._logging import trace_structured


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


def partitioner_base() -> type:
    """Base class of what Inductor takes as ``custom_partitioner_fn``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def default_partitioner() -> Callable[..., Any]:
    """Inductor's own partitioner: ``(joint module, joint inputs, **kwargs) -> (forward module, backward module)``."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


def graph_pass_base() -> type:
    """Base class of a post-grad graph pass; from 2.12 on one that is told whether it compiles for inference."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return aware or custom_graph_pass.CustomGraphPass


def scheduler_pass_base() -> type:
    """Base class of what Inductor calls before fusion, the only one that it caches graphs with."""
    from torch._inductor import custom_graph_pass

    return getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


def keeps_waits() -> bool:
    """Whether the hook that keeps waits behind messages is among Inductor's options of this compilation."""
    return bool(getattr(inductor_option("_pre_fusion_custom_pass"), "keeps_waits", False))


def accepts_pass_lists() -> bool:
    """Whether a custom-pass option takes a list of passes (from torch 2.12 on)."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def pass_uuid(graph_pass: object) -> Any:
    """Cache id of a custom graph pass or partitioner, None for a plain function."""
    uuid = getattr(graph_pass, "uuid", None)
    return uuid() if callable(uuid) else None


def as_pass_list(value: Any) -> list[Any]:
    """A custom-pass option (None, a pass, a list or a tuple of passes) as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def inductor_config() -> Any:
    """Inductor's config module."""
    import torch._inductor.config as config

    return config


def inductor_option_names() -> frozenset[str]:
    """All keys that ``torch.compile(options=...)`` accepts for Inductor."""
    config = inductor_config()
    # torch deprecates the older name; a torch without the newer one would still have it.
    copy = getattr(config, "get_config_copy", None) or config.shallow_copy_dict
    return frozenset(copy())


def is_inductor_option(name: str) -> bool:
    """Whether Inductor has an option of that name; False where it cannot be asked."""
    try:
        return name.replace("-", "_") in inductor_option_names()
    except (ImportError, AttributeError):
        return False


def inductor_option(name: str, default: Any = None) -> Any:
    """Current value of a (possibly nested) Inductor option; ``default`` where this torch does not have it."""
    value: Any = inductor_config()
    for part in name.split("."):
        if not hasattr(value, part):
            return default
        value = getattr(value, part)
    return value


@dataclass(frozen=True, slots=True)
class InliningLimits:
    """Up to where Inductor computes a result in its readers instead of storing it.

    Attributes:
        cpu: for a processor.
        reads: values that the code of a result reads.
        reads_of_reused: the same for a result with several readers.
        operators: operations per element of a result.
    """

    cpu: bool
    reads: int
    reads_of_reused: int
    operators: int


def inlining_limits(cpu: bool) -> InliningLimits:
    """The limits of the current compilation; those for a processor are others from torch 2.13 on."""

    def number(name: str, default: int) -> int:
        general = inductor_option(f"realize_{name}_threshold")
        own = inductor_option(f"realize_cpu_{name}_threshold") if cpu else None
        known = (general, own, inductor_option(f"_realize_{name}_threshold_default"), default)
        return int(next(n for n in known if n is not None))

    reused = inductor_option("realize_reads_threshold", 4)
    return InliningLimits(cpu, number("acc_reads", 8), int(reused), number("opcount", 30))


def writes_over_saved() -> bool:
    """Whether backward's kernels may write over what forward saved for them."""
    from torch._functorch import config

    return bool(getattr(config, "donated_buffer", False) and inductor_option("inplace_buffers", True))


def set_inductor_option(name: str, value: Any) -> None:
    """Set a (possibly nested) Inductor option for the whole process."""
    target: Any = inductor_config()
    *parents, last = name.split(".")
    for part in parents:
        target = getattr(target, part)
    setattr(target, last, value)


def expand_mode(mode: str) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for.

    Raises:
        ValueError: an unknown mode, with the known ones.
    """
    import torch._inductor

    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise ValueError(f"mode={mode!r} is not allowed; expected one of {', '.join(sorted(known))}")
    return dict(known[mode])


def compile_fx(module: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    """Compile a dynamo graph with Inductor under ``options``."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    return inductor_compile_fx(module, example_inputs, config_patches=options)


class _GeneratedError(Exception):
    """The code of a graph is generated, and nobody is going to run it."""


def generate_fx(module: Any, example_inputs: Any, options: dict[str, Any]) -> None:
    """As :func:`compile_fx`, up to the generated code, which the C++ or Triton compiler does not get to see.

    Where Inductor measures kernels it compiles all of it.
    """
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    measures = any(options.get(name, inductor_option(name)) for name in ("max_autotune", "max_autotune_gemm"))
    if measures or not hasattr(GraphLowering, "save_output_code"):
        compile_fx(module, example_inputs, options)
        return
    before: Callable[[str], None] | None = GraphLowering.save_output_code
    generated: list[str] = []
    mine = threading.get_ident()

    def stop(code: str) -> None:
        if before is not None:
            before(code)
        if threading.get_ident() != mine:
            # Another thread compiles what is going to run.
            return
        trace_structured("inductor_output_code", payload_fn=lambda: code)
        generated.append(code)
        raise _GeneratedError

    def inner(graph_module: Any, inputs: Any, **given: Any) -> Any:
        generated.clear()
        try:
            return compile_fx_inner(graph_module, inputs, **given)
        except Exception as error:
            # Inductor wraps what is raised inside of it.
            if not generated:
                raise
            error.__traceback__ = None

        def never(arguments: Any) -> Any:
            raise AssertionError("this graph was only explained")

        never._boxed_call = True  # type: ignore[attr-defined]
        return never

    GraphLowering.save_output_code = staticmethod(stop)
    try:
        inductor_compile_fx(module, example_inputs, inner_compile=inner, config_patches=options)
    finally:
        GraphLowering.save_output_code = before


def compile_aot_eager(
    module: Any,
    example_inputs: Any,
    graph_pass: Callable[[torch.fx.Graph, bool], None],
    partition: Callable[..., Any],
) -> Any:
    """Trace forward and backward ahead of time as Inductor would, run a pass on each, execute them op by op.

    Random operators stay what they are, so that they draw as without compilation.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    def compiler(is_inference: bool) -> Callable[[Any, Any], Any]:
        def run(graph_module: Any, inputs: Any) -> Any:
            graph_pass(graph_module.graph, is_inference)
            # Frees what forward saved when it was last read, as plans have it. A call with the inputs one by one keeps
            # all of them to the end.
            return boxed_nop(graph_module, inputs)

        return run

    with inductor_config().patch(fallback_random=True):
        decompositions = select_decomp_table()
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(False),
        inference_compiler=compiler(True),
        decompositions=decompositions,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(module, example_inputs)


def aot_graph_name() -> str:
    """Name of the graph that AOTAutograd is compiling, e.g. ``model__0_forward_1``; "" outside of it."""
    try:
        from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

        return str(get_aot_graph_name())
    except (ImportError, AttributeError):
        return ""


SIMPLE_OVERLAP = "aten_distributed_optimizations.enable_simple_overlap"


def features() -> dict[str, bool]:
    """Feature -> whether this torch build has it; every one is looked for, none is inferred from the version."""
    import importlib.util

    def module(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    missing = object()
    available = torch.distributed.is_available()
    return {
        "graph passes": inductor_option("post_grad_custom_post_pass", missing) is not missing,
        "scheduler hook": inductor_option("reorder_for_compute_comm_overlap_passes", missing) is not missing,
        "structured trace": module("torch._logging"),
        "distributed": available,
        "gloo": available and torch.distributed.is_gloo_available(),
        "nccl": available and torch.distributed.is_nccl_available(),
        "mpi": available and torch.distributed.is_mpi_available(),
        "fake process group": module("torch.testing._internal.distributed.fake_pg"),
        "symmetric memory": available and module("torch.distributed._symmetric_memory"),
        "simple_overlap": inductor_option(SIMPLE_OVERLAP, missing) is not missing,
        "triton": module("triton"),
    }


def compile_cache_dir() -> str:
    """The directory of Inductor's caches; it is not created."""
    import os

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def cpp_compiler() -> str:
    """The C++ compiler that Inductor would use for CPU code.

    Raises:
        RuntimeError: there is none (torch's own error type derives from it).
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def everything_compiled_at_once() -> contextlib.AbstractContextManager[Any]:
    """While it is entered a backward is compiled together with its forward, and neither comes out of AOT's cache."""
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)  # type: ignore[no-any-return]


def output_examples(module: torch.fx.GraphModule) -> list[Any]:
    """What a graph that dynamo captured returns: fake tensors and plain values, in order."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    found = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    return [n.meta.get("example_value", n.meta.get("val")) if isinstance(n, torch.fx.Node) else n for n in found]


def plain_values(values: Sequence[Any]) -> bool:
    """Whether all tensors among fake values are plain ones: no DTensor or other subclass."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return all(
        not isinstance(v, torch.Tensor)
        or (type(v) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and not is_traceable_wrapper_subclass(v))
        for v in values
    )
