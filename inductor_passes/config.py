"""Settings: one validated dataclass that all ways of enabling the plugin end in.

``PassConfig`` is frozen and rank-invariant: nothing in it is measured, and two processes with equal settings get
equal plans. Values may come as Python values, as text (environment variables, dotted ``torch.compile`` options) or as
attributes of the ``inductor_passes.config`` namespace; every bad one raises :class:`ConfigError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from inductor_passes import switch
from inductor_passes.records.words import NATIVE, Effort
from inductor_passes.settings import counts
from inductor_passes.settings.async_tp import AsyncTp, AsyncTpLowering, AsyncTpOverrides
from inductor_passes.settings.budget import DEFAULT_BUDGET, MemoryBudget
from inductor_passes.settings.errors import MOST_SHOWN, ConfigError
from inductor_passes.settings.narrowing import Narrowing, measured_every, rules_as_text
from inductor_passes.settings.redistribution import FOLLOWS, Numerics, Redistribution, Tier

#: Prefix of our keys among ``torch.compile(options=...)``.
PREFIX = "inductor_passes."
#: ``INDUCTOR_PASSES=1`` enables the plugin; ``INDUCTOR_PASSES_<FIELD>=value`` sets a field.
ENV = switch.ENV

Codegen = Literal["inductor", "aot_eager"]
Verify = Literal["on", "strict"]
Unpack = Literal["inductor", "kernel"]
InTree = Literal["error", "warn"]
RankCheck = Literal["off", "warn", "error"]
PlanMismatch = Literal["error", "replan"]
Replicas = Literal["proven", "implied"]
Switch = Literal["on", "off"]


def _doc(text: str, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"doc": text})


def plans_beside(profile: str) -> str:
    """Where plans go that belong to a cost profile of this path."""
    return os.path.splitext(profile)[0] + ".plan.json"


@dataclass(frozen=True)
class PassConfig:
    """All settings. Unknown keys and bad values raise :class:`ConfigError`.

    See ``docs/configuration.md``, which is generated from the fields below.
    """

    memory_budget: str = _doc(
        "Cap on the peak memory of a planned graph, relative to what the original graph needs, in its own order or one "
        'that needs less: "0" (never above it), "+5%", "2GiB" (on top of it), "+5% or 1MiB" (the larger of both: a '
        'small graph has room for a few messages; a plain "+5%" is kept exactly) or "unlimited". A plan above the cap '
        "is not used, but for [further variants](agreement.md#variants-of-a-function) that have no other choice, with "
        'a warning. "-30%" (below the peak of the step as Inductor would save and gather for it) and "=12GiB" (the '
        "peak of the step, whatever it was) also compute activations again in backward where that is needed. See "
        "[tuning](tuning.md#less-memory-than-before).",
        DEFAULT_BUDGET,
    )
    schedule: Switch = _doc("Reorder collectives around compute on the FX graph.", "on")
    numerics: Numerics = _doc(
        'What results may differ in: "exact" in nothing, every pass keeps every bit that it can know of; "reassociate" '
        "in the order of floating-point additions: `redistribute` and `async_tp`, unless you set them yourself, then "
        'count as "reassociate" and "auto". See [numerics](numerics.md).',
        "exact",
    )
    effort: Effort = _doc(
        'How long the planner searches for an order: "high" searches eight times longer, and plans graphs of up to '
        '24,000 nodes (instead of 1200) again with less memory and without single passes; "exact" then also solves '
        "parts of the order by constraint programming. That takes up to half a minute each time that a graph is "
        "planned (on FX and on fused kernels) and needs OR-Tools of the same version on every rank. More effort never "
        "gives a slower plan.",
        "normal",
    )
    redistribute: str = _doc(
        "Remove redundant collectives and copies, which DTensor inserts because it plans one mesh dimension at a time: "
        '"exact" applies rewrites that keep every bit, "reassociate" also those that sum in another order (fewer '
        'all-reduces in tensor parallel backwards, hybrid-shard gradients reduced at shard size), "off" none; '
        '"numerics" follows that setting. '
        'With ",error-above:64MiB" appended, compilation fails where an operator implicitly redistributes more than '
        "that per rank; the error names the source line. See [redistributions](redistribute.md).",
        "numerics",
    )
    replicas: Replicas = _doc(
        "What counts as equal on the ranks of a group, where a rank may compute for others what all of them computed "
        '(sequence parallelism): "proven" what came out of a collective over the group, and what is made of that; '
        '"implied" also inputs that are combined with it element by element, such as weights of norms, biases, '
        "position embeddings and the first residual. Say so only if ranks hold the same there: nothing checks it. See "
        "[redistributions](redistribute.md#sequence-parallelism).",
        "proven",
    )
    async_tp: AsyncTp | Literal["numerics"] = _doc(
        "Cut matmuls and the collectives next to them into parts that overlap: "
        '"auto" where the cost model says that it pays, "force" wherever it is legal, "off" nowhere; "numerics" is '
        '"auto" with `numerics="reassociate"`, else "off". '
        "A matmul that is cut along its contracted dimension sums in another order. See [async TP](async_tp.md).",
        "numerics",
    )
    async_tp_lowering: AsyncTpLowering = _doc(
        'How `async_tp` carries out the parts: "decompose" makes graph nodes that the planner schedules, on any '
        'backend; "op" makes one operator on point-to-point messages; "symm_mem" uses torch\'s operators on CUDA '
        'symmetric memory, "kernels" our Triton kernels. "auto" takes the cheapest of "decompose", "kernels" and '
        '"symm_mem" that fits. If the one that you choose does not fit, "decompose" is used and the decision says why. '
        '"symm_mem" and "kernels" need `inductor_passes.prepare_groups` before compilation.',
        "auto",
    )
    async_tp_groups: str = _doc(
        "Modes of `async_tp` for process groups by name or description (a mesh dimension `tp` makes `mesh_tp`); they "
        "take precedence over `async_tp_sizes`. Empty: none.",
        "",
    )
    async_tp_sizes: str = _doc(
        "Modes of `async_tp` for collectives whose full message has at least the given bytes; the largest size that "
        "fits counts. Empty: none.",
        "",
    )
    async_tp_parts: str = _doc(
        "Into how many parts `async_tp` may cut; the cost model chooses. If none of them divides a dimension, its "
        "smallest divisor is used, unless that is above the largest of them.",
        "2,4,8",
    )
    bucket: Switch = _doc(
        "Merge collectives of one process group into fewer, larger ones where that makes the planned step shorter, "
        "copies included, within the memory budget. See [bucketing](bucketing.md).",
        "on",
    )
    unpack: Unpack = _doc(
        "How a merged message is copied into separate tensors where matmuls, attention or the graph's output read "
        'them: "inductor" makes a copy kernel per tensor, "kernel" one launch per message (GPUs only; not yet timed on '
        "one).",
        "inductor",
    )
    compress: str = _doc(
        "Send messages in a narrower type. This changes results: see [compression](compress.md). "
        '"auto" narrows a collective where the planned step gets shorter by it, and leaves all others alone; a '
        'dictionary says the mode by group, mesh dimension or pattern of parameter names, e.g. `{"*.norm.weight": '
        '"off", "tp": "off", "*": "auto"}`: the first entry that fits counts, what fits none is left alone, and a '
        "type as mode narrows to it whether or not the step gains; `/between` behind a type, as in `int8/between`: "
        "between hosts only.",
        "off",
    )
    compress_dtypes: str = _doc(
        'What `compress="auto"` may send: "bf16", or codes of one byte with a scale per block ("int8", fp8 as "e4m3" '
        'and "e5m2").',
        "bf16,int8",
    )
    compress_block: str = _doc("How many elements share a scale where codes of one byte are sent.", "128")
    compress_error: str = _doc(
        "Largest error that one rounding of `compress` may make in an element, relative to the largest element of its "
        "block. bf16 and int8 stay below 0.004, e4m3 below 0.037, e5m2 below 0.073: the last two need more than the "
        "default.",
        "0.01",
    )
    compress_feedback: Switch = _doc(
        "Keep what narrow messages lose of a gradient and add it to the next one. Needs `compress`, and a model that "
        "`inductor_passes.add_feedback` gave the memory for it: see [error feedback](compress.md#error-feedback).",
        "off",
    )
    compress_measure: str = _doc(
        "Measure the error of every narrowed message in every so many runs of its graph, the first one included; the "
        'report has it next to the bound, and a warning says where it is above. "off" leaves no trace in the graph. '
        "See [measured errors](compress.md#measured-errors).",
        "off",
    )
    replay: Switch = _doc(
        "Plan again on Inductor's fused kernels and make the generated code run in that order. "
        '"off" leaves the order to Inductor, which moves waits back next to their starts.',
        "on",
    )
    verify: Verify = _doc(
        'Verification always runs. When it finds something, "on" restores the graph and warns once; "strict" raises.',
        "on",
    )
    rank_agreement: str = _doc(
        "How long a graph's ranks wait for each other, before anything is changed, to find out whether they all "
        "compile the same graph. They use the default group's store, never a collective. If their collectives "
        "differ, or one does not answer in time, collectives stay as they are and a warning says why. If only the rest "
        "of their graphs differs, collectives are merged and reordered, and nothing else is done. "
        "For the first graph of a function they wait longer, by the time that compiling it has taken so far. "
        '"trust" asks nobody: if the programs of the ranks then differ, they hang or compute wrong numbers. '
        "See [agreement](agreement.md).",
        "10s",
    )
    rank_check: RankCheck = _doc(
        "Compare the planned collectives of every graph with the other ranks of each process group when it is "
        "compiled, through the store and with a timeout, never by a collective. On a difference, which is shown with "
        'both ranks\' source lines, "warn" warns and "error" raises an error. A rank that does not answer within 30 s '
        "is only a warning.",
        "off",
    )
    codegen: Codegen = _doc(
        'What compiles the graphs: "inductor", or "aot_eager" to debug the FX rewrites without code generation '
        '(only through backend="inductor_passes").',
        "inductor",
    )
    cost_profile: str = _doc(
        "Path of a cost profile written by `inductor-passes calibrate`. Empty: datasheet defaults, and the report "
        "says so. Every rank must load the same file.",
        "",
    )
    dynamic_plans: int = _doc(
        "Into how many plans the range of symbolic sizes (`mark_dynamic`, `dynamic=True`) may be divided. 1: one plan "
        "for all sizes. With N, a function is compiled for up to N ranges: the first N - 1 plans are for sizes from "
        "half to twice those that they are first compiled with, and the last one for all others. See "
        "[sizes known at run time](bucketing.md#sizes-that-are-only-known-at-run-time).",
        1,
    )
    tune: int = _doc(
        "Time so many steps of every planned graph on every rank, after one that warms up, compare them with the plan, "
        "and write a cost profile that is corrected by what was measured, for the setting `cost_profile` of the next "
        "run. The ranks' times are put together through the default group's store, in the background. Results do not "
        "change. 0: off. See [measured steps](measured_steps.md).",
        0,
    )
    tune_file: str = _doc(
        "Path of the cost profile that `tune` writes, which is not one that the same run reads. Empty: a file beside "
        "Inductor's caches, which the report names.",
        "",
    )
    tune_swap: Switch = _doc(
        "Whether graphs that `tune` has timed are planned again with the corrected cost profile, compiled in the "
        "background, and swapped in while the program runs: at one call that all ranks agree on, and back again where "
        "the new code is not measured to be faster. Last bits change at most as another order may change them. Without "
        "`tune` it does nothing. See [the second plan](measured_steps.md#the-second-plan).",
        "off",
    )
    in_tree_passes: InTree = _doc(
        "What to do when Inductor's own communication passes are switched on at the same time: "
        'raise an error, or warn once and leave the graph to them ("warn").',
        "error",
    )
    estimator: Callable[[Any], float | None] | None = _doc(
        "A function of your own from an FX node to its duration in nanoseconds, or to None for the built-in estimate. "
        "It must be deterministic. Without an `inductor_passes_uuid` attribute (a string that changes with its "
        "behaviour) compiled graphs are not cached. See [costs](costs.md#your-own-durations).",
        None,
    )
    plan: str = _doc(
        "Path of a plan file, or of a directory of them: graphs that it describes get the buckets and orders written "
        "there, verified like any plan. Every rank must load the same file. Empty: everything is planned. "
        "See [plans as files](trace.md#plans-as-files).",
        "",
    )
    plan_mismatch: PlanMismatch = _doc(
        "What to do when a plan file does not fit its graph any more or asks for what is not allowed: raise an error "
        'that names the difference ("error"), or warn and plan the graph anew ("replan").',
        "error",
    )
    dump_plan: str = _doc(
        "Directory into which rank 0 writes the plan of every graph as a file for `plan`. Empty: none.",
        "",
    )
    dump_problem: str = _doc(
        "Directory into which the scheduling problem of every planned graph is written as JSON, for "
        "`inductor-passes simulate`. Empty: none.",
        "",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "compress", rules_as_text(self.compress))
        object.__setattr__(self, "tune", counts.steps(self.tune))
        object.__setattr__(self, "dynamic_plans", counts.plans(self.dynamic_plans))
        for f in dataclasses.fields(self):
            check_value(f.name, getattr(self, f.name))
        if self.compress_feedback == "on" and self.narrowing.is_off:
            needs = f'"off" beside compress={self.compress!r}: what is not narrowed loses nothing'
            raise ConfigError("compress_feedback", self.compress_feedback, needs)
        if self.plan and self.budget.shrinks:
            beside = f'beside memory_budget="{self.memory_budget}"'
            raise ConfigError("plan", self.plan, f"nothing {beside}: a plan file does not say what is computed again")
        self._check_tune_file()

    def _check_tune_file(self) -> None:
        """What a run reads it must not write: graphs that are compiled later would be planned by something else."""
        if not self.tune or not self.tune_file:
            return
        if os.path.isdir(self.tune_file):
            raise ConfigError("tune_file", self.tune_file, "the path of a file, and this is a folder")
        profile, plans = map(os.path.realpath, (self.tune_file, plans_beside(self.tune_file)))
        # Of a directory of plans all files are read.
        for name, written in (("cost_profile", (profile,)), ("plan", (plans, os.path.dirname(plans)))):
            read = getattr(self, name)
            if read and os.path.realpath(read) in written:
                needs = f"a path that does not make this run write {name}={read!r}, which it reads"
                raise ConfigError("tune_file", self.tune_file, needs)

    @property
    def budget(self) -> MemoryBudget:
        """``memory_budget``, parsed."""
        return MemoryBudget.parse(self.memory_budget)

    @property
    def rank_timeout_s(self) -> float | None:
        """``rank_agreement`` in seconds; None when nobody is asked."""
        return counts.rank_timeout_s(self.rank_agreement)

    @property
    def redistribution(self) -> Redistribution:
        """``redistribute``, parsed."""
        return Redistribution.parse(self.redistribute)

    @property
    def async_tp_overrides(self) -> AsyncTpOverrides:
        """``async_tp_groups``, ``async_tp_sizes`` and ``async_tp_parts``, parsed."""
        return AsyncTpOverrides.parse(self.async_tp_groups, self.async_tp_sizes, self.async_tp_parts)

    @property
    def narrowing(self) -> Narrowing:
        """``compress`` and the fields that belong to it, parsed."""
        found = Narrowing.parse(self.compress, self.compress_dtypes, self.compress_block, self.compress_error)
        return dataclasses.replace(found, feedback=self.compress_feedback == "on")

    @property
    def measured_every(self) -> int:
        """``compress_measure``, parsed: every how many runs of a graph; 0: never."""
        return measured_every(self.compress_measure)

    @property
    def async_tp_mode(self) -> AsyncTp:
        """``async_tp``, or what ``numerics`` makes of it."""
        if self.async_tp != "numerics":
            return self.async_tp
        return "auto" if self.numerics == "reassociate" else "off"

    @property
    def uses_async_tp(self) -> bool:
        """Whether async tensor parallelism is on for some collective."""
        overrides = self.async_tp_overrides
        modes = [self.async_tp_mode, *dict(overrides.groups).values(), *dict(overrides.sizes).values()]
        return any(mode != "off" for mode in modes)

    @property
    def tier(self) -> Tier:
        """The exactness tier of ``redistribute``, or what ``numerics`` says."""
        return self.redistribution.tier or self.numerics

    @staticmethod
    def from_mapping(values: Mapping[str, Any], base: PassConfig | None = None) -> PassConfig:
        """Settings from a mapping of field names (without prefix), on top of ``base`` (default: the defaults).

        Raises:
            ConfigError: an unknown key, with the closest known ones, or a bad value.
        """
        for key in values:
            check_key(key)
        return dataclasses.replace(base or PassConfig(), **values)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> PassConfig:
        """Defaults overridden by ``INDUCTOR_PASSES_<FIELD>`` variables, e.g. ``INDUCTOR_PASSES_MEMORY_BUDGET=0``.

        Raises:
            ConfigError: an unknown variable of this form, a bad value, or one of ``INDUCTOR_PASSES`` itself.
        """
        environ = os.environ if environ is None else environ
        if switch.parse(environ.get(ENV, "")) is None:
            raise ConfigError(ENV, environ[ENV], switch.ALLOWED)
        values: dict[str, Any] = {}
        for name, value in environ.items():
            if name == NATIVE:
                if switch.parse(value) is None:
                    raise ConfigError(name, value, switch.ALLOWED)
            elif name.startswith(ENV + "_"):
                key = name[len(ENV) + 1 :].lower()
                check_key(key, name)
                if key == "estimator":
                    raise ConfigError(name, value, "no environment variable: a function cannot come as text")
                try:
                    check_value(key, value)
                except ConfigError as error:
                    raise ConfigError(name, value, error.allowed) from None
                values[key] = value
        return PassConfig.from_mapping(values)

    def to_json(self) -> dict[str, Any]:
        """Plain data for reports and for the cache key."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.estimator is not None:
            values["estimator"] = str(getattr(self.estimator, "inductor_passes_uuid", "uncacheable"))
        return values


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(PassConfig)}
#: Fields of a few values, from the class: one that is added there is checked.
_LITERALS: dict[str, tuple[str, ...]] = {
    **{key: get_args(hint) for key, hint in get_type_hints(PassConfig).items() if get_origin(hint) is Literal},
    "async_tp": (FOLLOWS, *get_args(AsyncTp)),
}
_OVERRIDES: dict[str, str] = {
    "async_tp_groups": AsyncTpOverrides.GROUPS,
    "async_tp_sizes": AsyncTpOverrides.SIZES,
    "async_tp_parts": AsyncTpOverrides.PARTS,
}
_NARROWING: dict[str, str] = {
    "compress": Narrowing.ALLOWED,
    "compress_dtypes": Narrowing.DTYPES,
    "compress_block": Narrowing.BLOCK,
    "compress_error": Narrowing.ERROR,
    "compress_measure": Narrowing.MEASURE,
}


