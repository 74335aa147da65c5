"""What every rewrite works with: the graph's collectives kept up to date while nodes come and go, matches, refusals.

A rewrite is asked about one node at a time (its *root*) and answers with a :class:`Match`, with ``None`` (no candidate)
or by raising :class:`Refusal`. It decides from op, group and dtype, never from a size that may differ between ranks, so
all ranks decide alike. Replacing nodes costs their number, not the graph's: the maps of a :class:`Work` are patched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Protocol

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops
from inductor_passes.ir.ops import Role
from inductor_passes.ir.storages import FxStorage
from inductor_passes.ir.view import Collective, GraphView, collective_of
from inductor_passes.operators import CollectiveKind
from inductor_passes.redistribute.mesh import product
from inductor_passes.redistribute.plan import ORDER_FREE
from inductor_passes.redistribute.spec import REDUCE_OPS
from inductor_passes.report import Reason
from inductor_passes.rewrites.applications import Applications
from inductor_passes.rewrites.movement import movement_behind
from inductor_passes.rewriting.contract import Facts
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.numbers import Numbers
from inductor_passes.rewriting.split import Split
from inductor_passes.settings.redistribution import Tier
from inductor_passes.verify import Claim
from inductor_passes.verify.messages import KEY

Exactness = Tier

#: The name under which taking coalesced collectives apart is reported.
COALESCED = "coalesced"
#: DTensor's blocking exchange, as CUDA traces it.
EXCHANGE = "_dtensor::shard_dim_alltoall"
#: Operators that rewrites start from besides collectives.
INDEXED = ("aten::cat", EXCHANGE)


def check_exactness(value: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a tier."""
    if value not in ("exact", "reassociate", "off"):
        raise ValueError(f'exactness is {value!r}; expected "exact", "reassociate" or "off"')


