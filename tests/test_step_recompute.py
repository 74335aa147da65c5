"""What backward computes again: the choice on small steps, and whole models within budgets below their peak."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from inductor_passes.engine import shrinking
from inductor_passes.report import GraphReport, PassReport, Verdict
from inductor_passes.schedule.memory import peak_bytes, profile
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, Storage, Task
from inductor_passes.schedule.simulate import simulate
from inductor_passes.settings.budget import MemoryBudget
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.step import derived, recompute, states
from inductor_passes.step.derived import Candidate, Step
from inductor_passes.step.merging import Way
from inductor_passes.trace.collector import collect
from tests.support.compiled import compiled_reports, dotted, save_profile
from tests.support.device import DEVICE, on_device
from tests.support.models import LlamaConfig, cross_entropy, llama, llama_batch
from tests.support.parity import share
from tests.support.ranks import Ranks
from tests.support.world import fake_world

#: Activations are most of what it needs.
HEAVY = LlamaConfig(layers=2, dim=64, hidden=176, vocab=256, batch=8, seq=64)
#: Most of what it saves is attention's.
DEEP = LlamaConfig(layers=4, dim=64, hidden=96, vocab=64, batch=8, seq=64)
#: What ``train`` counts beside losses and parameters.
COUNTED = ("again", "attention", "peak", "saved", "planned")


def layers(costs: list[tuple[int, int]], gather_ns: int = 0) -> Step:
    """Layers of (duration, saved bytes) in a row; each result is saved, backward reads them from the last to the first.

    With ``gather_ns`` backward gathers a parameter of 10 bytes per layer, which the layer's chain needs, too.
    """
    n = len(costs)
    forward = Problem(
        tasks=tuple(Task(f"f{i}", Kind.COMPUTE, ns) for i, (ns, _) in enumerate(costs)),
        preds=tuple((i - 1,) if i else () for i in range(n)),
        storages=tuple(Storage(s, i, (i + 1,) if i + 1 < n else (), True, f"f{i}") for i, (_, s) in enumerate(costs)),
        name="forward",
    )
    tasks: list[Task] = []
    preds: list[tuple[int, ...]] = []
    storages: list[Storage] = []
    needs: dict[int, tuple[int, ...]] = {}
    reads: dict[int, set[int]] = {i: set() for i in range(n)}
    saved = [0] * n
    for i in reversed(range(n)):
        before = (len(tasks) - 1,) if tasks else ()
        gathered: tuple[int, ...] = ()
        if gather_ns:
            start = len(tasks)
            tasks += [
                Task(f"gather{i}", Kind.START, gather_ns, lane=0, issue_ns=1),
                Task(f"wait{i}", Kind.WAIT, lane=0, start=start),
            ]
            preds += [(), (start,)]
            gathered = (start + 1,)
            storages.append(Storage(10, start, (start + 1, start + 2), False, f"gather{i}"))
            needs[i] = gathered
            reads[i].add(len(storages) - 1)
        place = len(tasks)
        tasks.append(Task(f"b{i}", Kind.COMPUTE, costs[i][0]))
        preds.append((*before, *gathered))
        saved[i] = len(storages)
        storages.append(Storage(costs[i][1], INPUT, (place,), False, f"f{i}"))
    for i in range(1, n):
        reads[i].add(saved[i - 1])
    backward = Problem(
        tasks=tuple(tasks),
        preds=tuple(tuple(sorted(p)) for p in preds),
        lanes=(Lane("dp", "link"),) if gather_ns else (),
        storages=tuple(storages),
        name="backward",
    )
    candidates = tuple(Candidate(f"f{i}", size, (i,), i, (saved[i],)) for i, (_, size) in enumerate(costs))
    return Step(forward, backward, candidates, needs, {i: tuple(sorted(r)) for i, r in reads.items()})


def test_a_value_is_made_again_before_its_first_reader() -> None:
    step = layers([(5, 100), (5, 100), (5, 100)])
    both = derived.derived(step, (0, 1))
    assert both is not None
    forward, backward = both
    assert [t.name for t in backward.tasks] == ["b2", "f0.again", "f1.again", "b1", "b0"]
    # b1 needs what f1 makes, and f0's result stays for b0: one chain for both.
    assert profile(forward) == [100, 200, 200]
    assert profile(backward) == [100, 100, 200, 200, 100]
    assert profile(step.backward) == [300, 200, 100]
    assert simulate(backward).makespan_ns == simulate(step.backward).makespan_ns + 10
    assert derived.derived(step, ()) == (step.forward, step.backward)


def test_gathers_come_before_what_is_made_again() -> None:
    step = layers([(50, 100), (50, 100)], gather_ns=20)
    both = derived.derived(step, (0,))
    assert both is not None
    names = [t.name for t in both[1].tasks]
    assert names == ["gather1", "wait1", "b1", "gather0", "wait0", "f0.again", "b0"]
    both[1].check_order(both[1].input_order)
    # f0 and f1 again for b1: the gather for f0 moves in front of b1 and its result stays for b0.
    both = derived.derived(step, (0, 1))
    assert both is not None
    names = [t.name for t in both[1].tasks]
    assert names == ["gather1", "wait1", "gather0", "wait0", "f0.again", "f1.again", "b1", "b0"]
    gathered = next(s for s in both[1].storages if s.name == "gather0")
    assert gathered.readers == (3, 4, 7)


def test_a_state_lies_between_those_that_are_far_apart() -> None:
    """Half of the bytes that one computes again on top, the cheapest first; nothing where memory is nearly equal."""
    step = layers([(40, 100), (10, 100), (20, 100), (30, 100)])

    def between(*points: tuple[tuple[int, ...], int]) -> list[tuple[int, ...]]:
        return recompute._between(step, [recompute.Point(state, 0, peak, 1000 - peak) for state, peak in points])

    assert between(((0, 1, 2, 3), 100), ((), 500)) == [(1, 2)]
    # Points of more memory of a state are not what it needs least.
    assert between(((0, 1, 2, 3), 100), ((0, 1, 2, 3), 480), ((3,), 490), ((), 500)) == [(1, 2, 3)]
    assert between(((0, 1, 2, 3), 480), ((), 500)) == []
    # What is neither on top of the other cannot be halved, nor can one value.
    assert between(((0, 1), 100), ((2,), 500)) == between(((0,), 100), ((), 500)) == between() == []


def test_what_no_order_can_do_is_no_state() -> None:
    step = layers([(5, 100), (5, 100)])
    # What f1 needs comes out of b1 itself.
    impossible = Step(step.forward, step.backward, step.candidates, {1: (0,)}, step.reads)
    assert derived.derived(impossible, (1,)) is None
    assert {p.recomputed for p in recompute.points(impossible)} <= {(), (0,)}


def test_work_that_hides_behind_the_link_costs_nothing() -> None:
    for gather_ns, shown_ns in ((500, 0), (0, 20)):
        whole = layers([(10, 1000)] * 4, gather_ns)
        # Behind the last gather there is nothing to hide the first layer's chain behind.
        step = dataclasses.replace(whole, candidates=whole.candidates[1:3])
        both = derived.derived(step, (0, 1))
        assert both is not None
        # The peak is elsewhere, so among all points this state would not be looked at.
        ones = recompute._within(recompute.Point((0, 1), 0, 0, 0), Way(both), [])
        saved_ns = recompute.saved_ns(recompute.points(step))
        assert max(saved_ns, min(p.step_ns for p in ones)) - saved_ns == shown_ns


def test_first_layers_go_first_among_equal_ones() -> None:
    step = layers([(10, 100)] * 6)
    assert states.rankings(step) == ((0, 1, 2, 3, 4, 5),) * 2
    dear = layers([(1000, 100), (10, 100), (10, 100)])
    assert states.rankings(dear)[0] == (1, 2, 0)


def test_the_third_series_leaves_values_to_start_from() -> None:
    """What is computed again in one run is held all at once; values saved in between keep the runs short."""
    step = layers([(10, 100)] * 9)

    def peak(again: Sequence[int]) -> int:
        both = derived.derived(step, again)
        assert both is not None
        return max(peak_bytes(one) for one in both)

    series = states.from_peak_to_peak(step, 16)
    peaks = [peak(again) for again in series]
    assert peaks == sorted(set(peaks), reverse=True) and peaks[0] < peak(())
    assert peaks[-1] < min(peak(range(k)) for k in range(10))
    # With fewer sets they are further apart, and the last one stays.
    fewer = states.from_peak_to_peak(step, 3)
    assert len(fewer) <= 3 and peak(fewer[-1]) < peak(())


def _peak(step: Step, again: Sequence[int]) -> int:
    both = derived.derived(step, again)
    assert both is not None
    return max(peak_bytes(one) for one in both)


def test_the_least_memory_is_close_to_that_of_all_sets() -> None:
    """Found: blocks that a user checkpoints needed less than any budget reached, and a state that needs less was near
    one that had been tried. Held against all sets there are.
    """
    ratios = []
    for seed in range(100):
        rng = random.Random(seed)
        costs = [(rng.choice([1, 10, 100, 1000]), rng.choice([10, 100, 300, 1000])) for _ in range(rng.randrange(3, 8))]
        step = layers(costs)
        least = min(_peak(step, some) for k in range(len(costs) + 1) for some in combinations(range(len(costs)), k))
        ratios.append(min(_peak(step, state) for state in states.states(step, 16)) / least)
    assert min(ratios) == 1 and max(ratios) < 1.35 and statistics.mean(ratios) < 1.01


def test_what_makes_others_run_early_is_saved() -> None:
    """Equal layers, from whose ends everything inside can be computed again: the ends are saved, all of them together.
    """
    step = layers([(10, 1000), (10, 1000), (10, 1000), (7, 100)] * 6)
    series = states.from_peak_to_peak(step, 4, everything=True)
    assert _peak(step, series[-1]) < 0.3 * _peak(step, ())
    saved = {i for i in range(24) if i not in series[-1]}
    assert set(range(3, 20, 4)) <= saved and len(saved) <= 7
    peaks = [_peak(step, again) for again in series]
    assert peaks == sorted(set(peaks), reverse=True)


def test_views_of_one_saved_block_are_one_block_when_made_again() -> None:
    step = layers([(10, 100)] * 3)
    block = step.candidates[0].backward_storages[0]
    view = dataclasses.replace(step.backward.storages[block], readers=(0,))
    backward = dataclasses.replace(step.backward, storages=(*step.backward.storages, view))
    first = dataclasses.replace(step.candidates[0], backward_storages=(block, len(step.backward.storages)))
    both = derived.derived(Step(step.forward, backward, (first,), step.needs, step.reads), (0,))
    assert both is not None
    names = [t.name for t in both[1].tasks]
    assert names == ["f0.again", "b2", "b1", "b0"]
    made = [s for s in both[1].storages if s.producer == 0 and s.size_bytes]
    assert [(s.size_bytes, s.readers) for s in made] == [(100, (1, 3))]


def test_what_is_made_again_comes_before_its_reader_and_lives_until_its_last_use() -> None:
    """Found: a kernel computed a reader later, so the value was planned for then. Torch computes it for the reader."""
    step = layers([(10, 100)] * 3)
    block = step.candidates[1].backward_storages[0]
    storages = list(step.backward.storages)
    storages[block] = dataclasses.replace(storages[block], readers=(2,))
    backward = dataclasses.replace(step.backward, storages=tuple(storages))
    one = dataclasses.replace(step.candidates[1], readers=(1,))
    both = derived.derived(Step(step.forward, backward, (one,), step.needs, step.reads), (0,))
    assert both is not None
    assert [t.name for t in both[1].tasks] == ["b2", "f1.again", "b1", "b0"]
    assert [s.readers for s in both[1].storages if s.producer == 1 and s.size_bytes] == [(3,)]


STEPS = st.builds(
    layers,
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000)), min_size=1, max_size=8),
    st.sampled_from([0, 3, 40, 400]),
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.lists(st.integers(0, 120), min_size=2, max_size=6))
def test_more_memory_never_chooses_a_slower_step(step: Step, percents: list[int]) -> None:
    found = recompute.points(step)
    assert found == recompute.points(step)
    peak = derived.peak_of(step)
    last = None
    for percent in sorted(percents):
        limit = peak * percent // 100
        point = recompute.best(found, limit)
        # The least is what a warning names.
        assert (point is None) == (limit < recompute.least(found).peak_bytes)
        if point is None:
            assert last is None
            continue
        assert point.peak_bytes <= limit and (last is None or point.step_ns <= last)
        last = point.step_ns
    times = [p.step_ns for p in recompute.curve(found)]
    assert times == sorted(times, reverse=True)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.data())
def test_every_derived_problem_is_one(step: Step, data: st.DataObject) -> None:
    again = data.draw(st.sets(st.integers(0, len(step.candidates) - 1)))
    both = derived.derived(step, sorted(again))
    assert both is not None
    forward, backward = both
    backward.check_order(backward.input_order)
    assert len(backward) == len(step.backward) + len(again)
    assert peak_bytes(forward) <= peak_bytes(step.forward)
    live = sum(c.size_bytes for i, c in enumerate(step.candidates) if i not in again)
    assert sum(s.size_bytes for s in backward.storages if s.producer == INPUT) == live


def heavy(config: LlamaConfig = HEAVY, reshard: Any = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return simple_fsdp(llama(config), mesh, reshard_after_forward=reshard)


def again(reports: list[GraphReport]) -> PassReport:
    return next(p for r in reports for p in r.passes if p.name == recompute.NAME)


def peak_of(reports: list[GraphReport]) -> int:
    return max(r.schedules[-1].peak_after_bytes for r in reports)


@pytest.fixture(scope="module")
def slow_link(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Communication takes about as long as compute."""
    return save_profile(tmp_path_factory.mktemp("profile") / "slow.json", 100_000, 10.0, 5_000, 0.1)


