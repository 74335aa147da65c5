"""From the statement in a generated module to a report with measured times, and to a corrected cost profile.

:func:`loaded` starts a clock. When its last step is over, the tape goes to one thread of this process, which compares
it with the plan, exchanges it with the other ranks and writes the profile. The program does not wait for that thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inductor_passes import _torch, agreement
from inductor_passes.agreement.board import Board
from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.convert import convert, plain
from inductor_passes.report import Timing
from inductor_passes.trace import artifacts, collector
from inductor_passes.tuning import plan, record
from inductor_passes.tuning.clock import Clock
from inductor_passes.tuning.compare import timing
from inductor_passes.tuning.correct import corrected
from inductor_passes.tuning.exchange import Result, exchange
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.reconcile import Account, account
from inductor_passes.tuning.tape import Tape

log = logging.getLogger("inductor_passes")

#: At the end of a process what is under way may take so long.
_LAST_S = 5.0


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
        _graphs.add(planned, _torch.compile_id(), module)
    except Exception as error:
        log.warning("inductor_passes: a graph is not timed: %s: %s", type(error).__name__, error)


class _Graph:
    """A graph that is timed in this process."""

    def __init__(self, planned: Planned, compile_id: str, number: int) -> None:
        self.planned = planned
        self.compile_id = compile_id
        self.number = number

    @property
    def title(self) -> str:
        """For people."""
        about = self.planned.about
        return f"{about.phase}_{about.graph_index} [{self.compile_id}]"


class _Graphs:
    """All graphs that are timed in this process, and the thread that works on what was timed.

    Attributes:
        accounts: on the first of a graph's ranks, what was measured so far, in order of the exchanges; by what must be
            equal for one cost profile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._work: queue.SimpleQueue[tuple[_Graph, Tape, str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition(self._lock)
        self._waiting = 0
        self._board: Board | None = None
        self.accounts: dict[tuple[object, ...], list[tuple[Planned, Account]]] = {}

    def add(self, planned: Planned, compile_id: str, module: dict[str, Any]) -> None:
        """Start the clock of a graph."""
        with self._lock:
            number = self._numbers.get(planned.about.digest, 0)
            self._numbers[planned.about.digest] = number + 1
        graph = _Graph(planned, compile_id, number)
        called = [call.name for call in planned.calls]
        Clock(module, called, planned.about.steps, planned.about.device, lambda t, why: self._put(graph, t, why))

    def _put(self, graph: _Graph, tape: Tape, why: str) -> None:
        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inductor_passes tuning", daemon=True)
                self._thread.start()
                atexit.register(self._close)
        self._work.put((graph, tape, why))

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is under way; False when that takes longer than ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._waiting, timeout_s)

    def _close(self) -> None:
        """At the end of the process: what is under way is given a moment, and then the store is left alone."""
        if not self.wait(_LAST_S) and self._board is not None:
            self._board.closed = True
            self.wait(1.0)

    def _run(self) -> None:
        while True:
            graph, tape, why = self._work.get()
            try:
                self._finish(graph, tape, why)
            except Exception as error:
                log.warning("inductor_passes: %s was not timed: %s: %s", graph.title, type(error).__name__, error)
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _finish(self, graph: _Graph, tape: Tape, why: str) -> None:
        planned, rank = graph.planned, _torch.process_rank() if _torch.default_store() is not None else 0
        mine = why or record.record_of(planned, tape.steps(), rank)
        if isinstance(mine, str):
            log.warning("inductor_passes: %s was not timed: %s", graph.title, mine)
            return
        own = account(planned, [mine])
        _publish(graph, timing(planned, own), rank)
        try:
            result = self._exchanged(graph, mine)
        except Exception as error:  # what is known of this rank stays, with the reason why there is no more
            result = Result(None, f"{type(error).__name__}: {error}")
        if result.content is None:
            log.warning("inductor_passes: no cost profile comes of timing %s: %s", graph.title, result.why)
            _publish(graph, timing(planned, own, f"no cost profile was written: {result.why}"), rank)
            return
        found = convert(result.content["account"], Account, "an account")
        profile = CostProfile.from_json(result.content["profile"])
        path = _save(planned, profile, rank)
        log.info("inductor_passes: %s was timed; cost profile %s in %s", graph.title, profile.hash(), path)
        _publish(graph, timing(planned, found, "", path, profile.hash()), rank)

    def _exchanged(self, graph: _Graph, mine: record.Record) -> Result:
        about = graph.planned.about

        def combine(records: Mapping[int, bytes]) -> Any:
            found = account(graph.planned, [record.unpacked(data) for data in records.values()])
            kind = about.participants, about.profile_hash, about.tune_file
            everything = [*self.accounts.get(kind, ()), (graph.planned, found)]
            profile = corrected(_base(graph.planned), everything).to_json()
            self.accounts[kind] = everything
            return {"account": plain(found), "profile": profile}

        if about.participants == (mine.rank,):
            return Result(combine({mine.rank: record.packed(mine)}))
        if agreement.nobody_to_ask():
            return Result(None, "this process group moves nothing")
        session = agreement.session_of(about.participants) if about.participants else None
        if session is None or not session.usable:
            return Result(None, "the ranks are not known to have the same graph")
        place = _torch.default_store()
        if place is None:
            return Result(None, "there is no default process group with a store")
        self._board = board = Board(_torch.reconnected(place[1]))
        name = f"{about.digest} {graph.number}"
        return exchange(session, board, name, record.packed(mine), combine, about.timeout_s)


_graphs = _Graphs()


def finished(timeout_s: float = 60.0) -> bool:
    """Wait until all that was timed so far is in its report; False when that takes longer than ``timeout_s``."""
    return _graphs.wait(timeout_s)


def _base(planned: Planned) -> CostProfile:
    """The profile that the graph was planned with.

    Raises:
        ValueError: it is another one now.
    """
    about = planned.about
    base = CostProfile.load(about.profile_path) if about.profile_path else CostProfile.default(about.device)
    if base.hash() != about.profile_hash:
        name = about.profile_path or base.name
        raise ValueError(f"the cost profile {name} is another one than the graph was planned with")
    return base


def _publish(graph: _Graph, found: Timing, rank: int) -> None:
    about = graph.planned.about
    collector.amend(about.digest, graph.compile_id, found)
    artifacts.emit_timing(about.phase, about.graph_index, graph.compile_id, rank, found)


def _save(planned: Planned, profile: CostProfile, rank: int) -> str:
    """Write the profile: the first rank of the graph, and one rank of every other host; its path."""
    about = planned.about
    path = Path(about.tune_file or Path(_torch.compile_cache_dir()) / "inductor_passes" / "tuned.json")
    if len(about.participants) != _torch.rank_and_world_size()[1]:
        # Parts of a program whose ranks compile different graphs measure different things.
        path = path.with_name(f"{path.stem}.ranks{about.participants[0]}_{about.participants[-1]}{path.suffix}")
    if rank == about.participants[0] or os.environ.get("LOCAL_RANK") == "0":
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(partial.unlink, missing_ok=True)
            profile.save(partial)
            os.replace(partial, path)
    return str(path)
