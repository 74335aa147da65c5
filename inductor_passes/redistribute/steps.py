"""One step of a plan, and what it costs.

Bytes follow the ring model, per rank, of the busiest rank and the busier direction of its link: all_gather
``(g-1) * in``, reduce_scatter ``(g-1) * out``, all_reduce ``2 (g-1)/g * in``, all_to_all what is really sent or
received. Tensors of unequal size travel padded to the largest in a gather or reduce_scatter, unpadded in an
all_to_all. Times add a latency per collective, bytes over bandwidth and the copies that pack and unpack; without a
cost profile a stated default link stands in.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.spec import Layout
from inductor_passes.redistribute.traffic import traffic

Kind = Literal["local", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "partition"]

#: The default link: 10 us per collective, 100 GB/s per rank and direction; local copies at 1 TB/s read plus write.
DEFAULT_LATENCY_NS = 10_000
DEFAULT_BYTES_PER_US = 100_000
COPY_BYTES_PER_US = 1_000_000


class Profile(Protocol):
    """What a plan needs from a cost profile."""

    def communication_ns(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> int:
        """Time of one collective over ``ranks``."""
        ...


@dataclass(frozen=True)
class Step:
    """A local rearrangement or one collective, for all ranks at once.

    Attributes:
        kind: ``local`` selects or copies, ``partition`` turns a replicated value into a pending reduction; the
            others are collectives.
        mesh_dims: the sub-mesh that communicates; one process group per combination of the other coordinates.
        before / after: layouts.
        reduce_op: of a reduction or a partition, else "".
        bytes: sent or received per rank, ring model, maximum over ranks.
        copy_bytes: read plus written by packing and unpacking, maximum over ranks.
        cost_ns: the collective (link and host) and copies.
        working_bytes: buffers alive at the worst moment of the step (its input, staging buffers, output).
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    before: Layout
    after: Layout
    reduce_op: str = ""
    bytes: int = 0
    copy_bytes: int = 0
    cost_ns: int = 0
    working_bytes: int = 0

    @property
    def communicates(self) -> bool:
        """Whether the step is a collective."""
        return self.kind not in ("local", "partition")


