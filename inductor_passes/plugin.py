"""How torch.compile finds us: options, the backend entry point, and enabling for a whole process.

Every way ends in the same two objects among Inductor's options: a graph pass after Inductor's own rewrites, and a hook
at the end of scheduling. Both are part of Inductor's cache key by what they depend on (see ``identity``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx

from inductor_passes import _torch, config, garbage, identity, in_tree, joint, rank_check, verify
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.bucket.unpack_pass import UnpackPass
from inductor_passes.config import PREFIX, ConfigError, PassConfig
from inductor_passes.ir.view import GraphView
from inductor_passes.pin import pins
from inductor_passes.pin.file import GraphPlan
from inductor_passes.pipeline import Context, Pass, has_collectives, new_report, run_passes, warn_once
from inductor_passes.redistribute import audit
from inductor_passes.redistribute.driver import RewriteCollectives
from inductor_passes.redistribute.scatter_by_exchange import ScatterByExchange
from inductor_passes.reorder.pass_ import ReorderPass
from inductor_passes.replay import hook
from inductor_passes.report import Verdict
from inductor_passes.step.facts import facts_of
from inductor_passes.step.partitioner import StepPartitioner, split_with

_PASSES = "post_grad_custom_post_pass"
_JOINT_PASSES = "joint_custom_post_pass"
_PARTITIONER = "custom_partitioner_fn"
_REORDER = "reorder_for_compute_comm_overlap"
_REORDER_PASSES = "reorder_for_compute_comm_overlap_passes"
_REUSE = "allow_buffer_reuse"
_PARTITIONS = "triton.reorder_for_reducing_graph_partitions"


def passes_of(settings: PassConfig) -> list[Pass]:
    """The FX passes that a configuration switches on, in order."""
    passes: list[Pass] = []
    passes.append(RewriteCollectives(settings.tier))
    if settings.uses_async_tp:
        overrides = settings.async_tp_overrides
        passes.append(
            AsyncTpPass(
                mode=settings.async_tp,
                parts=overrides.parts,
                groups=overrides.groups,
                sizes=overrides.sizes,
                lowering=settings.async_tp_lowering,
            )
        )
    if settings.bucket == "on":
        passes.append(BucketPass())
        if settings.unpack == "kernel":
            passes.append(UnpackPass())
    passes.append(ScatterByExchange(settings.tier))
    if settings.schedule == "on":
        passes.append(ReorderPass())
    return passes


class GraphPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """Our passes as one post-grad graph pass of Inductor, for forward, backward and inference graphs.

    Runs the user's own passes first, where this torch takes only one pass.
    """

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite, reorder and verify one graph in place."""
        for one in self.others:
            one(graph)
        if is_inference is None:
            is_inference = "_inference_" in _torch.aot_graph_name()
        run(graph, is_inference, self.settings)

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        if self.settings.in_tree_passes == "warn":
            # On a warm cache no pass runs: this is the only place to say that Inductor's own passes have the graph.
            _refuse_to_combine(self.settings)
        return super().uuid()


