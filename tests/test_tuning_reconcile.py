"""Clocks put together, transfers told from late peers, costs corrected: on made-up times whose truth is known."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.cost.profile import CostProfile
from inductor_passes.report import Cause
from inductor_passes.tuning import plan as plans
from inductor_passes.tuning import record as records
from inductor_passes.tuning.align import Member, offsets
from inductor_passes.tuning.compare import timing
from inductor_passes.tuning.correct import as_calibrated, corrected
from inductor_passes.tuning.plan import Call, Planned
from inductor_passes.tuning.reconcile import AT_MOST, MEASURED, SHARED, UNKNOWN, account, of_own_calls
from tests.support.tuned import MS, US, World, measured, plan

clocks = st.integers(-(10**15), 10**15)


@given(st.lists(clocks, min_size=2, max_size=5), st.integers(0, 10**6), st.integers(0, 50_000))
def test_clocks_are_put_together_by_the_ends_of_collectives(ahead: list[int], late: int, wake: int) -> None:
    """All ranks stood still: each difference is as exact as the ranks were woken."""
    issued = [late * rank for rank in range(len(ahead))]
    end = max(issued) + 3 * MS
    seen = [
        {r: Member(issued[r] + a, end + a + (wake if (r + step) % 2 else 0), True) for r, a in enumerate(ahead)}
        for step in range(3)
    ]
    found = offsets(seen)
    assert set(found) == set(range(len(ahead)))
    for rank, a in enumerate(ahead):
        assert abs(found[rank] - (a - ahead[0])) <= 2 * wake


@given(clocks, st.integers(1, 10**6), st.integers(1, 10**6))
def test_where_nobody_stands_still_the_clocks_lie_within_their_bounds(ahead: int, transfer: int, later: int) -> None:
    """No wait was held up: the difference is known to within the time from the last start to the first wait's end."""
    members = {0: Member(0, transfer + later, False), 1: Member(ahead, ahead + transfer + later, False)}
    assert abs(offsets([members])[1] - ahead) <= transfer + later


def test_clocks_go_along_groups_and_stop_where_nothing_is_shared() -> None:
    def group(*ranks: int) -> dict[int, Member]:
        return {r: Member(100 * r, 1000 + 100 * r, True) for r in ranks}

    assert offsets([group(0, 2), group(1, 3), group(0, 1)]) == {0: 0, 1: 100, 2: 200, 3: 300}
    assert offsets([group(0, 2), group(1, 3)]) == {0: 0, 2: 200}
    assert offsets([]) == {}


@settings(max_examples=60)
@given(
    st.lists(st.integers(300 * US, 20 * MS), min_size=1, max_size=6),
    st.lists(clocks, min_size=2, max_size=4),
    st.integers(0, 5 * MS),
    st.integers(1, 3),
)
def test_transfers_are_told_from_late_peers(
    transfers: list[int], ahead: list[int], late: int, early: int
) -> None:
    """Whatever the clocks say and whoever comes late: a time that counts as measured is the truth."""
    planned = plan([4 * MS] * len(transfers), [100 * US] * len(transfers), ahead=early, ranks=len(ahead))
    late_ns = [late if rank == 1 else 0 for rank in range(len(ahead))]
    world = World(transfers, clocks_ns=ahead, late_ns=late_ns)
    found = account(planned, world.records(planned))
    for truth, one in zip(transfers, found.transfers):
        if one.known == MEASURED:
            assert one.transfer_ns == pytest.approx(truth, abs=2)
        elif one.known == AT_MOST:
            assert one.transfer_ns >= truth - 2
        assert one.for_peer_ns <= one.stall_ns + world.ask_ns
    first = found.transfers[0]
    assert first.known in (MEASURED, SHARED), "nothing is done before the first wait"
    assert first.skew_ns == pytest.approx(late, abs=2)
    assert late == 0 or first.late == 1


def test_a_late_peer_is_the_reason_of_a_stall() -> None:
    planned = plan([4 * MS] * 3, [MS] * 3)
    found = account(planned, World([4 * MS] * 3, late_ns=(0, 30 * MS)).records(planned))
    shown = timing(planned, found)
    first = shown.collectives[0]
    assert first.cause is Cause.SKEW and first.late == 1 and first.skew_ns == 30 * MS
    assert first.measured_ns == 4 * MS, "what the rank waited for the other is no transfer"
    alone = account(planned, World([4 * MS] * 3, late_ns=(0, 30 * MS)).records(planned)[:1])
    assert alone.transfers[0].transfer_ns == 34 * MS, "one rank's times cannot tell"
    assert timing(planned, alone).collectives[0].late == -1