@dataclass(frozen=True)
class Pricing:
    """Prices steps for one mesh, element size and cost profile (None: the default link)."""

    mesh: Mesh
    itemsize: int
    profile: Profile | None = None
    _known: dict[tuple[str, int, int, tuple[int, ...]], int] = field(default_factory=dict, compare=False, repr=False)
    _distinct: dict[tuple[int, ...], list[tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)
    _least: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def collective_ns(
        self, kind: str, input_bytes: int, output_bytes: int, wire_bytes: int, dims: tuple[int, ...]
    ) -> int:
        """Time of a collective over ``dims``, on its link and of the host that issues it, where the profile knows that:
        of the slowest of its groups when a profile knows them apart."""
        if self.profile is None:
            return DEFAULT_LATENCY_NS + wire_bytes * 1000 // DEFAULT_BYTES_PER_US
        question = (kind, input_bytes, output_bytes, dims)
        if question not in self._known:
            issue_ns = getattr(self.profile, "issue_ns", lambda *_: 0)
            about = kind, input_bytes, output_bytes
            self._known[question] = max(
                self.profile.communication_ns(*about, group) + int(issue_ns(*about, group))
                for group in self._groups(dims)
            )
        return self._known[question]

    def _groups(self, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """One group over ``dims`` of every layout that the profile tells apart (all, when it does not say)."""
        if dims not in self._distinct:
            layout = getattr(self.profile, "layout", lambda group: group)
            self._distinct[dims] = list({layout(group): group for group in reversed(self.mesh.groups(dims))}.values())
        return self._distinct[dims]

    def least_ns(self, wire_bytes: int) -> int:
        """Time of moving ``wire_bytes`` in one collective on the fastest sub-mesh, latency included: no plan that moves
        them is faster as long as a collective's time is linear in bytes with a latency of at least 0."""
        if wire_bytes <= 0:
            return 0
        if self.profile is None:
            return DEFAULT_LATENCY_NS
        if wire_bytes not in self._least:
            times = []
            used = [m for m, size in enumerate(self.mesh.shape) if size > 1]
            for count in range(1, len(used) + 1):
                for dims in itertools.combinations(used, count):
                    group = self.mesh.group_size(dims)
                    whole = wire_bytes * group // (group - 1)
                    times.append(self.collective_ns("all_to_all", whole, whole, wire_bytes, dims))
                    times.append(self.collective_ns("all_gather", whole // group, whole, wire_bytes, dims))
                    times.append(self.collective_ns("reduce_scatter", whole, whole // group, wire_bytes, dims))
                    times.append(self.collective_ns("all_reduce", whole // 2, whole // 2, wire_bytes, dims))
            self._least[wire_bytes] = min(times)
        return self._least[wire_bytes]

    def movements(self, before: Layout, after: Layout) -> list[Step]:
        """The single steps that rearrange ``before`` into ``after``: local when nothing crosses, else a gather with a
        selection and an exchange with exact splits, both on the smallest sub-mesh that suffices."""
        size = self.itemsize
        large_in, large_out = before.max_numel * size, after.max_numel * size
        # The common cases by formula: the exact transfers of hundreds of ranks take a while to count.
        if _extends(before, after):
            # Equal sizes and nothing to fetch: every rank already holds exactly its new block.
            copy = 0 if large_in == large_out else 2 * large_out
            return [self._step("local", (), before, after, 0, 0, copy, large_in + large_out)]
        gathered_dims = _extends(after, before)
        if gathered_dims and before.is_even:
            return [self._gather(before, after, gathered_dims)]
        moves = traffic(before, after)
        if not moves.crossing:
            copy = 0 if large_in == large_out else 2 * large_out
            return [self._step("local", (), before, after, 0, 0, copy, large_in + large_out)]
        dims = moves.crossing
        group = self.mesh.group_size(dims)
        gather = self._gather(before, after, dims)
        wire = moves.busiest * size
        # Cost models expect the whole message of an all_to_all, of which 1/g stays at home; ours keeps nothing in it.
        message = -(-wire * group // (group - 1))
        sent, received = moves.max_sent * size, moves.max_received * size
        exchange = self._step(
            "all_to_all",
            dims,
            before,
            after,
            wire,
            self.collective_ns("all_to_all", message, message, wire, dims),
            2 * sent + 2 * large_out,
            max(large_in + sent + received, large_in + received + large_out),
        )
        return [gather, exchange]

    def _gather(self, before: Layout, after: Layout, dims: tuple[int, ...]) -> Step:
        large_in, large_out = before.max_numel * self.itemsize, after.max_numel * self.itemsize
        group = self.mesh.group_size(dims)
        packing = large_in if not before.is_even else 0
        unpacking = 0 if _gathers_in_order(before, after, dims) else large_out
        ring, gathered = (group - 1) * large_in, group * large_in
        ns = self.collective_ns("all_gather", large_in, gathered, ring, dims)
        copy = 2 * (packing + unpacking)
        return self._step(
            "all_gather", dims, before, after, ring, ns, copy, large_in + gathered + max(packing, unpacking)
        )

    def reduce(self, before: Layout, after: Layout, dims: tuple[int, ...], op: str) -> Step:
        """An all_reduce (``after`` replicates along ``dims``) or a reduce_scatter (``after`` is cut by them)."""
        size = self.itemsize
        group = self.mesh.group_size(dims)
        large_in, large_out = before.max_numel * size, after.max_numel * size
        if set(dims) <= set(after.replicate_dims):
            wire = -(-2 * (group - 1) * large_in // group)
            ns = self.collective_ns("all_reduce", large_in, large_in, wire, dims)
            return self._step("all_reduce", dims, before, after, wire, ns, 0, 2 * large_in, op)
        packed = group * large_out
        wire = (group - 1) * large_out
        in_order = packed == large_in and _gathers_in_order(after, before, dims)
        ns = self.collective_ns("reduce_scatter", packed, large_out, wire, dims)
        copy = 0 if in_order else 2 * packed
        staging = 0 if in_order else packed
        return self._step("reduce_scatter", dims, before, after, wire, ns, copy, large_in + staging + large_out, op)

    def partition(self, before: Layout, after: Layout, dims: tuple[int, ...], op: str) -> Step:
        """A replicated value becomes one that is pending reduction along ``dims``; no communication."""
        large = before.max_numel * self.itemsize
        copy = 2 * large if op in ("sum", "product") else 0
        return self._step("partition", dims, before, after, 0, 0, copy, 2 * large, op)

    def _step(
        self,
        kind: Kind,
        dims: tuple[int, ...],
        before: Layout,
        after: Layout,
        wire: int,
        collective_ns: int,
        copy: int,
        working: int,
        op: str = "",
    ) -> Step:
        cost = collective_ns + self.copy_ns(copy)
        return Step(kind, dims, before, after, op, wire, copy, cost, working)

    def copy_ns(self, size_bytes: int) -> int:
        """Time of reading and writing ``size_bytes`` in all, in kernels that run anyway: packs fuse with neighbours."""
        price = getattr(self.profile, "compute_ns", None)
        return size_bytes * 1000 // COPY_BYTES_PER_US if price is None else int(price(0, size_bytes, "float32", 0))


@lru_cache(maxsize=16384)
def _extends(before: Layout, after: Layout) -> tuple[int, ...]:
    """The mesh dims of the cuts that ``after`` adds behind those of ``before``; () when it does anything else."""
    added: list[int] = []
    for old, new in zip(before.cuts, after.cuts):
        if new[: len(old)] != old:
            return ()
        added += [m for m, _ in new[len(old) :]]
    return tuple(sorted(added))


def _gathers_in_order(before: Layout, after: Layout, dims: tuple[int, ...]) -> bool:
    """Whether the gathered buffer of ``before`` over ``dims`` already is the local tensor of ``after``.

    True when the layouts differ in one tensor dimension only, whose innermost cuts by ``dims`` in ascending order
    disappear, the sizes are even and everything before that dimension has extent 1 (row-major memory).
    """
    changed = [d for d, (a, b) in enumerate(zip(before.cuts, after.cuts)) if a != b]
    if len(changed) != 1 or not before.is_even:
        return False
    (d,) = changed
    leading = math.prod(after.local_shape((0,) * len(after.mesh_shape))[:d])
    return leading == 1 and before.cuts[d] == after.cuts[d] + tuple((m, 1) for m in sorted(dims))
