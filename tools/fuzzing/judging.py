"""What a pass may not do to a program of the fuzzer, and how a failure is made small and printed.

Every rank's values are equal bit for bit before and after, no rank waits for ever, the peak is not above the cap, and
nothing is undone by the verifier. Where ranks' graphs differ, they still communicate alike. Where messages are
narrowed, values are within the bounds that follow from what the report states (``bounds``), those that no such message
reaches are equal, and what the report says about them is so (``claims``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V

from inductor_passes import _torch, verify
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine import complain, pipeline
from inductor_passes.engine.compilation import Compilation, Known
from inductor_passes.engine.judge import freed_inputs
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.groups import resolve
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build as build_problem
from inductor_passes.reorder.pass_ import ReorderPass
from inductor_passes.report import Reason
from inductor_passes.rewriting.contract import Facts, GroupOrder, Outcome, Pass
from inductor_passes.schedule import plan as planner
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.verify.snapshot import finding_key
from tools.fuzzing.bounds import Peaks, bounds
from tools.fuzzing.cases import Case
from tools.fuzzing.claims import IN_PLACE, wrong_claims
from tools.fuzzing.programs import build
from tools.fuzzing.running import differs, execute_ranks, inputs_of

#: By rank, how far each tensor may be off.
Allowed = list[list[float] | None]
#: The rule about results that are lost by that.
LOST = "result-overwritten"


class Vandal:
    """A pass that turns a graph upside down and breaks off."""

    name: ClassVar[str] = "vandal"
    group_order: ClassVar[GroupOrder] = "kept"

    def run(self, graph: torch.fx.Graph, facts: Facts) -> Outcome:
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op == "call_function":
                graph.erase_node(node)
            elif node.op == "call_function" and isinstance(node.args[0], torch.fx.Node):
                node.replace_all_uses_with(node.args[0])
        raise RuntimeError("broke off in the middle")


def passes(case: Case, settings: PassConfig) -> list[Pass]:
    """The passes of a case in order."""
    chosen = passes_of(settings)
    if case.async_tp:
        chosen.insert(0, AsyncTpPass(mode="force", parts=(2, 4)))
    if case.vandal >= 0:
        chosen.insert(min(case.vandal, len(chosen)), Vandal())
    return chosen


@contextlib.contextmanager
def _diligence(case: Case) -> Iterator[None]:
    """The planner searches, and plans again, as much as the case says."""
    kept = pipeline.ALTERNATIVES_NODES, planner._STATES
    pipeline.ALTERNATIVES_NODES, planner._STATES = case.alternatives, case.search
    try:
        yield
    finally:
        pipeline.ALTERNATIVES_NODES, planner._STATES = kept


def _variants(case: Case, groups: Sequence[str]) -> list[torch.fx.GraphModule]:
    """The graphs of a program: one for all ranks, or one for the first and one for the others."""
    return [build(case, groups, variant) for variant in range(1 + case.differs)]


def _of_ranks(modules: list[torch.fx.GraphModule], ranks: int) -> list[torch.fx.GraphModule]:
    return [modules[0], *[modules[-1]] * (ranks - 1)]


def judge(case: Case, groups: Sequence[str], cautious: list[str] | None = None) -> tuple[str, int]:
    """(what is wrong, "" when nothing is; how many passes changed a graph).

    A pass that the verifier undid is a failure, but for one reason: that Inductor might do an operator in place now.
    Passes may run into that; their names go into ``cautious``.
    """
    modules = _variants(case, groups)
    communicated = [_communication(gm) for gm in modules]
    if communicated[0] != communicated[-1]:
        return "the ranks of the generated program communicate differently", 0
    inputs = inputs_of(modules[0], case.ranks, case.special)
    peaks = Peaks() if case.compressed else None
    reference = execute_ranks(_of_ranks(modules, case.ranks), inputs, "prompt", peaks)
    before = _as_inductor_would(modules) if case.backs else []
    # Inductor makes the values of changed nodes anew behind custom passes; they say which nodes share memory.
    renewed = [FakeTensorUpdater(gm) for gm in modules] if case.backs else []
    changed, undone, rounding = 0, False, 0.0
    for gm in modules:
        compiled = _compiled(case, gm, groups, cautious)
        changed, undone = changed + compiled.changed, undone or compiled.undone
        rounding = max(rounding, compiled.rounding)
        if compiled.said:
            return compiled.said, changed
    if not changed and not undone:
        return "", 0
    communicated = [_communication(gm) for gm in modules]
    if communicated[0] != communicated[-1]:
        return f"ranks communicate differently: {communicated[0]} and {communicated[-1]}", changed
    allowed: Allowed = [None] * case.ranks
    if peaks is not None:
        each = [bounds(gm, peaks, rounding, case.async_tp) for gm in _variants(case, groups)]
        allowed = [each[0], *[each[-1]] * (case.ranks - 1)]
    prompt = None
    for timing in ("prompt", "late"):
        try:
            after = execute_ranks(_of_ranks(modules, case.ranks), inputs, timing)
        except Exception as error:
            return f"the result does not run ({timing}): {type(error).__name__}: {error}", changed
        if prompt is not None and (said := _differ(prompt, after, True)):
            return f"results depend on when messages arrive: {said}", changed
        prompt = after if case.compressed else None
        # Async TP adds partial products: exact for integers up to the sign of a zero.
        if said := _differ(reference, after, not case.async_tp, allowed):
            own = execute_ranks(_of_ranks(_variants(case, groups), case.ranks), inputs, "late")
            if illegal := _differ(reference, own, True):
                return f"the generated program itself is illegal: {illegal}", 0
            return f"other results ({timing}): {said}", changed
    if case.backs:
        # Inductor may break a program itself; where it does not, it must not break what became of it.
        if _differ(reference, execute_ranks(_of_ranks(before, case.ranks), inputs, "prompt"), True):
            return "", changed
        for gm, updater in zip(modules, renewed):
            with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])):
                updater.incremental_update()
        after = execute_ranks(_of_ranks(_as_inductor_would(modules), case.ranks), inputs, "prompt")
        if said := _differ(reference, after, not case.async_tp, allowed):
            return f"other results once Inductor has done in place what it may: {said}", changed
    return "", changed


def _as_inductor_would(modules: Sequence[torch.fx.GraphModule]) -> list[torch.fx.GraphModule]:
    """Copies in which torch's own pass has put operators in place."""
    done = []
    for gm in modules:
        copy = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in gm.graph.find_nodes(op="get_attr"):
            setattr(copy, str(node.target), getattr(gm, str(node.target)))
        for node in gm.graph.nodes:
            nodes[node] = copy.graph.node_copy(node, nodes.__getitem__)
        reinplace_inplaceable_ops_core(copy.graph)
        done.append(copy)
    return done


