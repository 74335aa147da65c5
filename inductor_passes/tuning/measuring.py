"""From the statement in a generated module to a report with measured times, and to a corrected cost profile.

:func:`loaded` starts a clock. When its last step is over, the tape goes to one thread of this process, which compares
it with the plan, exchanges it with the other ranks and writes the profile. Another thread plans again (``replanning``).
The program does not wait for these threads.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from inductor_passes import _torch, agreement
from inductor_passes.agreement.asking import within
from inductor_passes.agreement.board import Board, StoreError
from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.convert import convert, plain
from inductor_passes.report import Swap, SwapOutcome, Timing
from inductor_passes.trace import artifacts, collector
from inductor_passes.tuning import again, plan, record
from inductor_passes.tuning.clock import Clock
from inductor_passes.tuning.compare import timing
from inductor_passes.tuning.correct import corrected
from inductor_passes.tuning.exchange import Result, exchange
from inductor_passes.tuning.gathered import Gathered
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import Account, account, of_own_calls
from inductor_passes.tuning.replanning import TALK, TIMES, Replanning
from inductor_passes.tuning.settings import apart
from inductor_passes.tuning.tape import Tape
from inductor_passes.tuning.turnstile import Turnstile

log = logging.getLogger("inductor_passes")

#: What is to be done: (place in the order of work, number, title, the stage).
_Item: TypeAlias = tuple[int, int, str, Callable[[], None]]
#: A kind of connection, beside those for times and for talks.
_FILES = -1
#: How often it is looked whether graphs are still being timed.
_LOOK_S = 0.05
#: At the end of a process what is under way may take so long.
_LAST_S = 5.0
#: A rank whose program ends takes so long at most to tell the others.
_TELL_S = 2.0
#: Graphs that a message names.
_MOST_TITLES = 6
#: A compilation under way may take so long; after the shorter time it is said what the end waits for.
_LAST_COMPILATION_S, _SILENT_S = 120.0, 3.0


def statement(planned: Planned) -> str:
    """A Python statement for the end of a generated module, which times its first calls."""
    return (
        "__import__('inductor_passes.tuning.measuring', fromlist=['loaded'])"
        f".loaded(globals(), {plan.packed(planned)!r})"
    )


def loaded(module: dict[str, Any], text: str) -> None:
    """Called by a generated module when it has been loaded; never raises."""
    try:
        planned = plan.unpacked(text)
        if not again.catches(module, planned):
            _graphs.add(planned, _torch.compile_id(), module, again.take(text) if planned.about.swap else "")
    except Exception as error:
        log.warning("inductor_passes: a graph is not timed: %s: %s", type(error).__name__, error)


class _Graph:
    """A graph that is timed in this process.

    Attributes:
        number: how many graphs with this plan came before it; ``turn``: how many of this title.
        kept: what is needed to plan it again, or why there is nothing.
        turnstile: counts its calls once they are not timed any more.
        timing: what was measured of it.
    """

    def __init__(self, planned: Planned, compile_id: str, kept: again.Kept | str) -> None:
        self.planned = planned
        self.compile_id = compile_id
        self.number = self.turn = 0
        self.kept = kept
        self.turnstile: Turnstile | None = None
        self.timing: Timing | None = None

    @property
    def title(self) -> str:
        """For people."""
        about = self.planned.about
        return f"{about.phase}_{about.graph_index} [{self.compile_id}]"

    @property
    def name(self) -> str:
        """In the store."""
        return f"{self.planned.about.digest} {self.number}"


class _Graphs:
    """All graphs that are timed in this process, and the threads that work on what was timed.

    One exchanges times with the other ranks. The other plans again, compiles, and talks about calls (``replanning``).

    Attributes:
        gathered: what was measured so far, and the files that come of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        #: By whether it is for the thread that plans again.
        self._work: dict[bool, queue.PriorityQueue[_Item]] = {
            False: queue.PriorityQueue(),
            True: queue.PriorityQueue(),
        }
        self._count = itertools.count()
        self._threads: dict[bool, threading.Thread] = {}
        self._idle = threading.Condition(self._lock)
        #: What is to be done or being done, by its place in the order of work.
        self._waiting = collections.Counter[int]()
        self._ending = False
        #: Connections to the store: that for times, that for files, and that for talks about second plans.
        self._boards: dict[int, tuple[Board, Any]] = {}
        #: Graphs on their way to a second plan, by their titles.
        self._replanned: list[tuple[str, Replanning]] = []
        self.gathered = Gathered(
            _rank, lambda: self._connected(_FILES), _base, lambda base, found, others: corrected(base, found, others)
        )
        #: Of graphs whose calls are still being timed, by their names in the store: for how many calls, their titles.
        self._timed: dict[str, tuple[int, str]] = {}
        #: A clock that ended holds generated code.
        self._clocks: weakref.WeakSet[Clock] = weakref.WeakSet()

    def add(self, planned: Planned, compile_id: str, module: dict[str, Any], kept: again.Kept | str) -> None:
        """Start the clock of a graph."""
        with self._lock:
            graph = _Graph(planned, compile_id, kept)
            graph.number, graph.turn = self._next(planned.about.digest), self._next(graph.title)
        _latest[planned.about.digest, compile_id] = graph.number
        self.gathered.expect(planned)
        called = [call.name for call in planned.calls]

        def done(tape: Tape, why: str) -> None:
            self._timed.pop(graph.name, None)
            if planned.about.swap and not why and not isinstance(kept, str):
                with contextlib.suppress(ValueError):
                    graph.turnstile = Turnstile(module, planned.about.steps + 1)
            self._later(TIMES, graph.title, lambda: self._finished(graph, tape, why))

        self._look_for_thrown_away()
        if len(planned.about.participants) > 1:
            self._later(TIMES, graph.title, lambda: self._tell_settings(graph))
        clock = Clock(module, called, planned.about.steps, planned.about.device, done)
        with self._lock:
            self._clocks.add(clock)
        if _rank() in (planned.about.participants or (0,))[:1]:
            # One rank of the graph says it.
            atexit.unregister(self._tell_untimed)
            atexit.register(self._tell_untimed)
            self._timed[graph.name] = planned.about.steps, graph.title

    def _next(self, what: str) -> int:
        number = self._numbers.get(what, 0)
        self._numbers[what] = number + 1
        return number

    def _tell_untimed(self) -> None:
        """At the end of the process: graphs that did not run often enough, by the setting that asks for it."""
        by_steps: dict[int, list[str]] = {}
        for steps, title in self._timed.values():
            by_steps.setdefault(steps, []).append(title)
        self._timed.clear()
        for steps, titles in sorted(by_steps.items()):
            shown = ", ".join(titles[:_MOST_TITLES]) + (" and others" if len(titles) > _MOST_TITLES else "")
            log.warning(
                "inductor_passes: tune=%d: the program ended before these graphs had run %d times, so nothing is known "
                "of them: %s", steps, steps + 1, shown
            )

    def _later(self, order: int, title: str, run: Callable[[], None]) -> None:
        """Have something done in the background."""
        plans = order != TIMES
        with self._lock:
            self._waiting[order] += 1
            if not self._threads:
                atexit.register(self._close)
            if plans not in self._threads:
                name = "inductor_passes planning again" if plans else "inductor_passes tuning"
                self._threads[plans] = threading.Thread(target=self._run, args=(plans,), name=name, daemon=True)
                self._threads[plans].start()
        self._work[plans].put((order, next(self._count), title, run))

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is under way; False when that takes longer than ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._waiting.total(), timeout_s)

    def _settle(self, most_s: float) -> None:
        """Until all times that are there, or likely to come soon, are in the profile."""
        until = time.monotonic() + most_s
        with self._idle:
            while not self._ending and (left := until - time.monotonic()) > 0:
                if not self._waiting[TIMES] and not any(clock.running for clock in self._clocks):
                    return
                self._idle.wait(min(left, _LOOK_S))

    def _look_for_thrown_away(self) -> None:
        """A graph is loaded: after a reset that may be in the place of one whose agreed call does not come any more."""
        self._replanned = [(title, one) for title, one in self._replanned if not one.over]
        for title, one in self._replanned:
            self._later(TALK, title, one.look)

    def _close(self) -> None:
        """At the end of the process: nothing is swapped any more, and times that ranks exchange are given a moment.

        A compilation is told to stop and is not left in the middle: its threads and processes would outlive the
        interpreter, and a thread that comes back to an interpreter which is gone crashes.
        """
        self._ending = True
        again.ending.set()
        self._tell_ended()
        if TALK in self._boards:
            self._boards[TALK][0].closed = again.ENDED
        self._wait_for_lowering()
        if self.gathered.pause_s is not None:
            self._later(TIMES, "what other ranks measured", self._look)
        with self._idle:
            self._idle.wait_for(lambda: not self._waiting[TIMES], _LAST_S)
        for board, _ in list(self._boards.values()):
            board.closed = again.ENDED
        self.wait(1.0)

    def _tell_ended(self) -> None:
        """Graphs whose second plan was on its way, each with one sentence; one rank of the graph says it."""
        tell = []
        for title, one in self._replanned:
            said, others = one.end_with_program()
            if said and one.session.rank == one.session.ranks[0]:
                log.warning("inductor_passes: tune_swap: %s planned again: %s", title, said)
            tell.append(others)
        # So that they do not wait for this one. The store may have ended before this program.
        within(lambda: [others() for others in tell], _TELL_S)

    def _lowering(self) -> str:
        """The graph that is being compiled, "" where none is."""
        return next((title for title, one in self._replanned if one.lowering), "")

    def _wait_for_lowering(self) -> None:
        with self._idle:
            if self._idle.wait_for(lambda: not self._lowering(), _SILENT_S):
                return
            left = _LAST_COMPILATION_S - _SILENT_S
            print(
                f"inductor_passes: tune_swap: the program's end waits for the compilation of {self._lowering()} in the "
                f"background, for at most {left:g} s more: torch cannot be left in the middle of it",
                file=sys.stderr,
                flush=True,
            )
            self._idle.wait_for(lambda: not self._lowering(), left)

    def _run(self, plans: bool) -> None:
        while True:
            try:
                order, _, title, run = self._work[plans].get(timeout=None if plans else self.gathered.pause_s)
            except queue.Empty:
                self._look()
                continue
            try:
                # What is left of talks and compilations when the program ends nobody can use.
                if order == TIMES or not self._ending:
                    run()
            except Exception as error:
                log.warning("inductor_passes: %s was not timed: %s: %s", title, type(error).__name__, error)
            with self._idle:
                self._waiting[order] -= 1
                self._idle.notify_all()

    def _look(self) -> None:
        """Whether other ranks left something, while there is nothing else to do."""
        try:
            self.gathered.look()
        except Exception as error:  # the store may be gone, or the folder
            self.gathered.end_looks()
            log.debug("what other ranks measured is not looked for any more: %s", error)

    def _tell_settings(self, graph: _Graph) -> None:
        """So that nobody has to wait for this rank to know them."""
        self._apart(graph)

    def _apart(self, graph: _Graph) -> dict[str, str]:
        """Settings of tuning that differ between a graph's ranks, each with a sentence; does not wait."""
        about = graph.planned.about
        session = agreement.session_of(about.participants) if len(about.participants) > 1 else None
        if session is None or not session.usable or agreement.nobody_to_ask():
            return {}
        try:
            board = self._connected(TIMES)
            if not session.open(board.clock.now()):
                return {}
            mine = {"tune": str(about.steps), "tune_swap": "on" if about.swap else "off"}
            return apart(session, board, graph.name, mine)
        except Exception as error:  # the exchange of times says what is wrong with the store
            log.debug("settings are not compared: %s", error)
            return {}

    def _finished(self, graph: _Graph, tape: Tape, why: str) -> None:
        try:
            replanned = self._finish(graph, tape, why)
        except Exception:
            _over(graph)
            raise
        if not replanned:
            _over(graph)

    def _finish(self, graph: _Graph, tape: Tape, why: str) -> bool:
        """From a tape to the report; whether the graph goes on to a second plan."""
        planned, rank = graph.planned, _rank()
        mine = why or record.record_of(planned, tape.steps(), rank)
        if isinstance(mine, str):
            log.warning("inductor_passes: %s was not timed: %s", graph.title, mine)
            return False
        own = account(planned, [mine])
        _publish(graph, timing(planned, own), rank)
        # Ranks that time other numbers of steps have nothing to put together, and need not wait for each other.
        differs = self._apart(graph)
        result = Result(None, differs["tune"]) if "tune" in differs else self._taken(
            planned, graph.name, mine, self._with_profile(planned), f"{graph.title} {graph.turn}"
        )
        differs = self._apart(graph)
        if result.content is None:
            why = differs.get("tune", result.why)
            log.warning("inductor_passes: no cost profile comes of timing %s: %s", graph.title, why)
            _publish(graph, timing(planned, own, f"no cost profile was written: {why}"), rank)
            if "tune" in differs and planned.about.swap:
                _publish_swap(graph, Swap(SwapOutcome.NOTHING, why), rank)
            return False
        found = self._enter(graph, result.content, rank)
        if "tune_swap" in differs:
            log.warning("inductor_passes: %s is not planned again: %s", graph.title, differs["tune_swap"])
            _publish_swap(graph, Swap(SwapOutcome.NOTHING, differs["tune_swap"]), rank)
            return False
        return planned.about.swap and self._replan(graph, found, rank)

    def _enter(self, graph: _Graph, content: dict[str, Any], rank: int) -> Account:
        """Write what all ranks measured of a graph, and put it into the report; as it stands for this rank's calls."""
        planned = graph.planned
        found = convert(content["account"], Account, "an account")
        found = of_own_calls(found, tuple(map(str, content["calls"])), planned)
        profile = CostProfile.from_json(content["profile"])
        path, note, unsaved = _saved(self.gathered, planned, found, profile)
        if unsaved:
            log.warning("inductor_passes: %s was timed, and %s", graph.title, unsaved)
        else:
            log.info("inductor_passes: %s was timed; cost profile %s in %s", graph.title, profile.hash(), path)
        notes = [one for one in (unsaved, note, *content["untold"]) if one]
        entered = timing(planned, found, "; ".join(notes), path, profile.hash())
        swap = None if graph.timing is None else graph.timing.swap
        _publish(graph, dataclasses.replace(entered, swap=swap), rank)
        return found

    def _replan(self, graph: _Graph, found: Account, rank: int) -> bool:
        """Have the graph planned again with what was measured, where that concerns several ranks."""
        planned = graph.planned
        session = agreement.session_of(planned.about.participants)
        if session is None or len(planned.about.participants) == 1:
            _publish_swap(graph, Swap(SwapOutcome.NOTHING, "the graph concerns one rank alone"), rank)
            return False
        replanning = Replanning(
            planned,
            graph.name,
            graph.kept,
            graph.turnstile,
            session,
            connect=lambda: self._connected(TALK),
            connect_apart=_connection,
            later=lambda order, run: self._later(order, graph.title, run),
            publish=lambda swap: _publish_swap(graph, swap, rank),
            measure=self._measured_again,
            measure_first=lambda tape, name: self._measured_first(graph, tape, name),
            write=lambda made: self.gathered.add_plan(planned, made),
            profile=lambda: self.gathered.profile(planned),
            before_ns=found.step_ns,
            settle=self._settle,
        )
        self._replanned = [*self._replanned, (graph.title, replanning)]
        replanning.begin()
        graph.kept = "it is over"
        return True

    def _measured_again(self, planned: Planned, tape: Tape, name: str) -> int | str:
        """The slowest rank's step of a second plan, the same on all ranks; else why it is not known."""
        mine = record.record_of(planned, tape.steps(), _rank())
        if isinstance(mine, str):
            return mine

        def combine(records: Mapping[int, bytes]) -> Any:
            return account(planned, [record.unpacked(data) for data in records.values()]).step_ns

        result = self._taken(planned, name, mine, combine)
        return result.why if result.content is None else int(result.content)

    def _measured_first(self, graph: _Graph, tape: Tape, name: str) -> int | str:
        """The same for the first plan, timed once more: these times count in the place of those of its first steps."""
        planned, rank = graph.planned, _rank()
        mine = record.record_of(planned, tape.steps(), rank)
        if isinstance(mine, str):
            return mine
        result = self._taken(planned, name, mine, self._with_profile(planned))
        return result.why if result.content is None else self._enter(graph, result.content, rank).step_ns

    def _with_profile(self, planned: Planned) -> Callable[[Mapping[int, bytes]], Any]:
        def combine(records: Mapping[int, bytes]) -> Any:
            found = account(planned, [record.unpacked(data) for data in records.values()])
            return {
                "account": plain(found),
                "calls": planned.kinds,
                "profile": self.gathered.profile(planned, found).to_json(),
                "untold": self.gathered.untold(planned, found),
            }

        return combine

    def _taken(
        self,
        planned: Planned,
        name: str,
        mine: record.Record,
        combine: Callable[[Mapping[int, bytes]], Any],
        title: str = "",
    ) -> Result:
        """What comes of all ranks' records; where nothing does, what is known of this rank stays, with the reason."""
        try:
            return self._exchanged(planned.about, name, mine, combine, title)
        except Exception as error:
            return Result(None, f"{type(error).__name__}: {error}")

    def _exchanged(
        self,
        about: plan.About,
        name: str,
        mine: record.Record,
        combine: Callable[[Mapping[int, bytes]], Any],
        title: str,
    ) -> Result:
        if about.participants == (mine.rank,):
            return Result(combine({mine.rank: record.packed(mine)}))
        if agreement.nobody_to_ask():
            return Result(None, "this process group moves nothing")
        session = agreement.session_of(about.participants) if about.participants else None
        if session is None or not session.usable:
            return Result(None, "the ranks are not known to have the same graph")
        if _torch.default_store() is None:
            return Result(None, "there is no default process group with a store")
        return exchange(session, self._connected(TIMES), name, record.packed(mine), combine, about.timeout_s, title)

    def _connected(self, what: int) -> Board:
        """The connection to the store for one kind of work, one for the life of the process group.

        Talks have one of their own, which the program's end can close while times are still exchanged.
        """
        place = _torch.default_store()
        store = None if place is None else place[1]
        if what not in self._boards or store is None or self._boards[what][1] is not store:
            self._boards[what] = _connection(), store
        board = self._boards[what][0]
        if self._ending and what == TALK:
            board.closed = again.ENDED
        return board


