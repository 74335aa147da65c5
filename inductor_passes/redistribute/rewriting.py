"""What the graph rewrites share: chains of collectives, the joint group, decisions, replacing nodes.

A rewrite looks at collectives in graph order, answers for each of its candidates with a decision, and hands the
verifier one certificate per application. It uses only the op, the group and the dtype of a node, never local sizes, so
all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.bucket.emit import Emitter
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.pipeline import Context
from inductor_passes.report import Decision, PassReport, Reason, Verdict
from inductor_passes.verify import Certificate, Claim

from .mesh import product

Exactness = Literal["exact", "reassociate", "off"]
#: Reductions that give the same bits however they are grouped.
ORDER_FREE = ("min", "max")


def check_exactness(value: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a tier."""
    if value not in ("exact", "reassociate", "off"):
        raise ValueError(f'exactness is {value!r}; expected "exact", "reassociate" or "off"')


def may_reassociate(collective: Collective, exactness: Exactness) -> bool:
    """Whether a tier lets this reduction be regrouped."""
    whole = all(not d.is_floating_point and not d.is_complex for d in collective.dtypes)
    free = collective.reduce_op in ORDER_FREE or (whole and collective.reduce_op in ("sum", "product"))
    return exactness == "reassociate" or (exactness == "exact" and free)


@dataclass
class Rewriter:
    """One rewrite at work on one graph.

    Attributes:
        subject: its name in decisions and certificates, e.g. ``R2``.
    """

    subject: str
    graph: torch.fx.Graph
    context: Context
    report: PassReport
    view: GraphView = field(init=False)
    _handed_in: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.view = GraphView(self.graph)
        self._handed_in = len(self.context.certificates)

    def collectives(self, kind: str) -> Iterator[Collective]:
        """Functional collectives of one kind with one input and one wait, in graph order, as the graph is now."""
        for start in [c.start for c in self.view.collectives]:
            current = self.view.by_start.get(start)
            if current is None or current.kind != kind or current.in_place:
                continue
            if len(current.inputs) == 1 and len(current.waits) == 1 and list(start.users) == [current.waits[0]]:
                yield current

    def producer(self, node: torch.fx.Node, kind: str) -> Collective | None:
        """The collective of ``kind`` whose only wait is ``node``."""
        found = self.view.collectives_of_wait.get(node, ())
        if len(found) != 1 or found[0].kind != kind or found[0].in_place or len(found[0].inputs) != 1:
            return None
        return found[0] if list(found[0].start.users) == [node] else None

    def written(self, *nodes: torch.fx.Node) -> bool:
        """Whether anything in the graph writes to the memory of these nodes."""
        mine = set(nodes)
        return any(storage.writers for storage in self.view.storages.all if mine.intersection(storage.members))

    def joint_group(self, outer: Collective, inner: Collective) -> tuple[tuple[int, ...], str] | None:
        """Ranks and name of the flat group over both groups; None when they are no grid or it does not exist."""
        ranks = product(outer.group.ranks, inner.group.ranks)
        name = None if ranks is None else _torch.group_name_of(ranks)
        return None if ranks is None or name is None else (ranks, name)

    def gain_ns(self, before: Sequence[Collective], kind: str, sizes: tuple[int, int], ranks: tuple[int, ...]) -> int:
        """Link time saved when ``before`` become one collective of ``sizes`` (input, output bytes)."""
        price = self.context.profile.communication_ns
        spent = sum(price(c.kind, c.input_bytes or 0, c.output_bytes or 0, c.group.ranks) for c in before)
        return spent - price(kind, *sizes, ranks)

    def decide(
        self, at: Collective, verdict: Verdict, reason: Reason, detail: str = "", gain_ns: int = 0, setting: str = ""
    ) -> None:
        """Record what became of a candidate."""
        self.report.decisions.append(
            Decision(
                subject=self.subject,
                node=at.start.name,
                verdict=verdict,
                reason=reason,
                detail=detail,
                source=source_line(at.start),
                group=at.group.name,
                gain_ns=gain_ns,
                setting=setting,
            )
        )

    def refuse(self, at: Collective, reason: Reason, detail: str = "", setting: str = "") -> None:
        """Record a refusal."""
        self.decide(at, Verdict.REFUSED, reason, detail, setting=setting)

    def replace(
        self,
        origin: Collective,
        result: torch.fx.Node,
        removed: Sequence[torch.fx.Node],
        build: Callable[[Emitter], torch.fx.Node],
        claim: Claim = Claim.REPLACE,
        before: torch.fx.Node | None = None,
    ) -> None:
        """Put what ``build`` emits in the place of ``result`` and erase ``removed`` (users before producers).

        New nodes come in front of ``before`` (default: ``result``).
        """
        emitter = Emitter(self.graph, (before or result).prev)
        with emitter.standing_for(origin.start):
            new = build(emitter)
        names = tuple(node.name for node in removed)
        result.replace_all_uses_with(new)
        for node in removed:
            self.graph.erase_node(node)
        added = tuple(node.name for node in emitter.made)
        redirected = ((result.name, new.name),) if new.name not in added else ()
        self._certify(Certificate(self.subject, names, added, redirected, claim))
        self.report.changed = True
        self.view = GraphView(self.graph)

    def drop(
        self, origin: Collective, result: torch.fx.Node, removed: Sequence[torch.fx.Node], kept: torch.fx.Node
    ) -> None:
        """Users of ``result`` read ``kept``, which exists; ``removed`` is erased."""

        def build(emitter: Emitter) -> torch.fx.Node:
            return kept

        self.replace(origin, result, removed, build, Claim.REMOVE)

    def _certify(self, new: Certificate) -> None:
        """Hand in a certificate, joined with earlier ones of this pass whose nodes it removes: the verifier compares
        the graph before the pass with the graph after it."""
        certificates = self.context.certificates
        for old in [c for c in certificates[self._handed_in :] if set(c.added) & set(new.removed)]:
            certificates.remove(old)
            new = Certificate(
                self.subject,
                (*old.removed, *(n for n in new.removed if n not in old.added)),
                (*(n for n in old.added if n not in new.removed), *new.added),
                (*(pair for pair in old.replaced if pair[1] not in new.removed), *new.replaced),
                new.claim if new.claim is old.claim else Claim.REPLACE,
            )
        certificates.append(new)