def test_queued_transfers_share_what_the_last_stall_shows() -> None:
    """Two gathers are in flight before the first wait of either: the second's wait shows when both were over."""
    planned = plan([2 * MS, 2 * MS], [9 * MS, MS], ahead=2)
    waits_late = World([6 * MS, 6 * MS]).records(planned)
    found = account(planned, waits_late).transfers
    assert [one.known for one in found] == [MEASURED, AT_MOST] and found[0].transfer_ns == 6 * MS
    assert found[1].transfer_ns >= 6 * MS
    planned = plan([2 * MS, 2 * MS], [10 * US, MS], ahead=2)
    swapped = dataclasses.replace(planned, collectives=planned.collectives)
    found = account(swapped, World([6 * MS, 7 * MS]).records(swapped)).transfers
    assert [one.transfer_ns for one in found] == [6 * MS, 7 * MS]


@pytest.mark.parametrize("ask_ns", [20 * US, 200 * US])
def test_what_asking_costs_shows_no_end(ask_ns: int) -> None:
    """Every transfer was over long before anybody asked; on a busy host asking takes its time."""
    planned = plan([MS] * 6, [10 * MS] * 6, ahead=3)
    found = account(planned, World([MS] * 6, ask_ns=ask_ns).records(planned)).transfers
    hidden = [one for k, one in enumerate(found) if planned.timeline.exposed_ns[planned.collectives[k].task] == 0]
    assert len(hidden) == 5 and all(one.known == AT_MOST for one in hidden), found
    assert all(one.stall_ns == 0 and one.issue_ns >= ask_ns for one in hidden), "the host's time"
    assert found[0].known in (MEASURED, SHARED) and found[0].transfer_ns == pytest.approx(MS, rel=0.25)


def test_a_transfer_that_clocks_cannot_tell_from_nothing_is_not_known() -> None:
    """Found by an outsider: "at most 0 ns" of a transfer for which ranks had stood still."""
    planned = plan([MS] * 4, [10 * MS] * 4, ahead=2)
    record = World([MS] * 4, ask_ns=20 * US).records(planned)[0]
    at_once = tuple(
        tuple(((starts[k][1], starts[k][1]),) if k == 2 else waits for k, waits in enumerate(step))
        for step, starts in zip(record.waits, record.starts)
    )
    found = account(planned, [dataclasses.replace(record, waits=at_once)]).transfers
    assert (found[2].known, found[2].transfer_ns) == (UNKNOWN, 0)
    assert found[1].known == found[3].known == AT_MOST


def test_an_end_is_not_seen_long_after_it_was_predicted() -> None:
    """One of many waits takes longer than the others: it does not say that the transfer took all the time before."""
    planned = plan([MS] * 6, [10 * MS] * 6, ahead=3)
    for record in (records := World([MS] * 6, ask_ns=20 * US).records(planned)):
        late = 3
        longer = tuple(
            tuple(
                tuple((begin, end + 2 * MS * (k == late)) for begin, end in waits) for k, waits in enumerate(step)
            )
            for step in record.waits
        )
        records[records.index(record)] = dataclasses.replace(record, waits=longer)
    found = account(planned, records).transfers
    assert found[3].known == AT_MOST, found[3]


def test_kernels_are_charged_with_what_prepares_them_and_compared_by_class() -> None:
    planned = plan([MS] * 4, [2 * MS] * 4)
    found = account(planned, World([MS] * 4, kernel_factor=3.0).records(planned))
    (kernels,) = timing(planned, found).kernels
    assert (kernels.kernels, kernels.calls) == ("mm", 4)
    assert kernels.predicted_ns == 8 * MS and kernels.measured_ns == 24 * MS
    assert kernels.cause is Cause.UNKNOWN
    known = dataclasses.replace(planned, about=dataclasses.replace(planned.about, measured_costs=True))
    assert timing(known, found).kernels[0].cause is Cause.COST