def _differ(
    before: list[list[torch.Tensor]],
    after: list[list[torch.Tensor]],
    signed_zeros: bool,
    allowed: Allowed | None = None,
) -> str:
    """The first difference on any rank.

    Args:
        allowed: by rank, how far each tensor may be off; None: not at all.
    """
    for rank, (one, other) in enumerate(zip(before, after)):
        if said := differs(one, other, signed_zeros, allowed[rank] if allowed else None):
            return f"rank {rank}, {said}"
    return ""


def _communication(gm: torch.fx.GraphModule) -> list[tuple[object, ...]]:
    """What other ranks notice of a graph's collectives, in order."""
    return [
        (c.kind.name, c.group.name, c.reduce_op, c.dtypes, c.input_bytes, c.output_bytes)
        for c in GraphView(gm.graph).collectives
    ]


class _Compiled(NamedTuple):
    """What came of one graph.

    Attributes:
        said: what is wrong.
        changed: how many passes changed it.
        undone: whether one was undone.
        rounding: what one rounding of a narrowed message may change, by the report; 0: none was narrowed.
    """

    said: str
    changed: int
    undone: bool
    rounding: float = 0.0


def _profile(case: Case, groups: Sequence[str]) -> CostProfile:
    """The case's costs; links that were measured are a hundred times faster inside a host."""
    found = CostProfile.default(case.device, ranks_per_host=case.ranks_per_host)
    if not case.link_ns:
        return found
    layouts = {GroupLayout.of(resolve(name).ranks, case.ranks_per_host) for name in groups}

    def costs(layout: GroupLayout) -> GroupCost:
        per_byte = case.link_ns * (1.0 if layout.hosts > 1 else 0.01)
        slowdown = 0.4 if layout.hosts > 1 else 0.1
        kinds = tuple(CollectiveCost(kind, 1_000.0, per_byte, 100.0, 0.0, slowdown) for kind in KINDS)
        return GroupCost(layout, "fuzz", layout.link, kinds)

    return replace(found, measured=True, groups=tuple(costs(layout) for layout in sorted(layouts)))


