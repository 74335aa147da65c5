"""Neighbours up to a size: which buckets that proposes, and that a tight budget then merges what no sweep would."""

from __future__ import annotations

import functools

from inductor_passes.bucket.candidates import candidates
from inductor_passes.bucket.choose import PARTITIONS, choose
from inductor_passes.bucket.dependencies import Dependencies
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.bucket.question import Question
from inductor_passes.bucket.room import Room
from inductor_passes.bucket.sized import sized
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import build
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.plan import plan
from tests.support.bucket_graphs import narrow_then_wide
from tests.support.world import fake_world

GPU = CostProfile.default("h100")


def test_neighbours_fill_a_bucket_up_to_its_size() -> None:
    with fake_world(8) as world:
        view = GraphView(narrow_then_wide(world, 12).graph)
        problem, (found, _) = build(view, GPU).problem, candidates(view)
        costs, dependencies = BucketCosts(view, GPU), Dependencies(view)
        limit = peak_bytes(problem)
        question = Question(
            problem, plan(problem, limit, effort=0), found, dependencies, costs, limit, Room(problem, limit)
        )
        everything = sized(question, share=1)
        assert sum(map(len, everything)) == len(found) and all(len({c.key for c in one}) == 1 for one in everything)
        for share in (1, 64, 4096):
            for bucket in sized(question, share=share):
                assert sum(c.input_bytes + c.output_bytes for c in bucket) <= limit // share
                assert [c.collective.index for c in bucket] == sorted(c.collective.index for c in bucket)
        assert sized(question, share=limit) == []
        # Asking changes nothing, and it does not matter how much memory there is.
        assert sized(question, share=1) == everything
        unlimited = Question(problem, question.before, found, dependencies, costs, None)
        assert sized(unlimited, share=1) == everything


def test_what_is_proposed_keeps_to_the_budget() -> None:
    with fake_world(8) as world:
        view = GraphView(narrow_then_wide(world, 12).graph)
        problem, (found, _) = build(view, GPU).problem, candidates(view)
        costs, dependencies = BucketCosts(view, GPU), Dependencies(view)
        only = [one for one in PARTITIONS if isinstance(one, functools.partial) and one.func is sized]
        assert len(only) == 3
        for limit in (peak_bytes(problem), peak_bytes(problem) * 3 // 2):
            choice = choose(problem, found, dependencies, costs, only, limit)
            assert choice.plan.feasible and choice.plan.peak_bytes <= limit
            assert choice.plan.makespan_ns <= choice.before.makespan_ns
