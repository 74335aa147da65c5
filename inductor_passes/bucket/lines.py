"""What may travel together in a graph, and straight lines for what that costs: for the planner's own programmes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_passes import _torch
from inductor_passes.bucket.candidates import Candidate, GroupKey, candidates
from inductor_passes.bucket.gain import BucketCosts
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.canonical import shards
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem
from inductor_passes.schedule.partition import Costs

#: Backends that carry out a coalesced collective as one operation on the members' own memory.
COALESCING_BACKENDS = ("nccl", "xccl")


@dataclass(frozen=True)
class Lines:
    """Candidates, the name of each one's key, what their buckets cost, and lines for that by name."""

    found: tuple[Candidate, ...]
    names: Mapping[GroupKey, str]
    costs: BucketCosts
    lines: Mapping[str, Costs]


def coalesces(group: str) -> bool:
    """Whether buckets of a process group are not copied."""
    return _torch.group_backend(group) in COALESCING_BACKENDS


def of_graph(view: GraphView, fx: FxProblem, profile: CostProfile, *, exact: bool, call_copies: bool) -> Lines:
    """The collectives of a graph that may travel together.

    Args:
        exact, call_copies: see :class:`BucketCosts`.
    """
    known = shards(view)
    found, _ = candidates(view, uneven=known.uneven)
    coalesced = frozenset(name for name in {c.key.group for c in found} if coalesces(name))
    owner = known.owner
    costs = BucketCosts(
        view,
        profile,
        coalesced,
        owner,
        compute=fx.costs,
        uneven=bool(known.uneven),
        exact=exact,
        call_copies=call_copies,
    )
    return of(found, costs)


def of(found: Sequence[Candidate], costs: BucketCosts) -> Lines:
    """Lines through the empty message and through the message of all candidates of a key."""
    by_key: dict[GroupKey, list[Candidate]] = {}
    for candidate in found:
        by_key.setdefault(candidate.key, []).append(candidate)
    names = {key: str(position) for position, key in enumerate(by_key)}
    return Lines(tuple(found), names, costs, {names[key]: _line(members, costs) for key, members in by_key.items()})


def _line(members: Sequence[Candidate], costs: BucketCosts) -> Costs:
    load = costs.load(members)
    latency, kernel = costs.latency_ns(load), costs.kernel_ns
    return Costs(
        alpha_ns=latency,
        beta_ns_per_byte=(costs.transfer_ns(load) - latency) / max(1, load.sent_bytes, load.received_bytes),
        issue_ns=costs.issue_ns(costs.load(members[:1])),
        copy=costs.copies(load),
        unpack=costs.copies_out(load),
        launch_ns=kernel,
        pack_ns_per_byte=max(0, costs.pack_ns(load) - kernel) / max(1, load.sent_bytes),
        unpack_ns_per_byte=max(0, costs.unpack_ns(load) - kernel) / max(1, load.received_bytes),
    )
