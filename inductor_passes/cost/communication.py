"""How long a collective takes: alpha-beta models per algorithm on a two-level topology.

A group of ``g`` ranks spreads over hosts. A message costs ``alpha`` (latency of a hop) plus bytes times
``beta``; an algorithm is a number of sequential hops and a number of bytes that the busiest rank sends
(Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH", 2005). For every
kind the fastest of the algorithms listed in :data:`ALGORITHMS` counts, as communication libraries pick by
size.

All functions are pure, use only IEEE additions, multiplications, divisions and comparisons on their inputs
(so that ranks on different machines agree) and return whole nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from inductor_passes.cost.specs import DeviceSpec
from inductor_passes.operators import CollectiveKind, kind_of
from inductor_passes.records.limits import AtLeastOne

#: Every kind that has a price.
KINDS = tuple(CollectiveKind)

INTRA = "intra"
INTER = "inter"


@dataclass(frozen=True, order=True)
class GroupLayout:
    """What the model needs to know of a group; equal for groups that differ only in which hosts they use.

    Attributes:
        ranks: size of the group.
        hosts: how many hosts it touches.
        ranks_on_host: most ranks of the group on one host.
    """

    ranks: AtLeastOne
    hosts: AtLeastOne
    ranks_on_host: AtLeastOne

    def __post_init__(self) -> None:
        if not self.hosts <= self.ranks <= self.hosts * self.ranks_on_host:
            raise ValueError(f"{self} is not possible")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(ranks: tuple[int, ...], ranks_per_host: int) -> GroupLayout:
        """The layout of a group of global ranks when host ``h`` holds ranks ``h * ranks_per_host`` and following.

        Raises:
            ValueError: no ranks, or ``ranks_per_host`` below 1.
        """
        if not ranks:
            raise ValueError("a group without ranks has no layout")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host is {ranks_per_host}; expected at least 1")
        on_host: dict[int, int] = {}
        for rank in ranks:
            host = rank // ranks_per_host
            on_host[host] = on_host.get(host, 0) + 1
        return GroupLayout(len(ranks), len(on_host), max(on_host.values()))

    @property
    def link(self) -> str:
        """Name of the physical link that limits the group: ``intra`` within one host, else ``inter``."""
        return INTRA if self.hosts == 1 else INTER


def message_bytes(kind: str, input_bytes: int, output_bytes: int, ranks: int) -> int:
    """The full (gathered, reduced, exchanged) message in bytes, from what one rank puts in and gets out.

    For a coalesced collective pass the sums over its tensors.

    Raises:
        ValueError: unknown kind.
    """
    facts = kind_of(kind).facts
    sent = input_bytes * ranks if facts.input_share else input_bytes
    received = output_bytes * ranks if facts.output_share else output_bytes
    return max(sent, received)


def wire_bytes(kind: str, input_bytes: int, output_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends in the bandwidth-optimal (ring, pairwise) algorithm; 0 for a group of one rank."""
    full = message_bytes(kind, input_bytes, output_bytes, ranks)
    if ranks <= 1:
        return 0
    passes = kind_of(kind).facts.ring_passes
    return full if passes is None else passes * full * (ranks - 1) // ranks


@dataclass(frozen=True)
class Path:
    """Latency and bandwidth along a group's links.

    Attributes:
        base_ns: fixed cost of a collective.
        chain_ns: latency of a chain through all ranks (the ring's ``g - 1`` hops).
        depth_ns: latency of a binary tree over the hosts and the ranks in them, one way.
        hop_ns: latency of the slowest single hop.
        ns_per_byte: inverse bandwidth that one rank has on the limiting link when all send at once.
    """

    base_ns: float
    chain_ns: float
    depth_ns: float
    hop_ns: float
    ns_per_byte: float


def path_of(spec: DeviceSpec, layout: GroupLayout) -> Path:
    """The path of a group of ``layout`` over the links of ``spec``.

    Between hosts every rank of a host has its own port, so a ring that enters a host once per port is limited
    by the smaller of the two links' per-rank bandwidth; rings over the ports share the traffic.
    """
    intra, inter = spec.intra, spec.inter
    local_hops = layout.ranks - layout.hosts
    host_hops = layout.hosts - 1
    chain = local_hops * intra.latency_ns.value + host_hops * inter.latency_ns.value
    depth = (
        _tree_depth(layout.ranks_on_host) * intra.latency_ns.value + _tree_depth(layout.hosts) * inter.latency_ns.value
    )
    if layout.hosts == 1:
        bandwidth = intra.bytes_per_s.value
        hop = intra.latency_ns.value
    else:
        ports = inter.bytes_per_s.value * layout.ranks_on_host
        bandwidth = min(intra.bytes_per_s.value, ports) if layout.ranks_on_host > 1 else ports
        hop = inter.latency_ns.value
    return Path(spec.collective_ns.value, chain, depth, hop, 1e9 / bandwidth)


