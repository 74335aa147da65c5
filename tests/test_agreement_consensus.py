"""The consensus by itself: threads over one store in virtual time, thousands of interleavings, with every kind of
trouble that a store and a rank can make.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from inductor_passes.agreement.claim import opens_a_function
from inductor_passes.agreement.consensus import Ballot, Kind, Outcome, refusal, settle
from inductor_passes.agreement.literals import Literals
from inductor_passes.agreement.session import Session
from tests.support.virtual_time import Gone, UnreliableStore, VirtualClock, together

TIMEOUT_S = 10.0


def ballot(digest: str, literals: Literals | None = None, name: str = "0/0") -> Ballot:
    full = (digest * 32)[:32]
    return Ballot(full, literals or Literals(), (0, 1), name, lambda: ["first", f"graph {digest} | model.py:7"])


@dataclass
class Rank:
    """What one rank does: after a delay each it asks about graphs.

    Attributes:
        dies_at / loses_at: after so many operations of the store the rank dies, or its connection.
        loss_rate: how often an operation's answer is lost, although it may have been done.
    """

    asks: list[tuple[float, str]]
    dies_at: int = 1 << 30
    loses_at: int = 1 << 30
    loss_rate: float = 0.0
    operations: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def fails(self, applied: bool) -> None:
        self.operations += applied
        if self.operations >= self.dies_at:
            raise Gone
        if self.operations >= self.loses_at or self.rng.random() < self.loss_rate:
            raise RuntimeError("Connection reset by peer")


def play(ranks: list[Rank], store: Any, seed: int, slowness: float) -> list[list[tuple[str, Outcome]] | None]:
    """What each rank was told about each graph; None for one that died."""
    clock = VirtualClock(len(ranks))
    everybody = tuple(range(len(ranks)))

    def life(number: int) -> Callable[[], list[tuple[str, Outcome]]]:
        rank = ranks[number]
        rank.rng = random.Random(seed * 1000 + number)
        connection = UnreliableStore(store, clock, rank.rng, slowness, rank.fails)

        def run() -> list[tuple[str, Outcome]]:
            session = Session(connection, number, everybody, clock)
            told = []
            for delay, digest in rank.asks:
                clock.sleep(delay)
                told.append((digest, settle(session, ballot(digest), TIMEOUT_S)))
            return told

        return run

    return together(clock, [life(number) for number in everybody])


def check(ranks: list[Rank], told: list[list[tuple[str, Outcome]] | None]) -> dict[str, bool]:
    """One verdict per digest on all ranks that can tell, and "agreed" only where every rank asked; the verdicts."""
    verdicts: dict[str, bool] = {}
    for answers in told:
        for digest, outcome in answers or []:
            if outcome.kind is Kind.TROUBLE:
                # The only verdict that may be another one: this rank could not read it, and says so.
                assert not outcome.agreed and outcome.why
                continue
            assert verdicts.setdefault(digest, outcome.agreed) == outcome.agreed, (digest, told)
            assert bool(outcome.why) is not outcome.agreed
    for digest, agreed in verdicts.items():
        if agreed:
            assert all(digest in [asked for _, asked in rank.asks] for rank in ranks)
    return verdicts


def schedule(rng: random.Random) -> list[Rank]:
    """Ranks with random delays around the time-out that ask mostly for the same graphs, mostly in one order."""
    size = rng.randrange(2, 6)
    graphs = ["a", "b", "c"][: rng.randrange(1, 4)]
    late = rng.choice([0.5, 8.0, 15.0])
    ranks = []
    for number in range(size):
        own = list(graphs)
        if rng.random() < 0.15:
            own[rng.randrange(len(own))] = f"{number}"
        if rng.random() < 0.1:
            rng.shuffle(own)
        ranks.append(Rank([(rng.random() * late, digest) for digest in own]))
    return ranks


def test_all_ranks_take_one_verdict_in_a_thousand_schedules() -> None:
    seen = {True: 0, False: 0}
    for seed in range(1000):
        rng = random.Random(seed)
        ranks = schedule(rng)
        told = play(ranks, HashStore(), seed, rng.choice([0.0, 0.01, 0.3]))
        for agreed in check(ranks, told).values():
            seen[agreed] += 1
    assert min(seen.values()) > 200, seen


def apart(asks: list[list[tuple[float, str, str]]], seed: int) -> list[list[tuple[Outcome, float]] | None]:
    """What ranks are told that ask one after the other about (delay, question, settings), and how long they waited."""
    clock, store, everybody = VirtualClock(len(asks)), HashStore(), tuple(range(len(asks)))

    def life(number: int) -> Callable[[], list[tuple[Outcome, float]]]:
        connection = UnreliableStore(store, clock, random.Random(seed * 100 + number), 0.01, lambda _: None)

        def run() -> list[tuple[Outcome, float]]:
            session, told = Session(connection, number, everybody, clock), []
            for delay, question, settings in asks[number]:
                clock.sleep(delay)
                digest = hashlib.blake2b(f"{question} {settings}".encode(), digest_size=16).hexdigest()
                lines = [f"fact setting memory_budget: {settings}", f"fact phase: {question}"]
                asked = Ballot(
                    digest,
                    Literals(),
                    (0, 1),
                    question,
                    lambda lines=lines: lines,
                    compilation="0/0",
                    settings=settings,
                )
                began = clock.now()
                told.append((settle(session, asked, TIMEOUT_S), clock.now() - began))
            return told

        return run

    return together(clock, [life(number) for number in everybody])


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_with_other_settings_are_found_whatever_they_ask(size: int) -> None:
    """Found: one rank alone had a budget that asks questions of its own, and every rank waited in vain for each."""
    for seed in range(60):
        rng = random.Random(seed)
        odd = rng.randrange(size)
        asks = []
        for number in range(size):
            questions = ["step forward", "step backward", "forward"] if number == odd else ["forward"]
            settings = "less" if number == odd else "all"
            asks.append([(rng.random() * 0.5, question, settings) for question in questions])
        for number, told in enumerate(apart(asks, seed)):
            assert told is not None
            other = [n for n in range(size) if (n == odd) is not (number == odd)]
            for outcome, waited in told:
                assert outcome.kind is Kind.SETTINGS and waited < 5, (seed, number, told)
                assert any(f"what rank {n} was told differs" in outcome.why for n in other)
                assert "memory_budget: less" in outcome.why and "phase" not in outcome.why


def test_settings_that_are_changed_on_all_ranks_are_no_difference() -> None:
    """Dynamo counts compilations anew after a reset: one name comes with other settings, and then with the first."""
    for seed in range(40):
        rng = random.Random(seed)
        settings = [rng.choice("abc") for _ in range(5)]
        asks = [[(rng.random() * 2, f"graph {k}", one) for k, one in enumerate(settings)] for _ in range(3)]
        for told in apart(asks, seed):
            assert told is not None and all(outcome.agreed for outcome, _ in told), (seed, told)


def test_ranks_that_come_in_time_with_equal_graphs_agree() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randrange(2, 6)
        ranks = [Rank([(rng.random() * 4, digest) for digest in "abc"]) for _ in range(size)]
        told = play(ranks, HashStore(), seed, 0.01)
        assert check(ranks, told) == {"a": True, "b": True, "c": True}


def test_ranks_that_die_or_lose_answers_mislead_nobody() -> None:
    """Dead ranks, and answers lost before or after an operation was done, for good or for a moment."""
    troubled = agreed = 0
    for seed in range(600):
        rng = random.Random(10_000 + seed)
        ranks = schedule(rng)
        for rank in ranks:
            kind = rng.random()
            if kind < 0.15:
                rank.dies_at = rng.randrange(1, 25)
            elif kind < 0.3:
                rank.loss_rate = 0.1
        told = play(ranks, HashStore(), seed, 0.01)
        verdicts = check(ranks, told)
        agreed += sum(verdicts.values())
        troubled += sum(o.kind is Kind.TROUBLE for answers in told for _, o in answers or [])
    assert agreed > 100 and troubled > 20


def test_a_connection_lost_for_good_is_said_aloud() -> None:
    """Nothing can make this rank learn what the others came to; whatever that is, they are one."""
    lost = 0
    for seed in range(200):
        rng = random.Random(20_000 + seed)
        ranks = schedule(rng)
        ranks[rng.randrange(len(ranks))].loses_at = rng.randrange(1, 20)
        told = play(ranks, HashStore(), seed, 0.01)
        check(ranks, told)
        lost += any("after it had voted" in o.why for answers in told for _, o in answers or [])
    assert lost > 10


def test_what_an_earlier_life_left_in_the_store_does_not_count() -> None:
    """Also where that life ended in the middle: half of the votes are there, and the numbers of other processes."""
    agreed = 0
    for seed in range(300):
        rng = random.Random(30_000 + seed)
        store = HashStore()
        first = schedule(rng)
        size = len(first)
        for rank in first:
            if rng.random() < 0.5:
                rank.dies_at = rng.randrange(1, 25)
        check(first, play(first, store, seed, 0.01))
        differs = rng.random() < 0.5
        second = [Rank([(rng.random() * 3, "a" if not differs or number else "z")]) for number in range(size)]
        verdicts = check(second, play(second, store, seed + 1, 0.01))
        assert verdicts == ({"a": False, "z": False} if differs else {"a": True})
        agreed += verdicts["a"]
    assert agreed > 50


def test_a_verdict_stands() -> None:
    """A rank that is late finds that it is alone, at once; asked again, everybody says the same."""
    ranks = [Rank([(0, "a"), (20, "a")]), Rank([(15, "a"), (20, "a")])]
    told = play(ranks, HashStore(), 1, 0.0)
    assert check(ranks, told) == {"a": False}
    assert told[0] is not None and told[0][0][1].kind is Kind.UNANSWERED


def test_later_waits_for_a_silent_set_are_short_until_somebody_answers() -> None:
    clock = VirtualClock(2)
    store = HashStore()
    waited: list[float] = []

    def patient() -> None:
        session = Session(store, 0, (0, 1), clock)
        for digest in "abcd":
            began = clock.now()
            settle(session, ballot(digest), TIMEOUT_S)
            waited.append(clock.now() - began)

    def late() -> None:
        session = Session(store, 1, (0, 1), clock)
        clock.sleep(10.5)
        settle(session, ballot("b"), TIMEOUT_S)
        clock.sleep(5)
        settle(session, ballot("d"), TIMEOUT_S)

    together(clock, [patient, late])
    assert waited[0] == pytest.approx(10, abs=0.5)
    assert waited[1] == pytest.approx(0.5, abs=0.4)
    # Somebody answered: the whole time again for the next one.
    assert waited[2] == pytest.approx(10, abs=0.5) or waited[2] < 6
    assert waited[3] <= 10.5


def test_a_wait_in_vain_for_a_variant_leaves_the_next_function_its_time() -> None:
    """One rank alone compiles a variant; then all compile another function, the other one three seconds later."""
    clock = VirtualClock(2)
    store = HashStore()

    def alone() -> tuple[list[bool], list[float]]:
        session = Session(store, 0, (0, 1), clock)
        agreed, waited = [], []
        for digest, first in (("a", True), ("b", False), ("c", False), ("d", True), ("e", True)):
            began = clock.now()
            agreed.append(settle(session, replace(ballot(digest), first=first), TIMEOUT_S).agreed)
            waited.append(clock.now() - began)
        return agreed, waited

    def other() -> None:
        session = Session(store, 1, (0, 1), clock)
        settle(session, ballot("a"), TIMEOUT_S)
        clock.sleep(TIMEOUT_S + 4)
        settle(session, ballot("d"), TIMEOUT_S)
        clock.sleep(3)
        settle(session, ballot("e"), TIMEOUT_S)

    agreed, waited = together(clock, [alone, other])[0]
    assert agreed == [True, False, False, True, True]
    assert waited[1] == pytest.approx(10, abs=0.5) and waited[2] == pytest.approx(1, abs=0.5)
    assert waited[3] > 2 and waited[4] > 2


@pytest.mark.parametrize(
    ("compile_id", "first"),
    [("", True), ("7/0", True), ("7/0_1", True), ("!1/7/0", True), ("7/1", False), ("7/10_2", False)],
)
def test_which_graph_is_the_first_of_its_function(compile_id: str, first: bool) -> None:
    assert opens_a_function(compile_id) is first


def observed(asks: list[Ballot], store: Any | None = None) -> tuple[list[Outcome], list[int]]:
    """One ballot per rank at once, in real threads and time; outcomes and operations."""
    clock = VirtualClock(len(asks))
    shared = store or HashStore()
    sessions = [Session(shared, rank, tuple(range(len(asks))), clock) for rank in range(len(asks))]
    for session in sessions:
        session.board.operations = 0
    told = together(clock, [lambda r=rank: settle(sessions[r], asks[r], TIMEOUT_S) for rank in range(len(asks))])
    return told, [session.board.operations for session in sessions]


def test_a_difference_is_shown_on_both_sides_and_ends_the_wait() -> None:
    clock = VirtualClock(3)
    store = HashStore()

    def ask(rank: int, digest: str) -> Callable[[], tuple[Outcome, float]]:
        def run() -> tuple[Outcome, float]:
            session = Session(store, rank, (0, 1, 2), clock)
            return settle(session, ballot(digest), TIMEOUT_S), clock.now()

        return run

    for outcome, after in together(clock, [ask(0, "a"), ask(1, "b"), ask(2, "a")]):
        assert outcome.kind is Kind.DIFFERS and after < 3
        assert "<graph a> (model.py:7)" in outcome.why and "<graph b> (model.py:7)" in outcome.why
        assert "at line 1" in outcome.why


@pytest.mark.parametrize("late", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("others", ["aa", "ab", "aab", "xa", "xx"])
def test_a_rank_that_cannot_describe_its_graph_says_so_and_nobody_waits_for_its_vote(others: str, late: float) -> None:
    """Found: ranks that exchange all of their rows waited in vain for one that kept some of them.

    Args:
        others: what the other ranks vote for; x for one more that cannot describe its graph.
        late: when the rank comes, in seconds after the others.
    """
    graphs = [*others, "x"]
    clock, store, everybody = VirtualClock(len(graphs)), HashStore(), tuple(range(len(graphs)))

    def ask(rank: int, graph: str) -> Callable[[], tuple[Outcome, float, float]]:
        why = f"rank {rank} has an argument of type object"
        asked = ballot(graph)
        if graph == "x":
            asked = replace(asked, digest=refusal(why, rank), lines=lambda: [why])

        def run() -> tuple[Outcome, float, float]:
            session = Session(store, rank, everybody, clock)
            clock.sleep(late * (rank == everybody[-1]))
            began = clock.now()
            first = settle(session, asked, TIMEOUT_S), clock.now() - began
            # A further question about the graph has a name of its own.
            digest = asked.digest if asked.refused else asked.digest[:-1] + "e"
            settle(session, replace(asked, name="0/0 collectives", digest=digest), TIMEOUT_S)
            return *first, clock.now() - began

        return run

    for graph, (outcome, waited, both) in zip(graphs, together(clock, [ask(*one) for one in enumerate(graphs)])):
        assert not outcome.agreed and waited < late + 1 and both < late + 2
        if graph == "x":
            assert outcome.kind is Kind.REFUSED and "argument of type object" in outcome.why
        elif others in ("aa", "xa"):
            assert outcome.kind is Kind.REFUSED, outcome
            assert "cannot describe its graph to others: rank" in outcome.why and "type object" in outcome.why


@pytest.mark.parametrize(
    ("kind", "values", "agreed"),
    [
        # A piece is the same everywhere, or each rank's own.
        ("p", [0, 0, 0], True),
        ("p", [0, 1, 2], True),
        ("p", [5, 5, 5], True),
        ("p", [0, 2, 1], False),
        ("p", [2, 1, 0], False),
        ("p", [0, 1, 1], False),
        ("p", [0, 0, 2], False),
        # Where a rewrite could take a piece for one rank's own, it must be every rank's own.
        ("n", [0, 1, 2], True),
        ("n", [0, 0, 0], False),
        ("n", [1, 1, 1], False),
        # Offsets grow with a rank's own position.
        ("o", [0, 32, 64], True),
        ("o", [32, 64, 96], True),
        ("o", [7, 7, 7], True),
        ("o", [3, 7, 11], False),
        ("o", [0, 32, 96], False),
        ("o", [64, 32, 0], False),
        ("o", [0, -32, -64], True),
    ],
)
def test_an_open_number_is_the_same_everywhere_or_follows_a_ranks_position(
    kind: str, values: list[int], agreed: bool
) -> None:
    literals = [Literals((value,), kind, ((rank, 0, 1),), (1,)) for rank, value in enumerate(values)]
    outcomes, _ = observed([ballot("a", one) for one in literals])
    assert [outcome.agreed for outcome in outcomes] == [agreed] * 3
    if not agreed:
        said = "own on some ranks only" if kind == "n" else "a number on rank"
        assert all(said in o.why and "<graph a> (model.py:7)" in o.why for o in outcomes)


def test_a_position_may_be_one_of_several_groups() -> None:
    """A grid of 2 x 2: positions along its rows, along its columns, and among all four ranks."""
    roles = [((r % 2, 0, 1, 0), (r // 2, 0, 0, 1), (r, 0, 1, 2)) for r in range(4)]

    def told(kind: str, values: list[tuple[int, ...]]) -> list[bool]:
        asks = [
            Ballot("a" * 32, Literals(v, kind * len(v), roles[r], (1,) * len(v)), (0, 1, 2), "x", lambda: ["1", "2"])
            for r, v in enumerate(values)
        ]
        return [o.agreed for o in observed(asks)[0]]

    assert told("p", [(r % 2, r // 2, r) for r in range(4)]) == [True] * 4
    assert told("o", [(r % 2 * 8, (r // 2 + 1) * 5, r * 3) for r in range(4)]) == [True] * 4
    assert told("p", [(v,) for v in (0, 1, 1, 0)]) == [False] * 4


def test_equal_graphs_with_other_numbers_are_different_graphs() -> None:
    """As when layers are compiled one by one, each of which selects its own row."""
    clock = VirtualClock(2)
    store = HashStore()

    def run(rank: int) -> list[bool]:
        session = Session(store, rank, (0, 1), clock)
        asks = [ballot("a", Literals((v,), "p", ((rank, 0, 1),), (1,)), name=str(v)) for v in (0, 1, 2, 3, 0, 2)]
        return [settle(session, ask, TIMEOUT_S).agreed for ask in asks]

    assert together(clock, [lambda: run(0), lambda: run(1)]) == [[True] * 6] * 2


def test_a_rank_has_one_vote_however_often_it_asks() -> None:
    clock = VirtualClock(2)
    store = HashStore()

    def insistent() -> list[bool]:
        session = Session(store, 0, (0, 1), clock)
        return [settle(session, ballot("a"), TIMEOUT_S).agreed for _ in range(3)]

    def absent() -> None:
        assert Session(store, 1, (0, 1), clock).open(5)

    assert together(clock, [insistent, absent])[0] == [False] * 3


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_operations_do_not_grow_with_the_ranks(ranks: int) -> None:
    """Without skew, after the session is open: at most a handful per rank, the first rank's duties included."""
    store = HashStore()
    clock = VirtualClock(ranks)
    sessions = [Session(store, rank, tuple(range(ranks)), clock) for rank in range(ranks)]
    literals = Literals((0, 7), "po", (), (1, 1))
    counts: list[int] = [0] * ranks

    def run(rank: int) -> None:
        settle(sessions[rank], ballot("a", name="first"), TIMEOUT_S)
        clock.sleep(5 - clock.now())
        before = sessions[rank].board.operations
        assert settle(sessions[rank], ballot("b", literals, name="second"), TIMEOUT_S).agreed
        counts[rank] = sessions[rank].board.operations - before

    together(clock, [lambda r=rank: run(r) for rank in range(ranks)])
    assert max(counts) <= 16 and sum(counts) / ranks <= 12, counts