def allowed_values(key: str) -> str:
    """What a field accepts, as text for messages and for the reference page."""
    if key == "memory_budget":
        return MemoryBudget.ALLOWED
    if key == "redistribute":
        return Redistribution.ALLOWED
    if key in _OVERRIDES or key in _NARROWING:
        return {**_OVERRIDES, **_NARROWING}[key]
    if key in _LITERALS:
        return " or ".join(f'"{v}"' for v in _LITERALS[key])
    if key == "rank_agreement":
        return counts.RANK_AGREEMENT
    if key == "tune":
        return counts.STEPS
    if key == "dynamic_plans":
        return counts.PLANS
    if key == "estimator":
        return "None or a function from torch.fx.Node to nanoseconds"
    return "a path as text, or empty"


def check_key(key: object, name: str | None = None) -> None:
    """Raise :class:`ConfigError` unless ``key``, to the user ``name``, is a field of :class:`PassConfig`."""
    if key not in FIELDS:
        text = str(key)
        plain = text.removeprefix(PREFIX)
        close = [plain] if plain in FIELDS else difflib.get_close_matches(text[:MOST_SHOWN], FIELDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        # Imported here: the command line reads settings without torch.
        from inductor_passes import _torch

        if not close and _torch.is_inductor_option(text):
            hint = f" (an option of Inductor: pass it as inductor={{{text!r}: ...}})"
        raise ConfigError("unknown key", name or key, f"one of {', '.join(sorted(FIELDS))}{hint}")


def check_value(key: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is allowed for the field ``key``."""
    if key == "memory_budget":
        MemoryBudget.parse(value, key)
    elif key == "redistribute":
        Redistribution.parse(value, key)
    elif key == "rank_agreement":
        counts.rank_timeout_s(value)
    elif key == "tune":
        counts.steps(value)
    elif key == "dynamic_plans":
        counts.plans(value)
    elif key in _OVERRIDES:
        given = {"async_tp_groups": "", "async_tp_sizes": "", "async_tp_parts": "2", key: value}
        AsyncTpOverrides.parse(*given.values())
    elif key == "compress_measure":
        measured_every(value)
    elif key in _NARROWING:
        given = {"compress": "off", "compress_dtypes": "bf16", "compress_block": "128", "compress_error": "0.01"}
        value = rules_as_text(value) if key == "compress" else value
        Narrowing.parse(*{**given, key: value}.values())
    elif key in _LITERALS:
        if not isinstance(value, str) or value not in _LITERALS[key]:
            raise ConfigError(key, value, allowed_values(key))
        if (key, value) == ("effort", "exact") and importlib.util.find_spec("ortools") is None:
            needs = '"exact" needs OR-Tools, which is not installed: pip install "inductor-passes[exact]"'
            raise ConfigError(key, value, f'"normal" or "high"; {needs}')
    elif key == "estimator":
        if value is not None and not callable(value):
            raise ConfigError(key, value, allowed_values(key))
    elif not isinstance(value, str) or "\0" in value:
        raise ConfigError(key, value, allowed_values(key))


_process: dict[str, Any] = {}


def current() -> PassConfig:
    """Settings of this process: defaults, overridden by the environment, overridden by this module's attributes."""
    return PassConfig.from_mapping(_process, PassConfig.from_env())


class _Namespace(types.ModuleType):
    """``inductor_passes.config``: the settings as attributes, ``enabled`` to switch the plugin on for the process.

    Setting an unknown or bad value raises :class:`ConfigError`; ``patch`` sets values for a ``with`` block.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "enabled":
            return switch.is_on()
        if name in FIELDS:
            return getattr(current(), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        elif name == "enabled":
            _set_enabled(value)
        else:
            check_key(name)
            check_value(name, value)
            _process[name] = value

    def __delattr__(self, name: str) -> None:
        check_key(name)
        _process.pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *FIELDS, "enabled"})


def _set_enabled(value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError("enabled", value, "True or False")
    switch.set_on(value)


@contextlib.contextmanager
def patch(**values: Any) -> Iterator[None]:
    """Process-wide settings (``enabled`` included) for a ``with`` block.

    A compiled function is compiled at its first call, its backward at the first backward: both must be inside.
    """
    namespace = sys.modules[__name__]
    saved, was_enabled = dict(_process), switch.is_on()
    try:
        for name, value in values.items():
            setattr(namespace, name, value)
        yield
    finally:
        _process.clear()
        _process.update(saved)
        if switch.is_on() != was_enabled:
            switch.set_on(was_enabled)


sys.modules[__name__].__class__ = _Namespace
switch.follow_environment()
