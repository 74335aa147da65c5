"""The emulated link on real ranks: right results, times as modelled, and a log that says what was waited for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.link_model import PATIENCE_S, Link, Rate, Record, StepTime, Times
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

MS = 1_000_000


def _register(rank: int, world_size: int) -> None:
    emulated_link.register()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="emulated", setup=_register) as pool:
        yield pool


def _record(kind: str = "all_gather", duration: int = 10) -> Record:
    return Record(0, kind, "g", 2, "intra", 1, 2, 1, duration)


def test_link_serves_one_at_a_time() -> None:
    link = Link("intra", Rate())
    first, second, third = _record(), _record(), _record()
    link.issue(first, lambda: (100, 0))
    link.issue(second, lambda: (105, 5))
    link.issue(third, lambda: (200, 100))
    link.settle(third)
    assert [(r.wall.begin_ns, r.wall.end_ns) for r in (first, second, third)] == [(100, 110), (110, 120), (200, 210)]
    assert [(r.virtual.begin_ns, r.virtual.end_ns) for r in (first, second, third)] == [(0, 10), (10, 20), (100, 110)]


def test_what_is_ready_later_is_overtaken_on_each_clock() -> None:
    """The first one's other rank is late on the wall clock: the machine held it back. In virtual time it was first."""
    link = Link("intra", Rate())
    first, second = _record(), _record()
    answers = itertools.chain([None, None], itertools.repeat((50, 5)))
    link.issue(first, lambda: next(answers))
    link.issue(second, lambda: (10, 8))
    link.settle(second)
    link.settle(first)
    assert [(r.wall.begin_ns, r.virtual.begin_ns) for r in (first, second)] == [(50, 5), (10, 15)]


def test_what_is_waited_for_first_may_be_served_last() -> None:
    link = Link("intra", Rate())
    first, second = _record(), _record()
    link.issue(first, lambda: (100, 100))
    link.issue(second, lambda: (10, 95))
    link.settle(first)
    assert (first.wall.begin_ns, first.virtual.begin_ns) == (100, 105)
    link.settle(second)
    assert (second.wall.begin_ns, second.virtual.begin_ns) == (10, 95)


def test_a_rank_that_issues_in_another_order_is_waited_for_once() -> None:
    link = Link("intra", Rate())
    link.patience_s = 0.02
    late, ready, next_one = _record(), _record(), _record()
    asked: list[int] = [0]
    answer: list[tuple[int, int] | None] = [None]

    def of_late() -> tuple[int, int] | None:
        asked[0] += 1
        return answer[0]

    link.issue(late, of_late)
    link.issue(ready, lambda: (10, 10))
    link.settle(ready)
    assert (late.wall.end_ns, ready.wall.begin_ns) == (-1, 10) and asked[0] > 1
    link.issue(next_one, lambda: (20, 20))
    asked[0] = 0
    link.settle(next_one)
    assert next_one.virtual.begin_ns == 20 and asked[0] == 1
    answer[0] = (50, 50)
    link.settle(late)
    assert late.wall.begin_ns == 50
    link.restart()
    assert link.patience_s == PATIENCE_S


def test_settling_waits_until_all_ranks_have_issued() -> None:
    link = Link("intra", Rate())
    behind = _record()
    answers = iter([None, None, (5, 5)])
    link.issue(behind, lambda: next(answers))
    link.settle(behind)
    assert behind.wall.begin_ns == 5 and next(answers, "asked thrice") == "asked thrice"


def test_a_restart_forgets_what_nobody_waited_for() -> None:
    link = Link("intra", Rate())
    dropped, new = _record(), _record()
    dropped.wall.issue_ns = 3
    link.issue(dropped, lambda: None)
    link.restart()
    link.issue(new, lambda: (7, 0))
    link.settle(dropped)
    assert (dropped.wall.end_ns, new.wall.end_ns) == (3, -1)
    link.settle(new)
    assert (new.virtual.begin_ns, new.virtual.end_ns) == (0, 10)