def _compiled(case: Case, gm: torch.fx.GraphModule, groups: Sequence[str], cautious: list[str] | None) -> _Compiled:
    """Run the passes over one graph."""
    before = verify.snapshot(gm.graph)
    settings = PassConfig(**case.settings)
    profile = _profile(case, groups)
    known = Known("backward" if case.backward else "inference", agreed=not case.differs)
    try:
        with _diligence(case):
            done = run_passes(gm.graph, passes(case, settings), settings, profile, known=known)
    except Exception as error:
        return _Compiled(f"{type(error).__name__}: {error}", 0, False)
    reports = done.report.passes
    changed = sum(p.changed and p.rolled_back is None for p in reports)
    undone = any(p.rolled_back for p in reports)
    for one in reports:
        if one.rolled_back is Reason.VERIFIER and (IN_PLACE in one.detail or LOST in one.detail):
            if cautious is not None:
                cautious.append(one.name)
        elif one.rolled_back in (Reason.EXCEPTION, Reason.VERIFIER) and one.name != Vandal.name:
            return _Compiled(f"pass {one.name} was undone: {one.rolled_back.value} ({one.detail})", changed, undone)
    if said := _over_cap(done, gm) or wrong_claims(done, gm, settings, settings.bucket == "off"):
        return _Compiled(said, changed, undone)
    # The pipeline held each pass against what it was given; later passes rewrite what earlier certificates name.
    found = [f for f in verify.check(gm.graph) if IN_PLACE not in f.message]
    if foreign := [f for f in found if finding_key(f) not in before.findings]:
        said = f"the verifier refuses the result: {foreign[0].rule}: {foreign[0].message}"
        return _Compiled(said, changed, undone)
    # What Inductor breaks by itself is no fault of the program.
    if found := [f for f in found if f.rule != LOST]:
        return _Compiled(f"the verifier refuses the generated program: {found[0].rule}: {found[0].message}", 0, undone)
    gm.graph.lint()
    return _Compiled("", changed, undone, max((float(n.bound) for n in done.report.narrowed), default=0.0))


def _over_cap(done: Compilation, gm: torch.fx.GraphModule) -> str:
    """How far the result is above the cap; a graph that came in above it and was not ordered is no higher.

    An order that the planner has made is also counted by the verifier, which may not find more. Where shards are
    uneven, the planner leaves out inputs that nobody reads, or that are only returned: they are not of one size on
    all ranks.
    """
    built = build_problem(GraphView(gm.graph), done.profile)
    if not built.ranks_agree:
        return ""
    cap, peak = done.cap, peak_bytes(built.problem)
    ordered = done.scheduled is not None and done.scheduled.plan.feasible
    if cap.limit_bytes is not None and peak > max(cap.limit_bytes, 0 if ordered else cap.input_peak_bytes or 0):
        return f"peak {peak} bytes, the cap is {cap.limit_bytes}, it came in with {cap.input_peak_bytes}"
    last = done.report.passes[-1]
    if last.name == ReorderPass.name and last.changed and last.rolled_back is None:
        verified = verify.peak_bytes(gm.graph, donated=freed_inputs(gm.graph, done.known.phase))
        known = {storage.name for storage in built.problem.storages}
        unread = sum(
            _torch.storage_bytes(n.meta["val"]) or 0
            for n in gm.graph.nodes
            if n.op == "placeholder" and n.name not in known and all(user.op == "output" for user in n.users)
        )
        if verified is None or verified - unread > peak:
            return f"the verifier counts {verified} bytes where the planner counts {peak}, and {unread} unread"
    return ""


def shrink(case: Case, groups: Sequence[str], allowance: int = 400) -> Case:
    """A smaller case that fails too: steps left out greedily (halves first), then settings switched off."""

    def fails(candidate: Case) -> bool:
        nonlocal allowance
        allowance -= 1
        try:
            return bool(judge(candidate, groups)[0])
        except Exception:  # a program that cannot even be built is another problem
            return False

    length = max(1, len(case.steps) // 2)
    while length >= 1 and allowance > 0:
        start = 0
        while start < len(case.steps) and allowance > 0:
            smaller = replace(case, steps=case.steps[:start] + case.steps[start + length :])
            if fails(smaller):
                case = smaller
            else:
                start += length
        length //= 2
    plain: list[dict[str, Any]] = [{"async_tp": False}, {"vandal": -1}, {"backward": False}]
    plain += [{"device": "cpu"}, {"ranks_per_host": 8}, {"link_ns": 0.0}, {"special": 0}]
    keys = ("redistribute", "bucket", "schedule", "compress_feedback", "compress")
    plain += [{"settings": {**case.settings, key: "off"}} for key in keys if key in case.settings]
    for change in plain:
        if "settings" in change:
            off = {k: v for k, v in change["settings"].items() if v == "off"}
            change = {"settings": {**case.settings, **off}}
        simpler = replace(case, **change)
        if simpler != case and fails(simpler):
            case = simpler
    return case


def as_test(case: Case, groups: Sequence[str], said: str, name: str) -> str:
    """A failure as the source of a test, with its graph as a comment."""
    values = asdict(case)
    arguments = ",\n        ".join(f"{key}={value!r}" for key, value in values.items())
    graph = "\n".join(f"    # {line.strip()}" for line in str(build(case, groups).graph).splitlines() if line.strip())
    return (
        f"def test_{name}() -> None:\n    # {said[:300]!r}\n{graph}\n"
        f"    case = cases.Case(\n        {arguments},\n    )\n"
        f"    with cases.world({case.ranks}) as groups:\n"
        f'        assert judging.judge(case, groups)[0] == ""\n'
    )


def quiet() -> None:
    """Forget which warnings were given: a long run repeats them."""
    complain._warned.clear()
