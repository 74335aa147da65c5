"""A graph that was timed is planned again, swapped in on all ranks, measured, and swapped back where it is not faster.

A program's first steps, in which the first plan was timed, are slower than later ones. So the first plan is timed once
more in the calls right before the second one comes into use.

Background threads run the stages, each to its end; the program's own thread only counts calls and votes. One thread
exchanges times: a compilation may take minutes, and another rank waits for this one's times for seconds. The other
compiles first, and then talks about calls: while new code is measured this process compiles nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from inductor_passes.agreement.board import Board, ClosedError, StoreError
from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.errors import MeantError
from inductor_passes.report import Swap, SwapOutcome
from inductor_passes.tuning import again
from inductor_passes.tuning.again import Kept, New, UnfitError
from inductor_passes.tuning.clock import Clock
from inductor_passes.tuning.exchange import Talks
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.swap import Decision, Place, Ready, Vote, agreed_call
from inductor_passes.tuning.tape import Tape
from inductor_passes.tuning.turnstile import Turnstile

log = logging.getLogger("inductor_passes")

#: Order of work in the background: what was timed, compilations, talks about calls.
TIMES, COMPILE, TALK = range(3)
#: How often ranks look for a call that all have before them.
_TRIES = 3
#: Ranks wait for so many times ``rank_agreement`` that another one gets ready, and for so many times as long as it took
#: this one; at a call for so large a share of it: who is asked about another graph meanwhile still answers in time.
_PATIENCE, _TOOK, _AT_CALL = 3.0, 2.0, 0.5
_SAME = "the corrected profile gives the same plan"
_OLD = "the first plan was timed in the program's first steps only"
THROWN_AWAY = "torch threw the graph's code away meanwhile, as torch._dynamo.reset() does"


@dataclass
class Replanning:
    """One graph on its way.

    Attributes:
        planned: the first plan.
        name: of the graph in the store.
        kept: what is needed to plan again, or why there is nothing.
        turnstile: None where the calls of the graph cannot be counted.
        connect: to the store, for the background thread.
        connect_apart: another connection, for the program's own thread.
        later: puts a stage into the background thread's queue: (its place in the order, the stage).
        publish: enters what became of it into the report.
        measure: the times of the second plan's calls, put together by all ranks: the slowest rank's step in ns, or why
            there is none. ``measure_first``: the same for the first plan's last ones.
        write: writes the faster plan; the path of the file, and a sentence where there is none.
        profile: the newest corrected cost profile; asked on the first rank of the set.
        before_ns: the first plan's step on the slowest rank, as it was timed last.
        settle: waits until other graphs that are being timed are in the profile, for so many seconds at most.
        swap: what became of it so far.
        new: the second plan, once it is compiled, which took ``took_s`` seconds.
        in_use: whether it runs.
        over: nothing is changed any more.
        lowering: the graph is being compiled right now, which nothing can interrupt.
    """

    planned: Planned
    name: str
    kept: Kept | str
    turnstile: Turnstile | None
    session: Talks
    connect: Callable[[], Board]
    connect_apart: Callable[[], Board]
    later: Callable[[int, Callable[[], None]], None]
    publish: Callable[[Swap], None]
    measure: Callable[[Planned, Tape, str], int | str]
    measure_first: Callable[[Tape, str], int | str]
    write: Callable[[dict[str, Any]], tuple[str, str]]
    profile: Callable[[], CostProfile]
    before_ns: int
    settle: Callable[[float], None] = lambda most_s: None
    swap: Swap = field(default_factory=lambda: Swap(SwapOutcome.NOTHING))
    new: New | None = None
    took_s: float = 0.0
    in_use: bool = False
    over: bool = False
    lowering: bool = False
    #: The first plan's last times before the change, or why there are none.
    _first: tuple[Tape, str] | None = None
    #: Why there can be no file of its plans.
    _unwritten: str = ""
    #: Why an earlier try came to nothing, "" where there was none.
    _tried: str = ""
    #: What it is doing, for the sentence about a program that ends meanwhile.
    _doing: str = "waited to be planned again"
    #: The talk that it came to last: round and attempt.
    _at: tuple[int, int] = (0, 0)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def begin(self) -> None:
        """The ranks have one account of the first plan."""
        self.swap = replace(self.swap, before_ns=self.before_ns)
        self.later(COMPILE, self._stage(self._compile))

    def _stage(self, run: Callable[[], None]) -> Callable[[], None]:
        """A stage whose failure ends it: what runs now stays."""

        def guarded() -> None:
            if self.over:
                return
            try:
                run()
            except ClosedError as error:
                self._end(str(error))
            except Exception as error:  # a better plan must never stop a program
                log.debug("a second plan ended", exc_info=True)
                store = "the process group's store cannot be used" if isinstance(error, StoreError) else ""
                self._end(f"{store or type(error).__name__}: {error}")

        return guarded

    def end_with_program(self) -> tuple[str, Callable[[], None]]:
        """The program ends: what is to be said of it, "" where all was said before, and what tells the other ranks."""
        with self._lock:
            if self.over:
                return "", lambda: None
            why = self._not_done()
            vote = None if self.turnstile is None else self.turnstile.disarm()
            self._end(why)
        return f"{self.swap.outcome.value}: {self.swap.why}", lambda: self._tell(vote, again.ENDED)

    def _not_done(self) -> str:
        call, turnstile = self.swap.call, self.turnstile
        if turnstile is not None and turnstile.discarded():
            return THROWN_AWAY
        if self.swap.outcome is SwapOutcome.AGREED and turnstile is not None:
            ran = f"the graph had run {turnstile.count} times, the last time {turnstile.idle_s():.1f} s before"
            return f"{again.ENDED} before call {call}: {ran}"
        if self.new is not None and self.new.planned is None:
            # Its plan is written: this rank knows it.
            return f"{_SAME}; {again.ENDED} before the other ranks said so"
        return f"{again.ENDED} while it {self._doing}"

    def _tell(self, vote: Vote | None, why: str) -> None:
        """That this rank does not change, at the talk that it came to last."""
        try:
            if vote is not None:
                vote.refuse(why)
            else:
                agreed_call(self._place(self.connect_apart(), *self._at), Ready(why), lambda: 0, 0.0)
        except Exception:  # nobody may be there any more
            log.debug("the other ranks are not told why this one does not change", exc_info=True)

    def look(self) -> None:
        """End it where torch has thrown the graph's code away: the agreed call does not come."""
        with self._lock:
            if self.over or self.swap.outcome is not SwapOutcome.AGREED or self.turnstile is None:
                return
            if not self.turnstile.discarded():
                return
            vote = self.turnstile.disarm()
            self._end(THROWN_AWAY)
        self._tell(vote, THROWN_AWAY)

    def _compile(self) -> None:
        self.settle(self.planned.about.timeout_s)
        if self.over:
            return
        self._doing = "was planned and compiled again"
        began = time.monotonic()
        why = self._compiled()
        self.took_s = time.monotonic() - began
        self.later(TALK, self._stage(lambda: self._talk(0, 0, why)))

    def _compiled(self) -> str:
        """Plan and compile; "" when that is done, else why not."""
        why = "" if self.turnstile is not None else "the calls of the generated code cannot be counted"
        why = self.kept if isinstance(self.kept, str) else why
        # The others wait for the first rank's profile, whether or not it can go on itself.
        profile = self._shared_profile() if not why or self.session.rank == self.session.ranks[0] else ""
        if isinstance(profile, str) or isinstance(self.kept, str) or why:
            return why or str(profile)
        try:
            self.lowering = True
            self.new = self.kept.compile(profile)
        except UnfitError as error:
            return str(error)
        except Exception as error:
            log.debug("compiling a second plan failed", exc_info=True)
            return f"compiling it failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            self.lowering = False
        planned, self._unwritten = self.new.planned, self.new.unwritten
        if planned is None:
            return _SAME
        self.swap = replace(self.swap, predicted_ns=planned.timeline.makespan_ns, peak_bytes=self.new.peak_bytes)
        return ""

    def _shared_profile(self) -> CostProfile | str:
        """The first rank's, which may have been corrected by other graphs meanwhile."""
        place = self._place(self.connect(), "profile")
        key, board = place.key("profile"), place.board
        if self.session.rank == self.session.ranks[0]:
            return CostProfile.from_json(json.loads(board.put_once(key, json.dumps(self.profile().to_json()))))
        deadline = board.clock.now() + self._patience_s
        if not board.until(lambda: board.has([key]) or None, deadline):
            return f"rank {self.session.ranks[0]} named no cost profile"
        return CostProfile.from_json(json.loads(board.read([key])[0]))

    @property
    def _patience_s(self) -> float:
        return _PATIENCE * self.planned.about.timeout_s + _TOOK * self.took_s

    def _place(self, board: Board, *parts: object) -> Place:
        return Place(self.session, board, " ".join(map(str, (self.name, *parts))))

    def _talk(self, round_: int, attempt: int, why: str) -> None:
        """Look for a call at which all ranks change: in round 0 to the second plan, in round 1 back.

        Args:
            why: this rank cannot; "" where it can.
        """
        turnstile, new = self.turnstile, self.new
        self._at = round_, attempt
        self._tried = self._tried if attempt else ""
        self._doing = (
            "ran with the second plan, before that was known to be faster"
            if round_
            else ("waited for the other ranks to be ready")
        )
        place = self._place(self.connect(), round_, attempt)
        mine = Ready(why, "" if new is None else new.digest)
        # One call to warm up, as for the second plan.
        timed = 0 if round_ else self.planned.about.steps + 1
        ahead = (lambda: 0) if turnstile is None else (lambda: turnstile.ahead(attempt, timed))
        call, refused = agreed_call(place, mine, ahead, self._patience_s)
        if why == _SAME and refused.endswith(why):
            # So it is here, and the rank that said it first is no special one.
            refused = why
        if not call or turnstile is None or new is None:
            self._end(f"{self._tried}; tried again: {refused}" if self._tried else refused)
            return
        kept = self.kept
        assert not isinstance(kept, str)
        vote = Vote(
            self._place(self.connect_apart(), round_, attempt),
            max(1.0, _AT_CALL * self.planned.about.timeout_s),
            lambda: turnstile.broken or kept.conflict(),
            kept.place,
        )
        if not round_:
            self._say(SwapOutcome.AGREED, call=call)
        to = None if round_ else new.call
        if self.over:
            self._tell(vote, again.ENDED)
            return
        early = timed, lambda: self._time_first(turnstile)
        turnstile.arm(call, vote, to, lambda found: self._decided(round_, attempt, call, found), early)

    def _decided(self, round_: int, attempt: int, call: int, found: Decision) -> None:
        """At the call, on the program's thread, before the graph runs."""
        new = self.new
        assert new is not None
        if found.yes:
            self.in_use = not round_
            self._doing = "was timed with the second plan"
            new.use(not round_)
            if not round_:
                self._time(new)
        self.later(TALK, self._stage(lambda: self._after(round_, attempt, call, found)))

    def _time_first(self, turnstile: Turnstile) -> None:
        """Start the clock of the first plan once more."""

        def taken(tape: Tape, why: str) -> None:
            self._first = tape, why

        self._first = None
        self._start(self.planned, turnstile.module, taken, turnstile.own())

    def _time(self, new: New) -> None:
        """Start the clock of the second plan."""
        assert new.planned is not None
        self._start(new.planned, new.module, self._timed)

    @staticmethod
    def _start(
        planned: Planned,
        module: dict[str, Any],
        done: Callable[[Tape, str], None],
        function: types.FunctionType | None = None,
    ) -> None:
        names = [one.name for one in planned.calls]
        try:
            Clock(module, names, planned.about.steps, planned.about.device, done, function)
        except ValueError as error:
            done(Tape(1), str(error))

    def _timed(self, tape: Tape, why: str) -> None:
        self.later(TIMES, self._stage(lambda: self._compare(tape, why)))

    def _after(self, round_: int, attempt: int, call: int, found: Decision) -> None:
        """In the background, when the ranks have decided."""
        if found.late and attempt + 1 < _TRIES:
            # A rank that does not come at all does not get ready either: no call is waited at for it twice.
            self._tried = found.why
            self._talk(round_, attempt + 1, "")
        elif not found.yes:
            self._end(found.why)
        elif round_:
            assert self.new is not None
            first, measured = self.new.before, bool(self.swap.after_ns)
            self._say(SwapOutcome.RETURNED, back=call)
            self._done()
            if measured:
                # With the corrected profile alone the next run would plan again what was found slower.
                self._write(first)
        elif self.swap.outcome is SwapOutcome.AGREED:
            self._say(SwapOutcome.SWAPPED, call=call)

    def _compare(self, tape: Tape, why: str) -> None:
        """Whether the second plan's steps are faster than the first one's."""
        assert self.new is not None and self.new.planned is not None
        missed = self._measure_first()
        after = why or self.measure(self.new.planned, tape, f"{self.name} again")
        if isinstance(after, str):
            self._say(SwapOutcome.SWAPPED, why=f"its steps are not known: {after}")
        else:
            self._say(SwapOutcome.SWAPPED, before_ns=self.before_ns, after_ns=after, why=missed)
            if after < self.before_ns:
                plan = self.new.plan
                self._say(SwapOutcome.KEPT)
                self._done()
                self._write(plan)
                return
        self.later(TALK, self._stage(lambda: self._talk(1, 0, "")))

    def _measure_first(self) -> str:
        """Put the ranks' last times of the first plan together; why its first steps count, "" where they do not."""
        if self._first is None:
            return f"{_OLD}: its clock did not come to an end"
        tape, why = self._first
        self._first = None
        again = why or self.measure_first(tape, f"{self.name} before")
        if isinstance(again, str):
            return f"{_OLD}: {again}"
        self.before_ns = again
        return ""

    def _write(self, plan: dict[str, Any]) -> None:
        """Write the faster plan behind the last word."""
        made = self._written(plan)
        self._publish(self.swap.outcome, plan=made["plan"], why=_joined(self.swap.why, made["why"]))

    def _written(self, plan: dict[str, Any]) -> dict[str, str]:
        if self._unwritten:
            return {"plan": "", "why": self._unwritten}
        try:
            path, why = self.write(plan)
            return {"plan": path, "why": why}
        except (OSError, ValueError, MeantError) as error:
            return {"plan": "", "why": f"the plan cannot be written: {error}"}

    def _end(self, why: str) -> None:
        """Nothing is changed any more."""
        with self._lock:
            if self.over:
                return
            said = _joined(self.swap.why, why)
            if self.in_use:
                self._say(SwapOutcome.UNMEASURED, why=said)
            else:
                # What this rank knows of a plan that is not used the others may not know.
                made = {"plan": "", "why": ""}
                if self.new is not None and self.new.planned is None:
                    made = self._written(self.new.before)
                said = _joined(said, made["why"])
                self._say(SwapOutcome.NOTHING, why=said, call=0, predicted_ns=0, peak_bytes=0, plan=made["plan"])
            self._done()

    def _done(self) -> None:
        self.over = True
        if self.turnstile is not None:
            self.turnstile.end()
        self.kept, self._first = "it is over", None
        if not self.in_use:
            self.new = None

    def _say(self, outcome: SwapOutcome, **more: Any) -> None:
        """Enter how far it came, unless the last word was said."""
        with self._lock:
            if not self.over:
                self._publish(outcome, **more)

    def _publish(self, outcome: SwapOutcome, **more: Any) -> None:
        self.swap = replace(self.swap, outcome=outcome, **more)
        self.publish(self.swap)


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))