def test_durations() -> None:
    assert Rate(1_000, 1e9).duration_ns(500) == 1_500
    assert Rate().duration_ns(10**12) == 0
    with pytest.raises(ValueError, match="bytes_per_s above 0"):
        Rate(0, 0.0)


@pytest.mark.parametrize("name", ["EMULATED_LINK_LATENCY_NS", "EMULATED_LINK_INTRA_BYTES_PER_S"])
def test_bad_environment(name: str) -> None:
    with pytest.raises(ValueError, match=name[-8:]):
        emulated_link._rate_from_env({name: "quick"}, "intra")
    rate = emulated_link._rate_from_env(
        {"EMULATED_LINK_LATENCY_NS": "5e3", "EMULATED_LINK_INTRA_LATENCY_NS": "7"}, "intra"
    )
    assert rate == Rate(7, float("inf"))


def test_late_transfers_are_violations() -> None:
    record = _record(duration=100 * MS)
    record.late_ns = 1 * MS
    assert not record.violates_model
    record.late_ns = 3 * MS
    assert record.violates_model
    assert StepTime(0, 0, 0, 0, 0, {}, (record, _record())).violations == 1


def _results(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Every collective once; results as lists."""
    emulated_link.set_rate(latency_ns=100_000, bytes_per_s=1e9)
    group = dist.group.WORLD
    mine = torch.arange(4.0) + 10 * rank
    wait = torch.ops._c10d_functional.wait_tensor
    name = group.group_name
    out: dict[str, Any] = {}
    ops = torch.ops._c10d_functional
    out["all_gather"] = wait(ops.all_gather_into_tensor(mine, 2, name))
    out["all_gather_out"] = wait(ops.all_gather_into_tensor_out(mine, 2, name, out=torch.empty(8)))
    out["all_gather_coalesced"] = [wait(t) for t in ops.all_gather_into_tensor_coalesced([mine, mine.int()], 2, name)]
    out["reduce_scatter"] = wait(ops.reduce_scatter_tensor(mine, "sum", 2, name))
    out["reduce_scatter_out"] = wait(ops.reduce_scatter_tensor_out(mine, "sum", 2, name, out=torch.empty(2)))
    out["reduce_scatter_avg"] = wait(ops.reduce_scatter_tensor(mine, "avg", 2, name))
    out["reduce_scatter_coalesced"] = [
        wait(t) for t in ops.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", 2, name)
    ]
    out["all_reduce"] = wait(ops.all_reduce(mine, "max", name))
    out["all_reduce_"] = wait(ops.all_reduce_(mine.clone(), "sum", name))
    out["all_reduce_coalesced"] = [wait(t) for t in ops.all_reduce_coalesced([mine, mine.clone()], "sum", name)]
    out["all_to_all"] = wait(ops.all_to_all_single(mine, [1 + 2 * rank] * 2, [1, 3], name))
    out["broadcast"] = wait(ops.broadcast(mine, 1, name))
    out["eager_all_gather"] = [torch.empty(8), [torch.empty(4), torch.empty(4)]]
    dist.all_gather_into_tensor(out["eager_all_gather"][0], mine)
    dist.all_gather(out["eager_all_gather"][1], mine)
    out["eager_reduce_scatter"] = [torch.empty(2), torch.empty(2)]
    dist.reduce_scatter_tensor(out["eager_reduce_scatter"][0], mine)
    dist.reduce_scatter(out["eager_reduce_scatter"][1], list(mine.chunk(2)))
    out["eager_all_reduce"] = mine.clone()
    dist.all_reduce(out["eager_all_reduce"])
    received = torch.empty(4)
    if rank == 0:
        works = [dist.isend(mine, 1), dist.irecv(received, 1)]
    else:
        works = [dist.irecv(received, 0), dist.isend(mine, 0)]
    for work in works:
        work.wait()
    out["received"] = received
    # Functional messages exist from torch 2.13 on.
    functional = torch.empty(4)
    if hasattr(ops, "irecv"):
        if rank == 0:
            ops.wait_tensor(ops.isend(mine, 1, 0, name))
        else:
            functional = ops.wait_tensor(ops.irecv(functional, 0, 0, name))
    else:
        dist.send(mine, 1) if rank == 0 else dist.recv(functional, 0)
    out["functional_received"] = functional if rank == 1 else mine.clone()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    out["objects"] = [g["rank"] for g in gathered]
    future = dist.all_reduce(mine, async_op=True).get_future()
    out["future"] = future.wait()
    out["asynchronous"] = funcol.all_gather_tensor(torch.ones(2) * rank, 0, group)
    dist.barrier()
    return {k: _plain(v) for k, v in out.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [float(x) for x in value.flatten()]
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_every_collective_is_right(ranks: Ranks) -> None:
    zero, one = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    both = [10.0, 12.0, 14.0, 16.0]
    expected = [
        {
            "all_gather": zero + one,
            "all_gather_out": zero + one,
            "all_gather_coalesced": [zero + one, zero + one],
            "reduce_scatter": both[:2],
            "reduce_scatter_out": both[:2],
            "reduce_scatter_avg": [5.0, 6.0],
            "reduce_scatter_coalesced": [both[:2], [20.0, 24.0]],
            "all_reduce": one,
            "all_reduce_": both,
            "all_reduce_coalesced": [both, both],
            "all_to_all": [0.0, 10.0],
            "broadcast": one,
            "eager_all_gather": [zero + one, [zero, one]],
            "eager_reduce_scatter": [both[:2], both[:2]],
            "eager_all_reduce": both,
            "received": one,
            "functional_received": zero,
            "objects": [0, 1],
            "future": [both],
            "asynchronous": [0.0, 0.0, 1.0, 1.0],
        }
    ]
    expected.append(
        {
            **expected[0],
            "reduce_scatter": both[2:],
            "reduce_scatter_out": both[2:],
            "reduce_scatter_avg": [7.0, 8.0],
            "reduce_scatter_coalesced": [both[2:], [28.0, 32.0]],
            "all_to_all": [1.0, 2.0, 3.0, 11.0, 12.0, 13.0],
            "eager_reduce_scatter": [both[2:], both[2:]],
            "received": zero,
        }
    )
    for answer, right in zip(ranks.run(_results), expected, strict=True):
        for key, value in right.items():
            assert answer[key] == value, key
        assert answer.keys() == right.keys()


def _compute(seconds: float) -> None:
    """Busy for so much CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _overlapped(rank: int, world_size: int) -> tuple[StepTime, int, int]:
    """Two gathers of 30 ms each, issued together; 20 ms of compute; then both are waited for."""
    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    mine = torch.ones(250_000)
    emulated_link.set_rate(latency_ns=10 * MS, bytes_per_s=50e6)
    with emulated_link.step_clock() as clock:
        first = ops.all_gather_into_tensor(mine, 2, name)
        second = ops.all_gather_into_tensor(mine, 2, name)
        _compute(0.020)
        ops.wait_tensor(first)
        ops.wait_tensor(second)
    return clock.time, len(emulated_link.log()), int(first.sum() + second.sum())


def test_times_are_the_models(ranks: Ranks) -> None:
    for step, logged, total in ranks.run(_overlapped):
        assert total == 1_000_000 and logged == 2
        assert [r.duration_ns for r in step.records] == [30 * MS, 30 * MS]
        assert step.counts() == {"all_gather": 2}
        assert step.link_busy_ns == {"intra": 60 * MS}
        first, second = step.records
        for times in ((first.wall, second.wall), (first.virtual, second.virtual)):
            a, b = times
            assert a.end_ns - a.begin_ns == b.end_ns - b.begin_ns == 30 * MS
            assert b.begin_ns == a.end_ns
            assert a.issue_ns <= a.begin_ns and b.issue_ns <= b.begin_ns
            assert a.wait_begin_ns <= a.wait_end_ns <= b.wait_begin_ns <= b.wait_end_ns
            assert b.wait_end_ns >= b.end_ns
        # Virtual time does not know other processes: 60 ms of link, of which compute hides about 20.
        last = second.virtual
        assert step.virtual_ns == step.cpu_ns + step.exposed_ns
        assert last.wait_end_ns == last.end_ns
        assert last.end_ns == first.virtual.begin_ns + 60 * MS
        assert step.exposed_ns == first.virtual.exposed_ns + second.virtual.exposed_ns
        assert 20 * MS <= step.cpu_ns < 60 * MS
        assert step.virtual_ns >= 60 * MS
        assert step.wall_ns >= 60 * MS
    # The link begins when the later rank has issued, on both ranks at the same time.
    begins = {answer[0].records[0].wall.begin_ns for answer in ranks.run(_overlapped)}
    assert len(begins) == 1


def _late_rank(rank: int, world_size: int) -> Times:
    """Rank 1 computes before it issues; rank 0 issues at once."""
    emulated_link.set_rate(latency_ns=5 * MS)
    ops = torch.ops._c10d_functional
    with emulated_link.step_clock() as clock:
        _compute(0.030 * rank)
        ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", dist.group.WORLD.group_name))
    return clock.time.records[0].virtual


def test_a_late_rank_delays_the_link(ranks: Ranks) -> None:
    early, late = ranks.run(_late_rank)
    assert late.issue_ns >= 30 * MS > early.issue_ns
    assert early.begin_ns == late.begin_ns == late.issue_ns
    assert early.exposed_ns >= 30 * MS
    assert 0 < late.exposed_ns <= 5 * MS


def _compiled(rank: int, world_size: int) -> tuple[float, float, dict[str, int], StepTime]:
    """A gather, a matmul and a reduction under torch.compile against eager."""
    emulated_link.set_rate(latency_ns=1 * MS, bytes_per_s=1e9)
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor(x, 0, group)
        return funcol.reduce_scatter_tensor(gathered @ gathered.t(), "sum", 0, group).sum()

    torch.manual_seed(rank)
    x = torch.randn(8, 16)
    expected = step(x)
    compiled = torch.compile(step)
    compiled(x)
    with emulated_link.step_clock() as clock:
        got = compiled(x)
    return float(got), float(expected), clock.time.counts(), clock.time


@pytest.mark.slow
def test_under_torch_compile(ranks: Ranks) -> None:
    for got, expected, counts, measured in ranks.run(_compiled):
        assert got == pytest.approx(expected, rel=1e-5)
        assert counts == {"all_gather": 1, "reduce_scatter": 1}
        # Two transfers. What is exposed includes what the other rank computes for longer: not ours to bound.
        assert 2 * MS < sum(measured.link_busy_ns.values()) <= 2 * MS + 2048 * 2
        assert 0 < measured.exposed_ns <= measured.virtual_ns


def _two_links(rank: int, world_size: int) -> list[tuple[str, int]]:
    """With one rank per host the default group uses the slow link, a group of one rank none."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    emulated_link.set_rate(latency_ns=3 * MS, link="inter")
    emulated_link.set_rate(latency_ns=1 * MS, link="intra")
    with emulated_link.step_clock() as clock:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), group=alone)
    with pytest.raises(ValueError, match="link is 'moon'; expected one of intra, inter"):
        emulated_link.set_rate(link="moon")
    return [(r.link, r.duration_ns) for r in clock.time.records]


@pytest.mark.slow
def test_links_by_host() -> None:
    environment = {"EMULATED_LINK_RANKS_PER_HOST": "1"}
    with Ranks(2, backend="emulated", setup=_register, env=environment) as pool:
        assert pool.run(_two_links) == [[("inter", 3 * MS), ("intra", 0)]] * 2


def _refused(rank: int, world_size: int) -> str:
    torch.set_num_threads(2)
    try:
        emulated_link.step_clock()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.set_num_threads(1)
    return ""


def test_step_clock_needs_one_thread(ranks: Ranks) -> None:
    assert all("torch uses 2" in message for message in ranks.run(_refused))