def reduced(emitter: Emitter, tensor: torch.fx.Node, op: str, group: str) -> torch.fx.Node:
    """``wait(all_reduce(tensor))``."""
    start = emitter.call(_torch.collective_op("all_reduce"), tensor, op, group)
    return emitter.call(_torch.collective_op("wait_tensor"), start)


def gathered(emitter: Emitter, tensor: torch.fx.Node, size: int, group: str) -> torch.fx.Node:
    """``wait(all_gather(tensor))`` along dimension 0."""
    start = emitter.call(_torch.collective_op("all_gather_into_tensor"), tensor, size, group)
    return emitter.call(_torch.collective_op("wait_tensor"), start)


def scattered(emitter: Emitter, tensor: torch.fx.Node, op: str, size: int, group: str) -> torch.fx.Node:
    """``wait(reduce_scatter(tensor))`` along dimension 0."""
    start = emitter.call(_torch.collective_op("reduce_scatter_tensor"), tensor, op, size, group)
    return emitter.call(_torch.collective_op("wait_tensor"), start)


def transposed(emitter: Emitter, tensor: torch.fx.Node, rows: int, columns: int) -> torch.fx.Node:
    """Dimension 0 read as a ``rows x columns`` grid of equal chunks, in column order."""
    shape = list(tensor.meta["val"].shape)
    chunk = shape[0] // (rows * columns)
    grid = emitter.view(tensor, [rows, columns, chunk, *shape[1:]])
    swapped = emitter.call(torch.ops.aten.permute.default, grid, [1, 0, *range(2, 2 + len(shape))])
    dense = emitter.call(torch.ops.aten.clone.default, swapped, memory_format=torch.contiguous_format)
    return emitter.view(dense, shape)