def finished(timeout_s: float = 60.0) -> bool:
    """Wait until all that was timed so far is in its report; False when that takes longer than ``timeout_s``."""
    return _graphs.wait(timeout_s)


def _base(planned: Planned) -> CostProfile:
    """The profile that the graph was planned with.

    Raises:
        ValueError: it is another one now.
    """
    about = planned.about
    name, kind = _torch.accelerator()
    base = (
        CostProfile.load(about.profile_path) if about.profile_path else CostProfile.default(name, device_type=kind)
    )
    if base.hash() != about.profile_hash:
        name = about.profile_path or base.name
        raise ValueError(f"the cost profile {name} is another one than the graph was planned with")
    return base


def _rank() -> int:
    return _torch.process_rank() if _torch.default_store() is not None else 0


def _connection() -> Board:
    place = _torch.default_store()
    if place is None:
        raise StoreError("there is no default process group any more")
    return Board(_torch.reconnected(place[1]))


#: (digest, compile id) -> the number of the graph that was compiled last of those: numbers begin anew after a reset.
_latest: dict[tuple[str, str], int] = {}


def _over(graph: _Graph) -> None:
    """The code of the graph stays what it is."""
    graph.kept = "it is over"
    if graph.turnstile is not None:
        graph.turnstile.end()


