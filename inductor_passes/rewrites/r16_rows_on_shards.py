"""R16: what follows an all_reduce row by row is done on each rank's share of the rows (sequence parallelism).

before::

    h = residual + wait(all_reduce(x, a)); n = norm(h) * weight; y = mm(view(n), w)

after::

    h = own(residual) + wait(reduce_scatter(view(x), a)); n = norm(h) * weight
    y = mm(view(wait(all_gather(n, a))), w)

Rows are all dimensions but the last. The region grows from every all_reduce of sums with as many rows, through
operators that treat rows alike: pointwise ones, reductions of other dimensions, views that keep rows apart. So a
residual stream stays on shares from the first all_reduce of a model to its last reader. What the region hands out is
gathered once, as late as that costs no more; what only reshapes or widens it comes behind the gather. A sum over all
rows (the gradient of a norm's weight) becomes a sum over the share and a small all_reduce.

Right because every operator of the region computes a row of its result from that row of its operands, so it commutes
with taking rows; the reduce_scatter of row-major rows is the share of the all_reduce, and the gather puts the shares
behind each other in the order of ranks. A rank computes rows for the others: all that the region reads has to be equal
on the ranks (``replicas``). What is not known to be ends the region. Where the order matters in which a library adds
over ranks, or over rows, this reassociates. Left alone: rows that the group does not divide, regions without a
reduction of a row. Symbolic sizes have to divide for their whole range, and if rows have several dimensions, the first.

Bytes on the link stay the same. Saved is (ranks - 1) / ranks of reading and writing the region's inputs and results,
and memory of what lives in it. Async TP can cut a matmul in front of an all_reduce, but not one behind it; here it cuts
both. Where it is on, half of the shorter one of transfer and matmul counts as hidden, before and after, but for the
host's time to issue one more part. In training the region spans forward and backward, so it is looked for in the joint
graph first, where what is saved between them is a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.cost.flops import flops
from inductor_passes.cost.values import dtype_name
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewrites.movement import movement_behind, name_of
from inductor_passes.rewrites.packing import sizes
from inductor_passes.rewrites.row_regions import Region, found, gather_ns, pruned, size_bytes
from inductor_passes.rewrites.rows import OnShares, copied_bytes, is_free
from inductor_passes.rewrites.work import Match, Work, refuse, sizes_are_known
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.rewriting.exchange import dense, gathered, reduced, scattered

_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm"))


class RowsOnShards:
    """See the module's docstring."""

    name: ClassVar[str] = "R16"
    local: ClassVar[bool] = False

    def roots(self, work: Work) -> Iterator[torch.fx.Node]:
        """The first all_reduce of every region."""
        implied = work.facts.config.replicas == "implied"
        regions = {region.start: region for region in found(work, implied=implied)}
        known = {start for start, region in regions.items() if region.reduces}
        if not implied and work.exactness == "reassociate":
            # What could be done if inputs were known to be equal is worth a word.
            known.update(region.start for region in found(work, implied=True) if region.reduces)
        work.regions.clear()
        work.regions.update((start, region) for start, region in regions.items() if start in known)
        return iter(list(work.regions))

    def match(self, work: Work, root: torch.fx.Node) -> Match | None:
        """The region that begins here, as it was found when roots were asked for."""
        whole = work.regions.get(root)
        if not isinstance(whole, Region) or not whole.intact(work):
            return None
        shares, (first, *_) = whole.shares, whole.sources.values()
        if not shares.divides:
            reason = Reason.UNSUPPORTED if isinstance(shares.rows, int) else Reason.RANGE
            refuse(reason, f"{shares.rows} rows on {shares.ranks} ranks")
        _sizes_are_known(work, whole)
        for source in whole.sources.values():
            work.may_reassociate(source, "a reduce_scatter may add in another order than an all_reduce")
        region = pruned(work, whole)
        gain = _gain_ns(work, region) if region.sources else -1
        if (gain < 0 or not region.reduces) and whole.unknown:
            names = ", ".join(node.name for node in list(whole.unknown)[:3])
            helps = work.facts.config.replicas != "implied" and not any(whole.unknown.values())
            setting = 'replicas="implied"' if helps else ""
            refuse(Reason.DATA_DEPENDENCY, f"{names} may differ between the ranks", setting)
        if not region.reduces:
            refuse(Reason.NOT_PROFITABLE, "what reduces a row is read as a whole")
        if any(True for _ in region.brought()):
            work.for_this_rank()
        work.never_written(*region.leads)
        for source in region.sources.values():
            work.unwritten(source.inputs[0], source.start, source.waits[0])
        return Match(
            gain,
            f"{len(region.sources)} all_reduces of {shares.rows} rows, {len(region.handed_out())} gathers",
            lambda: _apply(work, self.name, region, first),
            "shares of rows take longer",
        )


