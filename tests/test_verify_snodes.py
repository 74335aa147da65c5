"""Orders of Inductor's scheduler nodes: legal ones pass, each illegal one is found.

The checks run inside Inductor's hook on its own nodes; raising there ends the compilation before any code is made.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch._inductor import config

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.hooks import FusionHook
from inductor_passes.problems import inside, kernel_calls, kernels
from inductor_passes.replay import batches
from inductor_passes.schedule.memory import peak_bytes
from inductor_passes.schedule.problem import INPUT, Kind
from inductor_passes.verify import snode_order
from inductor_passes.verify.snode_order import SnodeOrder
from inductor_passes.verify.snode_transfers import early_waits
from tests.support.transfers import needs_transfers
from tests.support.verify_graphs import scribble, unknown, unknown_pair
from tests.support.world import grouped_world


class _Seen(Exception):
    pass


def on_scheduler_nodes(function: Callable, inputs, check: Callable[[list], None]) -> None:
    """Lower a function and call ``check`` with the scheduler nodes of its graph."""
    seen = []

    def hook(nodes):
        seen.append(len(nodes))
        check(nodes)
        raise _Seen

    torch._dynamo.reset()
    with (
        config.patch(
            reorder_for_compute_comm_overlap=True,
            reorder_for_compute_comm_overlap_passes=[hook],
            force_disable_caches=True,
        ),
        pytest.raises(Exception, match="_Seen"),
    ):
        torch.compile(function)(*inputs)
    assert seen


@pytest.fixture(scope="module")
def groups():
    with grouped_world() as names:
        yield names


def program(groups) -> Callable:
    def step(a, b, state):
        gathered = funcol.all_gather_tensor(a, 0, groups["row"])
        x = torch.mm(b, b)
        y = funcol.all_reduce(torch.relu(x), "sum", groups["column"])
        z = torch.mm(x, b)
        first, second = funcol.all_reduce_coalesced([z, z + 1], "sum", groups["row"])
        seen = unknown(z)
        scattered = funcol.reduce_scatter_tensor(torch.mm(z, x), "sum", 0, groups["row"])
        w = torch.mm(gathered[:16], y)
        state.copy_(w)
        swapped = funcol.all_to_all_single(torch.mm(x, seen), None, None, groups["column"])
        return first + w, second, scattered + 1, torch.mm(swapped, seen), torch.mm(z, seen)

    return step


def inputs():
    return [torch.randn(16, 16) for _ in range(3)]


def random_order(nodes: list, rng: random.Random) -> list:
    """A random order that honours Inductor's dependencies, fences, and the order within groups (also artificial)."""
    producer = {b: n for n in nodes for b in _torch.snode_output_names(n)}
    before = {n: {producer[b] for b, _ in _torch.snode_dependencies(n) if b in producer} - {n} for n in nodes}
    communication = [n for n in nodes if _torch.snode_kind(n) in ("start", "wait")]
    fences = [n for n in nodes if str(_torch.snode_op(n)).startswith("verify_tests")]
    for fence in fences:
        for n in communication:
            if nodes.index(n) < nodes.index(fence):
                before[fence].add(n)
            else:
                before[n].add(fence)
    starts = [n for n in nodes if _torch.snode_kind(n) == "start"]
    for a, b in itertools.pairwise(starts):
        before[b].add(a)
    left, order = list(nodes), []
    while left:
        ready = [n for n in left if before[n] <= set(order)]
        node = rng.choice(ready)
        left.remove(node)
        order.append(node)
    return order


def rules(findings) -> set[str]:
    return {f.rule for f in findings}


def test_legal_orders_have_no_findings(groups):
    def check(nodes):
        kinds = [_torch.snode_kind(n) for n in nodes]
        assert kinds.count("start") == 5 and kinds.count("wait") >= 5
        assert verify.check_snodes(nodes, nodes) == []
        for seed in range(100):
            order = random_order(nodes, random.Random(seed))
            assert verify.check_snodes(order, nodes) == []

    on_scheduler_nodes(program(groups), inputs(), check)


def drawing(groups) -> Callable:
    """Kernels that draw, of which Inductor names the FX node (``rand``) and of which it does not (several results).

    Nothing but the generator keeps them in order. Attention without dropout does not draw.
    """

    def step(a, b, q):
        gathered = funcol.all_gather_tensor(a, 0, groups["row"])
        dropped = torch.ops.aten.native_dropout(b, 0.5, True)[0]
        noise = torch.rand(16, 16)
        plain, attended = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p)[0] for p in (0.0, 0.1)
        )
        others = torch.ops.aten.native_dropout(a, 0.5, True)[0]
        return gathered, dropped, noise, plain, attended, others

    return step