class Refusal(Exception):
    """A candidate that a rewrite leaves alone, and why."""

    def __init__(self, reason: Reason, detail: str = "", setting: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.setting = setting


def refuse(reason: Reason, detail: str = "", setting: str = "") -> NoReturn:
    """Raise :class:`Refusal`."""
    raise Refusal(reason, detail, setting)


def sizes_are_known(work: Work, found: Iterable[int | torch.SymInt]) -> None:
    """Refuse symbolic sizes that nothing can be estimated with, or that do not follow from the graph's inputs."""
    symbolic = {_torch.size_key(size): size for size in found if isinstance(size, torch.SymInt)}
    numbers = Numbers(work.graph.nodes) if symbolic else None
    for size in symbolic.values():
        if _torch.size_hint(size) is None:
            refuse(Reason.NO_HINT, f"nothing says how large {size} usually is")
        if numbers is not None and not numbers.has(size):
            refuse(Reason.RANGE, f"{size} does not follow from the sizes of the graph's inputs")


@dataclass(frozen=True)
class Match:
    """A candidate that may be applied.

    Attributes:
        gain_ns: estimated time saved, link and copies; below 0 the driver refuses.
        apply: does it; valid as long as nothing was applied since the match.
        loss: what to say when the gain is below 0.
        extends: it keeps a tensor alive for longer, so the memory budget has a say.
    """

    gain_ns: int
    detail: str
    apply: Callable[[], None]
    loss: str = "the rewritten form is slower"
    extends: bool = False


class Rewrite(Protocol):
    """One entry of the catalogue; stateless.

    ``local`` is true for one that leaves all collectives as they are: ranks need not agree about it.
    """

    name: ClassVar[str]
    local: ClassVar[bool]

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """Nodes to ask about, in graph order."""

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """What can be done at a root; None when it is no candidate. Raises :class:`Refusal`."""


class Work:
    """A graph under rewriting.

    Attributes:
        facts: about the graph as rewriting begins: settings, costs, what ranks agree on.
        exactness: the tier.
        fresh: starts that the last replacement made, and those whose operand it changed.
        visits: nodes touched by keeping the maps up to date.
        families: of starts that came out of coalesced collectives: the names of these.
        touched: the families that lost a start; whoever asks clears it.
        empty_pieces: some rank may hold no piece of a tensor that others slice: see :func:`_may_be_empty`.
        regions: by their root, where a rewrite looks for all of its candidates at once.
        for_all_ranks: the graph looks its process groups up when it runs (``compile_on_one_rank``): the name of a
            group of this rank must not be written into it.
    """

    def __init__(
        self, graph: torch.fx.Graph, facts: Facts, exactness: Exactness, splits: Sequence[Split] = ()
    ) -> None:
        view = facts.view
        self.graph = graph
        self.facts = facts
        self.exactness = exactness
        self.applications = Applications()
        self.families: dict[torch.fx.Node, frozenset[str]] = {}
        self.touched: set[str] = set()
        for one in splits:
            self.applications.add(COALESCED, list(one.removed), list(one.added), list(one.replaced))
            self.families.update((start, frozenset((one.name,))) for start in one.starts)
        self.fresh: list[torch.fx.Node] = []
        self.visits = len(view.nodes)
        self._by_start = dict(view.by_start)
        self._of_wait = dict(view.collectives_of_wait)
        landing = {wait for waits in view.transfer_waits.values() for wait in waits}
        self._idle = {wait: None for wait in view.nodes if wait not in landing and _is_idle(view, wait)}
        self._writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self._gone: set[torch.fx.Node] = set()
        self._numbered = len(view.collectives)
        self._named: dict[str, dict[torch.fx.Node, None]] = {name: {} for name in INDEXED}
        self.results_by_storage = _results(view)
        self.regions: dict[torch.fx.Node, object] = {}
        self.for_all_ranks = any(isinstance(c.group_argument, torch.fx.Node) for c in view.collectives)
        sizes = {len(ranks) for _, ranks in _torch.group_layout().items()}
        self.empty_pieces = False
        self._told: dict[str, list[torch.fx.Node]] = {}
        for node in view.nodes:
            self._index(node)
            self.empty_pieces = self.empty_pieces or _may_be_empty(node, sizes)
        for storage in view.storages.all:
            if storage.writers:
                for member in storage.members:
                    self._writers.setdefault(member, []).extend(storage.writers)

    def alive(self, node: torch.fx.Node) -> bool:
        """Whether the node is still in the graph."""
        return node not in self._gone

    def collectives(self, *kinds: CollectiveKind) -> Iterator[torch.fx.Node]:
        """Starts of simple collectives of these kinds, as the graph is now."""
        for start in list(self._by_start):
            if self.collective(start, *kinds) is not None:
                yield start

    def starts(self) -> Iterator[torch.fx.Node]:
        """Starts of all collectives, as the graph is now."""
        return iter(list(self._by_start))

    def named(self, name: str) -> Iterator[torch.fx.Node]:
        """Calls of an operator of :data:`INDEXED`, as the graph is now."""
        return iter(list(self._named[name]))

    def collective(self, start: torch.fx.Node, *kinds: CollectiveKind) -> Collective | None:
        """The collective that ``start`` issues when it is simple: functional, one input, one wait, of these kinds."""
        found = self._by_start.get(start)
        if found is None or found.kind not in kinds or found.in_place:
            return None
        simple = len(found.inputs) == 1 and len(found.waits) == 1 and list(start.users) == [found.waits[0]]
        return found if simple else None

    def repeatedly_awaited(self) -> Iterator[torch.fx.Node]:
        """Starts for which :meth:`repeated_waits` are not empty, as the graph is now."""
        return iter([start for start in self._by_start if self.repeated_waits(start)])

    def repeated_waits(self, start: torch.fx.Node) -> list[torch.fx.Node]:
        """The waits for a functional collective's only result, in graph order, when there are several of them."""
        found = self._by_start.get(start)
        if found is None or found.in_place or len(found.waits) < 2 or set(start.users) != set(found.waits):
            return []
        return sorted(found.waits)

    def idle_waits(self) -> Iterator[torch.fx.Node]:
        """Waits for what nothing is going to write: what was waited for already, and what was computed; in graph order.
        """
        return iter([wait for wait in self._idle if self.alive(wait)])

    def is_idle(self, node: torch.fx.Node) -> bool:
        """Whether the node is one of :meth:`idle_waits`."""
        return node in self._idle and self.alive(node)

    def behind(self, node: torch.fx.Node, *kinds: CollectiveKind) -> Collective | None:
        """The simple collective of these kinds whose wait ``node`` is."""
        found = self._of_wait.get(node, ())
        return self.collective(found[0].start, *kinds) if len(found) == 1 else None

    def awaited(self, node: torch.fx.Node) -> tuple[Collective, ...]:
        """The collectives whose wait ``node`` is."""
        return self._of_wait.get(node, ())

    def is_wait(self, node: torch.fx.Node) -> bool:
        """Whether the node is the wait of a known collective."""
        return node in self._of_wait

    def unwritten(self, node: torch.fx.Node, since: torch.fx.Node, until: torch.fx.Node) -> None:
        """Refuse when something writes to the memory of ``node`` from ``since`` to ``until``."""
        if any(not (writer < since) and not (until < writer) for writer in self._writers.get(node, ())):
            refuse(Reason.DATA_DEPENDENCY, f"{node.name} is written to")

    def not_in_flight(self, node: torch.fx.Node, own: torch.fx.Node, at: torch.fx.Node) -> None:
        """Refuse when a collective other than ``own`` is reading the memory of ``node`` at the place of ``at``.

        Inductor lets an all_reduce that is the last to use its operand work in it.
        """
        todo, seen = [self._base(node)], set[torch.fx.Node]()
        while todo:
            for user in todo.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                if ops.role(user) in (Role.FREE, Role.WAIT):
                    todo.append(user)
                other = self._by_start.get(user)
                if other is not None and user is not own and user < at and any(at < wait for wait in other.waits):
                    refuse(Reason.DATA_DEPENDENCY, f"{user.name} is reading {node.name}")

    def is_written(self, node: torch.fx.Node) -> bool:
        """Whether anything in the graph writes to the memory of the node."""
        return bool(self._writers.get(node))

    def never_written(self, *nodes: torch.fx.Node) -> None:
        """Refuse when anything in the graph writes to the memory of these nodes."""
        for node in nodes:
            if self.is_written(node):
                refuse(Reason.DATA_DEPENDENCY, f"{node.name} is written to")

    def may_stand_for(self, kept: torch.fx.Node, gone: torch.fx.Node) -> None:
        """Refuse to let readers of ``gone`` read ``kept`` when results of the graph would newly share memory, with
        each other or with an input: the caller may write to them."""
        if self._escapes(gone) and (self._escapes(kept) or self._base(kept).op in ("placeholder", "get_attr")):
            refuse(Reason.DATA_DEPENDENCY, "two results, or a result and an input, would share memory")

    @staticmethod
    def _escapes(node: torch.fx.Node) -> bool:
        """Whether a result of the graph lives in the memory of ``node``."""
        todo, seen = [node], {node}
        while todo:
            for user in todo.pop().users:
                if user.op == "output":
                    return True
                if user not in seen and ops.role(user) in (Role.FREE, Role.WAIT):
                    seen.add(user)
                    todo.append(user)
        return False

    @staticmethod
    def _base(node: torch.fx.Node) -> torch.fx.Node:
        """The node whose memory ``node`` is."""
        while node.op == "call_function" and node.all_input_nodes and ops.role(node) in (Role.FREE, Role.WAIT):
            node = node.all_input_nodes[0]
        return node

    def joint_group(self, outer: Collective, inner: Collective) -> tuple[tuple[int, ...], str]:
        """Ranks and name of the flat group over both groups."""
        self.for_this_rank()
        ranks = product(outer.group.ranks, inner.group.ranks)
        if ranks is None:
            refuse(Reason.DIFFERENT_GROUP, "the groups form no grid")
        name = _torch.group_name_of(ranks)
        if name is None:
            refuse(
                Reason.DIFFERENT_GROUP,
                f"no process group of the {len(ranks)} ranks of both",
                "inductor_passes.prepare_groups(mesh) before compiling",
            )
        return ranks, name

    def for_this_rank(self) -> None:
        """Refuse to name a process group in a graph that is compiled for all ranks at once."""
        if self.for_all_ranks:
            refuse(Reason.DIFFERENT_GROUP, "the graph is compiled for all ranks and looks its groups up at run time")

    def same_reduction(self, first: Collective, second: Collective) -> None:
        """Refuse unless two reductions may be regrouped: one op, and a tier that lets its sums change order."""
        if first.reduce_op != second.reduce_op or first.reduce_op not in REDUCE_OPS:
            refuse(Reason.MIXED_REDUCE_OP, f"{first.reduce_op} and {second.reduce_op}")
        self.may_reassociate(second)

    def may_reassociate(self, reduction: Collective, detail: str = "sums in another order") -> None:
        """Refuse unless the tier lets this reduction be regrouped."""
        if reduction.reduce_op not in REDUCE_OPS:
            refuse(Reason.MIXED_REDUCE_OP, reduction.reduce_op)
        whole = all(not d.is_floating_point and not d.is_complex for d in reduction.dtypes)
        free = reduction.reduce_op in ORDER_FREE or (whole and reduction.reduce_op in ("sum", "product"))
        if not free and self.exactness != "reassociate":
            refuse(Reason.NUMERICS, detail, 'redistribute="reassociate"')

    def collective_ns(
        self, kind: CollectiveKind, input_bytes: int | None, output_bytes: int | None, ranks: tuple[int, ...]
    ) -> int:
        """Time of one collective: on its link, and of the host that issues it."""
        profile, size = self.facts.profile, (input_bytes or 0, output_bytes or 0)
        return profile.communication_ns(kind, *size, ranks) + profile.issue_ns(kind, *size, ranks)

    def price_ns(self, *collectives: Collective) -> int:
        """Time of collectives as they are."""
        return sum(self.collective_ns(c.kind, c.input_bytes, c.output_bytes, c.group.ranks) for c in collectives)

    def copy_ns(self, size_bytes: int) -> int:
        """Time of copying a tensor: read plus write."""
        return self.facts.profile.compute_ns(0, 2 * size_bytes, "float32")

    def replace(
        self,
        subject: str,
        origin: torch.fx.Node,
        removed: Sequence[torch.fx.Node],
        build: Callable[[Emitter], torch.fx.Node | Iterable[tuple[torch.fx.Node, torch.fx.Node]]],
        *,
        result: torch.fx.Node | None = None,
        before: torch.fx.Node | None = None,
        claim: Claim = Claim.REPLACE,
    ) -> None:
        """Put what ``build`` emits in the place of ``result`` (default: the first of ``removed``); erase ``removed``.

        Args:
            subject: the rewrite's name.
            origin: the node whose source line, annotations and tags the new nodes inherit.
            removed: nodes that go, users before producers; what only they needed goes too when it is pure.
            build: emits nodes; returns the one that stands for ``result``, or (old, new) pairs for several results.
            before: new nodes come in front of it (default: ``result``).
        """
        result = result or removed[0]
        emitter = Emitter(self.graph, (before or result).prev)
        with emitter.standing_for(origin):
            built = build(emitter)
        pairs = [(result, built)] if isinstance(built, torch.fx.Node) else list(built)
        names = [node.name for node in removed]
        redirected = []
        for old, new in pairs:
            if old in self._writers:
                # Whoever writes to the old result writes to the new one: nothing may look unwritten that is not.
                for node in (new, *emitter.made):
                    self._writers.setdefault(node, []).extend(self._writers[old])
            old.replace_all_uses_with(new)
            redirected.append((old.name, new.name))
            self._tell(old, new)
        inputs = [n for node in removed for n in node.all_input_nodes]
        for node in removed:
            self._erase(node)
        self.applications.add(subject, names, [n.name for n in emitter.made], redirected, claim)
        self._sweep([*inputs, *emitter.made])
        self._enter([n for n in emitter.made if n not in self._gone], [new for _, new in pairs])

    def redirect(
        self,
        subject: str,
        old: torch.fx.Node,
        reader: torch.fx.Node,
        build: Callable[[Emitter], torch.fx.Node],
    ) -> None:
        """``reader`` reads what ``build`` emits (behind ``old``) in the place of ``old``, which stays."""
        emitter = Emitter(self.graph, old)
        with emitter.standing_for(old):
            new = build(emitter)
        reader.replace_input_with(old, new)
        self.applications.add(subject, [], [n.name for n in emitter.made], [(old.name, new.name)])
        self._enter(emitter.made, [])

    def drop(self, subject: str, origin: torch.fx.Node, removed: Sequence[torch.fx.Node], kept: torch.fx.Node) -> None:
        """Users of the first of ``removed`` read ``kept``, which exists; ``removed`` is erased."""
        # What makes ``kept`` had a part in this: a coalesced collective that it came out of stays apart.
        self.touched.update(self.families.get(self._base(movement_behind(self._base(kept)).source), ()))
        self.replace(subject, origin, removed, lambda _: kept, claim=Claim.REMOVE)

    def _tell(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Exchanges that say what they send of a value say it of the one that stands for it now."""
        for exchange in self._told.pop(old.name, ()):
            if exchange not in self._gone:
                exchange.meta[KEY] = dataclasses.replace(exchange.meta[KEY], source=new.name)
                self._told.setdefault(new.name, []).append(exchange)

    def _erase(self, node: torch.fx.Node) -> None:
        self.visits += 1
        self._by_start.pop(node, None)
        self.touched.update(self.families.pop(node, ()))
        for one in self._of_wait.pop(node, ()):
            if one.start in self._by_start:
                left = tuple(wait for wait in self._by_start[one.start].waits if wait is not node)
                self._by_start[one.start] = dataclasses.replace(self._by_start[one.start], waits=left)
        self._gone.add(node)
        self._index(node, forget=True)
        self.graph.erase_node(node)

    def _sweep(self, nodes: list[torch.fx.Node]) -> None:
        """Erase pure nodes that nobody reads any more."""
        while nodes:
            node = nodes.pop()
            if node in self._gone or node.users or node.op != "call_function" or node in self._writers:
                continue
            role = ops.role(node)
            if role not in (Role.FREE, Role.COMPUTE) or ops.effect_channel(node, role) or ops.mutated_inputs(node):
                continue
            nodes.extend(node.all_input_nodes)
            self.applications.forget(node.name)
            self._erase(node)

    def _enter(self, made: list[torch.fx.Node], results: list[torch.fx.Node]) -> None:
        """Take up new collectives; describe those anew whose operand is another node now."""
        self.fresh = []
        for node in made:
            self.visits += 1
            self._index(node)
            if ops.role(node) is Role.START:
                waits = tuple(user for user in node.users if ops.is_wait(user))
                self._take(node, waits)
                if self.touched:
                    self.families[node] = frozenset(self.touched)
        for result in results:
            for user in result.users:
                self.visits += 1
                known = self._by_start.get(user)
                if known is not None:
                    self._take(user, known.waits)

    def _index(self, node: torch.fx.Node, forget: bool = False) -> None:
        name = _torch.op_name(node.target) if node.op == "call_function" else ""
        if name in INDEXED:
            if forget:
                self._named[name].pop(node, None)
            else:
                self._named[name][node] = None
        if not forget and KEY in node.meta:
            self._told.setdefault(node.meta[KEY].source, []).append(node)

    def _take(self, start: torch.fx.Node, waits: tuple[torch.fx.Node, ...]) -> None:
        self._numbered += 1
        collective = collective_of(self._numbered, start, waits)
        self._by_start[start] = collective
        for wait in waits:
            others = tuple(c for c in self._of_wait.get(wait, ()) if c.start is not start)
            self._of_wait[wait] = (*others, collective)
        self.fresh.append(start)


def _may_be_empty(node: torch.fx.Node, group_sizes: set[int]) -> bool:
    """Evidence that a shard is empty on some rank.

    That rank does not read the tensor that the others slice, so a rewrite that asks who reads a result would be decided
    differently there. It sees a new tensor without elements; the others see a split into fewer pieces than a group has
    ranks.
    """
    name = _torch.op_name(node.target) if node.op == "call_function" else ""
    value = node.meta.get("val")
    if name in _CREATIONS and isinstance(value, torch.Tensor):
        return any(type(s) is int and s == 0 for s in value.shape)
    if name not in ("aten::split", "aten::split_with_sizes", "aten::chunk") or not isinstance(value, (list, tuple)):
        return False
    dim = _torch.op_arguments(node).get("dim", 0)
    rows = [piece.shape[dim] for piece in value]
    if not rows or any(type(r) is not int for r in rows):
        return False
    total, step = sum(rows), max(rows)
    return step > 0 and any(size > len(rows) and -(-total // size) == step for size in group_sizes)


_CREATIONS = frozenset({"aten::full", "aten::zeros", "aten::empty", "aten::new_zeros", "aten::new_empty"})


def _results(view: GraphView) -> dict[torch.fx.Node, tuple[torch.fx.Node, int, list[torch.fx.Node]]]:
    """Views that the graph returns, of memory that it made -> (producer, bytes of that memory, all results in it)."""
    found: dict[FxStorage, list[torch.fx.Node]] = {}
    for node in (n for output in view.nodes if output.op == "output" for n in output.all_input_nodes):
        storages = view.storages.of(node)
        if len(storages) == 1 and storages[0].size_bytes and view.roles[storages[0].producer] is not Role.INPUT:
            found.setdefault(storages[0], []).append(node)
    return {
        node: (storage.producer, storage.size_bytes or 0, results)
        for storage, results in found.items()
        for node in results
        if view.roles[node] is Role.FREE
    }


def _is_idle(view: GraphView, wait: torch.fx.Node) -> bool:
    """Whether a wait is for no collective of the graph, nor for one that a graph before may have begun."""
    if view.role(wait) is not Role.WAIT or wait in view.collectives_of_wait:
        return False
    source = wait.all_input_nodes[0] if len(wait.all_input_nodes) == 1 else None
    while source is not None and view.role(source) is Role.FREE and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if source is None:
        return False
    return view.role(source) is Role.COMPUTE or source in view.collectives_of_wait