def test_small_kernels_that_take_longer_are_bound_by_launches_and_move_the_fixed_cost() -> None:
    planned = plan([MS] * 4, [8 * US] * 4)
    found = account(planned, World([MS] * 4, kernel_factor=20.0).records(planned))
    assert timing(planned, found).kernels[0].cause is Cause.LAUNCH
    base = CostProfile.default("cpu", ranks_per_host=2)
    after = corrected(base, [(planned, found)])
    assert after.kernel_ns >= 100 * US
    assert after.compute_ns(1e9, 0, "float32", 0) == base.compute_ns(1e9, 0, "float32", 0), "not the matmuls"


@pytest.mark.parametrize(
    ("calls_ns", "slower_ns", "issues_ns", "kernels_ns"),
    [
        # Of 4 x 6 us that calls lack, kernels show all; what they took beside stays theirs.
        (4 * US, 20 * US, 10 * US, 4 * MS + 4 * 20 * US - 4 * 6 * US),
        # Kernels show a third: messages are cheaper than was calibrated.
        (4 * US, 2 * US, 6 * US, 4 * MS),
        # As long as predicted, or shorter: nobody else paid for it.
        (4 * US, 0, 4 * US, 4 * MS),
        (4 * US, -50 * US, 4 * US, 4 * MS - 4 * 50 * US),
        # Dearer than calibrated is dearer.
        (15 * US, 20 * US, 15 * US, 4 * MS + 4 * 20 * US),
    ],
)
def test_what_sending_costs_beside_its_calls_is_not_the_kernels(
    calls_ns: int, slower_ns: int, issues_ns: int, kernels_ns: int
) -> None:
    """Found: plans after their first steps merged less, and took up to a quarter longer with four ranks."""
    base = CostProfile.default("cpu", ranks_per_host=2)
    planned = plan([MS] * 4, [MS] * 4)
    measured = account(planned, World([MS] * 4).records(planned))
    found = dataclasses.replace(
        measured,
        transfers=tuple(dataclasses.replace(one, issue_ns=calls_ns) for one in measured.transfers),
        kernels=tuple(dataclasses.replace(one, measured_ns=MS + slower_ns) for one in measured.kernels),
    )
    after = as_calibrated(base, planned, found)
    assert [one.issue_ns for one in after.transfers] == [issues_ns] * 4
    assert sum(one.measured_ns for one in after.kernels) == kernels_ns
    before, now = (
        sum(t.issue_ns for t in one.transfers) + sum(k.measured_ns for k in one.kernels) for one in (found, after)
    )
    assert before == now, "together as measured"
    assert [t.transfer_ns for t in after.transfers] == [t.transfer_ns for t in found.transfers]


def test_contention_is_seen_where_kernels_beside_transfers_are_slower_than_alone() -> None:
    planned = plan([5 * MS] * 4, [4 * MS] * 4)
    rows = World([5 * MS] * 4).records(planned)
    slow = []
    for one in rows:
        lengths = list(one.durations_ns)
        for call in range(len(planned.calls)):
            # The last kernel runs when all transfers are over.
            if call not in planned.communicating and call != len(planned.calls) - 1:
                lengths[call] *= 2
        slow.append(dataclasses.replace(one, durations_ns=tuple(lengths)))
    (kernels,) = timing(planned, account(planned, slow)).kernels
    assert kernels.cause is Cause.CONTENTION and kernels.beside == pytest.approx(2.0)
    (before,) = timing(planned, account(planned, rows)).kernels
    assert before.cause is Cause.CLOSE and before.beside == pytest.approx(1.0)


def _contended(base: CostProfile) -> plans.Planned:
    """Gathers and kernels as ``base`` prices them. The kernels behind the last wait run alone."""
    sizes = [(k + 1) << 20 for k in range(6)]
    transfers = [base.communication_ns("all_gather", size // 2, size, (0, 1)) for size in sizes]
    kernels = [base.compute_ns(flops, 0, "float32", 1) for flops in (2e8, 9e8, 4e8, 6e8, 8e8, 7e8)]
    fixed = base.kernel_ns if base.kernel_ns >= 0 else float(base.spec.kernel_ns.value)
    percent = base.slowdown_percent("all_gather", (0, 1))
    return plan(transfers, [*kernels, *kernels], ahead=2, slowdown_percent=percent, kernel_ns=fixed)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.15, 3.0), st.floats(0.5, 1.2))