class NoCompareSet:
    """A store of which the one operation is missing that verdicts need."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "compare_set":
            raise NotImplementedError("compare_set")
        return getattr(self._store, name)


@pytest.mark.parametrize("broken", ["no compare_set", "closed"])
def test_a_store_that_cannot_do_it_is_no_agreement_and_no_error(broken: str) -> None:
    shared = HashStore()

    def of(rank: int) -> Any:
        if broken == "closed":
            return UnreliableStore(shared, clock, random.Random(0), 0.0, Rank([], loses_at=0).fails)
        return NoCompareSet(shared)

    clock = VirtualClock(2)
    sessions = [Session(of(rank), rank, (0, 1), clock) for rank in range(2)]
    told = together(clock, [lambda r=rank: settle(sessions[r], ballot("a"), TIMEOUT_S) for rank in range(2)])
    assert [outcome.agreed for outcome in told] == [False, False]
    assert all(outcome.why for outcome in told)


@pytest.mark.parametrize("garbage", ["", "x" * 5000, "[1, 2", '["agreed"]', '["no such kind", 0, ""]', "[" * 2000])
def test_garbage_in_the_store_is_no_agreement(garbage: str) -> None:
    store = HashStore()
    clock = VirtualClock(2)

    def run(rank: int) -> Outcome:
        session = Session(store, rank, (0, 1), clock)
        assert session.open(5)
        if rank == 1:
            store.set(session.key("a" * 32, "0", "verdict"), garbage or "[]")
            return Outcome(Kind.UNANSWERED, "not asked")
        clock.sleep(1)
        return settle(session, ballot("a"), TIMEOUT_S)

    assert not together(clock, [lambda: run(0), lambda: run(1)])[0].agreed


def stores() -> dict[str, Callable[[Path], list[Any]]]:
    def tcp(_: Path) -> list[Any]:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [server, TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)]

    def file(folder: Path) -> list[Any]:
        name = tempfile.mktemp(dir=folder)
        return [FileStore(name, 2), FileStore(name, 2)]

    return {"tcp": tcp, "file": file}


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_on_real_stores_in_real_time(kind: str, tmp_path: Path) -> None:
    connections = stores()[kind](tmp_path)
    clock = VirtualClock(2)
    clock.sleep = time.sleep  # type: ignore[method-assign]
    clock.now = time.monotonic  # type: ignore[method-assign]

    def run(rank: int) -> list[Outcome]:
        session = Session(connections[rank], rank, (0, 1), clock)
        return [settle(session, ballot(d, name=str(i)), 60.0) for i, d in enumerate(["a", "b", f"{rank}", "c"])]

    for told in together(clock, [lambda: run(0), lambda: run(1)]):
        assert [o.kind for o in told] == [Kind.AGREED, Kind.AGREED, Kind.DIFFERS, Kind.AGREED]
