"""What the passes would do to a model, without taking a step: ``inductor_passes.explain(model, *inputs)``.

The model is compiled as ``torch.compile`` would, forward and, where gradients are needed, backward, up to the generated
code: no C++ or Triton compiler gets it. Dynamo traces the model's Python; each graph that it hands over is compiled and
then stands in by zeros of the right shape, so that the Python between two graphs can go on.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from inductor_passes import _torch, agreement
from inductor_passes.config import FIELDS, PREFIX, check_key
from inductor_passes.engine.ours import is_ours
from inductor_passes.plugin import compile_options
from inductor_passes.report import GraphReport
from inductor_passes.settings.errors import ConfigError
from inductor_passes.trace import nothing
from inductor_passes.trace.collector import collect

#: Width of the text forms: a table of verdicts folded at 80 columns cannot be read.
WIDTH = 160
_ON_META = (
    "inductor_passes.explain: parameters or inputs are on the meta device, for which Inductor computes and sends "
    "nothing. Make them fake tensors of the device that is to run them: "
    'with FakeTensorMode(allow_non_fake_inputs=True): model.to_empty(device="cuda"), '
    "inputs made there, and explain() called there, too"
)


class _Stop(Exception):
    """Everything that can be compiled without running has been."""


@dataclass
class Explanation:
    """The reports of all graphs of a model, as ``inductor-passes report`` shows them; text, HTML or JSON.

    Attributes:
        reports: in the order of compilation; empty when no graph has collectives.
        notes: what was left out, for people; without reports, why there are none.
    """

    reports: list[GraphReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __rich__(self) -> Any:
        """For ``rich.print``."""
        from rich.console import Group
        from rich.text import Text

        from inductor_passes.trace.text import render_graph

        parts: list[Any] = [render_graph(report) for report in self.reports]
        if not parts:
            parts.append(Text("No graph with collectives was compiled."))
        return Group(*parts, *(Text(f"note: {note}") for note in self.notes))

    def __str__(self) -> str:
        return self._recorded().export_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        code = '<pre style="line-height:1.3;overflow-x:auto">{code}</pre>'
        return self._recorded().export_html(inline_styles=True, code_format=code)

    def to_json(self) -> dict[str, Any]:
        """The same form as ``inductor-passes report --json``."""
        return {
            "schema_version": 1,
            "graphs": [report.to_json() for report in self.reports],
            "notes": list(self.notes),
        }

    def _recorded(self) -> Any:
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False)
        console.print(self)
        return console


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """The report of ``model(*inputs, **keywords)`` without running it.

    What is executed: the model's Python code, once, by dynamo; compilation of every graph up to the generated code.
    What is not: the C++ or Triton compiler, a kernel, a collective, backward, an optimizer. Between graphs (after a
    graph break) values are zeros, so Python that branches on values may take another way than in training. Compilation
    itself measures kernels when ``max_autotune`` is on, and compares ranks through the store when ``rank_check`` is. No
    rank is asked whether it has the same graph: all are taken to. A fake process group does as well as a real one.
    Hooks outside of the graphs run as always: those of FSDP2 and DDP communicate, so all ranks must call it then.
    A model that does not fit needs no memory as fake tensors: ``model.to_empty(device=...)`` under ``FakeTensorMode``.

    Args:
        model: a module or function, compiled already or not; it is not changed.
        inputs, keywords: what it is called with.
        options: settings of ours (fields of :class:`PassConfig`), ``mode`` and ``inductor`` included, as for
            :func:`inductor_passes.options`; or what that function returns. Our settings may have the prefix
            ``inductor_passes.``, as for ``backend="inductor_passes"``; ``codegen`` is ``"inductor"`` here.

    Returns:
        An object that prints as text, shows as HTML in a notebook and has ``to_json()``.

    Raises:
        ConfigError: a setting that does not exist or is not allowed.
        ValueError: tensors on the meta device, of which Inductor computes nothing.
        Exception: what compiling the model raises.
    """
    resolved = _resolved(options)
    function = getattr(model, "_torchdynamo_orig_callable", None) or getattr(model, "_orig_mod", model)
    result = Explanation()
    # Before Dynamo holds on to parameters, which could not be replaced then.
    held = [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []
    _refuse_meta([*held, *pytree.tree_leaves((inputs, keywords))])

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        with _torch.everything_compiled_at_once():
            _torch.generate_fx(module, examples, resolved)
        values = _torch.output_examples(module)
        if not _torch.plain_values(values):
            result.notes.append("a graph returns tensor subclasses: what runs after it is not shown")
            return _stop

        def stand_in(*_: Any) -> Any:
            return tuple(_zeros(value) for value in values)

        return stand_in

    compiled = torch.compile(function, backend=backend)
    with collect() as reports, nothing.listen() as lines, agreement.explaining(), contextlib.suppress(_Stop):
        compiled(*inputs, **keywords)
    result.reports = list(reports)
    if not reports:
        result.notes += lines[:1]
    return result


def _resolved(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Inductor is given.

    Raises:
        ConfigError: options that are no mapping, or a setting that does not exist or is not allowed.
    """
    uncached = {"fx_graph_cache": False}
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError("options", options, 'our settings by name, e.g. {"memory_budget": "+5%"}')
    given = dict(options or {})
    if any(is_ours(one) for value in given.values() for one in (value if type(value) is list else [value])):
        # What inductor_passes.options() returned has all of it; anything that was added is checked as torch does.
        for key in given:
            if key in FIELDS and not _torch.is_inductor_option(key):
                raise ConfigError("options", {key: given[key]}, f"an argument: inductor_passes.options({key}=...)")
        return {**uncached, **given}
    settings = {key.removeprefix(PREFIX) if isinstance(key, str) else key: value for key, value in given.items()}
    inductor = settings.pop("inductor", None)
    if inductor is not None and not isinstance(inductor, Mapping):
        raise ConfigError("inductor", inductor, 'options of Inductor by name, e.g. {"max_autotune": True}')
    for key in settings:
        if key != "mode":
            check_key(key)
    return compile_options(inductor={**uncached, **(inductor or {})}, **settings)


def _refuse_meta(values: Iterable[Any]) -> None:
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        raise ValueError(_ON_META)


def _stop(*_: Any) -> Any:
    raise _Stop


def _zeros(value: Any) -> Any:
    """A value like the fake one, made of zeros."""
    if not isinstance(value, torch.Tensor):
        return value
    size = [_torch.size_hint(s) or 0 for s in value.shape]
    made = torch.zeros(size, dtype=value.dtype, device=value.device)
    return made.requires_grad_() if value.requires_grad else made
