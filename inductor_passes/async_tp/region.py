"""Regions: connected pieces of a graph around a collective that can be computed part by part along one axis.

Fusing communication with compute is strip-mining: cut one axis of a collective's operand into ``k`` parts and follow
the cut through everything that maps over that axis (views, casts, elementwise and row-local operators, matmuls along
a free or batch dimension, further collectives). Each part is then an independent chain ``start -> wait -> matmul``
(or ``matmul -> start -> wait``), and the link works on part ``j + 1`` while the device works on part ``j``. Where the
axis is contracted, the parts are partial sums. Forms (bias, batched, weight gradient, gathered weights, one gather for
several matmuls, a pair gather - matmuls - scatter) need no patterns of their own: they are shapes of regions.

The same idea for one loop nest is "loop fission and pipelining"; for tensor-parallel transformers see "Breadth-first
pipelining of tensor parallelism" in Jangda et al., CoCoNet (ASPLOS 2022), and Wang et al. (ASPLOS 2023), which cut
by hand-written patterns.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Container, Hashable
from dataclasses import dataclass

import torch
import torch.fx

from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.alike import Seen
from inductor_passes.async_tp.matmul import DotDim
from inductor_passes.async_tp.rules import Needs, Rule, carries, is_split, rule_of, shape_of
from inductor_passes.async_tp.slab import Cut, Partial, Slab, Uniform, Widths, cut_into, is_dense
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason

#: Reductions that a sum of parts and a part of a sum commute with.
LINEAR = ("", "sum", "avg")
#: Kinds whose operand holds one block per rank along dimension 0.
_BLOCK_PER_RANK = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
#: How far a region may reach; beyond, nothing is gained and planning time is lost.
MAX_NODES = 512


@dataclass(frozen=True, eq=False)
class Region:
    """What is computed in parts.

    Attributes:
        widths: units of each part.
        cuts: every member with its cut, in graph order.
        needs: for every member and each tensor operand, the part that it reads (None: the whole).
        collectives: the members that communicate, in graph order.
        matmuls: the members that are matmuls, with the dimension of the dot that is cut.
        axis: (collective's label, dimension of its operand) that was cut.
    """

    widths: Widths
    cuts: dict[torch.fx.Node, Cut]
    needs: dict[torch.fx.Node, Needs]
    collectives: tuple[Collective, ...]
    matmuls: dict[torch.fx.Node, DotDim]
    axis: tuple[str, int]

    @property
    def parts(self) -> int:
        """How many."""
        return len(self.widths)

    @property
    def units(self) -> int:
        """Of all parts together."""
        return sum(self.widths)

    def exits(self) -> list[torch.fx.Node]:
        """Members that somebody outside reads whole, in graph order."""
        return [n for n in self.cuts if any(self.reads_whole(user, n) for user in n.users)]

    def joined(self) -> list[torch.fx.Node]:
        """Members whose whole value must be put together from parts: exits, or what they view; in graph order."""
        found: set[torch.fx.Node] = set()
        stack = self.exits()
        while stack:
            node = stack.pop()
            if is_layout(node):
                stack.extend(i for i in node.all_input_nodes if i in self.cuts)
            else:
                found.add(node)
        return [n for n in self.cuts if n in found]

    def reads_whole(self, user: torch.fx.Node, operand: torch.fx.Node) -> bool:
        """Whether ``user`` needs all parts of ``operand`` at once."""
        return user not in self.cuts or self.needs[user].get(operand) is None


@dataclass(frozen=True)
class Refusal:
    """Why an axis leads nowhere; ``node``: what ``detail`` is about."""

    reason: Reason
    detail: str
    node: torch.fx.Node | None = None

    @property
    def text(self) -> str:
        """For people."""
        return self.detail if self.node is None else f"{self.node.name} {self.detail}"


@dataclass(frozen=True)
class Reach:
    """How a region may grow.

    Attributes:
        contracting: matmuls that contract the axis join it (their parts are summed).
        further: how many reductions or exchanges downstream join it; 0 stops at the first matmuls (or, upstream of a
            collective, at its wait).
    """

    contracting: bool = True
    further: int = 0


def axes(collective: Collective) -> list[int]:
    """Dimensions of the collective's operand that might be cut, the outermost first."""
    value = collective.inputs[0].meta.get("val")
    return list(range(value.dim())) if isinstance(value, torch.Tensor) else []


def blocks(collective: Collective, dim: int) -> int:
    """Into how many blocks a dimension of the collective's operand falls that belong to different ranks."""
    return collective.group.size if dim == 0 and collective.kind in _BLOCK_PER_RANK else 1


def unsupported(collective: Collective, view: GraphView) -> Refusal | None:
    """Why a collective cannot be cut at all, whatever is around it."""
    if len(collective.inputs) != 1:
        return Refusal(Reason.UNSUPPORTED, "coalesced collective")
    if collective.in_place:
        return Refusal(Reason.UNSUPPORTED, "writes to memory that existed before")
    if not axes(collective):
        return Refusal(Reason.UNSUPPORTED, "a scalar has no dimension to cut")
    if collective.kind == CollectiveKind.BROADCAST:
        return Refusal(Reason.UNSUPPORTED, "broadcast")
    if collective.reduce_op not in LINEAR:
        return Refusal(Reason.UNSUPPORTED, f"reduction {collective.reduce_op!r} is not linear")
    if len(collective.waits) != 1:
        return Refusal(Reason.UNSUPPORTED, f"{len(collective.waits)} waits")
    if any(user is not collective.waits[0] for user in collective.start.users):
        return Refusal(Reason.UNSUPPORTED, "its result is used before the wait")
    members = [node for storage in view.storages.of(collective.start) for node in storage.members]
    if any(view.role(user) is Role.WAIT and user not in collective.waits for node in members for user in node.users):
        return Refusal(Reason.UNSUPPORTED, "what was waited for is waited for again")
    if any(s.writers for s in view.storages.of(collective.start)):
        return Refusal(Reason.UNSUPPORTED, "its result is written to in place")
    return None


@dataclass(frozen=True)
class Recipe:
    """How a region was grown: the same graph gives the same region again.

    Attributes:
        start: name of the collective that it was grown from, ``dim`` the dimension of its operand.
        upstream: whether it was grown against the flow of data.
        beside: whether the gathers beside it are in it.
    """

    start: str
    dim: int
    widths: Widths
    reach: Reach
    upstream: bool
    beside: bool


#: Regions around one axis, the smallest first, or why there is none.
Grown = tuple[Region, ...] | Refusal


class Grower:
    """Grows regions in one graph.

    Where members read gathers that nobody else reads, in parts, there is a second region with these in it.

    Attributes:
        seen: what was looked at since somebody put this here.
    """

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self.seen = Seen()
        self._mutable = {n for s in view.storages.all if s.writers for n in s.members}
        self._gathers = {c.waits[0]: c for c in view.collectives if c.kind == CollectiveKind.ALL_GATHER and c.waits}

    def about(self, node: torch.fx.Node) -> Hashable:
        """What growing asks of a node beyond its operator, operands and users."""
        collective = self._view.by_start.get(node)
        refusal = None if collective is None else unsupported(collective, self._view)
        return node in self._mutable, node in self._gathers, "val" in node.meta, is_layout(node), refusal

    def forward(self, seed: Collective, dim: int, widths: Widths, reach: Reach) -> Grown:
        """The region downstream of ``seed``: up to the first matmuls, or further to collectives that follow them."""
        cut = cut_into(shape_of(seed.inputs[0]), dim, sum(widths), blocks(seed, dim))
        if cut is None:
            return _indivisible(seed, dim, len(widths))
        growth = _Growth(self._view, self._mutable, self._gathers, widths, self.seen)
        if not growth.add(seed.start, seed.inputs[0], cut):
            return Refusal(Reason.UNSUPPORTED, f"{seed.kind} cannot be cut along dimension {dim}")
        growth.add(seed.waits[0], seed.start, growth.slab(seed.start))
        targets = growth.downstream(seed.waits[0], reach)
        if not targets:
            return _no_matmul(f"no matmul consumes dimension {dim} of it in parts")
        return growth.regions(targets, (seed.start, seed.waits[0]), (seed.label, dim))

    def backward(self, seed: Collective, dim: int, widths: Widths, reach: Reach) -> Grown:
        """The region upstream of ``seed``, back to the matmuls that produce what it sends."""
        start, wait = seed.start, seed.waits[0]
        sent = cut_into(shape_of(seed.inputs[0]), dim, sum(widths), blocks(seed, dim))
        if sent is None:
            return _indivisible(seed, dim, len(widths))
        growth = _Growth(self._view, self._mutable, self._gathers, widths, self.seen)
        if not growth.add(start, seed.inputs[0], sent) or not growth.add(wait, start, growth.slab(start)):
            return Refusal(Reason.UNSUPPORTED, f"{seed.kind} cannot be cut along dimension {dim}")
        for loose in (False, True):
            found = growth.upstream(start, loose)
            if found:
                break
        else:
            return _no_matmul(f"no matmul produces dimension {dim} of it in parts")
        targets = [wait]
        if reach.further:
            targets += growth.downstream(wait, Reach(reach.contracting, reach.further - 1))
        return growth.regions(targets, (start, wait), (seed.label, dim))


def _indivisible(seed: Collective, dim: int, parts: int) -> Refusal:
    size = shape_of(seed.inputs[0])[dim]
    if not isinstance(size, int):
        return Refusal(Reason.RANGE, f"dimension {dim} of size {size} is not known to divide into {parts} parts")
    return Refusal(Reason.UNSUPPORTED, f"dimension {dim} of size {size} does not divide into {parts} parts")


def _no_matmul(detail: str) -> Refusal:
    return Refusal(Reason.NO_INDEPENDENT_COMPUTE, detail)


@dataclass(frozen=True)
class _State:
    """Where a node lies behind the root: ``matmuls`` since the last gather (or the root), ``sinks`` passed."""

    matmuls: int = 0
    sinks: int = 0


class _Growth:
    """One region under construction: a consistent assignment of cuts to nodes."""

    def __init__(
        self,
        view: GraphView,
        mutable: set[torch.fx.Node],
        gathers: dict[torch.fx.Node, Collective],
        widths: Widths,
        seen: Seen,
    ) -> None:
        self._view = view
        self._seen = seen
        self._mutable = mutable
        self._gathers = gathers
        self._widths, self._units = widths, sum(widths)
        self.cuts: dict[torch.fx.Node, Cut] = {}
        self.needs: dict[torch.fx.Node, Needs] = {}

    def slab(self, node: torch.fx.Node) -> Slab:
        """The cut of a member that is no partial sum."""
        cut = self.cuts[node]
        assert isinstance(cut, Slab)
        return cut

    def add(self, node: torch.fx.Node, operand: torch.fx.Node, cut: Slab, contracting: bool = True) -> bool:
        """Make ``node`` a member because its ``operand`` comes in parts; False when it cannot be."""
        self._seen.read[node] = None
        rule = rule_of(node)
        if rule is None or not carries(rule, cut):
            return False
        result = rule.result(node, operand, cut, self._units)
        if result is None or (isinstance(result, Partial) and not contracting):
            return False
        return self._admit(node, rule, result)

    def require(self, node: torch.fx.Node, cut: Slab) -> bool:
        """Make ``node`` a member because somebody reads it in parts; False when it cannot be."""
        self._seen.read[node] = None
        rule = rule_of(node)
        return rule is not None and carries(rule, cut) and self._admit(node, rule, cut)

    def _admit(self, node: torch.fx.Node, rule: Rule, cut: Cut) -> bool:
        if node in self._mutable or "val" not in node.meta:
            return False
        value = node.meta["val"]
        if (
            isinstance(cut, Slab)
            and isinstance(value, torch.Tensor)
            and not (cut.fits(value.shape, self._units) and (is_layout(node) or is_dense(value)))
        ):
            return False
        needs = rule.needs(node, cut, self._units)
        if needs is None:
            return False
        for operand, part in needs.items():
            if operand in self.cuts:
                if self.cuts[operand] != part:
                    return False
            elif part is not None and not self._takeable(operand, part):
                return False
        self.cuts[node], self.needs[node] = cut, needs
        self._seen.admitted[node] = None
        return True

    def _takeable(self, operand: torch.fx.Node, part: Slab) -> bool:
        """Whether parts of a value from outside can be had."""
        value = operand.meta.get("val")
        if self._view.role(operand) is Role.START or operand in self._mutable:
            return False
        if isinstance(value, (list, tuple)):
            # A list is cut by its producer, which must then become a member: see ``region``.
            return True
        return isinstance(value, torch.Tensor) and part.fits(value.shape, self._units)

    def _look(self, node: torch.fx.Node) -> None:
        """Note that it matters who reads a node, and what it reads."""
        self._seen.read[node] = self._seen.admitted[node] = None

    def _leave(self, node: torch.fx.Node) -> None:
        """Note that a node is left alone for one of its users."""
        self._seen.left[node] = None

    def downstream(self, root: torch.fx.Node, reach: Reach) -> list[torch.fx.Node]:
        """Admit what follows ``root``; returns the nodes that make it worth while."""
        position = self._view.position
        state = {root: _State()}
        queue: list[tuple[int, torch.fx.Node]] = []
        queued: set[torch.fx.Node] = set()

        def push(node: torch.fx.Node) -> None:
            for user in node.users:
                if user not in queued and user not in self.cuts:
                    queued.add(user)
                    heapq.heappush(queue, (position[user], user))

        push(root)
        targets: list[torch.fx.Node] = []
        while queue and len(self.cuts) < MAX_NODES:
            _, node = heapq.heappop(queue)
            if self._view.role(node) is Role.OUTPUT:
                continue
            self._seen.read[node] = None
            sources = [i for i in node.all_input_nodes if i in state and isinstance(self.cuts.get(i), Slab)]
            if not sources or self._view.role(node) in (Role.FENCE, Role.WAIT):
                continue
            now = _State(max(state[i].matmuls for i in sources), max(state[i].sinks for i in sources))
            collective = self._view.by_start.get(node)
            is_sink = collective is not None and collective.kind != CollectiveKind.ALL_GATHER
            if collective is not None and unsupported(collective, self._view):
                continue
            if now.sinks == reach.further and (now.matmuls or now.sinks):
                continue
            if is_sink and (not now.matmuls or now.sinks == reach.further):
                continue
            if not self.add(node, sources[0], self.slab(sources[0]), reach.contracting):
                continue
            is_matmul = matmul.canonical(node) is not None
            if is_matmul and not now.matmuls:
                targets.append(node)
            if collective is not None:
                node = collective.waits[0]
                self.add(node, collective.start, self.slab(collective.start))
                now = _State(0, now.sinks + is_sink)
                if is_sink:
                    targets.append(node)
            state[collective.start if collective is not None else node] = now
            state[node] = now if not is_matmul else _State(now.matmuls + 1, now.sinks)
            push(node)
        return targets

    def upstream(self, root: torch.fx.Node, loose: bool) -> list[torch.fx.Node]:
        """Admit what ``root`` is made from, back to the nearest matmuls; returns those matmuls.

        ``loose`` also passes computed values that others read.
        """
        position = self._view.position
        kept = dict(self.cuts), dict(self.needs)
        queue = [(-position[i], i) for i, part in self.needs[root].items() if part is not None]
        heapq.heapify(queue)
        seen = {node for _, node in queue}
        found: list[torch.fx.Node] = []
        wanted = dict(self.needs[root])
        while queue and len(self.cuts) < MAX_NODES:
            _, node = heapq.heappop(queue)
            part = wanted[node]
            if part is None or self._view.role(node) not in (Role.COMPUTE, Role.FREE):
                continue
            is_matmul = matmul.canonical(node) is not None
            free = is_layout(node)
            shared = any(user not in self.cuts for user in node.users)
            if shared and not (loose or free or is_matmul):
                self._leave(node)
                continue
            self._look(node)
            if any(user in self.cuts and self.needs[user].get(node) != part for user in node.users):
                continue
            if not self.require(node, part):
                continue
            if is_matmul:
                found.append(node)
                continue
            for operand, its_part in self.needs[node].items():
                if wanted.setdefault(operand, its_part) != its_part:
                    wanted[operand] = None
                if operand not in seen:
                    seen.add(operand)
                    heapq.heappush(queue, (-position[operand], operand))
        if not found:
            self.cuts, self.needs = kept
        else:
            self._keep_descendants(found, kept[0])
        return found

    def regions(
        self, targets: list[torch.fx.Node], seed: tuple[torch.fx.Node, ...], axis: tuple[str, int]
    ) -> tuple[Region, ...] | Refusal:
        """The region of the members, and one with the gathers beside them."""
        first = self.region(targets, seed, axis)
        if isinstance(first, Refusal):
            return first
        # What leads to no target stays outside, also for those who would only read gathers in parts with it.
        self.cuts, self.needs = dict(first.cuts), dict(first.needs)
        if not self._beside():
            return (first,)
        more = self.region(targets, seed, axis)
        return (first,) if isinstance(more, Refusal) else (first, more)

    def _beside(self) -> bool:
        """Admit gathers whose results only members read, in the parts that they need, with what lies between."""
        kept = {*self.cuts}
        position = self._view.position
        wanted: dict[torch.fx.Node, Slab | None] = {}
        queue: list[tuple[int, torch.fx.Node]] = []

        def ask(node: torch.fx.Node) -> None:
            for operand, part in self.needs[node].items():
                if operand not in wanted and operand not in self.cuts:
                    heapq.heappush(queue, (-position[operand], operand))
                if wanted.setdefault(operand, part) != part:
                    wanted[operand] = None

        for node in kept:
            ask(node)
        found: list[torch.fx.Node] = []
        while queue and len(self.cuts) < MAX_NODES:
            _, node = heapq.heappop(queue)
            part = wanted[node]
            if part is None:
                continue
            if any(user not in self.cuts or self.needs[user].get(node) != part for user in node.users):
                self._leave(node)
                continue
            self._look(node)
            gather = self._gathers.get(node)
            if gather is not None:
                if self._require_gather(gather, part):
                    found.append(gather.start)
                continue
            between = self._view.role(node) in (Role.COMPUTE, Role.FREE) and matmul.canonical(node) is None
            if between and self.require(node, part):
                ask(node)
        self._keep_descendants(found, kept)
        return bool(found)

    def _require_gather(self, gather: Collective, part: Slab) -> bool:
        """Admit a gather whose result is needed in parts."""
        if unsupported(gather, self._view) is not None or not self.require(gather.start, part):
            return False
        if self.require(gather.waits[0], part):
            return True
        del self.cuts[gather.start], self.needs[gather.start]
        return False

    def _keep_descendants(self, roots: list[torch.fx.Node], before: Container[torch.fx.Node]) -> None:
        """Drop new members that do not come after one of these: they stay outside, read in parts."""
        fed = set(roots)
        for node in sorted((n for n in self.cuts if n not in before), key=self._view.position.__getitem__):
            if node not in fed and any(i in fed for i in self.needs[node]):
                fed.add(node)
        for node in [n for n in self.cuts if n not in before and n not in fed]:
            del self.cuts[node], self.needs[node]

    def region(
        self, targets: list[torch.fx.Node], seed: tuple[torch.fx.Node, ...], axis: tuple[str, int]
    ) -> Region | Refusal:
        """The members that lead to a target, as a region."""
        keep = {*seed}
        stack = [*targets, *seed]
        while stack:
            node = stack.pop()
            keep.add(node)
            stack.extend(i for i in self.needs[node] if i in self.cuts and i not in keep)
        # What computes several results is read through its getitems only, so all of them belong to it.
        keep |= {u for n in keep if isinstance(n.meta["val"], (list, tuple)) for u in n.users if u in self.cuts}
        members = sorted(keep, key=self._view.position.__getitem__)
        collectives = tuple(self._view.by_start[n] for n in members if n in self._view.by_start)
        matmuls = {}
        for node in members:
            form = matmul.canonical(node)
            if form is not None:
                matmuls[node] = form.dot_dim(self.cuts[node])
        cuts, needs = {n: self.cuts[n] for n in members}, {n: self.needs[n] for n in members}
        for node in members:
            for operand, part in needs[node].items():
                if part is not None and operand not in cuts and isinstance(operand.meta["val"], (list, tuple)):
                    return Refusal(Reason.UNSUPPORTED, "has several results and is made outside", operand)
        region = Region(self._widths, cuts, needs, collectives, matmuls, axis)
        for node in region.joined():
            if not isinstance(node.meta["val"], torch.Tensor) and not isinstance(cuts[node], Uniform):
                return Refusal(Reason.UNSUPPORTED, "has several results and is read outside", node)
        return region


def is_layout(node: torch.fx.Node) -> bool:
    """Whether a member's whole value is a view of another member's, and not put together from parts itself.

    An output of a computation with several (``getitem``) has no other whole than its own.
    """
    if is_split(node):
        return True
    if ops.role(node) is not Role.FREE:
        return False
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    computed = source is not None and ops.role(source) is Role.COMPUTE and not is_split(source)
    return not (node.target is operator.getitem and computed)