def test_a_model_within_less_than_it_needs(slow_link: str) -> None:
    tokens = llama_batch(HEAVY)[0]
    with fake_world(2):
        plain = compiled_reports(heavy(), tokens, memory_budget="0", cost_profile=slow_link, bucket="off")
        assert not any(p.name == recompute.NAME for r in plain for p in r.passes)
        base = max(r.schedules[0].peak_before_bytes for r in plain)
        for budget, limit in (("-30%", base * 7 // 10), ("=1TiB", 2**40)):
            reports = compiled_reports(heavy(), tokens, memory_budget=budget, cost_profile=slow_link, bucket="off")
            choice = again(reports)
            assert choice.rolled_back is None and choice.metrics["limit_bytes"] in (limit, limit + 1)
            assert peak_of(reports) <= limit
            applied = [d for d in choice.decisions if d.verdict is Verdict.APPLIED]
            assert len(applied) == choice.metrics["recomputed"] and all(d.source for d in applied)
            assert bool(applied) == (limit < base)
            notes = "\n".join(reports[0].notes)
            assert "the planned step over its peak in bytes" in notes
            assert "5% more" in notes and "at the peak of" in notes
            assert not any("random" in d.detail for d in choice.decisions)


def test_what_a_little_more_memory_buys_is_told() -> None:
    def point(peak_bytes: int, step_ns: int) -> recompute.Point:
        return recompute.Point((), 0, peak_bytes, step_ns)

    least = point(100, 1_000)
    curve = [least, point(101, 950), point(103, 600), point(120, 300)]
    told = 'A first, simple schedule of its step takes 1 us, and 600 ns with 103 B ("=103B"). '
    assert shrinking.more_buys(least, curve) == told
    assert shrinking.more_buys(least, curve[:2]) == "", "5% less is not worth a word"
    beyond = 'A first, simple schedule of its step takes 1 us, and 300 ns with 120 B ("=120B"). '
    assert shrinking.more_buys(least, curve, 110) == beyond, "what needs more than was reached"
    assert shrinking.more_buys(least, []) == ""


def test_the_least_that_is_possible_is_named(slow_link: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = llama_batch(HEAVY)[0]
    with fake_world(2):
        reports = compiled_reports(heavy(), tokens, memory_budget="-99%", cost_profile=slow_link, bucket="off")
    assert again(reports).metrics["recomputed"] > 0
    (said,) = [r.getMessage() for r in caplog.records if "no plan was found" in r.getMessage()]
    assert "memory_budget='-99%'" in said and "needs less than" in said
    assert said.endswith("as it is executed, one operator after the other")
    # Both forms that it names can be asked for.
    named = re.fullmatch(r'.*less than [\d.]+ \w+ \("=(\d+)B", or "(-\d+%)".*', said)
    assert named is not None, said
    least, part = named.groups()
    peak = int(again(reports).metrics["peak_saved_bytes"])
    assert int(least) <= MemoryBudget.parse(part).limit_bytes(peak)  # type: ignore[operator]


class Blocks(nn.Module):
    """Two blocks between a gather and a reduce-scatter, computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.ones(s)) for s in ((16, 32), (32, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return x

    def block(self, x: torch.Tensor) -> torch.Tensor:
        world = dist.group.WORLD
        inner = nn.functional.silu(fc.all_gather_tensor_autograd(x, 0, world) @ self.up)
        return fc.reduce_scatter_tensor_autograd(inner @ self.down, "sum", 0, world)


def test_the_least_that_is_named_is_what_the_graphs_need(caplog: pytest.LogCaptureFixture) -> None:
    """Found by an outsider: budgets were refused that the plan kept then."""
    x = torch.ones(8, 16)
    with fake_world(2):
        reports = compiled_reports(Blocks(), x, memory_budget="=1B")
        (said,) = [r.getMessage() for r in caplog.records if "no plan was found" in r.getMessage()]
        named = re.search(r'"=(\d+)B"', said)
        assert named is not None and int(named[1]) <= peak_of(reports), said
        caplog.clear()
        repeated = compiled_reports(Blocks(), x, memory_budget=f"={peak_of(reports)}B")
        assert not [r for r in caplog.records if "no plan was found" in r.getMessage()]
        assert peak_of(repeated) <= peak_of(reports)


def train(
    rank: int, world_size: int, cost_profile: str, config: LlamaConfig = HEAVY, budget: str = "-30%"
) -> list[dict[str, torch.Tensor]]:
    """Losses and gradients of two steps with everything saved and within less than that."""
    reference = on_device(llama(config))
    batch = llama_batch(config, batch=8)
    inputs, targets = share((on_device(batch[0]), on_device(batch[1])), rank, world_size)
    found = []
    for reshard, allowed in ((True, "+5%"), ("auto", budget)):
        model = simple_fsdp(
            copy.deepcopy(reference),
            init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("dp",)),
            reshard_after_forward=reshard,
        )
        torch._dynamo.reset()
        options = dotted(memory_budget=allowed, cost_profile=cost_profile, bucket="off", codegen="inductor")
        one: dict[str, torch.Tensor] = {}
        compiled = torch.compile(model, fullgraph=True, backend="inductor_passes", options=options)
        with collect(what_if=False) as reports:
            for number in range(2):
                loss = cross_entropy(compiled(inputs), targets)
                loss.backward()
                one[f"loss{number}"] = loss.detach().clone()
                for parameter in model.parameters():
                    with torch.no_grad():
                        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                    parameter.grad = None
        one |= {name: p.to_local().detach().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        choice = next((p for r in reports for p in r.passes if p.name == recompute.NAME), None)
        one["again"] = torch.tensor(0 if choice is None else int(choice.metrics["recomputed"]))
        applied = [] if choice is None else [d.node for d in choice.decisions if d.verdict is Verdict.APPLIED]
        one["attention"] = torch.tensor(sum("attention" in name for name in applied))
        one["peak"] = torch.tensor(max(r.schedules[-1].peak_after_bytes for r in reports))
        one["saved"] = torch.tensor(0 if choice is None else int(choice.metrics["peak_saved_bytes"]))
        one["planned"] = torch.tensor(0 if choice is None else int(choice.metrics["peak_bytes"]))
        found.append(one)
    return found


@pytest.mark.ranks
def test_numbers_are_the_same_bit_for_bit(two_ranks: Ranks, slow_link: str) -> None:
    answers = two_ranks.run(train, slow_link)
    extras = [[{k: int(one.pop(k)) for k in COUNTED} for one in rank] for rank in answers]
    assert extras[0] == extras[1]
    plain, less = extras[0]
    assert plain["again"] == 0 < less["again"]
    assert less["planned"] <= less["saved"] * 7 // 10 < plain["peak"]
    # Inductor fuses kernels of two layers into one, which keeps both alive: nobody knows that when it is chosen.
    assert less["peak"] <= less["saved"] * 0.7 * 1.04
    same_bits(answers)


@pytest.mark.ranks
def test_attention_runs_again_with_the_same_bits(two_ranks: Ranks, slow_link: str) -> None:
    answers = two_ranks.run(train, slow_link, DEEP, "-99%")
    extras = [[{k: int(one.pop(k)) for k in COUNTED} for one in rank] for rank in answers]
    assert extras[0] == extras[1]
    plain, less = extras[0]
    assert plain["attention"] == 0 < less["attention"] and less["peak"] < plain["peak"]
    same_bits(answers)


def same_bits(answers: list[list[dict[str, torch.Tensor]]]) -> None:
    for rank in answers:
        for one in rank[1:]:
            assert list(one) == list(rank[0])
            for name, value in rank[0].items():
                assert torch.equal(value, one[name]), name


def test_attention_runs_again_without_a_state_of_the_generator(slow_link: str) -> None:
    """torch saves the state, a value of symbolic size, around what it counts as random: nothing is drawn here."""
    seen: list[str] = []
    original = shrinking.Shrinking.run

    def run(self: shrinking.Shrinking, base: shrinking.Split) -> shrinking.Shrunk:
        done = original(self, base)
        seen.extend(f"{n.name} {n.target}" for module in done.both for n in module.graph.nodes)
        return done

    with fake_world(2), mock.patch.object(shrinking.Shrinking, "run", run):
        tokens = llama_batch(DEEP)[0]
        reports = compiled_reports(heavy(DEEP), tokens, memory_budget="-99%", cost_profile=slow_link, bucket="off")
    attention = [text for text in seen if "attention" in text and "backward" not in text.partition(" ")[2]]
    assert len(attention) > DEEP.layers and not any("rng" in text for text in seen)
    assert not any("holds for" in note for r in reports for note in r.notes)


class Checkpointed(nn.Module):
    """What is checkpointed cannot be saved, and the rest needs most in backward's own order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 96), nn.Linear(96, 32)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).view(4, 48, 4, 8).transpose(1, 2) for one in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(4, 48, 32))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + checkpoint(self.attend, self.first(x), use_reentrant=False)
        x = x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("budget", ["-10%", "-99%"])
def test_both_graphs_keep_to_what_was_said(caplog: pytest.LogCaptureFixture, budget: str) -> None:
    """Found: a cap below what the graph's best order needs, so that it kept its own order, above the budget."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = simple_fsdp(Checkpointed(), mesh, reshard_after_forward="auto")
        reports = compiled_reports(model, torch.randint(0, 50, (4, 48)), memory_budget=budget)
    choice = again(reports)
    limit = int(choice.metrics["limit_bytes"])
    said = [r.getMessage() for r in caplog.records if "no plan was found" in r.getMessage()]
    assert bool(said) == (budget == "-99%")
    if said:
        parts = said[0].partition("no plan was found")[2].partition("The one that is used")
        least, limit = (int(part.partition('("=')[2].partition("B")[0]) for part in (parts[0], parts[2]))
        assert least <= limit
        # The curve in the same report begins there, too.
        assert limit <= choice.metrics["peak_bytes"] * 1.01
    assert [s.peak_after_bytes <= limit for r in reports for s in r.schedules if s.level == "fx"] == [True, True]


class Dropped(nn.Module):
    """Layers with dropout, the second one checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.narrow(self.wide(x).exp())
        y = checkpoint(self.second[0], self.first(x).exp(), use_reentrant=False)
        return self.third(y.sin()).exp()  # type: ignore[no-any-return]


class Biased(nn.Module):
    """Wide layers whose results only what runs again needs."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(32, 256, bias=bias) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(256, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, narrow in zip(self.wide, self.narrow):
            x = x + narrow(torch.nn.functional.gelu(wide(x)) * x.sum(-1, keepdim=True).sigmoid())
        return x


@pytest.mark.parametrize("reshard", [True, "auto"])
def test_a_bias_does_not_keep_an_activation(slow_link: str, reshard: Any) -> None:
    """Backward gathers the bias again. Found from outside: a model with biases could give up an eighth of its peak,
    the same without them two fifths."""
    least, kept = [], []
    for bias in (False, True):
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            model = simple_fsdp(Biased(bias), mesh, reshard_after_forward=reshard)
            reports = compiled_reports(
                model, torch.randn(4096, 32), memory_budget="-99%", cost_profile=slow_link, bucket="off"
            )
        choice = again(reports)
        kept.append(sum("communicates" in d.detail for d in choice.decisions))
        least.append(choice.metrics["peak_bytes"] / choice.metrics["peak_saved_bytes"])
    # Backward has no gradient to compute with the first layer's weight, which is large: it gathers that again, too.
    assert kept == [0, 0]
    assert least[1] == pytest.approx(least[0], rel=0.02) and least[0] < 0.8


def test_random_operators_run_once_and_checkpoints_stay(slow_link: str) -> None:
    calls: list[list[str]] = []

    def watch(graph: torch.fx.Graph) -> list[str]:
        return [str(n.target) for n in graph.nodes if n.op == "call_function"]

    original = shrinking.Shrinking.run

    def run(self: shrinking.Shrinking, base: shrinking.Split) -> shrinking.Shrunk:
        done = original(self, base)
        calls.extend(watch(module.graph) for module in done.both)
        return done

    with fake_world(2), mock.patch.object(shrinking.Shrinking, "run", run):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = simple_fsdp(Dropped(), mesh)
        x = torch.randn(512, 64)
        choice = again(compiled_reports(model, x, memory_budget="-15%", cost_profile=slow_link, bucket="off"))
    forward, backward = calls
    assert choice.rolled_back is None and choice.metrics["recomputed"] > 0
    assert sum("rand" in target or "bernoulli" in target or "dropout" in target for target in forward) == 2
    assert not any("rand" in target or "bernoulli" in target for target in backward)
