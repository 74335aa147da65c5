"""The verifier on graphs of real models: nothing is found in them or in their legal orders, every damage is found."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import verify
from inductor_passes.ir import ops
from tests.support import models
from tests.support.verify_graphs import Program, apply_order
from tests.support.verify_mutations import MUTATIONS, WAIT, Case, inject, is_start
from tests.support.world import fake_world

INJECTIONS = 3
#: Kinds of change that need what these models do not have: memory that is written to, random draws, asserts, unknown
#: ops, all-reduces, broadcasts, coalesced and in-place collectives, a second group, independent starts on one group.
NO_PLACE = frozenset(
    {
        "drop_the_waits_of_one_result_of_a_coalesced_collective",
        "read_the_memory_of_an_in_place_collective",
        "read_the_out_buffer_of_a_collective",
        "lose_a_collective",
        "change_the_group",
        "change_the_kind",
        "change_the_source_of_a_broadcast",
        "swap_starts_of_a_group",
        "move_a_start_across_a_fence",
        "move_a_wait_across_a_fence",
        "swap_fences",
        "lose_a_fence",
        "swap_random_draws",
        "lose_the_update_of_an_input",
        "swap_asserts",
        "read_after_the_write_instead_of_before",
        "write_before_the_read_instead_of_after",
        "change_a_constant",
        "claim_a_merge_that_loses_bytes",
        "claim_a_merge_across_groups",
        "certify_one_removal_and_do_two",
    }
)


@pytest.fixture(scope="module")
def real():
    """([(program, snapshot)], groups) of a tensor-parallel and an expert-parallel model, forward and backward."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (8,))
        config = models.LlamaConfig(layers=1, heads=8, kv_heads=8, dim=64, hidden=64)
        x, y = models.llama_batch(config)
        model = models.tensor_parallel(models.llama(config), mesh, sequence_parallel=True)
        graphs = models.capture_graphs(model, (x,), lambda out: models.cross_entropy(out, y))
        found = [*graphs.forward, *graphs.backward, *graphs.joint]
        experts = models.MoEConfig(experts=8)
        moe = models.moe(experts, dist.group.WORLD)
        more = models.capture_graphs(moe, models.moe_batch(experts)[:1])
        found += [*more.forward, *more.backward]
        names = {"world": mesh.get_group().group_name}
        for name in ("row", "column", "other"):
            names[name] = dist.new_group([0, 1, 2, 3]).group_name
        programs = [program(module.graph) for module in found]
        yield [(p, verify.snapshot(p.graph)) for p in programs], names


def program(graph: torch.fx.Graph) -> Program:
    """The books of a graph without writes to memory: data flow, effects and order per group are all there is."""
    nodes = list(graph.nodes)
    assert not any(ops.mutated_inputs(n) for n in nodes)
    communication = [n for n in nodes if is_start(n) or n.target is WAIT]
    fences = [n for n in nodes if ops.role(n) is ops.Role.FENCE]
    chains: dict[str, list[torch.fx.Node]] = {"fence": fences}
    for node in nodes:
        if (channel := ops.effect_channel(node, ops.role(node))) in ("random", "assert"):
            chains.setdefault(channel, []).append(node)
        if is_start(node):
            chains.setdefault(f"group {node.args[-1]}", []).append(node)
    return Program(graph, [], chains, communication, fences, {})


def test_nothing_is_found_in_real_graphs(real):
    programs, _ = real
    assert sum(len([n for n in p.communication if is_start(n)]) for p, _ in programs) > 20
    for p, _ in programs:
        assert verify.check(p.graph) == []
        assert verify.check(p.graph, reference=p.graph, memory_budget=verify.peak_bytes(p.graph)) == []
        assert verify.certify([p.graph]).holds


def test_legal_orders_of_real_graphs(real):
    programs, _ = real
    for p, reference in programs:
        original = list(p.graph.nodes)
        for seed in range(5):
            apply_order(p.graph, p.legal_order(random.Random(seed)))
            assert verify.check(p.graph, reference=reference) == []
        apply_order(p.graph, original)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_illegal_change_is_found(real, mutation):
    programs, groups = real
    injected = 0
    for attempt in range(60):
        p, reference = programs[attempt % len(programs)]
        case = Case(p, groups, random.Random(attempt))
        if not inject(mutation, case):
            continue
        findings = verify.check(case.graph, reference=reference, certificates=case.certificates)
        assert {f.rule for f in findings} & mutation.rules, f"attempt {attempt}: {findings[:3]}"
        injected += 1
        if injected == INJECTIONS:
            break
    assert (injected > 0) == (mutation.name not in NO_PLACE)
