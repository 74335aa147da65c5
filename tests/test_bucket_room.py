"""Memory is asked for where a bucket would live, and what a small budget finds is found under a larger one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.bucket.candidates import Candidate, candidates
from inductor_passes.bucket.choose import PARTITIONS, Choice, choose
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.fitted import fitted
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.question import Partition
from inductor_passes.bucket.room import Capped, Room
from inductor_passes.bucket.sized import sized
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.report import PassReport, Reason
from inductor_passes.schedule.memory import peak_bytes, profile
from inductor_passes.schedule.problem import Problem
from tests.support.bucket_graphs import kinds, narrow_then_wide
from tests.support.world import fake_world
from tests.test_bucket_pass import layers, run_pass

GPU = CostProfile.default("cuda")


def test_a_peak_elsewhere_refuses_nothing() -> None:
    with fake_world(8) as world:
        gm = narrow_then_wide(world, 12)
        before = peak_bytes(build(GraphView(gm.graph), GPU).problem)
        report = run_pass(gm, budget="0")
        assert report.changed and len(kinds(gm).split()) <= 3
        assert peak_bytes(build(GraphView(gm.graph), GPU).problem) <= before


def test_more_memory_is_no_slower() -> None:
    def planned(report: PassReport) -> float:
        name = "makespan_after_ns" if report.changed else "makespan_before_ns"
        return report.metrics[name]

    for make in (layers, narrow_then_wide):
        with fake_world(8) as world:
            found = [planned(run_pass(make(world, 6), budget=b)) for b in ("0", "+5%", "+100%", "+400%", "unlimited")]
        assert all(later <= earlier * 1.001 for earlier, later in itertools.pairwise(found)), found


@functools.cache
def _six_layers() -> tuple[Problem, list[Candidate]]:
    with fake_world(8) as world:
        view = GraphView(layers(world, 6).graph)
        return build(view, GPU).problem, candidates(view)[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 17), st.integers(0, 17), st.integers(0, 9000)), max_size=12), st.data())
def test_what_is_free_is_the_cap_less_everything_at_each_place(
    takes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    problem, found = _six_layers()
    memory = profile(problem)
    cap = data.draw(st.integers(0, 2 * max(memory)))
    room = Room(problem, cap)
    for one, other, size in takes:
        span = room.span([found[one], found[other]])
        assert room.free_bytes(span) == min(cap - memory[at] for at in range(span.first, span.stop))
        room.take(span, size)
        for at in range(span.first, span.stop):
            memory[at] += size
    span = room.span(found)
    assert room.copy().free_bytes(span) == min(cap - m for m in profile(problem)[span.first : span.stop])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 17), st.integers(0, 17), st.integers(0, 9000)), max_size=12), st.data())
def test_of_two_memory_models_the_smaller_room_counts(
    takes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    problem, found = _six_layers()
    less = dataclasses.replace(problem, storages=problem.storages[::2])
    caps = [data.draw(st.integers(0, 2 * max(profile(p)))) for p in (problem, less)]
    rooms = [Room(problem, caps[0]), Capped(less, caps[1]).room()]
    both = Room(problem, caps[0], Capped(less, caps[1]).room())
    for one, other, size in takes:
        span = both.span([found[one], found[other]])
        assert both.free_bytes(span) == min(room.free_bytes(span) for room in rooms)
        assert both.copy().free_bytes(span) == min(room.copy().free_bytes(span) for room in rooms)
        for room in (both, *rooms):
            room.take(span, size)


def test_what_generated_code_has_no_memory_for_is_not_merged() -> None:
    """Found as measured: "deep" took 1.07 times the memory of default Inductor at "0"."""
    with fake_world(8) as world:
        view = GraphView(narrow_then_wide(world, 12).graph)
        fx, found = build(view, GPU), candidates(view)[0]
        assert fx.generated is not None
        costs, dependencies = BucketCosts(view, GPU, frozenset(), {}), Dependencies(view)
        plain, generated = peak_bytes(fx.problem), peak_bytes(fx.generated)
        # The wide chain behind the product is computed where it is summed; then that is the peak.
        assert plain - generated == 2048 * 2048 * 4 - 4

        def chosen(generated: Capped | None, partitions: Sequence[Partition] = PARTITIONS) -> Choice:
            return choose(fx.problem, found, dependencies, costs, partitions, plain, generated=generated)

        alone = chosen(None)
        assert alone.buckets and chosen(Capped(fx.generated, generated)).buckets == alone.buckets
        # What takes no look at the room is refused by what comes of it.
        stubborn = chosen(Capped(fx.generated, generated - 1), [lambda _: alone.buckets])
        assert not stubborn.buckets and stubborn.objection is Reason.OVER_BUDGET
        narrow = max(profile(fx.generated)[: len(fx.generated) // 2])
        looking = [one for one in PARTITIONS if getattr(one, "func", one) not in (sized, fitted)]
        assert chosen(Capped(fx.generated, narrow), looking).tried == []
        assert chosen(Capped(fx.generated, narrow)).buckets == []
