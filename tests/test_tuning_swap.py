"""Ranks that change to another plan: all at one call or none, within bounded time, whatever happens to one of them."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from inductor_passes.agreement.board import Board, StoreError
from inductor_passes.agreement.session import Session
from inductor_passes.cost.profile import CostProfile
from inductor_passes.report import Swap, SwapOutcome
from inductor_passes.tuning import again, measuring, replanning, swap
from inductor_passes.tuning.again import New
from inductor_passes.tuning.callers import nobody_calls
from inductor_passes.tuning.clock import Clock
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.replanning import Replanning
from inductor_passes.tuning.swap import LATE, DeadStoreError, Decision, Place, Ready, Vote, agreed_call
from inductor_passes.tuning.tape import Tape
from inductor_passes.tuning.turnstile import Turnstile
from tests.support.tuned import MS, FailingBoard, plan

LIMIT_S = 60.0
#: That the made-up plan has timed.
STEPS = plan([MS], [MS]).about.steps


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies in its talk with the store leaves it without an answer."""
    monkeypatch.setattr(swap, "_STALLED_S", 1.0)


class Dies(BaseException):
    """A rank ends in the middle."""


def module() -> dict[str, Any]:
    """A generated module that says which plan ran."""
    made: dict[str, Any] = {}
    exec("def call(args):\n    args.clear()\n    return 'old'", made)
    return made


def new(args: list[Any]) -> str:
    args.clear()
    return "new"


@dataclass
class Rank:
    """One rank: a thread that calls the graph, and one that talks.

    Attributes:
        did: which plan ran at each call.
        ended: with which error it ended.
    """

    store: Any
    number: int
    ranks: int
    why: str = ""
    digest: str = "same"
    calls: int = 60
    pause_s: float = 0.01
    timeout_s: float = 5.0
    late_s: float = 0.0
    dies_at: int = 0
    sent: str = "7"
    conflict: str = ""
    talks: Callable[[Any], Board] = Board
    votes: Callable[[Any], Board] = Board
    ahead: Callable[[Turnstile], int] = lambda turnstile: turnstile.count + 20
    #: Whether a program waits, before the agreed call, until its rank has heard of it: a busy machine may keep it from
    #: that, which most tests are not about.
    paced: bool = True
    #: All ranks of a run, this one among them.
    beside: list[Rank] = field(default_factory=list)
    proposed: int = 0
    did: list[str] = field(default_factory=list)
    decided: list[Decision] = field(default_factory=list)
    ended: str = ""
    took_s: float = 0.0

    def __post_init__(self) -> None:
        self.module = module()
        self.turnstile = Turnstile(self.module, 0)
        self.session = Session(self.store, self.number, range(self.ranks))
        self.threads = [threading.Thread(target=one, daemon=True) for one in (self._calls, self._talks)]

    def _calls(self) -> None:
        try:
            for number in range(1, self.calls + 1):
                if number == self.dies_at:
                    raise Dies("killed")
                self.pace(number)
                began = time.monotonic()
                self.did.append(self.module["call"]([1]))
                self.took_s = max(self.took_s, time.monotonic() - began)
                time.sleep(self.pause_s)
        except BaseException as error:
            self.ended = type(error).__name__

    def waits(self, call: int) -> bool:
        """Whether the program of a paced rank does not make this call yet."""
        return self.turnstile._at != call and any(one.proposed == call for one in self.beside)

    def pace(self, call: int) -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while self.paced and self.waits(call) and self.talking() and time.monotonic() < deadline:
            time.sleep(0.001)

    def talking(self) -> bool:
        """Whether something may still change."""
        return self.threads[1].is_alive()

    def propose(self, own: Callable[[], int]) -> int:
        """A call for all ranks; that of a paced one is before the rank that is furthest."""
        further = max(one.turnstile.count for one in self.beside) - self.turnstile.count if self.paced else 0
        self.proposed = own() + max(further, 0)
        return self.proposed

    def _talks(self) -> None:
        try:
            time.sleep(self.late_s)
            assert self.session.open(time.monotonic() + self.timeout_s)
            place = Place(self.session, self.talks(self.store), "a graph")
            mine = Ready(self.why, self.digest)
            call, why = agreed_call(
                place, mine, lambda: self.propose(lambda: self.ahead(self.turnstile)), self.timeout_s
            )
            if not call:
                self.decided.append(Decision(False, why))
                return
            apart = Place(self.session, self.votes(self.store), "a graph")
            vote = Vote(apart, self.timeout_s, lambda: self.conflict or self.turnstile.broken, lambda: self.sent)
            self.turnstile.arm(call, vote, new, self.decided.append)
        except BaseException as error:
            self.ended = self.ended or type(error).__name__