def test_what_transfers_slow_down_is_told_from_the_speed_of_kernels(slowdown: float, slower: float) -> None:
    base = CostProfile.default("cpu", ranks_per_host=2)
    planned = _contended(base)
    truth = [t.duration_ns for t in planned.problem.tasks if t.size_bytes]
    world = World(truth, kernel_factor=slower, slowdown=slowdown)
    found = account(planned, world.records(planned))
    after = corrected(base, [(planned, found)])
    for flops in (2e8, 8e8):
        assert after.compute_ns(flops, 0, "float32", 1) == pytest.approx(
            slower * base.compute_ns(flops, 0, "float32", 1), rel=0.05
        )
    assert after.slowdown_percent("all_gather", (0, 1)) == pytest.approx(100 * slowdown, rel=0.1, abs=5)
    assert after.slowdown_percent("reduce_scatter", (0, 1)) == after.slowdown_percent("all_gather", (0, 1)), "untold"
    # The next plan of the same program says what was measured.
    again = _contended(after)
    assert again.timeline.makespan_ns == pytest.approx(found.step_ns, rel=0.05)


def test_without_contention_none_is_found_and_where_nothing_ran_alone_nothing_is_said() -> None:
    base = CostProfile.default("cpu", ranks_per_host=2)
    planned = _contended(base)
    truth = [t.duration_ns for t in planned.problem.tasks if t.size_bytes]
    after = corrected(base, [(planned, account(planned, World(truth, kernel_factor=2.0).records(planned)))])
    assert after.slowdown_percent("all_gather", (0, 1)) == 0
    # All kernels but the last have a transfer beside them: they are slow, and why nobody can tell.
    hidden = plan([20 * MS] * 5, [4 * MS] * 5, ahead=2)
    found = account(hidden, World([20 * MS] * 5, slowdown=1.0).records(hidden))
    assert [one.beside for one in found.kernels] == [True] * 4 + [False]
    after = corrected(base, [(hidden, found)])
    assert after.slowdown_percent("all_gather", (0, 1)) == 0
    # What an earlier run told stays, and is not taken for the kernels' speed.
    told = dataclasses.replace(
        after,
        groups=tuple(
            dataclasses.replace(g, costs=tuple(dataclasses.replace(c, slowdown=1.0) for c in g.costs))
            for g in after.groups
        ),
    )
    again, without = corrected(told, [(hidden, found)]), corrected(after, [(hidden, found)])
    assert again.slowdown_percent("all_gather", (0, 1)) == 100
    assert again.compute_ns(1e9, 0, "float32", 1) < 0.7 * without.compute_ns(1e9, 0, "float32", 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(50_000, 3 * MS), st.floats(0.5, 20), st.floats(0.3, 5))