def in_front(moved, before, nodes) -> list:
    """The order in which a node and the results that are taken out of it come in front of another one."""
    parts = [n for n in nodes if n is moved or set(_torch.snode_output_names(moved)) & set(_torch.snode_reads(n))]
    order = [n for n in nodes if n not in parts]
    order[order.index(before) : order.index(before)] = parts
    return order


def test_draws_keep_their_order_whatever_inductor_knows_of_them(groups):
    def check(nodes):
        called = [n for n in nodes if re.search("dropout|rand|attention", str(_torch.snode_op(n)))]
        assert sum(_torch.snode_origin(n) is None for n in called) == 4 and len(called) == 5
        edges = kernels.build(nodes, CostProfile.default("cpu"), backward=False).problem.edges()
        (plain,) = [n for n in called if "attention" in str(_torch.snode_op(n)) and 0.1 not in n.node.constant_args]
        drawn = [n for n in called if n is not plain]
        for before, after in itertools.pairwise(drawn):
            assert nodes.index(before) in edges[nodes.index(after)]
            assert "rng-order" in rules(verify.check_snodes(in_front(after, before, nodes), nodes))

    with config.patch(fallback_random=True):
        on_scheduler_nodes(drawing(groups), [torch.randn(16, 16), torch.randn(16, 16), torch.randn(1, 2, 16, 8)], check)


def test_attention_without_dropout_is_free(groups):
    def check(nodes):
        plain, attended = sorted(
            (n for n in nodes if "attention" in str(_torch.snode_op(n))), key=lambda n: 0.1 in n.node.constant_args
        )
        edges = kernels.build(nodes, CostProfile.default("cpu"), backward=False).problem.edges()
        assert not edges[nodes.index(plain)]
        assert nodes.index(plain) not in edges[nodes.index(attended)]
        assert not verify.check_snodes(in_front(attended, plain, nodes), nodes)

    on_scheduler_nodes(drawing(groups), [torch.randn(16, 16), torch.randn(16, 16), torch.randn(1, 2, 16, 8)], check)


def test_what_a_call_takes_inside_counts_whatever_inductor_knows_of_it(groups):
    def taken(node):
        return 1 << 20 if "attention" in str(node.target) else 0

    def check(nodes):
        for module, peak in ((inside, planned), (snode_order, verify.snodes_peak_bytes)):
            without = peak(nodes)
            with mock.patch.object(module, "inside_bytes", taken):
                assert peak(nodes) - without > 1 << 19

    def planned(nodes):
        return peak_bytes(kernels.build(nodes, CostProfile.default("cpu"), backward=False).problem)

    on_scheduler_nodes(drawing(groups), [torch.randn(16, 16), torch.randn(16, 16), torch.randn(1, 2, 16, 8)], check)


def test_calls_are_held_in_the_order_of_the_program(groups):
    """Also those that have no tensor as a result."""

    def step(a, b):
        gathered = funcol.all_gather_tensor(a, 0, groups["row"])
        first = torch.ops.aten.native_dropout(a, 0.5, True)[0]
        scribble(b, a)
        count = b.sum().item()
        second, third = unknown_pair(a)
        return gathered, first, second, third, torch.ops.aten.native_dropout(a, 0.5, True)[0], count

    def check(nodes):
        pairs = kernel_calls.in_order(nodes)
        held = [pairs[0][0], *(after for _, after in pairs)]
        assert [str(_torch.snode_op(n)).partition(".")[0] for n in held if _torch.snode_op(n) is not None] == [
            *("aten", "verify_tests", "verify_tests", "aten")
        ]
        for before, after in pairs:
            ordered = {b for b, _ in _torch.snode_dependencies(after)}
            assert ordered & set(_torch.snode_output_names(before)), (before, after)

    patches = {"fallback_random": True, "_pre_fusion_custom_pass": FusionHook(PassConfig())}
    with config.patch(patches), torch._dynamo.config.patch(capture_scalar_outputs=True):
        on_scheduler_nodes(step, [torch.randn(16, 16), torch.randn(16, 16)], check)


def test_every_broken_dependency_is_found(groups):
    def check(nodes):
        producer = {b: n for n in nodes for b in _torch.snode_output_names(n)}
        broken = 0
        for node in nodes:
            for buffer, _ in _torch.snode_dependencies(node):
                if buffer in producer and producer[buffer] is not node:
                    order = [n for n in nodes if n is not node]
                    order.insert(order.index(producer[buffer]), node)
                    assert "dependency" in rules(verify.check_snodes(order, nodes))
                    broken += 1
        assert broken > 30

    on_scheduler_nodes(program(groups), inputs(), check)


