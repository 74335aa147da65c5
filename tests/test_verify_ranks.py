"""Programs of several ranks: matching, deadlock certificates, and queues that play them through."""

from __future__ import annotations

import random

import pytest
import torch
import torch.fx

from inductor_passes import verify
from inductor_passes.verify import queue
from inductor_passes.verify.events import Action, Event
from tests.support.verify_graphs import Builder, apply_order, c10d, random_program
from tests.support.world import grouped_world

WORLD = 8
GROUPS = {
    "world": tuple(range(8)),
    **{f"row{i}": tuple(range(4 * i, 4 * i + 4)) for i in range(2)},
    **{f"column{i}": (i, i + 4) for i in range(4)},
}


@pytest.fixture(scope="module")
def groups():
    with grouped_world() as names:
        yield names


def start(name: str, group: str, what: str = "all_reduce float32 64->64 B sum", **kwargs) -> Event:
    return Event(name, Action.START, group=group, ranks=GROUPS[group], what=what, source=f"model.py:{name}", **kwargs)


def wait(*starts: str) -> Event:
    return Event(f"wait_{'_'.join(starts)}", Action.WAIT, what="wait", starts=starts)


def projected(rng: random.Random, length: int = 14) -> dict[int, list[Event]]:
    """One global sequence of collectives, as each rank sees it, with waits at random places after their starts."""
    programs: dict[int, list[Event]] = {r: [] for r in range(WORLD)}
    open_waits: dict[int, list[str]] = {r: [] for r in range(WORLD)}
    for number in range(length):
        group = rng.choice(list(GROUPS))
        blocking = rng.random() < 0.1
        what = f"all_reduce float32 {rng.choice([64, 128])} B"
        event = start(f"n{number}", group, what)
        if blocking:
            event = Event(event.name, Action.BLOCKING, event.group, event.ranks, what, source=event.source)
        for rank in GROUPS[group]:
            programs[rank].append(event)
            if not blocking:
                open_waits[rank].append(event.name)
            while open_waits[rank] and rng.random() < 0.4:
                programs[rank].append(wait(open_waits[rank].pop(rng.randrange(len(open_waits[rank])))))
    for rank in range(WORLD):
        programs[rank].extend(wait(name) for name in open_waits[rank])
    return programs


def rules(findings) -> set[str]:
    return {f.rule for f in findings}


def test_certified_programs_run_to_the_end():
    for seed in range(200):
        programs = projected(random.Random(seed))
        assert verify.check_ranks(programs) == []
        certification = verify.certify(programs, max_in_flight=1)
        assert certification.holds and len(certification.proven) == 3
        for limit in (1, 2, None):
            outcome = queue.run(programs, max_in_flight=limit)
            assert outcome.completed and outcome.done == 14


def test_the_certificate_holds_exactly_when_the_queues_run_empty():
    """Random disorder on one rank: the certificate and the simulator, which share no code, must agree."""
    outcomes = {True: 0, False: 0}
    for seed in range(600):
        rng = random.Random(seed)
        programs = projected(rng, length=10)
        program = rng.choice([p for p in programs.values() if len(p) > 1])
        for _ in range(rng.randrange(1, 4)):
            i = rng.randrange(len(program) - 1)
            a, b = program[i], program[i + 1]
            if b.action is not Action.WAIT or a.name not in b.starts:
                program[i], program[i + 1] = b, a
        for limit in (1, None):
            certified = verify.certify(programs, max_in_flight=limit).holds
            completed = queue.run(programs, max_in_flight=limit).completed
            assert certified == completed, f"seed {seed}, limit {limit}"
            outcomes[certified] += 1
    assert min(outcomes.values()) > 100


def test_disorder_between_groups_hangs_only_where_the_backend_is_limited():
    a, b = start("a", "row0"), start("b", "world")
    programs = {r: [b] for r in range(WORLD)}
    programs.update({r: [a, b, wait("a"), wait("b")] for r in range(4)})
    programs[3] = [b, a, wait("a"), wait("b")]
    limited = verify.certify(programs, max_in_flight=1)
    assert rules(limited.findings) == {"launch-cycle"}
    assert "ranks wait for each other" in limited.findings[0].message
    assert not queue.run(programs, max_in_flight=1).completed
    unlimited = verify.certify(programs, max_in_flight=None)
    assert unlimited.holds and "the backend runs any number of collectives at a time" in unlimited.assumed
    assert queue.run(programs, max_in_flight=None).completed


def test_a_wait_between_the_starts_hangs_on_any_backend():
    a, b = start("a", "row0"), start("b", "world")
    programs = {r: [b] for r in range(WORLD)}
    programs.update({r: [a, wait("a"), b, wait("b")] for r in range(4)})
    programs[3] = [b, wait("b"), a, wait("a")]
    assert rules(verify.certify(programs, max_in_flight=None).findings) == {"launch-cycle"}
    outcome = queue.run(programs, max_in_flight=None)
    assert set(outcome.stuck) == set(range(WORLD)) and not outcome.completed