def _tree_depth(count: int) -> int:
    return (count - 1).bit_length()


def _ring(path: Path, full: int, ranks: int) -> float:
    return path.chain_ns + full * (ranks - 1) / ranks * path.ns_per_byte


def _ring_all_reduce(path: Path, full: int, ranks: int) -> float:
    return 2 * _ring(path, full, ranks)


def _tree_all_reduce(path: Path, full: int, ranks: int) -> float:
    return 2 * path.depth_ns + 2 * full * path.ns_per_byte


def _one_shot_all_reduce(path: Path, full: int, ranks: int) -> float:
    return path.hop_ns + full * (ranks - 1) * path.ns_per_byte


def _one_shot_gather(path: Path, full: int, ranks: int) -> float:
    return path.hop_ns + full * (ranks - 1) / ranks * path.ns_per_byte


def _recursive(path: Path, full: int, ranks: int) -> float:
    return path.depth_ns + full * (ranks - 1) / ranks * path.ns_per_byte


def _pairwise(path: Path, full: int, ranks: int) -> float:
    return path.hop_ns + full * (ranks - 1) / ranks * path.ns_per_byte


def _chain_broadcast(path: Path, full: int, ranks: int) -> float:
    return path.chain_ns + full * path.ns_per_byte


def _tree_broadcast(path: Path, full: int, ranks: int) -> float:
    return path.depth_ns + full * _tree_depth(ranks) * path.ns_per_byte


def _message(path: Path, full: int, ranks: int) -> float:
    return path.hop_ns + full * path.ns_per_byte


Algorithm = Callable[[Path, int, int], float]

#: Per kind, the algorithms by name. One-shot forms (every rank talks to all others at once) exist within a
#: host only.
ALGORITHMS: dict[CollectiveKind, dict[str, Algorithm]] = {
    CollectiveKind.ALL_GATHER: {"ring": _ring, "recursive doubling": _recursive, "one-shot": _one_shot_gather},
    CollectiveKind.REDUCE_SCATTER: {"ring": _ring, "recursive halving": _recursive, "one-shot": _one_shot_gather},
    CollectiveKind.ALL_REDUCE: {"ring": _ring_all_reduce, "tree": _tree_all_reduce, "one-shot": _one_shot_all_reduce},
    CollectiveKind.ALL_TO_ALL: {"pairwise": _pairwise},
    CollectiveKind.BROADCAST: {"chain": _chain_broadcast, "tree": _tree_broadcast},
    CollectiveKind.SEND: {"message": _message},
    CollectiveKind.RECV: {"message": _message},
}


def communication_estimate(
    kind: str, input_bytes: int, output_bytes: int, layout: GroupLayout, spec: DeviceSpec
) -> tuple[int, str]:
    """Duration in ns on the link, and the name of the algorithm that it belongs to.

    ``input_bytes`` and ``output_bytes`` are what this rank puts in and gets out (sums for coalesced forms).

    Raises:
        ValueError: unknown kind or a negative size.
    """
    if input_bytes < 0 or output_bytes < 0:
        raise ValueError(f"sizes of {kind} are {input_bytes} and {output_bytes} bytes; expected none below 0")
    full = message_bytes(kind, input_bytes, output_bytes, layout.ranks)
    if layout.ranks == 1:
        return 0, "none"
    path = path_of(spec, layout)
    if kind_of(kind).facts.own_port and layout.hosts > 1:
        path = Path(path.base_ns, path.chain_ns, path.depth_ns, path.hop_ns, 1e9 / spec.inter.bytes_per_s.value)
    candidates = [
        (path.base_ns + algorithm(path, full, layout.ranks), name)
        for name, algorithm in ALGORITHMS[kind_of(kind)].items()
        if name != "one-shot" or layout.hosts == 1
    ]
    duration, name = min(candidates, key=lambda c: c[0])
    return round(duration), name


def default_issue_ns(kind: str, input_bytes: int, output_bytes: int, layout: GroupLayout, spec: DeviceSpec) -> int:
    """Host time in ns to issue the collective: constant on accelerators, plus one copy of the message on a
    CPU.

    Raises:
        ValueError: unknown kind.
    """
    full = message_bytes(kind, input_bytes, output_bytes, layout.ranks)
    copies = full / spec.memory_bytes_per_s.value * 1e9 if spec.device_type == "cpu" else 0.0
    return round(spec.issue_ns.value + copies)