def test_waits_are_checked_without_trusting_dependencies(groups):
    """The in-flight rules alone find a reader before its wait, also when Inductor's dependencies are gone."""

    def check(nodes):
        kept = {n: n.unmet_dependencies for n in nodes}
        found = 0
        for wait in [n for n in nodes if _torch.snode_kind(n) == "wait"]:
            own = set(_torch.snode_output_names(wait))
            readers = [n for n in nodes if own & set(_torch.snode_data_reads(n))]
            for reader in readers:
                order = [n for n in nodes if n is not reader]
                order.insert(order.index(wait), reader)
                for n in nodes:
                    n.unmet_dependencies = type(kept[n])()
                found_rules = rules(verify.check_snodes(order, nodes))
                for n in nodes:
                    n.unmet_dependencies = kept[n]
                assert "read-before-wait" in found_rules
                found += 1
        assert found >= 5

    on_scheduler_nodes(program(groups), inputs(), check)


def test_lost_duplicated_and_unwaited_nodes(groups):
    def check(nodes):
        assert rules(verify.check_snodes(nodes[1:], nodes)) == {"lost"}
        assert rules(verify.check_snodes([*nodes, nodes[0]], nodes)) == {"duplicated"}
        assert rules(verify.check_snodes(nodes, nodes[1:])) == {"added"}

    on_scheduler_nodes(program(groups), inputs(), check)


@pytest.mark.parametrize("fenced", [unknown, unknown_pair], ids=["one result", "two results"])
def test_order_of_a_group_and_fences(groups, fenced):
    def two(a, b):
        x = funcol.all_reduce(a, "sum", groups["row"])
        y = funcol.all_reduce(b + 1, "sum", groups["row"])
        return torch.mm(x, y), fenced(torch.mm(a, b))

    def check(nodes):
        starts = [n for n in nodes if _torch.snode_kind(n) == "start"]
        for n in nodes:
            n.unmet_dependencies = type(n.unmet_dependencies)(
                d for d in n.unmet_dependencies if not getattr(d, "is_fake", False)
            )
        order = [n for n in nodes if n is not starts[0]]
        order.insert(order.index(starts[1]) + 1, starts[0])
        assert "group-order" in rules(verify.check_snodes(order, nodes))
        assert "group-order" not in rules(verify.check_snodes(order, nodes, group_order="any"))
        fence = next(n for n in nodes if str(_torch.snode_op(n)).startswith("verify_tests"))
        last = [n for n in nodes if _torch.snode_kind(n) == "wait"][-1]
        order = [n for n in nodes if n is not fence]
        late = nodes.index(fence) > nodes.index(starts[0])
        order.insert(0 if late else order.index(last) + 1, fence)
        assert "fence" in rules(verify.check_snodes(order, nodes))

    on_scheduler_nodes(two, [torch.randn(16, 16), torch.randn(16, 16)], check)


def test_write_to_an_input_in_flight(groups):
    def step(a, b):
        gathered = funcol.all_gather_tensor(a, 0, groups["row"])
        x = torch.mm(gathered[:16], b)
        a.copy_(torch.mm(x, b))
        return x

    def check(nodes):
        waits = [n for n in nodes if _torch.snode_kind(n) == "wait"]
        writer = next(n for n in nodes if _torch.snode_kind(n) != "wait" and _torch.snode_mutations(n))
        start = next(n for n in nodes if _torch.snode_kind(n) == "start")
        order = [n for n in nodes if n is not writer]
        order.insert(order.index(start) + 1, writer)
        assert waits
        assert {"write-in-flight", "dependency"} <= rules(verify.check_snodes(order, nodes))

    on_scheduler_nodes(step, [torch.randn(16, 16), torch.randn(16, 16)], check)


def test_peak_memory_follows_the_order(groups):
    def step(a, b):
        return torch.mm(torch.mm(a, b), b).sum(), torch.mm(torch.mm(b, a), a).sum()

    def check(nodes):
        peak = verify.snodes_peak_bytes(nodes)
        assert peak >= 2 * 16 * 16 * 4
        assert verify.check_snodes(nodes, nodes, memory_budget=peak) == []
        assert rules(verify.check_snodes(nodes, nodes, memory_budget=peak - 1)) == {"memory"}

    on_scheduler_nodes(step, [torch.randn(16, 16), torch.randn(16, 16)], check)


