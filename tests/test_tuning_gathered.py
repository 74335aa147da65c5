"""Graphs of different ranks: one profile and one file of plans of all, and settings that differ, without waiting."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inductor_passes.agreement.board import Board
from inductor_passes.agreement.session import Session
from inductor_passes.cost.profile import CostProfile
from inductor_passes.pin import file as plan_file
from inductor_passes.tuning import gathered as gathering
from inductor_passes.tuning.correct import corrected
from inductor_passes.tuning.gathered import Gathered
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import Account, account
from inductor_passes.tuning.settings import apart
from tests.support.tuned import MS, World, plan

BASE = CostProfile.default("cpu", ranks_per_host=4)
MIB = 1 << 20
#: Tensor parallelism of two by data parallelism of two: all ranks have the forward, pairs have the backward.
ALL, FIRST, SECOND = (0, 1, 2, 3), (0, 2), (1, 3)


def graph(ranks: tuple[int, ...], path: Path, phase: str, ns: int, size: int = MIB) -> tuple[Planned, Account]:
    """A graph of these ranks with two gathers, and what it takes; messages are told from others by their size."""
    made = plan([MS, MS], [2 * MS, 2 * MS], ranks=len(ranks), size=size)
    about = dataclasses.replace(made.about, phase=phase, participants=ranks, tune_file=str(path), digest=f"{phase}{ns}")
    about = dataclasses.replace(about, profile_hash=BASE.hash())
    found = account(made, World([ns, 2 * ns], clocks_ns=(0,) * len(ranks), late_ns=(0,) * len(ranks)).records(made))
    collectives = tuple(dataclasses.replace(c, ranks=ranks) for c in made.collectives)
    planned = dataclasses.replace(made, about=about, collectives=collectives)
    return planned, dataclasses.replace(found, ranks=ranks)


class Ranks:
    """Four ranks of one process, each with what it gathers, and talks among them that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.sessions: dict[tuple[int, tuple[int, ...]], Session] = {}
        self.rank = 0
        self.gathered = [
            Gathered(lambda rank=rank: rank, lambda: Board(self.store), lambda planned: BASE, corrected)  # type: ignore[misc]
            for rank in ALL
        ]
        monkeypatch.setattr(gathering.agreement, "session_of", lambda ranks: self.sessions.get((self.rank, ranks)))

    def open(self, ranks: tuple[int, ...]) -> None:
        made = {rank: Session(self.store, rank, ranks) for rank in ranks}
        threads = [threading.Thread(target=one.open, args=(time.monotonic() + 30,)) for one in made.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.sessions |= {(rank, ranks): one for rank, one in made.items()}

    def each(self, ranks: tuple[int, ...], what: Callable[[Gathered], Any]) -> list[Any]:
        said = []
        for rank in ranks:
            self.rank = rank
            said.append(what(self.gathered[rank]))
        return said

    def expect(self, planned: Planned) -> None:
        self.each(planned.about.participants, lambda one: one.expect(planned))

    def measured(self, planned: Planned, found: Account) -> list[tuple[str, str]]:
        """A graph's ranks hold one account: the first one makes the profile."""
        ranks = planned.about.participants
        (profile,) = self.each(ranks[:1], lambda one: one.profile(planned, found))
        said: list[tuple[str, str]] = self.each(ranks, lambda one: one.add(planned, found, profile))
        return said


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    made = Ranks(monkeypatch)
    made.open(ALL)
    yield made


def gather_ns(profile: CostProfile, group: tuple[int, ...], size: int) -> int:
    return profile.communication_ns("all_gather", size // len(group), size, group)


@pytest.mark.parametrize(("first", "second"), [(4 * MS, 9 * MS), (9 * MS, 4 * MS)])
@pytest.mark.parametrize("later", [True, False])
def test_one_profile_holds_what_all_graphs_gave(
    ranks: Ranks, tmp_path: Path, first: int, second: int, later: bool
) -> None:
    """Found: the stated name held the forward alone, and what the backward measured lay in files that nobody read."""
    path = tmp_path / "tuned.json"
    forward, one, other = (
        graph(ALL, path, "forward", 6 * MS),
        *(graph(r, path, "backward", ns) for r, ns in ((FIRST, first), (SECOND, second))),
    )
    for planned, _ in (forward, one, other):
        ranks.expect(planned)
    assert ranks.measured(*forward) == [(str(path), "")] * 4
    order = (one, other) if later else (other, one)
    said = {planned.about.participants: ranks.measured(planned, found) for planned, found in order}
    assert said[FIRST] == [(str(path), "")] * 2
    assert all(where == str(path) and "rank 0 writes" in why for where, why in said[SECOND])
    ranks.each((0,), Gathered.look)
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]
    profile = CostProfile.load(path)
    assert gather_ns(profile, ALL, MIB) == pytest.approx(6 * MS, rel=0.05)
    assert gather_ns(profile, FIRST, MIB) == pytest.approx(9 * MS, rel=0.05), "of equal groups the slower one"
    assert "on 4 ranks" in profile.name and all(name in profile.name for name in ("forward", f"backward{second}"))
    before = path.stat().st_mtime_ns
    ranks.each((0,), Gathered.look)
    assert path.stat().st_mtime_ns == before, "nothing is new"


def test_an_earlier_file_is_replaced_as_a_whole(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("of another run")
    planned, found = graph(ALL, path, "forward", 6 * MS)
    ranks.expect(planned)
    ranks.measured(planned, found)
    assert CostProfile.load(path).measured


def test_a_graph_that_is_timed_once_more_counts_once(ranks: Ranks, tmp_path: Path) -> None:
    """A program's first steps are slower than later ones. Other graphs stay."""
    found = []
    for name, firsts in (("once", ()), ("twice", (9 * MS,))):
        path = tmp_path / f"{name}.json"
        planned, later = graph(ALL, path, "forward", 5 * MS)
        other, beside = graph(ALL, path, "backward", 8 * MS, 4 * MIB)
        for one in (planned, other):
            ranks.expect(one)
        for ns in firsts:
            ranks.measured(planned, graph(ALL, path, "forward", ns)[1])
        ranks.measured(other, beside)
        ranks.measured(planned, later)
        found.append(CostProfile.load(path))
    assert gather_ns(found[0], ALL, MIB) == pytest.approx(5 * MS, rel=0.2)
    for size in (MIB, 2 * MIB, 4 * MIB):
        assert gather_ns(found[0], ALL, size) == gather_ns(found[1], ALL, size)


@pytest.mark.parametrize("looks_between", [True, False])
def test_a_graph_of_other_ranks_that_is_timed_once_more_counts_once(
    ranks: Ranks, tmp_path: Path, looks_between: bool
) -> None:
    """Ranks that share no graph with those of rank 0's graph leave their times for rank 0, early and later ones."""
    found = []
    for name, firsts in (("once", ()), ("twice", (30 * MS,))):
        path = tmp_path / f"{name}.json"
        forward, beside = graph(ALL, path, "forward", 6 * MS)
        one, its = graph(FIRST, path, "backward", 4 * MS)
        planned, later = graph(SECOND, path, "backward", 5 * MS)
        for each in (forward, one, planned):
            ranks.expect(each)
        ranks.measured(forward, beside)
        ranks.measured(one, its)
        for ns in firsts:
            ranks.measured(planned, graph(SECOND, path, "backward", ns)[1])
            if looks_between:
                ranks.each((0,), Gathered.look)
        ranks.measured(planned, later)
        ranks.each((0,), Gathered.look)
        found.append(CostProfile.load(path))
    assert gather_ns(found[0], FIRST, MIB) == pytest.approx(5 * MS, rel=0.05), "of equal groups the slower one"
    for size in (MIB, 2 * MIB):
        assert gather_ns(found[0], FIRST, size) == gather_ns(found[1], FIRST, size)


def test_plans_of_all_graphs_lie_in_one_file(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    which = (ALL, "forward"), (FIRST, "backward"), (SECOND, "backward")
    graphs = [graph(members, path, phase, 6 * MS)[0] for members, phase in which]
    for planned in graphs:
        ranks.expect(planned)
    made = [{"phase": planned.about.phase, "graph_index": number % 2} for number, planned in enumerate(graphs)]
    stated = str(tmp_path / "tuned.plan.json")
    for planned, one in zip(graphs[:2], made):
        said = ranks.each(planned.about.participants, lambda g, planned=planned, one=one: g.add_plan(planned, one))
        assert set(said) == {(stated, "")}
    for where, why in ranks.each(SECOND, lambda g: g.add_plan(graphs[2], made[2])):
        assert where == "" and why == f"{stated} holds the plans of rank 0 and of the ranks that share its graphs"
    assert [plan.phase for plan in plan_file.load(stated).graphs] == ["forward", "backward"]
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.plan.json"]


def test_ranks_that_share_no_graph_with_rank_0_write_their_own(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    for members in (FIRST, SECOND):
        planned, found = graph(members, path, "forward", 6 * MS)
        ranks.expect(planned)
        assert {why for _, why in ranks.measured(planned, found)} == {""}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.json", "tuned.ranks1_3.json"]


def test_the_rank_of_another_host_writes_what_rank_0_wrote(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that load different files do not agree on any graph."""
    path, there = tmp_path / "tuned.json", tmp_path / "there.json"
    forward, backward, other = (
        graph(r, path, phase, ns) for r, phase, ns in ((ALL, "f", 6 * MS), (FIRST, "b", 4 * MS), (SECOND, "b", 9 * MS))
    )
    for planned, _ in (forward, backward, other):
        ranks.expect(planned)
    for planned, found in (forward, backward, other):
        ranks.measured(planned, found)
    ranks.each((0,), Gathered.look)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(gathering.files, "path_of", lambda planned, home: there)
    assert ranks.gathered[3].pause_s is not None
    ranks.each((3,), Gathered.look)
    assert there.read_text() == path.read_text()


def test_looks_end(ranks: Ranks, tmp_path: Path) -> None:
    planned, found = graph(ALL, tmp_path / "tuned.json", "forward", 6 * MS)
    assert ranks.gathered[0].pause_s is None
    ranks.expect(planned)
    ranks.measured(planned, found)
    pauses = []
    while (pause := ranks.gathered[0].pause_s) is not None:
        pauses.append(pause)
        ranks.each((0,), Gathered.look)
    assert pauses == [0.5 * 2**k for k in range(9)]
    assert ranks.gathered[1].pause_s is None, "it writes nothing"


def test_settings_that_differ_are_named_with_ranks_and_values(ranks: Ranks) -> None:
    board = Board(ranks.store)

    def said(rank: int, tune: str, swap: str, name: str = "a graph") -> dict[str, str]:
        return apart(ranks.sessions[rank, ALL], board, name, {"tune": tune, "tune_swap": swap})

    assert said(1, "4", "off") == said(0, "4", "off") == {}
    sentence = "tune_swap differs: rank 1 has off and rank 2 has on"
    assert said(2, "4", "on") == {"tune_swap": sentence}
    both = {"tune_swap": sentence, "tune": "tune differs: rank 1 has 4 and rank 3 has 6"}
    assert said(3, "6", "off") == both
    assert said(0, "4", "off") == both, "a rank that was there first learns it at the exchange"
    assert said(0, "4", "off", "another graph") == {}
