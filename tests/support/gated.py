"""Our passes behind an agreement, on real ranks: each decides what it may by the verdict that :func:`reach` gives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx

import inductor_passes
from inductor_passes import _torch, agreement
from inductor_passes.agreement import Agreement
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import agreeing, identity
from inductor_passes.engine.compilation import Known, phase_of
from inductor_passes.engine.hooks import split_with
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.report import Verdict

#: Long enough for a loaded machine: only tests of waiting wait for less.
PATIENT_S = 120.0
_KEY = "gated_verdict"


@dataclass
class Told:
    """What came of one graph on one rank."""

    agreed: bool
    why: str
    digest: str
    participants: tuple[int, ...]
    mixed: bool
    applied: int
    collectives: list[str]
    operations: int
    seconds: float


@dataclass
class Gate:
    """Runs our passes on graphs, with what the ranks agree on.

    Attributes:
        timeout_s: how long to wait for other ranks.
        facts: more of them.
        told: per graph in order of compilation.
    """

    settings: PassConfig = field(default_factory=lambda: PassConfig(codegen="aot_eager", verify="strict"))
    timeout_s: float = PATIENT_S
    facts: dict[str, str] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)

    def plan(self, graph: torch.fx.Graph, is_inference: bool) -> Agreement:
        """Ask, then rewrite and order one graph in place."""
        view = GraphView(graph)
        phase = phase_of(graph, is_inference)
        profile = CostProfile.default("cpu")
        facts = {**agreeing.facts_of(self.settings, profile, phase, ""), **self.facts}
        began = time.monotonic()
        verdict = agreement.reach(view, facts, timeout_s=self.timeout_s, name=phase)
        seconds = time.monotonic() - began
        known = Known(phase, agreed=verdict.agreed)
        done = run_passes(graph, passes_of(self.settings), self.settings, profile, known=known, view=view)
        applied = sum(d.verdict is Verdict.APPLIED for p in done.report.passes for d in p.decisions)
        kinds = [f"{c.kind} {c.dtypes[0]}" for c in GraphView(graph).collectives]
        self.told.append(
            Told(
                verdict.agreed,
                verdict.why,
                verdict.digest,
                verdict.participants,
                verdict.mixed,
                applied,
                kinds,
                verdict.operations,
                seconds,
            )
        )
        return verdict

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` compiled without code generation."""

        def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return _torch.compile_aot_eager(module, inputs, self.plan, split_with(self.settings))

        return torch.compile(function, backend=backend)


class GatedPass(identity.Configured, _torch.graph_pass_base()):  # type: ignore[misc]
    """:meth:`Gate.plan` as a graph pass of Inductor."""

    label = "gated"

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.settings)
        self._gate = gate

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        verdict = self._gate.plan(graph, "_inference_" in _torch.aot_graph_name())
        assert graph.owning_module is not None
        graph.owning_module.meta[_KEY] = verdict


class GatedHook(identity.Configured):
    """Puts the verdict into the generated code; leaves the order to Inductor."""

    label = "gated"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        module = _torch.current_graph_module()
        verdict = None if module is None else module.meta.pop(_KEY, None)
        if verdict is not None and (text := agreement.statement(verdict)):
            _torch.add_module_statement(text)
        return nodes

    def __reduce__(self) -> tuple[Any, ...]:
        return (GatedHook, (), {"uuid": self.uuid()})

    def __setstate__(self, state: object) -> None:
        pass


def inductor_options(gate: Gate) -> dict[str, Any]:
    """Options for ``torch.compile``: Inductor with our passes behind the gate."""
    options = inductor_passes.options(schedule="off", replay="off")
    passes: Any = GatedPass(gate)
    options["post_grad_custom_post_pass"] = [passes] if _torch.accepts_pass_lists() else passes
    options["reorder_for_compute_comm_overlap"] = True
    options["reorder_for_compute_comm_overlap_passes"] = [GatedHook(gate.settings)]
    options.pop("custom_partitioner_fn", None)
    return options


def use_cache(folder: str) -> None:
    """Let torch keep its caches there, which its fresh processes do not know yet."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


# programs; ``rank`` is this rank


def world() -> Any:
    return dist.group.WORLD


def ag(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    found = funcol.all_gather_tensor(x, 0, group or world())
    # Torch's own gather damages memory where two run at a time on gloo. Compiled code has ours.
    return found if torch.compiler.is_compiling() else funcol.wait_tensor(found)


def ar(x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    return funcol.all_reduce(x, op, group or world())


def returned_by_one(rank: int, x: torch.Tensor) -> Any:
    """A gather whose result rank 0 alone returns."""
    full = ag(x)
    return (x.sum(), full.relu()) if rank == 0 else (x.sum(), None)


def read_by_one(rank: int, x: torch.Tensor) -> Any:
    """A gather whose result rank 0 alone reads."""
    full = ag(x)
    return x.sum() + full.sum() if rank == 0 else x.sum()


def cast_by_one(rank: int, x: torch.Tensor) -> Any:
    """A cast behind a gather that rank 0 alone can move in front of it."""
    full = ag(x)
    return full.to(torch.bfloat16) * 2 if rank == 0 else (full.to(torch.bfloat16) * 2, full + 1)


def duplicates_on_one(rank: int, x: torch.Tensor) -> Any:
    """Two gathers, which are one twice on rank 0."""
    return ag(x) + ag(x) if rank == 0 else ag(x) + ag(x + 1)


def equal_already_on_one(rank: int, x: torch.Tensor) -> Any:
    """A maximum of what is the same on all ranks already, as rank 0 can tell."""
    first = ar(x, "max")
    return ar(first, "max") if rank == 0 else ar(first * 1.5, "max")


def another_reader_on_one(rank: int, x: torch.Tensor) -> Any:
    """Two reductions that are added, of which rank 1 reads one elsewhere too."""
    a, b = ar(x.sin()), ar(x.cos())
    return a + b if rank == 0 else (a + b, a.relu())


DIFFER = (returned_by_one, read_by_one, cast_by_one, duplicates_on_one, equal_already_on_one, another_reader_on_one)


def alike(rank: int, x: torch.Tensor) -> Any:
    """A gather that nobody reads, two that are one, and a cast that can move."""
    ag(x * 3)
    return ag(x) + ag(x), ag(x.sin()).to(torch.bfloat16) * 2


def inputs(rank: int, width: int = 4) -> torch.Tensor:
    """Small integers, other ones on each rank."""
    return torch.arange(8 * width, dtype=torch.float32).view(8, width).remainder(5) + rank


def flat(value: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    return [v for v in (value if isinstance(value, tuple) else (value,)) if v is not None]


def right(function: Callable[..., Any], program: Callable[..., Any], rank: int, width: int = 4) -> bool:
    """Whether a compiled function of (x) returns what the program does."""
    found, expected = flat(function(inputs(rank, width))), flat(program(rank, inputs(rank, width)))
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6)
        for a, b in zip(found, expected)
    )