def test_a_concatenation_is_allocated_with_its_first_part(groups):
    """It has no kernel: parts are computed where they belong, and the first one of them brings the whole to life."""

    def joined(a, b):
        first = torch.relu(a) * 2
        middle = torch.mm(b, b)
        # With a few parts Inductor computes the whole in one kernel.
        later = [torch.relu(middle[i::16]) + i for i in range(16)]
        return torch.mm(torch.cat([first, *later]), middle)

    def check(nodes):
        built = kernels.build(nodes, CostProfile.default("cpu"), backward=False)
        problem = built.problem
        shared = [{s for _, _, names, _ in _torch.snode_buffers(node) for s in names} for node in nodes]
        (whole,) = [s for s in problem.storages if any(s.name in names for names in shared)]
        assert whole.size_bytes == 2 * 256 * 256 * 4
        parts = [i for i, names in enumerate(shared) if whole.name in names]
        assert whole.producer == min(parts) < next(i for i, n in enumerate(nodes) if _torch.snode_kind(n) == "nop")
        assert all(whole.producer in problem.edges()[i] for i in parts if i != whole.producer)
        assert len(parts) > 1
        assert verify.snodes_peak_bytes(nodes) == batches.peak_bytes(problem, problem.input_order, built.batched) - sum(
            s.size_bytes for s in problem.storages if s.producer == INPUT
        )

    on_scheduler_nodes(joined, [torch.randn(256, 256), torch.randn(256, 256)], check)


def test_kernels_in_a_row_free_nothing_between_them(groups):
    def row(a, b):
        x = torch.mm(a, b)
        y = torch.relu(x).sum(0, keepdim=True)
        z = (x * y).sum(1)
        return torch.mm(z.expand(256, 256).contiguous(), b)

    def check(nodes):
        built = kernels.build(nodes, CostProfile.default("cpu"), backward=False)
        order = built.problem.input_order
        rows = [len([*run]) for one, run in itertools.groupby(built.batched) if one]
        assert max(rows) > 1
        with_rows = batches.peak_bytes(built.problem, order, built.batched)
        assert with_rows > peak_bytes(built.problem, order)
        inputs = sum(s.size_bytes for s in built.problem.storages if s.producer == INPUT)
        assert verify.snodes_peak_bytes(nodes) == with_rows - inputs

    on_scheduler_nodes(row, [torch.randn(256, 256), torch.randn(256, 256)], check)


@needs_transfers
def test_transfers_keep_their_place_among_collectives(groups):
    def step(a, b):
        gathered = funcol.all_gather_tensor(a, 0, groups["row"])
        sent = torch.ops._c10d_functional.isend(b, 1, 0, groups["world"])
        done = torch.ops._c10d_functional.wait_tensor(sent)
        reduced = funcol.all_reduce(torch.mm(a, b), "sum", groups["column"])
        return gathered + 1, done, reduced + 1

    def check(nodes):
        starts = {str(_torch.snode_op(n)): n for n in nodes if _torch.snode_kind(n) == "start"}
        send = next(n for op, n in starts.items() if "isend" in op)
        gather = next(n for op, n in starts.items() if "all_gather" in op)
        assert verify.check_snodes(nodes, nodes) == []
        order = [n for n in nodes if n is not send]
        order.insert(order.index(gather), send)
        # Inductor gives transfers artificial dependencies on the communication before them.
        assert "dependency" in rules(verify.check_snodes(order, nodes, group_order="any"))

    on_scheduler_nodes(step, inputs()[:2], check)


@needs_transfers
@pytest.mark.parametrize("held", [False, True], ids=["Inductor", "with our hook"])
def test_waits_stay_behind_messages_that_are_sent_first(groups, held):
    """Inductor moves and fuses waits in front of sends: the other rank may answer only after it has got them."""

    def step(x, w):
        c10d, name = torch.ops._c10d_functional, groups["world"]
        received = c10d.irecv(torch.empty_like(x), 1, 0, name)
        hidden = x @ w
        kept = torch.relu(hidden)
        sent = c10d.isend(kept, 1, 0, name)
        both = c10d.batch_p2p_ops(["isend", "irecv"], [1, 1], [1, 1], [kept @ w, torch.empty_like(x)], name)
        grad = c10d.wait_tensor(received)
        c10d.wait_tensor(sent)
        c10d.wait_tensor(both[0])
        return grad * (hidden > 0), c10d.wait_tensor(both[1]).relu()

    def check(nodes):
        early = list(early_waits(SnodeOrder(nodes)))
        assert {f.rule for f in early} == (set() if held else {"transfer-wait"})
        problem = kernels.build(nodes, CostProfile.default(), backward=False).problem
        kinds = [task.kind for task in problem.tasks]
        assert kinds.count(Kind.START) == 3 and kinds.count(Kind.WAIT) == 4
        assert not any(task.fence for task in problem.tasks)
        if held:
            wait = next(n for n in nodes if _torch.snode_kind(n) == "wait")
            start = next(n for n in reversed(nodes) if _torch.snode_kind(n) == "start")
            order = [n for n in nodes if n is not wait]
            order.insert(order.index(start), wait)
            assert "transfer-wait" in rules(verify.check_snodes(order, nodes))

    with config.patch(_pre_fusion_custom_pass=FusionHook() if held else None):
        on_scheduler_nodes(step, inputs()[:2], check)
