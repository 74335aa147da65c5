"""How torch.compile finds us: options and the backend entry point (``switch`` and ``engine/process.py``: the process).

Every way ends in the same objects among Inductor's options:

- a pass on Dynamo's graph, which notes layouts of redistributions (``DynamoPass``),
- a graph pass after Inductor's own rewrites (``GraphPass``),
- a hook before fusion, for graphs with messages between two ranks (``FusionHook``),
- a hook at the end of scheduling (``SchedulerHook``),
- a partitioner, which decides which gathered parameters are kept for backward (``StepPartitioner``),
- where rewrites may reassociate sums, a pass on the joint graph, before backward is separated (``JointPass``).

They are part of Inductor's cache key by what they depend on (see ``identity``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch.fx

from inductor_passes import _torch, config
from inductor_passes.config import PREFIX, PassConfig
from inductor_passes.engine import identity, in_tree
from inductor_passes.engine.hooks import (
    DynamoPass,
    FusionHook,
    GraphPass,
    JointPass,
    SchedulerHook,
    StepPartitioner,
    joint_wanted,
    split_with,
)
from inductor_passes.engine.options import SIMPLE_OVERLAP, Hooks, with_ours
from inductor_passes.records.convert import shown
from inductor_passes.settings.errors import MOST_SHOWN, ConfigError


def compile_options(
    settings: PassConfig | None = None,
    *,
    mode: str | None = None,
    inductor: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=...)`` that switch the plugin on.

    Custom passes that are set for the process in ``torch._inductor.config`` are copied now: one set later does not run.

    Args:
        settings: a complete configuration; default: that of the process (``inductor_passes.config`` and environment).
        mode: what ``torch.compile(mode=...)`` would be; torch does not accept ``mode`` beside ``options``.
        inductor: further Inductor options, e.g. ``{"max_autotune": True}``; custom passes of your own run before ours.
        **fields: fields of :class:`~inductor_passes.config.PassConfig`, e.g. ``memory_budget="+5%"``.

    Returns:
        A new dict for ``torch.compile``.

    Raises:
        ConfigError: an unknown field or a value that is not allowed, an unknown mode, or Inductor's own communication
            passes among ``inductor`` (see ``in_tree_passes``).
    """
    if settings is not None and not isinstance(settings, PassConfig):
        raise ConfigError("settings", settings, 'a PassConfig, or fields as keywords: options(memory_budget="+5%")')
    resolved = PassConfig.from_mapping(fields, settings or config.current())
    if resolved.codegen != "inductor":
        raise ConfigError("codegen", resolved.codegen, '"inductor" here; backend="inductor_passes" offers the others')
    own = _expand(mode, inductor)
    lookup = in_tree.overlay(own)
    if resolved.in_tree_passes == "error":
        found = in_tree.clashes(lookup)
        if found:
            in_tree.complain_about(found, resolved)
    if own.get(SIMPLE_OVERLAP):
        in_tree.complain_about([f"{SIMPLE_OVERLAP}=True"], resolved)
    if in_tree.switched_off(lookup):
        why = f"{in_tree.POST_GRAD}=True: Inductor would not call these passes"
        if mode is not None and in_tree.POST_GRAD not in (inductor or {}):
            raise ConfigError("mode", mode, f"a mode with {why}")
        raise ConfigError(in_tree.POST_GRAD, False, why)
    identity.load_profile(resolved)
    identity.load_plan(resolved)
    return with_ours(own, lookup, _hooks(resolved))


def _expand(mode: str | None, inductor: Mapping[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if mode is not None and not isinstance(mode, str):
        raise ConfigError("mode", mode, 'the name of a mode of torch.compile, e.g. "max-autotune"')
    if mode is not None:
        try:
            own.update(_torch.expand_mode(mode))
        except ValueError as error:
            raise ConfigError("mode", mode, str(error).partition("expected ")[2]) from None
    if inductor is not None and not isinstance(inductor, Mapping):
        raise ConfigError("inductor", inductor, 'options of Inductor by name, e.g. {"max_autotune": True}')
    if inductor:
        for key, value in inductor.items():
            if not _is_of_inductor(key):
                raise ConfigError("inductor", {key: value}, _of_inductor(key, "ours are keyword arguments"))
            own[key.replace("-", "_")] = value
    return own


def _is_of_inductor(key: object) -> bool:
    return isinstance(key, str) and key.replace("-", "_") in _torch.inductor_option_names()


def _of_inductor(key: object, ours: str) -> str:
    """What is allowed where ``key`` was given for the name of an option of Inductor."""
    close = difflib.get_close_matches(str(key)[:MOST_SHOWN], _torch.inductor_option_names(), n=1)
    name, hint = shown(key, MOST_SHOWN), f" (did you mean {close[0]!r}?)" if close else ""
    return f"names of options of Inductor, and {name} is none{hint}; torch._inductor.list_options() gives all; {ours}"


def _hooks(settings: PassConfig) -> Hooks:
    return Hooks(
        graph_pass=lambda others: GraphPass(settings, others),
        dynamo_pass=lambda others: DynamoPass(settings, others),
        joint_pass=(lambda others: JointPass(settings, others)) if joint_wanted(settings) else None,
        partitioner=lambda others: StepPartitioner(settings, *others),
        scheduler=lambda: SchedulerHook(settings),
        fusion=lambda others: FusionHook(settings, others),
    )


def backend(
    module: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The dynamo backend ``inductor_passes``: Inductor (or AOT eager) with our passes.

    Args:
        mode: as for ``torch.compile``.
        options: our settings under dotted keys (``"inductor_passes.memory_budget": "+5%"``), Inductor's under theirs.

    Raises:
        ConfigError: as for :func:`inductor_passes.options`.
    """
    fields: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError("options", options, f'settings by name, e.g. {{"{PREFIX}memory_budget": "+5%"}}')
    for key, value in (options or {}).items():
        if key.startswith(PREFIX):
            fields[key[len(PREFIX) :]] = value
        elif key in config.FIELDS and key not in _torch.inductor_option_names():
            raise ConfigError("options", {key: value}, f'"{PREFIX}{key}": a setting of ours has that prefix here')
        elif not _is_of_inductor(key):
            raise ConfigError("options", {key: value}, _of_inductor(key, f'ours are "{PREFIX}<setting>"'))
        else:
            inductor[key] = value
    for key in fields:
        config.check_key(key, PREFIX + key)
    settings = PassConfig.from_mapping(fields, config.current())
    if settings.codegen == "aot_eager":
        if inductor or mode not in (None, "default"):
            raise ConfigError("codegen", "aot_eager", "no mode and no Inductor options beside it")
        DynamoPass(settings)(module.graph)
        return _torch.compile_aot_eager(module, example_inputs, GraphPass(settings), split_with(settings))
    merged = compile_options(settings, mode=mode, inductor=inductor)
    return _torch.compile_fx(module, example_inputs, merged)