def test_the_corrected_profile_predicts_what_was_measured(latency: int, ns_per_byte: float, slower: float) -> None:
    base = CostProfile.default("cpu", ranks_per_host=2)
    sizes = [(k + 1) << 20 for k in range(4)]
    predicted = [base.communication_ns("all_gather", size // 2, size, (0, 1)) for size in sizes]
    flops = [2e8, 4e8, 6e8, 8e8]
    kernels = [base.compute_ns(one, 0, "float32", 1) for one in flops]
    fixed = base.kernel_ns if base.kernel_ns >= 0 else float(base.spec.kernel_ns.value)
    planned = plan(predicted, kernels)
    planned = dataclasses.replace(planned, about=dataclasses.replace(planned.about, kernel_ns=fixed))
    truth = [round(latency + ns_per_byte * size / 2) for size in sizes]
    found = account(planned, World(truth, kernel_factor=slower).records(planned))
    after = corrected(base, [(planned, found)])
    exact = [one.known == MEASURED for one in found.transfers]
    if all(exact):
        for size, ns in zip(sizes, truth):
            assert after.communication_ns("all_gather", size // 2, size, (0, 1)) == pytest.approx(ns, rel=0.02)
    for one, ns in zip(flops, kernels):
        assert after.compute_ns(one, 0, "float32", 1) == pytest.approx(slower * ns, rel=0.05)
    assert after.name.startswith(f"tuned from {base.name}: 5 steps on 2 ranks from {base.hash()}, plans ")
    again = corrected(after, [(planned, found)])
    assert again.name.count("tuned") == 1


def test_kinds_that_were_not_measured_share_the_fate_of_their_link() -> None:
    """Found: reduce-scatters of the next run became all-to-alls, whose cost was still that of a faster link."""
    base = CostProfile.default("cpu", ranks_per_host=2)
    sizes = [(k + 1) << 20 for k in range(3)]
    planned = plan([base.communication_ns("all_gather", s // 2, s, (0, 1)) for s in sizes], [MS] * 3)
    truth = [3 * base.communication_ns("all_gather", s // 2, s, (0, 1)) for s in sizes]
    after = corrected(base, [(planned, account(planned, World(truth).records(planned)))])
    for kind, sent, got in (("all_to_all", 1 << 20, 1 << 20), ("reduce_scatter", 1 << 20, 1 << 19)):
        before = base.communication_ns(kind, sent, got, (0, 1))
        # Bandwidth made up most of the times and takes most of the difference.
        assert after.communication_ns(kind, sent, got, (0, 1)) == pytest.approx(3 * before, rel=0.1)
        sums = [sum(p.communication_ns(kind, k * sent, k * got, (0, 1)) for k in (1, 2, 3)) for p in (base, after)]
        assert sums[1] == pytest.approx(3 * sums[0], rel=0.02)
        assert after.issue_ns(kind, sent, got, (0, 1)) == pytest.approx(base.issue_ns(kind, sent, got, (0, 1)), abs=2)


def test_plans_and_records_travel_as_they_are() -> None:
    planned = plan([MS, 2 * MS], [MS, MS])
    assert plans.unpacked(plans.packed(planned)) == planned
    (one, _) = World([MS, MS]).records(planned)
    assert records.unpacked(records.packed(one)) == one
    with pytest.raises(ValueError):
        records.unpacked(b"nonsense")


def test_ranks_that_timed_something_else_have_no_account() -> None:
    planned = plan([MS], [MS])
    mine, other = World([MS]).records(planned)
    for wrong, said in (
        (dataclasses.replace(other, digest="x"), "rank 1 timed another plan: x and not"),
        (dataclasses.replace(other, steps_ns=(1,)), "rank 1 timed another number of steps than rank 0"),
        (dataclasses.replace(other, calls=("", "")), "rank 1 did not time the calls"),
    ):
        with pytest.raises(ValueError, match=said):
            account(planned, [mine, wrong])


def test_kernels_that_one_rank_has_alone_are_left_out() -> None:
    planned = plan([MS] * 2, [MS] * 2)
    mine, other = World([MS] * 2).records(planned)
    # Rank 1 pads its shard before the first gather, so all its calls come one later.
    padding = {"offsets_ns": 0, "durations_ns": 7 * MS, "gaps_ns": 0}
    more = {name: (first, *getattr(other, name)) for name, first in padding.items()}
    padded = dataclasses.replace(other, calls=("pad", *other.calls), **more)
    found = account(planned, [mine, padded])
    assert found == account(planned, [mine, other])
    # As rank 1 has it, and as it is told by rank 0.
    calls = (Call("pad", ()), *planned.calls)
    theirs = Planned.of(planned.about, calls, planned.collectives, planned.problem, planned.order)
    told = of_own_calls(found, planned.kinds, theirs)
    assert [one.call for one in told.kernels] == [one.call + 1 for one in found.kernels]
    assert told.kernels and told.transfers == found.transfers
    assert timing(theirs, told).kernels == timing(planned, found).kernels
    assert of_own_calls(found, planned.kinds, planned) == found


def test_calls_are_matched_between_what_communicates() -> None:
    assert records.matched(["pad", "", "mm", "", "mm"], ["", "mm", "", "mm"]) == {1: 0, 2: 1, 3: 2, 4: 3}
    assert records.matched(["mm", "", "mm", "gelu"], ["mm", "mm", "", "gelu", "mm"]) == {1: 2, 2: 4, 3: 3}
    with pytest.raises(ValueError, match="equally often"):
        records.matched(["", "mm"], ["mm"])


def test_calls_of_the_code_are_found_among_those_that_were_made() -> None:
    assert records.places_of(["seed", "a", "x", "b"], ["a", "b"]) == [1, 3]
    assert records.places_of(["b", "a"], ["a", "b"]) is None


def test_a_kernel_takes_the_fused_nodes_before_it_that_no_call_has() -> None:
    outputs = [("start", ("s",)), ("fused", ("inner",)), ("fused", ("b",)), ("wait", ("w",)), ("fused", ("c",))]
    statements = [
        ("gather", "extern", ("s",)),
        ("cpp_fused_0", "kernel", ("arg", "b")),
        ("wait", "extern", ("w",)),
        ("cpp_fused_1", "kernel", ("b", "c")),
    ]
    assert [call.tasks for call in plans.carried_out(statements, outputs)] == [(0,), (1, 2), (3,), (4,)]


def test_a_wait_behind_that_of_a_later_collective_shows_nothing_of_the_first() -> None:
    """Found on a link of 5 MB/s: the second gather was waited for first, and the first then counted as ended there."""
    planned = plan([MS, 3 * MS], [MS, MS], ahead=2)
    calls = {planned.problem.tasks[c.tasks[0]].name: k for k, c in enumerate(planned.calls)}
    order = [*planned.order]
    order[2], order[4] = order[4], order[2]
    swapped = plans.Planned.of(
        planned.about, [plans.Call(planned.calls[calls[planned.problem.tasks[t].name]].name, (t,)) for t in order],
        planned.collectives, planned.problem, order,
    )  # fmt: skip
    world = World([2 * MS, 6 * MS], ask_ns=110 * US)
    first, second = account(swapped, world.records(swapped)).transfers
    assert (first.known, second.known) == (SHARED, SHARED)
    assert first.transfer_ns + second.transfer_ns == pytest.approx(8 * MS, abs=2) and first.stall_ns == 0


def served(issued: dict[int, int], ready: dict[int, int], took: dict[int, int]) -> dict[int, int]:
    """When each of a rank's transfers ends: of those that all members have issued its link serves the first issued."""
    ends: dict[int, int] = {}
    free = 0
    while len(ends) < len(issued):
        left = [k for k in issued if k not in ends]
        now = max(free, min(ready[k] for k in left))
        k = min((k for k in left if ready[k] <= now), key=lambda k: issued[k])
        free = ends[k] = now + took[k]
    return ends


@pytest.mark.parametrize("late_us", [0, 300, 2000, 20_000])
def test_what_waits_for_a_late_peer_lets_others_by(late_us: int) -> None:
    """Found with FSDP x TP on four ranks: gathers of weights counted as long as what the link served before them.

    Each rank issues a gather with one peer, then one with another; ranks 2 and 3 are late. On ranks 0 and 1 the link
    serves the second gather meanwhile, on ranks 2 and 3 the first one. Then all ranks stand still for two more.
    """
    took, peers = {0: MS, 1: 6 * MS, 2: MS, 3: MS}, (2, 1, 2, 1)
    planned = plan([2 * ns for ns in took.values()], [100 * US] * 4)
    names = [planned.problem.tasks[call.tasks[0]].name for call in planned.calls]
    said = ("s0", "s1", "w1", "mm1", "w0", "mm0", "s2", "w2", "mm2", "s3", "w3", "mm3")
    order = [planned.order[names.index(one)] for one in said]
    calls = [plans.Call(planned.calls[planned.order.index(t)].name, (t,)) for t in order]
    late = [late_us * US * (rank > 1) for rank in range(4)]
    ends = [dict.fromkeys(took, 0) for _ in range(4)]
    rows: list[list[tuple[int, int]]] = []
    # What a rank issues depends on what it waited for, and that on when others issue.
    for _ in range(20):
        rows, issued = [], list[dict[int, int]]()
        for rank in range(4):
            at, row, mine = late[rank], list[tuple[int, int]](), dict[int, int]()
            for t in order:
                task, begin = planned.problem.tasks[t], at
                if task.name.startswith("s"):
                    mine[t] = at = at + 10 * US
                else:
                    at = max(at + 5 * US, ends[rank][task.start]) if task.name.startswith("w") else at + 100 * US
                row.append((begin, at))
            rows.append(row)
            issued.append(mine)
        ready = [{k: max(issued[rank][k], issued[rank ^ peers[k]][k]) for k in took} for rank in range(4)]
        ends = [served(issued[rank], ready[rank], took) for rank in range(4)]
    found = []
    for rank in range(4):
        groups = [tuple(sorted((rank, rank ^ peer))) for peer in peers]
        collectives = [dataclasses.replace(c, ranks=g) for c, g in zip(planned.collectives, groups)]
        mine_too = plans.Planned.of(planned.about, calls, collectives, planned.problem, order)
        steps = [[(b + step * 100 * MS, e + step * 100 * MS) for b, e in rows[rank]] for step in range(5)]
        found.append(measured(mine_too, rank, [late[rank] + step * 100 * MS for step in range(5)], steps))
    transfers = account(mine_too, found).transfers
    for one, ns in zip(transfers, took.values()):
        assert one.known in (MEASURED, SHARED) and one.transfer_ns == pytest.approx(ns, rel=0.25), transfers