def run(ranks: int, *, store: Any = None, **each: dict[int, Any]) -> list[Rank]:
    """Ranks to their end; ``each`` has fields of single ranks."""
    store = store or dist.HashStore()
    made = [Rank(store, n, ranks, **{k: v[n] for k, v in each.items() if n in v}) for n in range(ranks)]
    went_through(made)
    return made


def went_through(made: Sequence[Rank]) -> None:
    for one in made:
        one.beside = list(made)
    threads = [thread for one in made for thread in one.threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    assert alike(list(made)), [one.did for one in made]


def alike(ranks: list[Rank]) -> bool:
    """Whether all ranks ran the same plan at every call, as far as they came."""
    return all(len(set(plans)) == 1 for plans in zip(*(one.did for one in ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_change_at_one_call(ranks: int) -> None:
    made = run(ranks, pause_s={0: 0.02, 1: 0.005})
    assert all(one.decided == [Decision(True)] for one in made)
    assert alike(made)
    at = made[0].did.index("new")
    assert at >= 20 and made[0].did == ["old"] * at + ["new"] * (60 - at)


@pytest.mark.parametrize(
    ("each", "why"),
    [
        ({"why": {1: "its code came out of a cache"}}, "rank 1: its code came out of a cache"),
        ({"why": {0: "it did not compile"}}, "rank 0: it did not compile"),
        ({"digest": {2: "other"}}, "rank 2 planned something else than rank 0"),
        ({"sent": {1: "8"}}, "the ranks had not sent equally much at that call"),
        ({"conflict": {2: "another graph sends the same messages"}}, "rank 2: another graph sends the same messages"),
    ],
)
def test_what_one_rank_cannot_none_does(each: dict[str, Any], why: str) -> None:
    made = run(3, **each)
    assert {one.decided[0].why for one in made} == {why}
    assert all(set(one.did) == {"old"} and len(one.did) == 60 for one in made)
    assert max(one.took_s for one in made) < 4.0, "nobody waits where the answer is there"


def test_a_rank_that_had_the_call_behind_it_is_named_and_a_later_one_may_be_tried() -> None:
    ahead = {0: lambda turnstile: turnstile.count + 30}
    made = run(
        2, ahead=ahead, pause_s={1: 0.0}, calls={0: 200, 1: 3000}, late_s={1: 0.1}, paced=dict.fromkeys(range(2), False)
    )
    assert {one.decided[0].why for one in made} == {f"rank 1: {LATE}"}
    assert all(one.decided[0].late and set(one.did) == {"old"} for one in made)
    assert not Decision(True).late and not Decision(False, "rank 1 is ill").late
    assert Decision(False, f"rank 1 {swap.ABSENT} 5 s").late


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_is_killed_before_the_call_costs_one_wait(gone: int) -> None:
    waits = dict.fromkeys(range(3), 1.0)
    made = run(3, dies_at={gone: 22}, ahead={0: lambda turnstile: turnstile.count + 25}, timeout_s=waits)
    others = [one for one in made if one.number != gone]
    assert all(one.decided == others[0].decided and not one.decided[0].yes for one in others)
    assert f"rank {gone} did not come to that call within 1 s" == others[0].decided[0].why
    assert all(one.did == ["old"] * 60 and one.took_s < 10 for one in others)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_never_gets_ready_costs_nothing_but_the_change(gone: int) -> None:
    made = run(3, talks={gone: lambda store: FailingBoard(store, 0, Dies)}, timeout_s=dict.fromkeys(range(3), 0.5))
    others = [one for one in made if one.number != gone]
    why = "rank 0 named no call" if gone == 0 else "rank 1 did not get ready"
    assert {one.decided[0].why for one in others} == {why}
    assert all(one.did == ["old"] * 60 for one in made)


def test_a_store_that_is_lost_before_the_call_leaves_the_plan() -> None:
    made = run(2, votes={1: lambda store: FailingBoard(store, 0, StoreError)}, timeout_s={0: 1.0, 1: 1.0})
    assert [one.ended for one in made] == ["", ""] and all(set(one.did) == {"old"} for one in made)


def test_a_store_that_is_lost_in_the_vote_is_an_error() -> None:
    """This rank cannot know what the others do."""
    made = run(2, votes={1: lambda store: FailingBoard(store, 2, StoreError)}, timeout_s={0: 4.0, 1: 4.0})
    assert made[1].ended == DeadStoreError.__name__ and alike(made)
    with pytest.raises(DeadStoreError):
        made[1].module["call"]([1])


@pytest.mark.parametrize("seed", range(20))
def test_no_two_ranks_ever_run_different_plans(seed: int) -> None:
    """Ranks are slow, late, killed, or lose the store at random places."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    each: dict[str, dict[int, Any]] = {
        "timeout_s": dict.fromkeys(range(ranks), 0.6),
        "paced": dict.fromkeys(range(ranks), False),
    }
    for rank in range(ranks):
        each.setdefault("pause_s", {})[rank] = rng.uniform(0.001, 0.02)
        each.setdefault("late_s", {})[rank] = rng.choice((0.0, 0.0, 0.2, 0.7))
        if rng.random() < 0.3:
            each.setdefault("dies_at", {})[rank] = rng.randint(5, 50)
        if rng.random() < 0.3:
            error, at = rng.choice((Dies, StoreError)), rng.randint(0, 5)
            which = rng.choice(("talks", "votes"))
            each.setdefault(which, {})[rank] = lambda store, at=at, error=error: FailingBoard(store, at, error)
    made = run(ranks, **each)
    assert alike(made), [one.did for one in made]
    for one in made:
        assert one.took_s < 0.6 + 12.0, "a wait has an end"


def test_a_graph_that_two_threads_run_is_not_changed() -> None:
    inside, store = threading.Event(), dist.HashStore()
    one = Rank(store, 0, 1)
    stands = threading.Event()

    def slow(args: list[Any]) -> str:
        inside.set()
        stands.wait(LIMIT_S)
        return "slow"

    one.turnstile._other = slow
    thread = threading.Thread(target=lambda: one.module["call"]([1]), daemon=True)
    thread.start()
    assert inside.wait(LIMIT_S)
    one.turnstile._other = None
    assert one.module["call"]([1]) == "old"
    stands.set()
    thread.join(LIMIT_S)
    assert "two threads" in one.turnstile.broken


def test_at_the_end_the_function_is_its_own_again_or_hands_on() -> None:
    made = module()
    code = made["call"].__code__
    turnstile = Turnstile(made, 3)
    assert made["call"].__code__ is not code and made["call"]([1]) == "old" and turnstile.count == 4
    turnstile.end()
    assert made["call"].__code__ is code and made["call"]([1]) == "old" and turnstile.count == 4
    (one,) = run(1)
    one.turnstile.end()
    count = one.turnstile.count
    assert one.module["call"]([1]) == "new" and one.turnstile.count == count


def test_a_call_ahead_is_further_away_at_each_try_and_for_faster_calls() -> None:
    turnstile = Turnstile(module(), 0)
    turnstile.count, turnstile._began = 10, time.monotonic() - 10
    assert [turnstile.ahead(attempt) for attempt in range(3)] == [13, 22, 58]
    turnstile._began = time.monotonic() - 0.1
    assert turnstile.ahead(0) >= 100


def test_what_is_to_be_done_before_a_vote_is_done_that_many_calls_earlier_or_the_rank_is_late() -> None:
    store = dist.HashStore()
    session = Session(store, 0, range(1))
    assert session.open(time.monotonic() + 10)

    def armed(call: int, calls: int) -> list[int]:
        vote = Vote(Place(session, Board(store), f"{call} {calls}"), 1.0, lambda: "", lambda: "")
        turnstile.arm(call, vote, new, decided.append, (calls, lambda: began.append(turnstile.count)))
        return began

    began: list[int] = []
    decided: list[Decision] = []
    made = module()
    turnstile = Turnstile(made, 10)
    armed(14, 4)
    assert not decided[-1].yes and decided[-1].late, "its first of these calls is behind it"
    armed(15, 4)
    did = [made["call"]([1]) for _ in range(6)]
    assert began == [11] and did == ["old"] * 4 + ["new"] * 2 and decided[-1].yes


def test_a_graph_is_timed_beneath_what_counts_its_calls() -> None:
    """The first plan, right before the second one comes: all functions have their own code behind it."""
    made = module()
    exec("def kernel():\n    return 'done'\ndef call(args):\n    args.clear()\n    return kernel()", made)
    turnstile, tapes = Turnstile(made, 0), []
    own = turnstile.own().__code__
    Clock(made, ["kernel"], 2, "cpu", lambda tape, why: tapes.append((tape, why)), turnstile.own())
    assert [made["call"]([1]) for _ in range(4)] == ["done"] * 4
    ((tape, why),) = tapes
    assert why == "" and [one.names for one in tape.steps()] == [("kernel",)] * 2
    assert turnstile.own().__code__ is own and turnstile.count == 4
    turnstile.end()
    assert made["call"].__code__ is own and made["call"]([1]) == "done"


class Kept:
    """A graph that can be planned again at no cost."""

    def __init__(self, same: bool = False, unwritten: str = "") -> None:
        self.used: list[bool] = []
        self.same, self.unwritten = same, unwritten

    def compile(self, profile: CostProfile) -> New:
        assert profile.name
        planned = None if self.same else plan([MS], [MS])
        before = {"phase": "before"}
        return New(planned, {}, new, "same", {"phase": "forward"}, before, self.used.append, self.unwritten)

    def conflict(self) -> str:
        return ""

    def place(self) -> str:
        return "7"


class Whole(Rank):
    """A rank that goes through all stages; ``measured`` is what comes of timing the second plan, after 5 more calls.

    Attributes:
        first: what comes of timing the first plan once more.
        same: whether the second plan is the first one.
        unwritten: why there is no file of the plans.
    """

    measured: int | str | Exception = 1
    first: int | str = 8
    same: bool = False
    unwritten: str = ""
    tries: tuple[int, ...] = (20, 20)
    replanning: Replanning | None = None

    def talking(self) -> bool:
        return self.replanning is None or not self.replanning.over

    def waits(self, call: int) -> bool:
        # The last calls are for what is still to be agreed on.
        return super().waits(call) or (call > self.calls - 80 and self.turnstile._vote is None)

    def timed_first(self, one: Replanning) -> None:
        self.began_at, one._first = self.turnstile.count, (Tape(1), "")

    def _talks(self) -> None:
        assert self.session.open(time.monotonic() + self.timeout_s)
        work: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self.swaps: list[Swap] = []
        self.kept = Kept(self.same, self.unwritten)
        ahead = iter(self.tries)
        self.turnstile.ahead = lambda attempt, more=0: self.propose(  # type: ignore[method-assign]
            lambda: self.turnstile.count + next(ahead) + more
        )
        put = [0]

        def later(order: int, run: Callable[[], None]) -> None:
            put[0] += 1
            work.put((order, put[0], run))

        def measure(planned: Planned, tape: Tape, name: str) -> int | str:
            time.sleep(0.05)
            if isinstance(self.measured, Exception):
                raise self.measured
            return self.measured

        one = Replanning(
            plan([MS], [MS]),
            "a graph",
            self.kept,
            self.turnstile,
            self.session,
            connect=lambda: Board(self.store),
            connect_apart=lambda: Board(self.store),
            later=later,
            publish=self.swaps.append,
            measure=measure,
            measure_first=lambda tape, name: self.first,
            write=lambda made: (f"a plan of {made['phase']}", ""),
            profile=lambda: CostProfile.default("cpu"),
            before_ns=10,
        )
        one._time = lambda made: one._timed(Tape(1), "")  # type: ignore[method-assign]
        one._time_first = lambda turnstile: self.timed_first(one)  # type: ignore[method-assign]
        self.replanning = one
        one.begin()
        while self.threads[0].is_alive() or not work.empty():
            try:
                work.get(timeout=0.1)[2]()
            except queue.Empty:
                continue


def whole(ranks: int, **each: dict[int, Any]) -> list[Whole]:
    store = dist.HashStore()
    made = [Whole(store, n, ranks, calls=160, timeout_s=1.0) for n in range(ranks)]
    for name, values in each.items():
        for n, value in values.items():
            setattr(made[n], name, value)
    went_through(made)
    return made


def test_a_faster_plan_stays_on_all_ranks() -> None:
    made = whole(3)
    assert {tuple(one.did) for one in made} == {tuple(made[0].did)} and made[0].did[-1] == "new"
    for one in made:
        assert [s.outcome for s in one.swaps][-1] is SwapOutcome.KEPT and one.kept.used == [True]
        last = one.swaps[-1]
        assert (last.before_ns, last.after_ns, last.plan) == (8, 1, "a plan of forward")
        assert last.call == one.did.index("new") + 1
        assert one.began_at == last.call - STEPS - 1, "the first plan is timed right before, behind a call to warm up"


def test_what_the_first_plan_takes_right_before_counts() -> None:
    """In the program's first steps it took 10: a plan that takes 9 is no faster than one that takes 8 now."""
    made = whole(2, measured=dict.fromkeys(range(2), 9))
    for one in made:
        last = one.swaps[-1]
        assert (last.outcome, last.before_ns, last.after_ns) == (SwapOutcome.RETURNED, 8, 9)


@pytest.mark.parametrize(("measured", "outcome"), [(9, SwapOutcome.KEPT), (10, SwapOutcome.RETURNED)])
def test_where_the_first_plan_has_no_later_times_its_first_steps_count(measured: int, outcome: SwapOutcome) -> None:
    made = whole(2, measured=dict.fromkeys(range(2), measured), first=dict.fromkeys(range(2), "no times"))
    for one in made:
        last = one.swaps[-1]
        assert (last.outcome, last.before_ns, last.after_ns) == (outcome, 10, measured)
        assert last.why == "the first plan was timed in the program's first steps only: no times"
        assert last.plan == ("a plan of forward" if outcome is SwapOutcome.KEPT else "a plan of before")


@pytest.mark.parametrize(("measured", "why"), [(10, ""), ("no times", "its steps are not known: no times")])
def test_a_plan_that_is_not_faster_goes_again_on_all_ranks(measured: Any, why: str) -> None:
    made = whole(2, measured=dict.fromkeys(range(2), measured))
    for one in made:
        last = one.swaps[-1]
        assert (last.outcome, last.why) == (SwapOutcome.RETURNED, why) and one.kept.used == [True, False]
        # What the next run should do is known where both were measured.
        assert last.plan == ("" if why else "a plan of before")
        before, between = last.call - 1, last.back - last.call
        assert one.did == ["old"] * before + ["new"] * between + ["old"] * (160 - before - between)


@pytest.mark.parametrize(("measured", "same"), [(1, False), (9, False), (1, True)])
def test_where_the_next_run_takes_no_plan_file_none_is_written(measured: int, same: bool) -> None:
    why = "a budget below the peak takes none"
    made = whole(2, measured={0: measured, 1: measured}, same={0: same, 1: same}, unwritten={0: why, 1: why})
    said = "the corrected profile gives the same plan; " * same + why
    assert {(one.swaps[-1].plan, one.swaps[-1].why) for one in made} == {("", said)}


def test_where_one_rank_has_the_same_plan_the_others_name_it() -> None:
    made = whole(2, same={0: False, 1: True})
    why = "the corrected profile gives the same plan"
    assert [one.swaps[-1].why for one in made] == [f"rank 1: {why}", why]


def test_a_call_that_a_rank_had_behind_it_is_tried_again_further_on() -> None:
    made = whole(2, tries={0: (0, 20)})
    for one in made:
        assert one.swaps[-1].outcome is SwapOutcome.KEPT and one.did[-1] == "new"
        assert [s.outcome for s in one.swaps].count(SwapOutcome.AGREED) == 2


def test_a_rank_that_comes_to_the_call_too_late_is_waited_for_again_further_on() -> None:
    """Once it has come. Here rank 1 stands still for three seconds before the first agreed call, and catches up."""
    store = dist.HashStore()
    made = [
        Whole(store, n, 2, calls=400, timeout_s=1.0, pause_s=pause_s, paced=False)
        for n, pause_s in enumerate((0.01, 0.002))
    ]
    made[0].tries = (20, 100)
    stands, real = [3.0], Vote.cast

    def comes_late(self: Vote) -> Decision:
        if self._place.session.rank == 1 and stands:
            time.sleep(stands.pop())
            for one in made:
                one.paced = True
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replanning, "_AT_CALL", 0.4)
        patch.setattr(Vote, "cast", comes_late)
        went_through(made)
    for one in made:
        assert one.swaps[-1].outcome is SwapOutcome.KEPT and one.did[-1] == "new"
        assert [s.outcome for s in one.swaps].count(SwapOutcome.AGREED) == 2
    assert made[0].took_s < 2.9, "it waits for its own limit, not for the late rank"


def test_a_rank_that_never_comes_again_is_waited_for_once() -> None:
    store = dist.HashStore()
    made = [Whole(store, n, 2, calls=120, timeout_s=1.0) for n in range(2)]
    made[1].dies_at = 30
    made[0].tries, made[1].tries = (60, 20), (60, 20)
    waits, real = [], Vote.cast

    def cast(self: Vote) -> Decision:
        waits.append(self._place.session.rank)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vote, "cast", cast)
        patch.setattr(replanning, "_PATIENCE", 0.3)
        went_through(made)
    assert waits == [0] and set(made[0].did) == {"old"} and len(made[0].did) == 120
    assert made[0].swaps[-1].why == (
        "rank 1 did not come to that call within 2.5 s; tried again: rank 1 did not get ready"
    )


def test_a_rank_that_knows_nothing_of_the_second_plan_keeps_all_from_going_back() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replanning, "_PATIENCE", 1.0)
        made = whole(3, measured={0: 20, 1: ValueError("lost"), 2: 20})
    assert {one.swaps[-1].outcome for one in made} == {SwapOutcome.UNMEASURED}
    assert all(one.did[-1] == "new" for one in made)
    assert "ValueError: lost" in made[1].swaps[-1].why
    assert {made[n].swaps[-1].why for n in (0, 2)} == {"rank 1 did not get ready"}


def entry() -> dict[str, Any]:
    """A generated module as Inductor writes it: the entry is a method of an object."""
    made: dict[str, Any] = {}
    source = (
        "class Runner:\n    def call(self, args):\n        args.clear()\n        return 'old'\n"
        "runner = Runner()\ncall = runner.call\n"
    )
    exec(source, made)
    return made


def test_nobody_calls_what_only_its_own_module_refers_to() -> None:
    made = entry()
    assert nobody_calls(made)
    compiled = made["call"]
    assert not nobody_calls(made), "torch has it"
    turnstile = Turnstile(made, 0)
    assert compiled([1]) == "old" and not turnstile.discarded()
    del compiled
    assert turnstile.discarded(), "a stand-in is no caller"
    assert not nobody_calls({}) and not nobody_calls(module()), "not known of other code"


def on_its_way(store: Any, rank: int, made: dict[str, Any]) -> tuple[Replanning, list[Swap], list[Callable[[], None]]]:
    """A graph of two ranks that is to be planned again; what it says and what it wants done."""
    said: list[Swap] = []
    work: list[Callable[[], None]] = []
    session = Session(store, rank, range(2))
    one = Replanning(
        plan([MS], [MS]),
        "a graph",
        Kept(),
        Turnstile(made, 3),
        session,
        connect=lambda: Board(store),
        connect_apart=lambda: Board(store),
        later=lambda order, run: work.append(run),
        publish=said.append,
        measure=lambda *_: 1,
        measure_first=lambda *_: 1,
        write=lambda made: ("", ""),
        profile=lambda: CostProfile.default("cpu"),
        before_ns=10,
    )
    return one, said, work


def opened(*ones: Replanning) -> None:
    threads = [threading.Thread(target=one.session.open, args=(time.monotonic() + 10,)) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def agreed(call: int = 19) -> tuple[Replanning, Replanning, list[Swap], list[Any]]:
    """Two ranks that are to change at a call; the first one's entry is held by the list."""
    store, made = dist.HashStore(), entry()
    one, said, work = on_its_way(store, 0, made)
    other, _, others = on_its_way(store, 1, entry())
    opened(one, other)
    assert one.turnstile is not None
    one.turnstile.ahead = lambda attempt, more=0: call  # type: ignore[method-assign]
    held = [made["call"]]
    del made
    for each in (one, other):
        each.begin()
    threads = [threading.Thread(target=lambda todo=todo: [todo.pop()() for _ in range(2)]) for todo in (work, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert said[-1].outcome is SwapOutcome.AGREED and said[-1].call == call
    return one, other, said, held


def test_a_program_that_ends_before_the_call_says_so_and_tells_the_others() -> None:
    one, other, said, held = agreed()
    assert held[0]([1]) == "old"
    sentence, tell = one.end_with_program()
    assert said[-1].outcome is SwapOutcome.NOTHING
    assert said[-1].why.startswith("the program ended before call 19: the graph had run 4 times, the last time 0.")
    assert sentence == f"nothing swapped: {said[-1].why}"
    tell()
    assert other.turnstile is not None and other.turnstile._vote is not None
    assert other.turnstile._vote.cast() == Decision(False, "rank 0: the program ended")
    before = len(said)
    assert one.end_with_program()[0] == "" and len(said) == before, "it is said once"


def test_a_graph_that_torch_threw_away_is_not_waited_for() -> None:
    one, _, said, held = agreed()
    one.look()
    assert said[-1].outcome is SwapOutcome.AGREED, "it may still be called"
    held.clear()
    one.look()
    assert (said[-1].outcome, said[-1].why) == (SwapOutcome.NOTHING, replanning.THROWN_AWAY)
    one, _, said, held = agreed()
    held.clear()
    assert one.end_with_program()[0] == f"nothing swapped: {replanning.THROWN_AWAY}"


def test_a_program_that_ends_while_it_compiles_says_that_and_not_that_the_store_failed() -> None:
    store, made = dist.HashStore(), entry()
    held = made["call"]
    one, said, work = on_its_way(store, 0, made)
    other, _, others = on_its_way(store, 1, entry())
    opened(one, other)
    board = Board(store)
    one.connect = lambda: board

    def ends(profile: CostProfile) -> New:
        assert one.lowering
        one.end_with_program()[1]()
        board.closed = again.ENDED
        raise RuntimeError("in the middle")

    one.kept.compile = ends  # type: ignore[method-assign,union-attr]
    one.begin()
    work.pop()()
    assert not one.lowering
    assert (said[-1].outcome, said[-1].why) == (
        SwapOutcome.NOTHING,
        "the program ended while it was planned and compiled again",
    )
    other.begin()
    others.pop()()
    began = time.monotonic()
    others.pop()()
    assert other.swap.why == "rank 0: the program ended" and time.monotonic() - began < 4.0
    work.pop()()
    assert said[-1].why.endswith("compiled again"), "the last word stays"
    assert held([1]) == "old"


def test_a_program_that_ends_with_the_same_plan_says_so() -> None:
    """Found by an outsider: the plan was written, and the sentence said that it was still being looked for."""
    store, made = dist.HashStore(), entry()
    held = made["call"]
    one, said, work = on_its_way(store, 0, made)
    opened(one, on_its_way(store, 1, entry())[0])
    one.write = lambda made: ("tuned.plan.json", "")
    one.kept = Kept(same=True)
    one.begin()
    work.pop(0)()
    one.end_with_program()
    assert said[-1].why == "the corrected profile gives the same plan; the program ended before the other ranks said so"
    assert (said[-1].outcome, said[-1].plan) == (SwapOutcome.NOTHING, "tuned.plan.json")
    assert held([1]) == "old"


def test_a_store_that_was_closed_at_the_end_is_not_said_to_fail() -> None:
    store = dist.HashStore()
    one, said, work = on_its_way(store, 0, entry())
    opened(one, on_its_way(store, 1, entry())[0])
    board = Board(store)
    board.closed = again.ENDED
    one.connect = lambda: board
    one.begin()
    work.pop()()
    assert said[-1].why == "the program ended"


@pytest.fixture
def graphs() -> Iterator[measuring._Graphs]:
    yield measuring._Graphs()
    again.ending.clear()


@pytest.mark.parametrize("stage", [replanning.COMPILE, replanning.TALK])
def test_the_end_waits_for_no_rank(graphs: measuring._Graphs, stage: int) -> None:
    """A rank that waits for another one's profile or answer has nothing that cannot be left."""
    board, began = Board(dist.HashStore()), time.monotonic()
    graphs._boards[replanning.TALK] = board, None
    graphs._later(stage, "a graph", lambda: board.until(lambda: board.has(["never"]) or None, began + LIMIT_S))
    time.sleep(0.1)
    graphs._close()
    assert time.monotonic() - began < 3.0 and not graphs._waiting.total()


def test_the_end_says_that_it_waits_for_a_compilation(
    graphs: measuring._Graphs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_SILENT_S", 0.2)
    one, _, _ = on_its_way(dist.HashStore(), 0, entry())
    graphs._replanned = [("forward_0 [0/0]", one)]
    left = threading.Event()

    def compiles() -> None:
        one.lowering = True
        left.wait(1.0)
        one.lowering = False

    graphs._later(replanning.COMPILE, "forward_0 [0/0]", compiles)
    time.sleep(0.1)
    graphs._close()
    said = capsys.readouterr().err
    assert "waits for the compilation of forward_0 [0/0] in the background, for at most 119.8 s more" in said
    assert not one.lowering and again.ending.is_set()
