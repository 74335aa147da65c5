"""What a program measured of all its graphs, for one cost profile and one file of plans at the stated name.

Graphs concern different ranks: with tensor parallelism a forward may concern all of them and a backward only those of
one data-parallel group. Every rank has the accounts of its own graphs. Rank 0 writes the files. A set of ranks without
rank 0 that has a graph in common with it leaves what its collectives took in the store, under the keys of that graph's
ranks; rank 0 takes it when it looks, and nobody waits for that. Of equal messages the slower group counts. What rank 0
writes it leaves in the store as well, for the rank of another host that writes there.

Ranks that have no graph in common with rank 0 (stages of a pipeline) write files of their own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes import agreement
from inductor_passes.agreement.board import Board
from inductor_passes.agreement.session import Session
from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.convert import convert, plain
from inductor_passes.tuning import files
from inductor_passes.tuning.correct import Others, others_of, untold
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import Account

#: After a result this often, in seconds, twice as long each time, it is looked for what other ranks left.
_FIRST_LOOK_S, _LOOKS = 0.5, 9

#: Ranks in whose name times were left for rank 0, and a number.
Place = tuple[tuple[int, ...], int]


@dataclass
class Program:
    """What this rank knows of the graphs that were planned with one cost profile, for one file.

    Attributes:
        latest: the last graph that was measured.
        found: of this rank's graphs, in order of the exchanges.
        others: on rank 0, what other sets of ranks left, by place.
        plans: second plans that stayed, of this rank's graphs.
        sets: ranks of its graphs, measured or not.
        posted: where this rank left a graph's times for rank 0.
        replaced: on rank 0, places of graphs that were timed once more.
    """

    latest: Planned | None = None
    found: list[tuple[Planned, Account]] = field(default_factory=list)
    others: dict[Place, Others] = field(default_factory=dict)
    plans: list[dict[str, Any]] = field(default_factory=list)
    sets: set[tuple[int, ...]] = field(default_factory=set)
    posted: dict[int, Place] = field(default_factory=dict)
    replaced: set[Place] = field(default_factory=set)
    written: str = ""


class Gathered:
    """All of them. Used by the thread that exchanges times and by the one that plans again, one at a time.

    Args:
        rank: of this process; asked when it is needed.
        connect: to the store, a connection that nothing else uses.
        base: the cost profile that a graph was planned with.
        correct: that with everything that was measured laid over it.
    """

    def __init__(
        self,
        rank: Callable[[], int],
        connect: Callable[[], Board],
        base: Callable[[Planned], CostProfile],
        correct: Callable[[CostProfile, Sequence[tuple[Planned, Account]], Sequence[Others]], CostProfile],
    ) -> None:
        self._rank = rank
        self._connect = connect
        self._base = base
        self._correct = correct
        self._programs: dict[tuple[str, str], Program] = {}
        self._looks = _LOOKS
        self._lock = threading.RLock()

    def _program(self, planned: Planned) -> Program:
        return self._programs.setdefault((planned.about.profile_hash, planned.about.tune_file), Program())

    def expect(self, planned: Planned) -> None:
        """A graph is going to be timed."""
        program = self._program(planned)
        # The background thread may be going through the old ones.
        program.sets = program.sets | {planned.about.participants}

    def home(self, planned: Planned) -> tuple[int, ...]:
        """The ranks in whose name the graph's results are written: its own, or the most with which it shares rank 0."""
        mine = planned.about.participants
        around = [one for one in self._program(planned).sets if 0 in one and set(mine) <= set(one)]
        return max(around, key=lambda one: (len(one), one), default=mine)

    def profile(self, planned: Planned, found: Account | None = None) -> CostProfile:
        """The cost profile that comes of everything so far, and of a graph that was just measured."""
        with self._lock:
            return self._correct(self._base(planned), *self._everything(planned, found))

    def untold(self, planned: Planned, found: Account) -> list[str]:
        """What the times behind :meth:`profile` do not tell."""
        with self._lock:
            return untold(self._base(planned), *self._everything(planned, found))

    def _everything(
        self, planned: Planned, found: Account | None
    ) -> tuple[list[tuple[Planned, Account]], list[Others]]:
        program = self._program(planned)
        if found is None:
            return list(program.found), list(program.others.values())
        return [*_without(program, planned), (planned, found)], list(program.others.values())

    def add(self, planned: Planned, found: Account, profile: CostProfile) -> tuple[str, str]:
        """The ranks of a graph hold one account and one profile: write it, or leave it for rank 0.

        A graph that is timed once more has one account, the later one.

        Returns:
            The path of the file, and a sentence where another rank writes it.

        Raises:
            OSError: it cannot be written.
            StoreError: it cannot be left.
        """
        with self._lock:
            return self._added(planned, found, profile)

    def _added(self, planned: Planned, found: Account, profile: CostProfile) -> tuple[str, str]:
        program = self._program(planned)
        program.found = [*_without(program, planned), (planned, found)]
        program.latest = planned
        self._looks = 0
        home, rank = self.home(planned), self._rank()
        path = files.path_of(planned, home)
        if 0 in planned.about.participants or home == planned.about.participants:
            if files.writes(planned, rank):
                files.save(path, profile)
                self._leave(program, profile)
            return str(path), ""
        if rank == planned.about.participants[0]:
            self._post(planned, found, home)
        return str(path), _THEIRS.format(path=path)

    def add_plan(self, planned: Planned, made: dict[str, Any]) -> tuple[str, str]:
        """A graph's plan is known to be the faster one; the path of its file and "", or "" and why it is in none."""
        with self._lock:
            return self._added_plan(planned, made)

    def _added_plan(self, planned: Planned, made: dict[str, Any]) -> tuple[str, str]:
        home, rank = self.home(planned), self._rank()
        path = files.plan_path_of(planned, home)
        if home != planned.about.participants and 0 not in planned.about.participants:
            return "", f"{path} holds the plans of rank 0 and of the ranks that share its graphs"
        program = self._program(planned)
        program.plans.append(made)
        if files.writes(planned, rank):
            files.save_plans(path, program.plans)
            if program.found:
                self._leave(program, self.profile(planned))
        return str(path), ""

    def look(self) -> None:
        """Take what other ranks left, and write it; without waiting.

        Raises:
            OSError: it cannot be written.
            StoreError: the store cannot be used.
        """
        with self._lock:
            self._looked()

    def _looked(self) -> None:
        self._looks += 1
        for program in list(self._programs.values()):
            planned = program.latest
            if planned is None:
                continue
            if self._rank() == 0:
                if self._took(program):
                    profile = self.profile(planned)
                    files.save(files.path_of(planned, self.home(planned)), profile)
                    self._leave(program, profile)
            elif files.writes_for_host():
                self._follow(program, planned)

    @property
    def pause_s(self) -> float | None:
        """How long until the next look; None where nothing more is expected, or where it concerns nobody."""
        rank = self._rank()
        shared = any(0 in one and len(one) > 1 for program in list(self._programs.values()) for one in program.sets)
        if self._looks >= _LOOKS or not shared or not (rank == 0 or files.writes_for_host()):
            return None
        return float(_FIRST_LOOK_S * 2**self._looks)

    def end_looks(self) -> None:
        """The store cannot be used."""
        self._looks = _LOOKS

    def _post(self, planned: Planned, found: Account, home: tuple[int, ...]) -> None:
        session = _opened(home)
        if session is not None:
            board, key = self._connect(), _key(session, planned)
            posted = self._program(planned).posted
            left = others_of(self._base(planned), planned, found)
            number = board.add(f"{key}/count")
            board.put(f"{key}/{number}", json.dumps({"replaces": posted.get(id(planned)), "times": plain(left)}))
            posted[id(planned)] = home, number

    def _took(self, program: Program) -> bool:
        """On rank 0, whether there was something new."""
        planned, new = program.latest, False
        assert planned is not None
        for home in sorted(one for one in program.sets if 0 in one):
            session = _opened(home)
            if session is None:
                continue
            board, key = self._connect(), _key(session, planned)
            for number in range(1, board.count(f"{key}/count") + 1):
                place = home, number
                known = place in program.others or place in program.replaced
                if not known and board.has([f"{key}/{number}"]):
                    found = json.loads(board.read([f"{key}/{number}"])[0])
                    # A graph that is timed once more counts once; what it left before may come second.
                    if found["replaces"] is not None:
                        ranks, earlier = found["replaces"]
                        program.replaced.add((tuple(ranks), earlier))
                    program.others[place] = convert(found["times"], Others, "another rank's times")
                    new = True
        for replaced in program.replaced & set(program.others):
            del program.others[replaced]
        return new

    def _leave(self, program: Program, profile: CostProfile) -> None:
        """On rank 0: what it wrote, for the ranks that write on other hosts."""
        planned = program.latest
        if self._rank() != 0 or planned is None:
            return
        for home in sorted(one for one in program.sets if 0 in one):
            if (session := _opened(home)) is not None:
                self._connect().put(f"{_key(session, planned)}/files", json.dumps([profile.to_json(), program.plans]))

    def _follow(self, program: Program, planned: Planned) -> None:
        home = self.home(planned)
        session = _opened(home) if 0 in home else None
        if session is None:
            return
        board, place = self._connect(), f"{_key(session, planned)}/files"
        text = board.read([place])[0].decode() if board.has([place]) else ""
        if text and text != program.written:
            profile, plans = json.loads(text)
            files.save(files.path_of(planned, home), CostProfile.from_json(profile))
            if plans:
                files.save_plans(files.plan_path_of(planned, home), plans)
            program.written = text


def _without(program: Program, planned: Planned) -> list[tuple[Planned, Account]]:
    return [one for one in program.found if one[0] is not planned]


_THEIRS = (
    "rank 0 writes {path} from its own graphs; what these ranks' collectives took goes into it where it is more than "
    "rank 0 measured"
)


def _opened(ranks: tuple[int, ...]) -> Session | None:
    """The talks with a set of ranks that have begun."""
    session = agreement.session_of(ranks) if len(ranks) > 1 and not agreement.nobody_to_ask() else None
    return session if session is not None and session.usable and session.token is not None else None


def _key(session: Session, planned: Planned) -> str:
    about = json.dumps([planned.about.profile_hash, planned.about.tune_file])
    return session.key("tuned", hashlib.blake2b(about.encode(), digest_size=12).hexdigest())