def _saved(gathered: Gathered, planned: Planned, found: Account, profile: CostProfile) -> tuple[str, str, str]:
    """The path of the written profile, and a sentence where another rank writes it; "" where it cannot be written, and
    why."""
    try:
        return *gathered.add(planned, found, profile), ""
    except StoreError as error:
        return "", "", f"what was measured cannot be left for rank 0: {error}"
    except OSError as error:
        name = planned.about.tune_file
        where = f"tune_file={name!r}" if name else "the folder of Inductor's caches"
        return "", "", f"the cost profile cannot be written to {where}: {type(error).__name__}: {error}"


def _publish(graph: _Graph, found: Timing, rank: int) -> None:
    about = graph.planned.about
    graph.timing = found
    if _latest.get((about.digest, graph.compile_id)) == graph.number:
        collector.amend(about.digest, graph.compile_id, found)
    artifacts.emit_timing(about.phase, about.graph_index, graph.compile_id, rank, found)


def _publish_swap(graph: _Graph, swap: Swap, rank: int) -> None:
    said = f": {swap.why}" if swap.why else ""
    log.info("inductor_passes: %s planned again, %s%s", graph.title, swap.outcome.value, said)
    assert graph.timing is not None
    _publish(graph, dataclasses.replace(graph.timing, swap=swap), rank)


_graphs = _Graphs()
