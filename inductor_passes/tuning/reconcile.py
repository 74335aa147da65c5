"""One account of what several ranks measured of a graph.

Of a collective the ranks know when they had issued it and, where they stood still in its wait, when it ended. On one
clock (``align``) it began when its last member had issued it and its members' links were free, so what a rank waited
for a late peer is told apart from what the transfer took. A link serves in order of issue what all members have issued;
what waits for a late peer lets others by. Where a stall shows when one transfer ended, it and those served before it
whose end nobody saw filled the link together and share that time as they were predicted to. A transfer whose end nobody
saw took at most until its first wait returned.

A call is charged with the time since the call before it, in which the host prepared it, and a collective with what its
waits cost where nobody stands still. So kernels, issues and stalls add up to the step.

All quantities are medians over steps; of the ranks the slowest counts for steps, and their mean for everything else.

Where shards are uneven a rank has kernels of its own, which pad: kernels are those that all ranks have.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from inductor_passes.cost.fit import spread
from inductor_passes.operators import GROUP_KINDS
from inductor_passes.tuning.align import Member, offsets
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.record import Record, matched

#: A wait up to this long, in ns, is the cost of asking. So is one up to so many times what asking costs: half of the
#: collectives that are hidden by the plan wait no longer, if that is no more than the last of these; else the shortest
#: wait of the graph, if it is so many times shorter than the longest.
_WAIT_NS, _TIMES, _SHORTER, _LONGEST_NS = 50_000, 3, 20, 300_000
#: Who begins to wait this many times longer after the predicted end than the wait takes has not seen the end: that it
#: came in just this moment is less likely than that only the wait cost so much.
_AFTER = 3
#: Of which all members need each other.
_JOINT = tuple(kind for kind in GROUP_KINDS if kind != "broadcast")

#: How a transfer's time is known.
MEASURED, SHARED, AT_MOST, UNKNOWN = "measured", "shared", "at most", ""


@dataclass(frozen=True)
class Transfer:
    """What the ranks measured of one collective, in ns.

    Attributes:
        transfer_ns: on the link; ``known`` says how (``measured``, ``shared`` with others, ``at most``, "").
        among: how many transfers a measured time was divided among.
        spread_ns: standard deviation of a measured time over the steps; negative where one step tells none.
        skew_ns: from the first member's start to the last one's; ``late`` is the rank that came last most often, -1
            where that is not known.
        issue_ns: that the host took to issue it.
        stall_ns: that ranks stood still in its waits; ``for_peer_ns`` of it before the last member had issued it.
    """

    transfer_ns: int
    known: str
    among: int
    skew_ns: int
    late: int
    issue_ns: int
    stall_ns: int
    for_peer_ns: int
    spread_ns: int = -1


@dataclass(frozen=True)
class Kernel:
    """A call that computes.

    Attributes:
        measured_ns: mean time over the ranks.
        beside: on some rank a transfer was under way for half of it or more.
        covered: of each collective that was under way, by its place in the plan, the share of the call's time, mean
            over the ranks.
        unsure: a transfer whose time is not known may have been under way.
    """

    call: int
    measured_ns: int
    beside: bool
    covered: tuple[tuple[int, float], ...] = ()
    unsure: bool = False


@dataclass(frozen=True)
class Account:
    """What several ranks measured of one graph.

    Attributes:
        ranks: whose records it is made of.
        steps: how many there were.
        step_ns: of the slowest rank.
        transfers: by the plan's collectives.
        kernels: by calls that compute and that all these ranks have.
    """

    ranks: tuple[int, ...]
    steps: int
    step_ns: int
    transfers: tuple[Transfer, ...]
    kernels: tuple[Kernel, ...]


def account(planned: Planned, records: Sequence[Record]) -> Account:
    """What the ranks measured together.

    Args:
        records: of the same plan, at least one; the steps of all are the same ones.

    Raises:
        ValueError: the records are not of this plan, or have different numbers of steps.
    """
    for r in records:
        if r.digest != planned.about.digest:
            raise ValueError(f"rank {r.rank} timed another plan: {r.digest} and not {planned.about.digest}")
        if len(r.steps_ns) != len(records[0].steps_ns) or len(r.starts) != len(r.steps_ns):
            raise ValueError(f"rank {r.rank} timed another number of steps than rank {records[0].rank}")
        if len(r.groups) != len(planned.collectives) or not (
            len(r.calls) == len(r.durations_ns) == len(r.offsets_ns) == len(r.gaps_ns)
        ):
            raise ValueError(f"rank {r.rank} did not time the calls of the plan")
    places = [matched(planned.kinds, r.calls) for r in records]
    records = [_placed(r, len(planned.calls), place) for r, place in zip(records, places)]
    transfers = _Transfers(planned, records).all()
    shared = set.intersection(*map(set, places))
    kernels = _kernels(planned, transfers, records, sorted(shared - planned.communicating))
    slowest = max(round(median(r.steps_ns)) for r in records)
    ranks = tuple(sorted(r.rank for r in records))
    return Account(ranks, len(records[0].steps_ns), slowest, tuple(transfers), tuple(kernels))


def of_own_calls(found: Account, calls: Sequence[str], planned: Planned) -> Account:
    """What another rank of the plan put together, with the numbers of this rank's calls.

    Args:
        calls: classes of the other rank's calls.
        planned: as this rank has it.

    Raises:
        ValueError: the ranks do not communicate equally often.
    """
    place = matched(calls, planned.kinds)
    kernels = tuple(replace(one, call=place[one.call]) for one in found.kernels if one.call in place)
    return replace(found, kernels=kernels)


def _placed(record: Record, calls: int, place: Mapping[int, int]) -> Record:
    """The record with the times of each call where ``place`` has it among ``calls``; 0 for those it does not have."""
    if len(place) == calls == len(record.calls):
        return record

    def moved(times: Sequence[int]) -> tuple[int, ...]:
        return tuple(times[place[k]] if k in place else 0 for k in range(calls))

    return replace(
        record,
        offsets_ns=moved(record.offsets_ns),
        durations_ns=moved(record.durations_ns),
        gaps_ns=moved(record.gaps_ns),
    )


@dataclass(frozen=True)
class _UnderWay:
    """When the collective ``place`` of the plan was under way on one rank; ``known``: about when it ended."""

    place: int
    begin: int
    end: int
    known: bool


def _under_way(planned: Planned, transfers: Sequence[Transfer], record: Record) -> list[_UnderWay]:
    """Medians over the steps. A link serves in order of issue, and a transfer is over when its first wait is.

    One that was hidden whole took as long as was predicted, as far as that is not above what is known.
    """
    free: dict[str, int] = {}
    found = []
    for k, (one, transfer) in enumerate(zip(planned.collectives, transfers)):
        link = planned.link_of[k]
        begin = max(record.offsets_ns[one.start] + record.durations_ns[one.start], free.get(link, 0))
        end = record.offsets_ns[one.waits[0]] + record.durations_ns[one.waits[0]]
        known = transfer.known != UNKNOWN
        if known:
            length = transfer.transfer_ns
            if transfer.known == AT_MOST:
                length = min(length, planned.problem.tasks[one.task].duration_ns)
            free[link] = end = min(end, begin + length + transfer.skew_ns)
        if end > begin:
            found.append(_UnderWay(k, begin, end, known))
    return sorted(found, key=lambda one: one.begin)


def _kernels(
    planned: Planned, transfers: Sequence[Transfer], records: Sequence[Record], calls: Sequence[int]
) -> list[Kernel]:
    """In order of the calls. Calls and transfers of a rank are both in order of time: one sweep over them."""
    shares: dict[int, dict[int, float]] = {call: {} for call in calls}
    beside, unsure = set(), set()
    for record in records:
        coming = deque(_under_way(planned, transfers, record))
        current: list[_UnderWay] = []
        for call in calls:
            begin, length = record.offsets_ns[call], record.durations_ns[call]
            while coming and coming[0].begin < begin + length:
                current.append(coming.popleft())
            current = [one for one in current if one.end > begin]
            covered = 0
            for one in current:
                ns = max(0, min(one.end, begin + length) - max(one.begin, begin))
                covered += ns
                if ns and one.known:
                    shares[call][one.place] = shares[call].get(one.place, 0.0) + ns / length / len(records)
                elif ns:
                    unsure.add(call)
            if 2 * covered >= length > 0:
                beside.add(call)
    return [
        Kernel(
            call,
            round(fmean(r.durations_ns[call] + r.gaps_ns[call] for r in records)),
            call in beside,
            tuple(sorted(shares[call].items())),
            call in unsure,
        )
        for call in calls
    ]


@dataclass(frozen=True)
class _Seen:
    """A collective in one step: when its last member had issued it, when it ended where somebody saw that, until
    when it must have ended because somebody found it ended then, and how long who saw the end stood still."""

    ready: int
    end: int | None
    latest: int | None
    stood: int = 0


#: The instance of each collective that some rank has.
_Path = tuple[tuple[int, ...], ...]
#: Collectives of a link in the order in which it served them, and what was seen of them.
_Queue = tuple[list[int], dict[int, _Seen]]


class _Transfers:
    """The collectives of all steps on one clock.

    The n-th collective of the plan is one of each group that has it: its *instances*, by their ranks.
    """

    def __init__(self, planned: Planned, records: Sequence[Record]) -> None:
        self.planned = planned
        self.records = {r.rank: r for r in sorted(records, key=lambda r: r.rank)}
        self.steps = range(len(records[0].starts))
        self.collectives = range(len(planned.collectives))
        hidden = [planned.timeline.exposed_ns[one.task] == 0 for one in planned.collectives]
        self.waits = {r.rank: _Waits.of(r, hidden) for r in records}
        self.instances = [sorted({r.groups[k] for r in records}) for k in self.collectives]
        self.clock: Mapping[int, int] = {}
        joint = [k for k in self.collectives if planned.collectives[k].kind in _JOINT]
        seen = [self._members(s, k, ranks) for s in self.steps for k in joint for ranks in self.instances[k]]
        self.clock = offsets([members for members in seen if len(members) > 1])
        self._known: dict[tuple[int, int, tuple[int, ...]], _Seen | None] = {}

    def all(self) -> list[Transfer]:
        """Of every collective, medians over the steps, of the slowest instance."""
        paths = sorted({r.groups for r in self.records.values()})
        queues = [{path: self._queues(step, path) for path in paths} for step in self.steps]
        busy = [self._busy(one) for one in queues]
        served = [(path, [self._served(path, queues[s][path], busy[s]) for s in self.steps]) for path in paths]
        return [self._one(k, served) for k in self.collectives]

    def _one(self, k: int, served: Sequence[tuple[Any, Sequence[Mapping[int, tuple[int, int]]]]]) -> Transfer:
        # What clocks cannot tell from nothing was not measured.
        known, ns, among, apart = UNKNOWN, 0, 1, -1
        for _, steps in served:
            found = [step[k] for step in steps if k in step]
            if 2 * len(found) >= len(self.steps) and (mine := round(median(one for one, _ in found))) > ns:
                ns, among = mine, max(number for _, number in found)
                apart = -1 if (one := spread([time for time, _ in found])) is None else round(one)
                known = MEASURED if among == 1 else SHARED
        if known == UNKNOWN:
            most = [[m for s in self.steps if (m := self._at_most(s, k, ranks)) is not None]
                    for ranks in self.instances[k]]
            # A bound of nothing is one that clocks cannot tell, either.
            if any(most) and (bound := max(round(median(one)) for one in most if one)) > 0:
                ns, known = bound, AT_MOST
        times = [t for s in self.steps for ranks in self.instances[k] if len(t := self._times(s, k, ranks)) > 1]
        last = Counter(max(one, key=lambda rank: (one[rank], -rank)) for one in times)
        return Transfer(
            transfer_ns=max(0, ns),
            known=known,
            among=among,
            skew_ns=round(median(max(one.values()) - min(one.values()) for one in times)) if times else 0,
            late=max(last, key=lambda rank: (last[rank], -rank)) if last else -1,
            issue_ns=round(fmean(self._issue(r, k) for r in self.records.values())),
            stall_ns=self._mean(lambda r, s: self._stall(r, s, k)),
            for_peer_ns=self._mean(lambda r, s: self._for_peer(r, s, k)),
            spread_ns=apart,
        )

    def _issue(self, record: Record, k: int) -> int:
        one = self.planned.collectives[k]
        calls = (one.start, *one.waits)
        asking = sum(min(self.waits[record.rank].asking_ns, record.durations_ns[wait]) for wait in one.waits)
        return record.durations_ns[one.start] + sum(record.gaps_ns[call] for call in calls) + asking

    def _mean(self, what: Callable[[Record, int], int]) -> int:
        return round(fmean(median(what(r, s) for s in self.steps) for r in self.records.values()))

    def _stall(self, record: Record, step: int, k: int) -> int:
        if not self.waits[record.rank].stood[k]:
            return 0
        asking = self.waits[record.rank].asking_ns
        return sum(max(0, end - begin - asking) for begin, end in record.waits[step][k])

    def _for_peer(self, record: Record, step: int, k: int) -> int:
        """Of a stall, what was before the last member had issued the collective."""
        times = self._times(step, k, record.groups[k])
        if record.rank not in times or len(times) < 2 or not self.waits[record.rank].stood[k]:
            return 0
        begin, end = record.waits[step][k][0]
        ready = max(times.values()) + self.clock[record.rank]
        return max(0, min(end, ready) - begin)

    def _members(self, step: int, k: int, ranks: tuple[int, ...]) -> dict[int, Member]:
        found = {}
        for rank in ranks:
            record = self.records.get(rank)
            if record is not None:
                begin, end = record.waits[step][k][0]
                stood = self.waits[rank].stood[k] and end - begin > self.waits[rank].limit_ns
                found[rank] = Member(record.starts[step][k][1], end, stood)
        return found

    def _times(self, step: int, k: int, ranks: tuple[int, ...]) -> dict[int, int]:
        """When each member whose clock is known had issued a collective; of the only record by its own clock."""
        members = self._members(step, k, ranks)
        if len(members) == 1:
            return {rank: one.issued_ns for rank, one in members.items()}
        return {rank: one.issued_ns - self.clock[rank] for rank, one in members.items() if rank in self.clock}

    def _seen(self, step: int, k: int, ranks: tuple[int, ...]) -> _Seen | None:
        key = step, k, ranks
        if key not in self._known:
            self._known[key] = self._look(step, k, ranks)
        return self._known[key]

    def _look(self, step: int, k: int, ranks: tuple[int, ...]) -> _Seen | None:
        members, times = self._members(step, k, ranks), self._times(step, k, ranks)
        if not times:
            return None
        by = {rank: 0 if len(members) == 1 else self.clock[rank] for rank in times}
        ends = [members[rank].ended_ns - by[rank] for rank in times if members[rank].stood]
        over = [members[rank].ended_ns - by[rank] for rank in times if not members[rank].stood]
        lengths = [end - begin for r in times if members[r].stood for begin, end in self.records[r].waits[step][k][:1]]
        ready = max(times.values())
        return _Seen(ready, min(ends) if ends else None, min(over) if over else None, max(lengths, default=0))

    def _at_most(self, step: int, k: int, ranks: tuple[int, ...]) -> int | None:
        found = self._seen(step, k, ranks)
        over = [] if found is None else [at for at in (found.latest, found.end) if at is not None]
        return None if found is None or not over else max(0, min(over) - found.ready)

    def _served(
        self, path: _Path, queues: Sequence[_Queue], busy: Mapping[tuple[int, tuple[int, ...]], int]
    ) -> dict[int, tuple[int, int]]:
        """(ns on the link, how many share the measurement) of the transfers of a step whose time can be told.

        Args:
            path: the instance of each collective that is looked at.
            queues / busy: see the methods.
        """
        found: dict[int, tuple[int, int]] = {}
        for queue, at in queues:
            found |= self._queue(queue, at, {k: busy[k, path[k]] for k in queue if (k, path[k]) in busy})
        return found

    def _queues(self, step: int, path: _Path) -> list[_Queue]:
        """Per link the collectives in the order in which it served them, and what was seen of them."""
        links: dict[str, list[int]] = {}
        for k in self.collectives:
            links.setdefault(self.planned.link_of[k], []).append(k)
        found = []
        for queue in links.values():
            at = {k: seen for k in queue if (seen := self._seen(step, k, path[k])) is not None}
            found.append((self._in_service([k for k in queue if k in at], at), at))
        return found

    @staticmethod
    def _busy(every: Mapping[_Path, Sequence[_Queue]]) -> dict[tuple[int, tuple[int, ...]], int]:
        """Until when the link of some member of an instance had others to serve before it, as far as ends were seen."""
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        for path, queues in every.items():
            for queue, at in queues:
                # What ends behind a later one was waited for late.
                first, ends = None, dict[int, int]()
                for k in reversed(queue):
                    end = at[k].end
                    if end is not None and (first is None or end < first):
                        ends[k] = first = end
                free: int | None = None
                for k in queue:
                    if free is not None:
                        found[k, path[k]] = max(free, found.get((k, path[k]), free))
                    free = ends.get(k, free)
        return found

    def _in_service(self, queue: Sequence[int], at: Mapping[int, _Seen]) -> list[int]:
        """In the order in which the link served them: of those that all members had issued, the first that was issued.

        Groups of a rank have other peers, which are late at other times, so a rank's order of issue is not the link's.
        Where nobody saw an end, the link was free again when it was predicted to be. O(n log n).
        """
        coming = deque(sorted(range(len(queue)), key=lambda place: at[queue[place]].ready))
        waiting: list[int] = []
        order: list[int] = []
        free = min((seen.ready for seen in at.values()), default=0)
        while coming or waiting:
            if not waiting:
                free = max(free, at[queue[coming[0]]].ready)
            while coming and at[queue[coming[0]]].ready <= free:
                heapq.heappush(waiting, coming.popleft())
            k = queue[heapq.heappop(waiting)]
            end = at[k].end
            free = free + self._predicted_ns(k) if end is None else max(free, end)
            order.append(k)
        return order

    def _queue(
        self, queue: Sequence[int], at: Mapping[int, _Seen], busy: Mapping[int, int]
    ) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        run: list[int] = []
        free: int | None = None
        for position, k in enumerate(queue):
            run.append(k)
            end, latest = at[k].end, at[k].latest
            later = [seen for other in queue[position + 1 :] if (seen := at[other].end) is not None]
            if end is not None and later and min(later) <= end:
                # It was over before one behind it, and waited for after that one: its own wait shows nothing.
                end, latest = None, min(later)
            if end is not None and self._is_chance(run, free, at):
                latest = end if latest is None else min(end, latest)
                end = None
            if end is None:
                if latest is not None and all(latest <= at[other].ready for other in queue[position + 1 :]):
                    # Over before the next one was issued: the link was idle then.
                    run, free = [], latest
                continue
            ready = at[run[0]].ready
            begin = ready if free is None else max(ready, free)
            if begin < busy.get(run[0], begin) < end:
                # The link of another member was not free yet.
                begin = busy[run[0]]
            if len(run) == 1:
                found[k] = (max(0, end - begin), 1)
            else:
                found |= self._shared(run, begin, end, at)
            run, free = [], end
        return found

    def _is_chance(self, run: Sequence[int], free: int | None, at: Mapping[int, _Seen]) -> bool:
        """Whether what shows the end of the transfers ``run`` may only be what it costs to ask for the last of them."""
        last, first = at[run[-1]], at[run[0]].ready
        assert last.end is not None
        took = last.end - (first if free is None else max(first, free))
        return took - last.stood - sum(map(self._predicted_ns, run)) > _AFTER * last.stood

    def _predicted_ns(self, k: int) -> int:
        return self.planned.problem.tasks[self.planned.collectives[k].task].duration_ns

    def _shared(
        self, run: Sequence[int], begin: int, end: int, at: Mapping[int, _Seen]
    ) -> dict[int, tuple[int, int]]:
        """The time from ``begin`` to ``end``, divided as predicted; {} where one of them came after its turn."""
        predicted = list(map(self._predicted_ns, run))
        total, share = end - begin, sum(predicted)
        reached, parts = float(begin), {}
        for k, ns in zip(run, predicted):
            if at[k].ready > reached + 1:
                return {}
            part = total * ns / share if share else total / len(run)
            reached += part
            parts[k] = (max(0, round(part)), len(run))
        return parts


@dataclass(frozen=True)
class _Waits:
    """What the waits of a rank say.

    Attributes:
        asking_ns: what one costs in which nobody stands still; 0 where none shows it.
        limit_ns: longer ones stand still.
        stood: of each collective whether the rank mostly stood still in its first wait.
    """

    asking_ns: int
    limit_ns: int
    stood: list[bool]

    @staticmethod
    def of(record: Record, hidden: Sequence[bool]) -> _Waits:
        """``hidden``: the collectives for which nobody waits by the plan."""
        lengths = [median(step[k][0][1] - step[k][0][0] for step in record.waits) for k in range(len(record.groups))]
        least = round(min(lengths, default=0))
        quiet = [length for length, over in zip(lengths, hidden) if over]
        if quiet and median(quiet) <= _LONGEST_NS:
            asking, shows = round(median(quiet)), True
        else:
            asking, shows = least, least <= _WAIT_NS or (least <= _LONGEST_NS and _SHORTER * least < max(lengths))
        limit = max(_WAIT_NS, _TIMES * asking) if shows else _WAIT_NS
        return _Waits(asking if shows else 0, limit, [length > limit for length in lengths])
