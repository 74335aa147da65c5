"""Whether the programs of several ranks fit together: same collectives in the same order per group, transfers paired.

On each process group all members must issue the same sequence: kind, dtypes, sizes, reduce op, source rank, and the
same tensor. The splits of an all-to-all must mirror each other. Every send needs its receive: same pair of ranks, tag,
dtype and size, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch.fx

from inductor_passes.report import Finding
from inductor_passes.verify.checker import snapshot
from inductor_passes.verify.events import Action, Event
from inductor_passes.verify.snapshot import ReferenceSnapshot

Program: TypeAlias = ReferenceSnapshot | torch.fx.Graph | Sequence[Event]
Programs: TypeAlias = Sequence[Program] | Mapping[int, Program]


def check_ranks(programs: Programs) -> list[Finding]:
    """What does not fit between ranks; a finding's message names both sides with their source lines.

    Args:
        programs: per global rank a graph, its snapshot or its events; a sequence holds ranks 0, 1, ...

    Raises:
        ValueError: a graph uses a value before it is defined.
    """
    by_rank = per_rank_events(programs)
    return [*_groups(by_rank), *_transfers(by_rank)]


def per_rank_events(programs: Programs) -> dict[int, tuple[Event, ...]]:
    """Events by global rank."""
    items = programs.items() if isinstance(programs, Mapping) else enumerate(programs)
    result: dict[int, tuple[Event, ...]] = {}
    for rank, program in sorted(items):
        if isinstance(program, torch.fx.Graph):
            program = snapshot(program)
        result[rank] = program.events if isinstance(program, ReferenceSnapshot) else tuple(program)
    return result


def on_groups(by_rank: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, list[Event]]]:
    """Group -> rank -> its collectives in order. Members without any are there with an empty list."""
    result: dict[str, dict[int, list[Event]]] = {}
    for rank, events in by_rank.items():
        for event in events:
            if event.action in (Action.START, Action.BLOCKING):
                result.setdefault(event.group, {}).setdefault(rank, []).append(event)
    for members in result.values():
        named = {r for events in members.values() for e in events for r in e.ranks}
        for rank in named & by_rank.keys():
            members.setdefault(rank, [])
    return {group: dict(sorted(members.items())) for group, members in sorted(result.items())}


def _side(rank: int, event: Event | None) -> str:
    if event is None:
        return f"rank {rank} has nothing more on it"
    return f"rank {rank} has {event}" + (f" at {event.source}" if event.source else "")


def _groups(by_rank: Mapping[int, Sequence[Event]]) -> Iterator[Finding]:
    positions = _positions(by_rank)
    for group, members in on_groups(by_rank).items():
        yield from _pieces(group, members, positions)
        first = next(iter(members))
        for rank in list(members)[1:]:
            yield from _difference(group, first, members[first], rank, members[rank])
        for rank, events in members.items():
            outside = next((e for e in events if e.ranks and rank not in e.ranks), None)
            if outside is not None:
                yield Finding(
                    "rank-outside-group", outside.name, f"{_side(rank, outside)}, but is not one of {outside.ranks}"
                )
        yield from _splits(group, members)


def _difference(group: str, a: int, mine: list[Event], b: int, theirs: list[Event]) -> Iterator[Finding]:
    for position in range(max(len(mine), len(theirs))):
        left = mine[position] if position < len(mine) else None
        right = theirs[position] if position < len(theirs) else None
        if left is None or right is None or not _alike(left, right):
            shown = right or left
            assert shown is not None
            yield Finding(
                "ranks-differ",
                shown.name,
                f"collective {position} of group {group} differs: {_side(a, left)}; {_side(b, right)}",
                other="" if left is None else left.name,
                source=shown.source,
            )
            return


def _alike(left: Event, right: Event) -> bool:
    names = {event.tensor.name for event in (left, right) if event.tensor.name}
    return (left.action, left.what, left.ranks) == (right.action, right.what, right.ranks) and len(names) <= 1


def _pieces(
    group: str, members: Mapping[int, list[Event]], positions: Mapping[int, Mapping[str, int]]
) -> Iterator[Finding]:
    """A piece of a tensor is the same one on all ranks, or each rank's own in a group that all of them are in.

    Args:
        positions: rank -> name of a process group -> the rank's position in it.
    """
    common = set.intersection(*(set(positions[rank]) for rank in members))
    own = {tuple(positions[rank][name] for rank in members) for name in common}
    for number, events in enumerate(zip(*members.values())):
        for values in zip(*(event.tensor.pieces for event in events)):
            if len(set(values)) > 1 and values not in own:
                shown = ", ".join(f"piece {value} on rank {rank}" for value, rank in zip(values, members))
                side = _side(next(iter(members)), events[0])
                yield Finding(
                    "ranks-differ",
                    events[0].name,
                    f"collective {number} of group {group} moves other pieces of a tensor: {shown}; {side}",
                    other=events[-1].name,
                    source=events[0].source,
                )
                return


def _positions(by_rank: Mapping[int, Sequence[Event]]) -> dict[int, dict[str, int]]:
    """Rank -> its process groups -> its position in each."""
    return {
        rank: {event.group: event.ranks.index(rank) for event in events if rank in event.ranks}
        for rank, events in by_rank.items()
    }


def _splits(group: str, members: Mapping[int, list[Event]]) -> Iterator[Finding]:
    """What rank i sends to rank j is what j expects from i."""
    for events in zip(*members.values()):
        ranks = events[0].ranks
        by_rank = {r: e for r, e in zip(members, events) if e.splits and all(e.splits) and e.ranks == ranks}
        for i, left in by_rank.items():
            for j, right in by_rank.items():
                assert left.splits is not None and right.splits is not None
                at_i, at_j = ranks.index(i) if i in ranks else -1, ranks.index(j) if j in ranks else -1
                if min(at_i, at_j) < 0 or at_j >= len(left.splits[0]) or at_i >= len(right.splits[1]):
                    continue
                sent, expected = left.splits[0][at_j], right.splits[1][at_i]
                if -1 not in (sent, expected) and sent != expected:
                    yield Finding(
                        "splits-differ",
                        right.name,
                        f"on group {group} rank {i} sends {sent} rows to rank {j}, which expects {expected}",
                        other=left.name,
                        source=right.source,
                    )


def _transfers(by_rank: Mapping[int, Sequence[Event]]) -> Iterator[Finding]:
    sides: dict[tuple[str, int, int, int], tuple[list[Event], list[Event]]] = {}
    for rank, events in by_rank.items():
        for e in events:
            if e.action is Action.SEND:
                sides.setdefault((e.group, rank, e.peer, e.tag), ([], []))[0].append(e)
            elif e.action is Action.RECEIVE:
                sides.setdefault((e.group, e.peer, rank, e.tag), ([], []))[1].append(e)
    for (_, sender, receiver, _), (sends, receives) in sorted(sides.items()):
        if sender not in by_rank or receiver not in by_rank:
            continue
        for position in range(max(len(sends), len(receives))):
            left = sends[position] if position < len(sends) else None
            right = receives[position] if position < len(receives) else None
            if left is not None and right is not None and left.what == right.what:
                continue
            shown = left or right
            assert shown is not None
            yield Finding(
                "transfer-unmatched",
                shown.name,
                f"a transfer has no counterpart: {_side(sender, left)}; {_side(receiver, right)}",
                source=shown.source,
            )
            break
