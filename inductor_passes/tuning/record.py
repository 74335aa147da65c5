"""What one rank measured of a graph: plain numbers that travel to the other ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from inductor_passes.records.convert import convert, plain
from inductor_passes.records.limits import Count, Integer
from inductor_passes.tuning.plan import Planned
from inductor_passes.tuning.tape import Step

#: A record of another rank may not be larger.
MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Record:
    """Times in ns of the rank's own clock.

    Attributes:
        rank: global rank.
        digest: of the plan that was timed.
        calls: of every call of the generated code its class, "" where it communicates (``Planned.kinds``). Where shards
            are uneven a rank has kernels of its own.
        groups: ranks of each collective of the plan; ranks of one plan may be in different groups of one shape.
        steps_ns: how long each step took.
        starts, waits: per step, (begin, end) of each collective's start, and of each of its waits in order of the plan.
        offsets_ns: per call of the generated code the median of its begin within the step.
        durations_ns: and of its length.
        gaps_ns: and of the time since the call before it ended, in which the host prepared it.
    """

    rank: Count
    digest: str
    calls: tuple[str, ...]
    groups: tuple[tuple[Count, ...], ...]
    steps_ns: tuple[Count, ...]
    starts: tuple[tuple[tuple[Integer, Integer], ...], ...]
    waits: tuple[tuple[tuple[tuple[Integer, Integer], ...], ...], ...]
    offsets_ns: tuple[Integer, ...]
    durations_ns: tuple[Count, ...]
    gaps_ns: tuple[Count, ...]


def record_of(planned: Planned, steps: Sequence[Step], rank: int) -> Record | str:
    """A rank's record, or a sentence where the calls that were timed are not those of the plan."""
    places = [places_of(step.names, [call.name for call in planned.calls]) for step in steps]
    rows = [
        [(step.begins[p], step.ends[p]) for p in found] for step, found in zip(steps, places) if found is not None
    ]
    if not rows or len(rows) < len(steps):
        return "the calls that were timed are not those of the generated code"
    begins = [step.begin_ns for step in steps]
    calls = range(len(rows[0]))
    before = [[begin, *(end for _, end in row[:-1])] for begin, row in zip(begins, rows)]
    return Record(
        rank=rank,
        digest=planned.about.digest,
        calls=planned.kinds,
        groups=tuple(c.ranks for c in planned.collectives),
        steps_ns=tuple(max(0, step.end_ns - step.begin_ns) for step in steps),
        starts=tuple(tuple(row[c.start] for c in planned.collectives) for row in rows),
        waits=tuple(tuple(tuple(row[w] for w in c.waits) for c in planned.collectives) for row in rows),
        offsets_ns=tuple(round(median(row[k][0] - b for row, b in zip(rows, begins))) for k in calls),
        durations_ns=tuple(max(0, round(median(row[k][1] - row[k][0] for row in rows))) for k in calls),
        gaps_ns=tuple(max(0, round(median(row[k][0] - one[k] for row, one in zip(rows, before)))) for k in calls),
    )


def places_of(names: Sequence[str], expected: Sequence[str]) -> list[int] | None:
    """Where the expected calls are among those that were made, in order; None where one is missing.

    What else was called (inside of a subgraph, to make seeds) is passed over.
    """
    found, at = [], 0
    for name in expected:
        while at < len(names) and names[at] != name:
            at += 1
        if at == len(names):
            return None
        found.append(at)
        at += 1
    return found


def matched(these: Sequence[str], those: Sequence[str]) -> dict[int, int]:
    """Which call of one rank's code is which of another's; a rank's own kernels are left out.

    Ranks of one plan communicate alike. Between two communicating calls they have the same calls of a class when they
    have equally many.

    Args:
        these, those: classes of the calls, "" where they communicate.

    Raises:
        ValueError: the two do not communicate equally often.
    """
    if these == those:
        return {k: k for k in range(len(these))}
    if these.count("") != those.count(""):
        raise ValueError("ranks of one plan do not communicate equally often")
    ours, theirs = _by_place(these), _by_place(those)
    found = {a: b for place, mine in ours.items() if len(mine) == len(other := theirs.get(place, []))
             for a, b in zip(mine, other)}
    return dict(sorted(found.items()))


def _by_place(calls: Sequence[str]) -> dict[tuple[int, str], list[int]]:
    """Calls by how many communicate before them, and their class."""
    found: dict[tuple[int, str], list[int]] = {}
    before = 0
    for k, name in enumerate(calls):
        found.setdefault((before, name), []).append(k)
        before += not name
    return found


def packed(record: Record) -> bytes:
    """For another rank."""
    return zlib.compress(json.dumps(plain(record), separators=(",", ":")).encode(), 6)


def unpacked(data: bytes) -> Record:
    """Inverse of :func:`packed`.

    Raises:
        ValueError: it is none.
    """
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"a rank's record cannot be read: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError(f"a rank's record is larger than {MAX_BYTES} bytes")
    return convert(json.loads(text), Record, "a rank's record")