class SchedulerHook(identity.Configured):
    """Our hook at the end of Inductor's scheduling; pickles to its cache key and nothing else."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes in the planned order; as they came for graphs that our graph pass left alone."""
        context = hook.context_of_current_graph()
        if context is None or not hook.has_replay(self.settings):
            return nodes
        return hook.replay(nodes, context)

    def __deepcopy__(self, memo: dict[int, Any]) -> SchedulerHook:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchedulerHook) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(("inductor_passes.SchedulerHook", self._settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_hook_from_key, (self.uuid(),))


def _hook_from_key(key: str | None) -> SchedulerHook:
    """A pickled hook is a cache key; the settings behind it stay in the process that made it."""
    del key
    return SchedulerHook()


@garbage.paused()
def run(graph: torch.fx.Graph, is_inference: bool, settings: PassConfig) -> Context | None:
    """Run all passes on one graph; returns what happened, None for a graph that is none of our business.

    Raises:
        ConfigError: Inductor's own communication passes are on and ``in_tree_passes`` is ``error``.
        VerificationError: with ``verify="strict"``, when a pass failed or broke a rule.
        LargeRedistributionError: an operator redistributes more than ``redistribute="error-above:..."`` allows.
        PlanFileError: the pinned plan cannot be read, does not fit the graph or is not allowed.
        RanksDifferError: with ``rank_check="error"``, when another rank has other collectives.
    """
    view = GraphView(graph)
    if not has_collectives(view):
        return None
    if _refuse_to_combine(settings):
        return None
    profile = identity.load_profile(settings)
    report = new_report(graph, is_inference, settings, profile)
    step = facts_of(graph)
    context = Context(settings, profile, report, backward=report.phase == "backward", step=step, _view=view)
    if step is not None and step.keep is not None:
        report.passes.append(step.keep)
    if not context.backward:
        report.passes.extend(joint.taken(report.compile_id))
    collectives = pins.described(view)
    plans = identity.load_plan(settings)
    if plans is not None:
        replan = settings.plan_mismatch == "replan"
        context.pins = pins.find(
            plans, report.phase, report.graph_index, collectives, rank=report.rank, replan=replan
        )
    run_passes(graph, passes_of(settings), context)
    _note_plan(context, collectives)
    audit.close(report, settings)
    if settings.rank_check != "off":
        context.rank_steps = rank_check.check(GraphView(graph), report.phase, settings)
    report.notes += verify.statement(context.view(graph), compared=settings.rank_check != "off")
    module = graph.owning_module
    if hook.has_replay(settings) and settings.codegen == "inductor" and module is not None:
        module.meta[hook.META_KEY] = context
    else:
        if settings.codegen == "inductor" and settings.replay == "on":
            report.notes.append("Inductor's deterministic mode skips its reordering hook: planned on FX only")
            warn_once(f"inductor_passes: {report.notes[-1]}")
        hook.finish_without_replay(context)
    return context


def _note_plan(context: Context, collectives: Mapping[str, str]) -> None:
    """Write down what was decided on FX, in the form of a plan file."""
    report, fx, found = context.report, context.fx, context.plan
    bucketed = any(p.name == "bucket" and p.changed and p.rolled_back is None for p in report.passes)
    report.plan = GraphPlan(
        phase=report.phase,
        graph_index=report.graph_index,
        compile_id=report.compile_id,
        rank=report.rank,
        world_size=report.world_size,
        collectives=collectives,
        buckets=tuple(tuple(b) for b in context.buckets) if bucketed else (),
        kept=_kept(context),
        order=None if fx is None or found is None else tuple(fx.problem.tasks[i].name for i in found.order),
    ).to_json()
    note_pins(context)


def _kept(context: Context) -> tuple[str, ...] | None:
    """Gathers whose results backward reuses; None where that was not ours to choose."""
    choice = None if context.step is None else context.step.keep
    if choice is None or choice.rolled_back is not None:
        return None
    return tuple(sorted(d.node for d in choice.decisions if d.verdict is Verdict.APPLIED))


def note_pins(context: Context) -> None:
    """Say in the report whether the pinned plan was used."""
    found = context.pins
    if found is None:
        if context.config.plan:
            context.report.notes.append(f"{context.config.plan} says nothing about this graph: planned as usual")
    elif found.given_up:
        context.report.notes.append(f"pinned plan given up: {found.given_up}")
        warn_once(f"inductor_passes: planning anew, {found.given_up}")
    else:
        context.report.notes.append(f"pinned by {found.path} ({found.digest})")


def _refuse_to_combine(settings: PassConfig) -> bool:
    """Whether to leave the graph to Inductor's own passes, which are on."""
    if settings.codegen != "inductor":
        return False
    found = in_tree.clashes(_torch.inductor_option, lambda p: isinstance(p, SchedulerHook))
    if in_tree.has_simple_overlap() and _torch.inductor_option(in_tree.SIMPLE_OVERLAP):
        found.append(f"{in_tree.SIMPLE_OVERLAP}=True")
    if not found:
        return False
    _clash(found, settings)
    return True


def _clash(found: list[str], settings: PassConfig) -> None:
    shown = ", ".join(found)
    if settings.in_tree_passes == "error":
        raise ConfigError(
            "in-tree communication passes",
            shown,
            'all of them off, or inductor_passes.options(in_tree_passes="warn") to leave such graphs to them',
        )
    warn_once(f"inductor_passes: leaving graphs alone, Inductor's own communication passes are on: {shown}")


def compile_options(
    settings: PassConfig | None = None,
    *,
    mode: str | None = None,
    inductor: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=...)`` that switch the plugin on.

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
    resolved = PassConfig.from_mapping(fields, settings or config.current())
    if resolved.codegen != "inductor":
        raise ConfigError("codegen", resolved.codegen, '"inductor" here; backend="inductor_passes" offers the others')
    own = _expand(mode, inductor)
    lookup = in_tree.overlay(own)
    if resolved.in_tree_passes == "error":
        found = in_tree.clashes(lookup, lambda p: isinstance(p, SchedulerHook))
        if found:
            _clash(found, resolved)
    if own.get(in_tree.SIMPLE_OVERLAP):
        _clash([f"{in_tree.SIMPLE_OVERLAP}=True"], resolved)
    identity.load_profile(resolved)
    identity.load_plan(resolved)
    return _with_ours(own, lookup, resolved)


def _expand(mode: str | None, inductor: Mapping[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if mode is not None:
        try:
            own.update(_torch.expand_mode(mode))
        except ValueError as error:
            raise ConfigError("mode", mode, str(error).partition("expected ")[2]) from None
    if inductor:
        known = _torch.inductor_option_names()
        for key, value in inductor.items():
            if key.replace("-", "_") not in known:
                raise ConfigError("inductor", {key: value}, "options of Inductor; ours are keyword arguments")
            own[key.replace("-", "_")] = value
    return own


def _with_ours(own: dict[str, Any], lookup: Callable[[str], Any], settings: PassConfig | None) -> dict[str, Any]:
    existing = [p for one in _torch.as_pass_list(lookup(_PASSES)) for p in _unpacked(one)]
    result = dict(own)
    if _torch.accepts_pass_lists():
        result[_PASSES] = [*existing, GraphPass(settings)]
    else:
        result[_PASSES] = GraphPass(settings, existing)
    if settings is None or joint.wanted(settings):
        existing = [p for one in _torch.as_pass_list(lookup(_JOINT_PASSES)) for p in _unpacked(one)]
        if _torch.accepts_pass_lists():
            result[_JOINT_PASSES] = [*existing, joint.JointPass(settings)]
        else:
            result[_JOINT_PASSES] = joint.JointPass(settings, existing)
    inner = lookup(_PARTITIONER)
    result[_PARTITIONER] = StepPartitioner(settings, inner.inner if isinstance(inner, StepPartitioner) else inner)
    foreign = [p for p in lookup(_REORDER_PASSES) or [] if not isinstance(p, SchedulerHook)]
    kept = foreign if lookup(_REORDER) else []
    result[_REORDER] = True
    result[_REORDER_PASSES] = [*kept, SchedulerHook(settings)]
    if _torch.inductor_option(_PARTITIONS) is not None and _PARTITIONS not in own:
        # With CUDA graphs Inductor would move nodes once more to have fewer partitions, after the order is planned.
        result[_PARTITIONS] = False
    if in_tree.has_simple_overlap() and not own.get(in_tree.SIMPLE_OVERLAP):
        result[in_tree.SIMPLE_OVERLAP] = False
    if _REUSE not in own:
        # Generated code would keep freed buffers for later ones of equal size, up to what Inductor believes the peak
        # to be; it counts buffers that never leave a kernel, so that peak is above the budget that we keep.
        result[_REUSE] = False
    return result


def _unpacked(one: Any) -> tuple[Any, ...]:
    """The user's passes in an entry of the option: a pass of ours only carries them."""
    return one.others if isinstance(one, (GraphPass, joint.JointPass)) else (one,)


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
    for key, value in (options or {}).items():
        if key.startswith(PREFIX):
            fields[key[len(PREFIX) :]] = value
        else:
            inductor[key] = value
    for key in fields:
        config.check_key(key, shown=PREFIX + key)
    settings = PassConfig.from_mapping(fields, config.current())
    if settings.codegen == "aot_eager":
        if inductor or mode not in (None, "default"):
            raise ConfigError("codegen", "aot_eager", "no mode and no Inductor options beside it")
        return _torch.compile_aot_eager(module, example_inputs, GraphPass(settings), split_with(settings))
    merged = compile_options(settings, mode=mode, inductor=inductor)
    return _torch.compile_fx(module, example_inputs, merged)


_before_enabling: dict[str, Any] | None = None


def enable() -> None:
    """Put our passes into Inductor's process-wide configuration; later ``torch.compile`` calls pick them up."""
    global _before_enabling
    if _before_enabling is not None:
        return
    ours = _with_ours({}, _torch.inductor_option, None)
    _before_enabling = {name: _torch.inductor_option(name) for name in ours}
    for name, value in ours.items():
        _torch.set_inductor_option(name, value)


def disable() -> None:
    """Undo :func:`enable`."""
    global _before_enabling
    if _before_enabling is None:
        return
    for name, value in _before_enabling.items():
        _torch.set_inductor_option(name, value)
    _before_enabling = None

