"""What the demo and the link benchmark share: contenders on one model, measured on the emulated link.

Runs inside a rank. A *contender* is a way to compile; a *trial* is a contender with a model of its own (same
initial weights), which takes training steps one at a time so that contenders can be interleaved.
"""

from __future__ import annotations

import json
import os
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import inductor_passes
from inductor_passes import _torch
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.link_model import Record, StepTime
from inductor_passes.models import LlamaConfig
from tools.link.census import Tally, census
from tools.link.models import Layout, Spread
from tools.shared import in_tree_schedule
from tools.shared.activations import saving

LEARNING_RATE = 0.5
# Renamed in torch 2.13; the old names warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
IN_TREE_ORDER = {
    "reorder_for_compute_comm_overlap": True,
    # What the comment on this setting in torch/_inductor/config.py recommends.
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
_IN_TREE_BUCKETS = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
_ALONE = {"schedule": "off", "bucket": "off", "redistribute": "off", "async_tp": "off"}


@dataclass(frozen=True)
class Contender:
    """A way to run the model.

    Attributes:
        name: key on the command line.
        title: for tables.
        family: ``eager``, ``inductor``, ``in-tree`` or ``ours``.
        options: of ``torch.compile``; None: not compiled.
        settings: of ours.
        scheduler: Inductor's own overlap scheduling on FX, given our measured durations.
        reshard: ``reshard_after_forward`` of its model; the others gather again in backward.
        wrapped: its model is wrapped by torch (FSDP2, DDP), not by ``simple_fsdp``.
        adopted: and then given to ``adopt``.
        regional: each block is compiled by itself.
        saved: torch's ``activation_memory_budget``: the share of what it would save that it may save.
        checkpointed: every block of its model is computed again in backward, as the user asked.
        within: the memory budget in percent of the step's peak as Inductor would run it, as ``"=..."``; 0: by
            ``settings``.
        assumed: it gets no cost profile: costs are those of a device that nobody measured.
    """

    name: str
    title: str
    family: str
    options: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    scheduler: bool = False
    reshard: bool | Literal["auto"] = True
    wrapped: bool = False
    adopted: bool = False
    regional: bool = False
    saved: float = 1.0
    checkpointed: bool = False
    within: int = 0
    assumed: bool = False

    @property
    def tunes(self) -> bool:
        """Whether it is compiled once more, with the costs that its first steps had."""
        return "tune" in self.settings

    @property
    def planned(self) -> bool:
        """Whether what it compiles depends on the cost profile."""
        return self.family == "ours" or self.scheduler

    @property
    def narrows(self) -> bool:
        """Whether its messages do not carry the values of parameters and gradients."""
        return "compress" in self.settings

    def tune_file(self, profile: str) -> str:
        """Where the costs of its first steps are written; ``profile`` is the link's."""
        return str(Path(profile).with_name(f"{Path(profile).stem}_{self.name}.json"))

    def timed(self, plan: str = "") -> Contender:
        """The next run: what is compiled with these costs, and with the plans in the file ``plan``, "" for none."""
        settings = {key: value for key, value in self.settings.items() if not key.startswith("tune")}
        if plan:
            settings["plan"] = plan
        return replace(self, name=f"{self.name}-timed", settings=settings, assumed=False)

    def compile_options(
        self, profile: str, problems: str = "", step_peak_bytes: int | None = None
    ) -> dict[str, Any] | None:
        """Options for ``torch.compile``; who plans gets the cost profile in file ``profile``.

        Args:
            problems: folder for the problems of ours, "" for none.
            step_peak_bytes: what ``within`` is relative to.

        Raises:
            ValueError: that is not known.
        """
        if self.scheduler:
            return {**(self.options or {}), **in_tree_schedule.compile_options(CostProfile.load(profile))}
        if self.family != "ours":
            return self.options
        settings = dict(self.settings)
        if not self.assumed:
            settings["cost_profile"] = profile
        if self.tunes:
            settings["tune_file"] = self.tune_file(profile)
        if self.within:
            if step_peak_bytes is None:
                raise ValueError(f"{self.name} needs a contender with a budget below the peak before it")
            settings["memory_budget"] = f"={step_peak_bytes * self.within // 100}B"
        if problems:
            settings["dump_problem"] = problems
        return inductor_passes.options(**settings)

    def limited(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``step``, a compiled function of tokens and targets, under this contender's ``saved``."""
        if self.saved == 1:
            return step

        def limited(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with saving(self.saved):
                return step(tokens, targets)

        return limited


CONTENDERS = {
    c.name: c
    for c in (
        Contender("eager", "eager", "eager"),
        Contender("fsdp2", "eager FSDP2", "eager", wrapped=True),
        Contender("inductor", "default Inductor", "inductor", {}),
        Contender("reorder", "in-tree reorder", "in-tree", IN_TREE_ORDER),
        Contender("bucket", "in-tree bucketing", "in-tree", _IN_TREE_BUCKETS),
        Contender("both", "in-tree both", "in-tree", {**IN_TREE_ORDER, **_IN_TREE_BUCKETS}),
        Contender("overlap", "in-tree overlap scheduling", "in-tree", scheduler=True),
        Contender("schedule", "ours, schedule alone", "ours", None, {**_ALONE, "schedule": "on"}),
        Contender("buckets", "ours, buckets alone", "ours", None, {**_ALONE, "bucket": "on"}),
        Contender("redistribute", "ours, rewrites alone", "ours", None, {**_ALONE, "redistribute": "reassociate"}),
        Contender("async-tp", "ours, async TP alone", "ours", None, {**_ALONE, "async_tp": "auto"}),
        Contender("ours-0", 'ours, budget "0"', "ours", None, {"memory_budget": "0"}),
        Contender("ours", "ours, default", "ours"),
        Contender("ours-25", 'ours, budget "+25%"', "ours", None, {"memory_budget": "+25%"}),
        Contender("ours-100", 'ours, budget "+100%"', "ours", None, {"memory_budget": "+100%"}),
        Contender("ours-keep", "ours, all kept", "ours", reshard=False),
        Contender("ours-auto-0", 'ours, "auto", budget "0"', "ours", None, {"memory_budget": "0"}, reshard="auto"),
        Contender("ours-auto", 'ours, "auto"', "ours", reshard="auto"),
        Contender("ours-auto-25", 'ours, "auto", "+25%"', "ours", None, {"memory_budget": "+25%"}, reshard="auto"),
        Contender("ours-auto-100", 'ours, "auto", "+100%"', "ours", None, {"memory_budget": "+100%"}, reshard="auto"),
        Contender("half", "default Inductor, half saved", "inductor", {}, saved=0.5),
        Contender("reorder-half", "in-tree reorder, half saved", "in-tree", IN_TREE_ORDER, saved=0.5),
        Contender("ours-less-10", 'ours, "auto", "-10%"', "ours", None, {"memory_budget": "-10%"}, reshard="auto"),
        Contender("ours-less-20", 'ours, "auto", "-20%"', "ours", None, {"memory_budget": "-20%"}, reshard="auto"),
        Contender("ours-less-30", 'ours, "auto", "-30%"', "ours", None, {"memory_budget": "-30%"}, reshard="auto"),
        Contender("ours-all", "ours, everything on", "ours", None, {"redistribute": "reassociate", "async_tp": "auto"}),
    )
}

#: Messages in a narrower type: results differ by design, so these run where they are asked for.
NARROWER = {
    c.name: c
    for c in (
        Contender("ours-bf16", "ours, bf16 messages", "ours", None, {"compress": {"*": "bf16"}}),
        Contender("ours-int8", "ours, int8 messages", "ours", None, {"compress": {"*": "int8"}}),
        Contender("ours-compress", 'ours, compress="auto"', "ours", None, {"compress": "auto"}),
    )
}
_TUNED = {"tune": 5, "tune_swap": "on"}
#: What ``tune`` makes of a measured link, and of one that nobody measured. They take time, so they run where asked for.
#: What is measured is the next run, with the files of this one: the corrected profile, and of each graph the plan that
#: was the faster of two.
TUNED = {
    c.name: c
    for c in (
        Contender("ours-tuned", "ours, tuned", "ours", None, _TUNED),
        Contender("ours-assumed", "ours, link not measured", "ours", assumed=True),
        Contender("ours-assumed-tuned", "ours, link not measured, tuned", "ours", None, _TUNED, assumed=True),
    )
}
#: Models that torch wrapped: as they are, compiled as their users do, and adopted.
WRAPPED = {
    c.name: c
    for c in (
        Contender("wrapped", "eager", "eager", wrapped=True),
        Contender("wrapped-blocks", "compiled per block", "inductor", {}, wrapped=True, regional=True),
        Contender("wrapped-whole", "compiled as a whole", "inductor", {}, wrapped=True),
        Contender("adopted", "adopted, ours", "ours", wrapped=True, adopted=True),
        Contender(
            "adopted-25", 'adopted, ours, "+25%"', "ours", None, {"memory_budget": "+25%"}, wrapped=True, adopted=True
        ),
        Contender("adopted-alone", "adopted, default Inductor", "inductor", {}, wrapped=True, adopted=True),
    )
}
ALL_CONTENDERS = {**CONTENDERS, **NARROWER, **TUNED, **WRAPPED}

class Trial:
    """One contender with its model, on this rank."""

    def __init__(
        self,
        contender: Contender,
        layout: Layout,
        config: LlamaConfig,
        profile: str,
        problems: str = "",
        step_peak_bytes: int | None = None,
    ) -> None:
        self.contender = contender
        self.losses: list[float] = []
        laid = layout.build(config, Spread(contender.wrapped, contender.reshard, contender.checkpointed))
        self.model, self.groups, self._batch_of = laid.model, laid.groups, laid.batch
        if contender.adopted:
            inductor_passes.adopt(self.model)
        step = own_code(self.model, contender.name)
        self._code = step.__code__  # type: ignore[attr-defined]
        options = contender.compile_options(profile, problems, step_peak_bytes)
        if contender.regional:
            for layer in getattr(self.model, "module", self.model).layers:
                layer.compile(options=options)
            options = None
        # Hooks break graphs.
        whole = contender.adopted or not contender.wrapped
        compiled = step if options is None else torch.compile(step, options=options, fullgraph=whole)
        self._step = contender.limited(compiled)

    def forget(self) -> None:
        """Have Dynamo throw away what was compiled: its records keep the code of functions alive that are gone."""
        torch._C._dynamo.eval_frame.reset_code(self._code)

    def timed_step(self) -> StepTime:
        """One training step whose forward and backward are timed; all ranks together."""
        tokens, targets = self._batch()
        with emulated_link.step_clock() as clock:
            loss = self._step(tokens, targets)
            loss.backward()
        self._update()
        self.losses.append(float(loss.detach()))
        return clock.time

    def plain_step(self) -> None:
        """One training step, not timed."""
        loss = self._step(*self._batch())
        loss.backward()
        self._update()
        self.losses.append(float(loss.detach()))

    def rehearse(self) -> StepTime:
        """A timed step that leaves parameters and losses as they are."""
        with emulated_link.step_clock() as clock:
            self._step(*self._batch()).backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return clock.time

    def census(self) -> list[Tally]:
        """What a step sends for each parameter; leaves parameters and losses as they are."""
        return census(self.model, lambda: self._step(*self._batch()))

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._batch_of(len(self.losses))

    def _update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local(parameter).sub_(LEARNING_RATE * local(_laid_like(parameter.grad, parameter)))
                    parameter.grad = None

    def peak_bytes(self) -> int:
        """Most memory that forward and backward hold above what they found, from the allocator's events; takes a step.

        The optimizer is left out: nobody here plans it.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = self._step(*self._batch())
            loss.backward()
        self._update()
        self.losses.append(float(loss.detach()))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
        return peak_of_events(events)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _laid_like(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's layout: sequence parallelism leaves those of norms unreduced."""
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        return grad.redistribute(placements=parameter.placements)
    return grad


def peak_of_events(events: Sequence[dict[str, Any]]) -> int:
    """Peak of the running sum of allocations and releases in a Chrome trace with memory events."""
    changes = sorted((float(e["ts"]), int(e["args"]["Bytes"])) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def own_code(model: torch.nn.Module, name: str) -> Callable[..., torch.Tensor]:
    """A step function whose code object no other contender shares: compiled code is cached per code object.
    """

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model(tokens, targets)  # type: ignore[no-any-return]

    code = step.__code__.replace(co_name="step_" + "".join(c if c.isalnum() else "_" for c in name))
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def compute_alone(trial: Trial, steps: int) -> list[StepTime]:
    """Steps on an infinitely fast link: compute, and the cost of issuing the same collectives. Sets the
    link's rate.
    """
    emulated_link.set_rate()
    return [trial.rehearse() for _ in range(steps)]


@dataclass(frozen=True)
class LinkRate:
    """A link, described by the reference's step on it.

    Attributes:
        name: key on the command line.
        ratio: communication alone over compute alone.
        latency_share: how much of the communication is latency.
    """

    name: str
    ratio: float
    latency_share: float

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and 0 <= self.latency_share < 1):
            raise ValueError(f"{self} is not possible; expected a ratio above 0 and a share of 0 to below 1")


RATES = {
    rate.name: rate
    for rate in (
        LinkRate("latency-bound", 1.0, 0.8),
        LinkRate("compute-bound", 0.5, 0.05),
        LinkRate("balanced", 1.0, 0.05),
        LinkRate("bandwidth-bound", 2.0, 0.02),
        LinkRate("fast", 0.1, 0.05),
    )
}


def tuned(records: Sequence[Record], compute_ns: float, rate: LinkRate) -> tuple[int, float]:
    """Latency in ns and bytes/s at which the collectives of a step take ``rate.ratio`` times ``compute_ns``.

    Raises:
        ValueError: the step has no collectives.
    """
    moved = [r.wire_bytes for r in records if r.wire_bytes]
    if not moved:
        raise ValueError("a step without collectives has no link rate")
    total_ns = rate.ratio * compute_ns
    latency_ns = round(total_ns * rate.latency_share / len(moved))
    return latency_ns, sum(moved) / (total_ns * (1 - rate.latency_share)) * 1e9


def communication_alone(records: Sequence[Record]) -> StepTime:
    """The collectives of a step back to back: all issued, then all waited for."""
    starts = [_replay(r) for r in records if r.wire_bytes]
    with emulated_link.step_clock() as clock:
        for work in [start() for start in starts]:
            work.wait()
    return clock.time


def _replay(record: Record) -> Callable[[], Any]:
    source = torch.zeros(record.input_bytes, dtype=torch.uint8)
    target = torch.zeros(record.output_bytes, dtype=torch.uint8)
    group = _torch.process_group(record.group)
    if record.kind == "all_gather":
        return lambda: _gather(target, source, group=group, async_op=True)
    if record.kind == "reduce_scatter":
        return lambda: _reduce_scatter(target, source, group=group, async_op=True)
    if record.kind == "all_to_all":
        return lambda: dist.all_to_all_single(target, source, group=group, async_op=True)
    return lambda: dist.all_reduce(source, group=group, async_op=True)


def head_and_tail_ns(records: Sequence[Record]) -> tuple[int, int]:
    """What no order hides: the forward's first gather, before any compute, and the last reduction, after all
    of it.
    """
    gathers = [r for r in records if r.kind == "all_gather"]
    reductions = [r for r in records if r.kind in ("reduce_scatter", "all_reduce")]
    return (gathers[0].duration_ns if gathers else 0), (reductions[-1].duration_ns if reductions else 0)