def _sizes_are_known(work: Work, region: Region) -> None:
    """Refuse symbolic sizes that nothing can be estimated with, that cannot be computed from the graph's inputs, or
    for which the verifier cannot say where a share begins: where it may begin in the middle of the first dimension."""
    if not isinstance(region.shares.rows, int):
        for node, lead in region.leads.items():
            shape = sizes(node)
            if shape and lead > 1 and not _torch.is_multiple(shape[0], region.shares.ranks):
                ranks = region.shares.ranks
                refuse(Reason.RANGE, f"{node.name} has {shape[0]} x {shape[1]} rows: the first is to divide by {ranks}")
    found = [region.shares.share, *(size for node in (*region.leads, *region.sums) for size in sizes(node) or ())]
    sizes_are_known(work, found)


def _gain_ns(work: Work, region: Region) -> int:
    """Time saved, see the module's docstring."""
    ranks, handed = region.shares.ranks, region.handed_out()
    brought = dict(region.brought())
    gain = work.price_ns(*region.sources.values())
    gain -= sum(_scatter_ns(work, source) for source in region.sources.values())
    gain -= sum(gather_ns(work, region, node) for node in handed)
    for node in region.sums:
        (source, *_), size = region.sources.values(), size_bytes(node)
        gain -= work.collective_ns(CollectiveKind.ALL_REDUCE, size, size, source.group.ranks)
    copies = [copied_bytes(region.shares, operand, reader, region.leads[reader]) for operand, reader in brought.items()]
    gain -= sum(work.copy_ns(size) for size in copies if size)
    # Inductor fuses what lies in between.
    moved = sum(size_bytes(node) for node in (*region.sources, *handed))
    gain += work.facts.profile.compute_ns(0, moved, "float32", 0) * (ranks - 1) // ranks
    return gain + (_hidden_ns(work, region, handed) if work.facts.config.uses_async_tp else 0)


def _scatter_ns(work: Work, source: Collective) -> int:
    size = source.input_bytes or 0
    return work.collective_ns(CollectiveKind.REDUCE_SCATTER, size, size // source.group.size, source.group.ranks)


def _hidden_ns(work: Work, region: Region, handed: list[torch.fx.Node]) -> int:
    """What async TP may hide more than it can of the all_reduces."""
    hidden = 0
    (first, *_) = region.sources.values()
    profile, ranks = work.facts.profile, first.group.ranks

    def halved(kind: CollectiveKind, sent: int, received: int, product_ns: int) -> int:
        shorter = min(profile.communication_ns(kind, sent, received, ranks), product_ns)
        return max(0, shorter // 2 - profile.issue_ns(kind, 0, 0, ranks))

    for source in region.sources.values():
        product, size = movement_behind(source.inputs[0]).source, source.input_bytes or 0
        if name_of(product) in _PRODUCTS:
            product_ns = _product_ns(work, product)
            hidden += halved(CollectiveKind.REDUCE_SCATTER, size, size // len(ranks), product_ns)
            hidden -= halved(CollectiveKind.ALL_REDUCE, size, size, product_ns)
    for node in handed:
        products, size = sum(_product_ns(work, product) for product in _products_ahead(region, node)), size_bytes(node)
        hidden += halved(CollectiveKind.ALL_GATHER, size // len(ranks), size, products)
    return hidden


def _products_ahead(region: Region, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The products that read what is handed out, through views."""
    for user in region.outside(node):
        if name_of(user) in _PRODUCTS:
            yield user
        elif is_free(user):
            yield from (one for one in user.users if name_of(one) in _PRODUCTS)


def _product_ns(work: Work, product: torch.fx.Node) -> int:
    moved = sum(size_bytes(n) for n in (product, *product.all_input_nodes) if hasattr(n.meta.get("val"), "dtype"))
    return work.facts.profile.compute_ns(flops(product) or 0, moved, dtype_name(product.meta["val"].dtype))


def _apply(work: Work, subject: str, region: Region, first: Collective) -> None:
    handed = set(region.handed_out())
    ranks, size, argument = first.group.ranks, first.group.size, first.group_argument
    on_shares = OnShares(region.shares, region.leads, ranks.index(_torch.process_rank()), ranks)
    ordered = sorted({*region.leads, *region.sums})

    def build(emit: Emitter) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        pairs = []
        for node in ordered:
            emit.cursor = node
            with emit.standing_for(node):
                if node in region.sums:
                    pairs.append((node, reduced(emit, on_shares.summed(emit, node), "sum", argument)))
                    continue
                source = region.sources.get(node)
                if source is None:
                    new = on_shares.emit(emit, node)
                else:
                    rows = emit.view(dense(emit, source.inputs[0]), [region.shares.rows, node.meta["val"].shape[-1]])
                    new = scattered(emit, rows, source.reduce_op, size, argument)
                on_shares.new[node] = new
                if node in handed:
                    whole = gathered(emit, dense(emit, new), size, argument)
                    pairs.append((node, emit.view(whole, list(node.meta["val"].shape))))
        return pairs

    removed = sorted({*ordered, *(source.start for source in region.sources.values())}, reverse=True)
    work.replace(subject, first.start, removed, build, before=first.start)