@pytest.mark.parametrize("what", ["lost", "group order", "kind"])
def test_differences_name_both_sides(what):
    shown = 0
    for seed in range(200):
        rng = random.Random(seed)
        programs = projected(rng)
        rank = rng.randrange(WORLD)
        program = programs[rank]
        starts = [i for i, e in enumerate(program) if e.action is Action.START]
        i = rng.choice(starts)
        if what == "lost":
            del program[i]
        elif what == "kind":
            e = program[i]
            program[i] = Event(e.name, e.action, e.group, e.ranks, "broadcast", source="other.py:1")
        else:
            j = next((j for j in starts if j > i and program[j].group == program[i].group), None)
            if j is None or program[j].what == program[i].what:
                continue
            program[i], program[j] = program[j], program[i]
        findings = verify.check_ranks(programs)
        assert "ranks-differ" in rules(findings)
        assert f"rank {rank}" in " ".join(f.message for f in findings)
        assert "model.py:" in findings[0].message
        assert not queue.run(programs, max_in_flight=None).completed
        shown += 1
    assert shown > 30


def test_all_to_all_splits_must_mirror_each_other():
    def exchange(splits_in, splits_out):
        return [
            Event("x", Action.START, "column0", GROUPS["column0"], "all_to_all float32", (splits_in, splits_out)),
            wait("x"),
        ]

    good = {0: exchange((3, 5), (3, 2)), 4: exchange((2, 6), (5, 6))}
    assert verify.check_ranks(good) == []
    bad = {0: exchange((3, 5), (3, 2)), 4: exchange((2, 6), (4, 6))}
    assert rules(verify.check_ranks(bad)) == {"splits-differ"}


def transfer(name: str, action: Action, peer: int, tag: int = 0, what: str = "float32 64 B") -> Event:
    return Event(name, action, "world", GROUPS["world"], what, peer=peer, tag=tag)


def test_transfers_are_paired():
    send, receive = transfer("s", Action.SEND, 1), transfer("r", Action.RECEIVE, 0)
    assert verify.certify({0: [send, wait("s")], 1: [receive, wait("r")]}).holds
    assert queue.run({0: [send, wait("s")], 1: [receive, wait("r")]}).completed
    for broken in (
        {0: [send, wait("s")], 1: []},
        {0: [], 1: [receive, wait("r")]},
        {0: [send, wait("s")], 1: [transfer("r", Action.RECEIVE, 0, tag=7), wait("r")]},
        {0: [send, wait("s")], 1: [transfer("r", Action.RECEIVE, 0, what="float16 32 B"), wait("r")]},
    ):
        assert "transfer-unmatched" in rules(verify.check_ranks(broken))
        assert not queue.run(broken).completed


def test_blocking_sends_to_each_other_hang_and_a_batch_does_not():
    def program(batched: bool, peer: int):
        names = ("p", "p") if batched else ("s", "r")
        sends = [transfer(names[0], Action.SEND, peer), transfer(names[1], Action.RECEIVE, peer)]
        return [*sends, *(wait(n) for n in dict.fromkeys(names))]

    apart = {0: program(False, 1), 1: program(False, 0)}
    assert rules(verify.certify(apart, max_in_flight=1).findings) == {"launch-cycle"}
    assert not queue.run(apart, max_in_flight=1).completed
    together = {0: program(True, 1), 1: program(True, 0)}
    assert verify.certify(together, max_in_flight=1).holds
    assert queue.run(together, max_in_flight=1).completed


def test_one_program_for_all_ranks_says_what_it_assumes(groups):
    program = random_program(random.Random(3), groups)
    certification = verify.certify([program.graph])
    assert certification.holds
    assert any("every rank runs this program" in a for a in certification.assumed)
    assert any("verify_tests::unknown" in a for a in certification.assumed)


def test_legal_orders_of_graphs_run_on_all_ranks(groups):
    """Every rank runs the same reordered graph; collectives of groups that a rank is not in are not its own."""
    for seed in range(40):
        rng = random.Random(seed)
        program = random_program(rng, groups)
        apply_order(program.graph, program.legal_order(rng))
        events = verify.snapshot(program.graph).events
        by_rank = {r: [e for e in events if not e.ranks or r in e.ranks] for r in range(WORLD)}
        assert verify.certify(by_rank, max_in_flight=1).holds
        assert queue.run(by_rank, max_in_flight=1).completed


def test_digest_is_equal_exactly_for_programs_that_fit(groups):
    program = random_program(random.Random(5), groups)
    digest = verify.digest(verify.snapshot(program.graph).events)
    starts = [n for n in program.graph.nodes if n.target is c10d.all_reduce.default]
    assert digest == verify.digest(verify.snapshot(program.graph).events)
    starts[0].args = (starts[0].args[0], "max", starts[0].args[2])
    assert digest != verify.digest(verify.snapshot(program.graph).events)


def test_graphs_with_transfers(groups):
    def graph(rank: int, tag: int = 0) -> torch.fx.Graph:
        b = Builder(groups)
        x = b.input(4, 4)
        op, peer = (c10d.isend.default, 1) if rank == 0 else (c10d.irecv.default, 0)
        moved = b.call(op, x, peer, tag, groups["world"])
        done = b.call(c10d.wait_tensor.default, moved)
        b.outputs = [b.call(torch.ops.aten.relu.default, done)]
        return b.finish().graph

    assert verify.check(graph(0)) == [] and verify.check(graph(1)) == []
    assert verify.check_ranks([graph(0), graph(1)]) == []
    assert rules(verify.check_ranks([graph(0), graph(1, tag=2)])) == {"transfer-unmatched"}
    early = graph(1)
    received = next(n for n in early.nodes if n.target is c10d.irecv.default)
    with early.inserting_after(received):
        early.call_function(torch.ops.aten.relu.default, (received,)).meta["val"] = received.meta["val"]
    assert "read-before-wait" in rules(verify.check(early))


def test_bad_limit():
    with pytest.raises(ValueError, match="max_in_flight=0"):
        verify.certify([[]], max_in_flight=0)
