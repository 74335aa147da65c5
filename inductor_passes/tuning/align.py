"""The clocks of ranks put together by the ends of the collectives that they share.

A collective of which every member needs every other one ends at one time E for all: no member's wait returns before E,
and no member issues it after E. With ``o`` the offset of a rank's clock, ``i`` when it had issued the collective and
``e`` when its wait returned, for every two members r and q

    i_r - e_q <= o_r - o_q <= e_r - i_q,

and where both stood still in their waits, e_r - e_q is the difference itself, but for how late each was woken. So the
difference is the median of those, held within the bounds; with no such collective it is the middle of the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Member:
    """What one rank saw of a collective, in ns of its own clock.

    Attributes:
        issued_ns: when it had issued it.
        ended_ns: when its wait returned.
        stood: whether it stood still in the wait until the collective ended.
    """

    issued_ns: int
    ended_ns: int
    stood: bool


def offsets(seen: Sequence[Mapping[int, Member]]) -> dict[int, int]:
    """Rank -> ns by which its clock is ahead of that of the first rank; ranks that share nothing with it are left out.

    Args:
        seen: of every collective in which all members need each other, and of every step of it, what its ranks saw.
    """
    ranks = sorted({rank for one in seen for rank in one})
    if not ranks:
        return {}
    edges: dict[int, dict[int, int]] = {}
    for members in dict.fromkeys(tuple(sorted(one)) for one in seen):
        shared = [one for one in seen if tuple(sorted(one)) == members]
        hub = max(members, key=lambda rank: (sum(one[rank].stood for one in shared), -rank))
        for other in members:
            if other != hub and other not in edges.get(hub, {}):
                ahead = _difference(hub, other, shared)
                edges.setdefault(hub, {})[other] = -ahead
                edges.setdefault(other, {})[hub] = ahead
    found = {ranks[0]: 0}
    waiting = [ranks[0]]
    while waiting:
        rank = waiting.pop(0)
        for other, ahead in edges.get(rank, {}).items():
            if other not in found:
                found[other] = found[rank] + ahead
                waiting.append(other)
    return found


def _difference(rank: int, other: int, shared: Iterable[Mapping[int, Member]]) -> int:
    """By how many ns the clock of ``rank`` is ahead of that of ``other``."""
    stood, low, high = [], None, None
    for one in shared:
        mine, theirs = one[rank], one[other]
        least, most = mine.issued_ns - theirs.ended_ns, mine.ended_ns - theirs.issued_ns
        low = least if low is None else max(low, least)
        high = most if high is None else min(high, most)
        if mine.stood and theirs.stood:
            stood.append(mine.ended_ns - theirs.ended_ns)
    assert low is not None and high is not None
    if not stood:
        return (low + high) // 2
    found = round(median(stood))
    return found if low > high else min(max(found, low), high)
