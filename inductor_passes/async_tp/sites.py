"""Sites: a collective and the matmuls right next to it, along rows - what a single operator can compute.

gather::

    s = all_gather(x); w = wait(s); v = view(w, [m, k]); y = mm(v, b); z = addmm(c, v, d)

scatter::

    y = mm(a, b); v = view(y, ...); s = reduce_scatter(v); w = wait(s)

Both move blocks of rows, rank after rank, and a view keeps the order of elements: so rank ``r``'s block of the
two-dimensional matrix is rows ``r * rows`` and following, whatever shape the collective itself saw. Any other layout
(a gather along columns, or rows of a batch) has other operators in between and is no site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.async_tp import matmul
from inductor_passes.async_tp.lower_decompose import Lowered
from inductor_passes.async_tp.matmul import Matmul
from inductor_passes.async_tp.region import Region
from inductor_passes.ir.ops import Role
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.rewriting.emit import Emitter

aten = torch.ops.aten
#: Views that keep the order of elements.
_IN_ORDER = frozenset(f"aten::{name}" for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias"))


@dataclass(frozen=True, eq=False)
class Site:
    """One collective with its matmuls.

    Attributes:
        products: the matmuls, all of the same two-dimensional left operand (gather) or the only one (scatter).
        rows: of the matrix, per rank; possibly symbolic.
        columns: of the matrix that is communicated.
        whole: somebody else reads the gathered matrix too.
        anchor: the node behind which one operator for all of it can stand.
    """

    collective: Collective
    products: tuple[Matmul, ...]
    rows: int
    columns: int
    whole: bool
    anchor: torch.fx.Node

    @property
    def gathers(self) -> bool:
        """Whether the collective comes before the matmuls."""
        return self.collective.kind == CollectiveKind.ALL_GATHER


IsProduct = Callable[[torch.fx.Node], Matmul | None]


def sites(
    region: Region, view: GraphView, owned: Mapping[torch.fx.Node, Region] = MappingProxyType({})
) -> tuple[Site, ...] | str:
    """Every collective of a region as a site, or why one of them is none.

    ``owned`` are nodes that belong to a region. A matmul of no region joins the site that it is next to.
    """

    def product(node: torch.fx.Node) -> Matmul | None:
        return _plain_product(node) if owned.get(node, region) is region else None

    found: list[Site] = []
    taken: dict[torch.fx.Node, Collective] = {}
    for collective in region.collectives:
        if not isinstance(collective.group_argument, str):
            return f"{collective.label}: the group is an object that the graph computes"
        gathers = collective.kind is CollectiveKind.ALL_GATHER
        one = _gather(collective, product, view) if gathers else _scatter(collective, product)
        if isinstance(one, str):
            return f"{collective.label}: {one}"
        for form in one.products:
            if form.node in taken:
                return f"{collective.label}: its matmul is that of {taken[form.node].label} too"
            taken[form.node] = collective
        found.append(one)
    return tuple(found)


def _in_order(node: torch.fx.Node) -> bool:
    """Whether a node is a view with the same elements in the same order."""
    if node.op != "call_function" or _torch.op_name(node.target) not in _IN_ORDER:
        return False
    return bool(node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype)


def _in_order_or_bytes(node: torch.fx.Node) -> bool:
    """Also views of the elements as another dtype of the same size: what is only moved may be called anything."""
    if node.op != "call_function" or _torch.op_name(node.target) not in _IN_ORDER:
        return False
    return bool(node.meta["val"].dtype.itemsize == node.all_input_nodes[0].meta["val"].dtype.itemsize)


def _plain_product(node: torch.fx.Node) -> Matmul | None:
    form = matmul.canonical(node)
    if form is None or form.dims != matmul.PLAIN:
        return None
    arguments = _torch.op_arguments(node)
    scaled = arguments.get("alpha", 1) != 1 or arguments.get("beta", 1) != 1
    return None if scaled or not node.meta["val"].dtype.is_floating_point else form


def _are_blocks(rows: int | torch.SymInt, world: int) -> bool:
    """Whether rows fall into equal blocks, one per rank, whatever their number."""
    return _torch.is_multiple(rows, world) and not _torch.same_size(rows, 0)


def _gather(collective: Collective, product: IsProduct, view: GraphView) -> Site | str:
    wait, world = collective.waits[0], collective.group.size
    same = [wait]
    products: list[Matmul] = []
    readers: list[torch.fx.Node] = []
    for node in same:
        for user in node.users:
            form = product(user)
            if _in_order_or_bytes(user):
                same.append(user)
            elif form is not None and form.left is node and sum(n is node for n in user.all_input_nodes) == 1:
                products.append(form)
            else:
                readers.append(user)
    lefts = [(*form.left.meta["val"].shape, form.left.meta["val"].dtype) for form in products]
    if not products:
        return "no matmul has its rows as the left operand"
    if len({str(one) for one in lefts}) > 1:
        return "its matmuls see it in different shapes"
    total, columns, _ = lefts[0]
    if not _are_blocks(total, world):
        return f"{total} rows are no blocks of rows of {world} ranks"
    after = _descendants(wait)
    anchor = wait
    for form in products:
        for operand in _others(form):
            if operand in after:
                return f"{operand.name} depends on what is gathered"
            base = _base(operand, wait, view)
            anchor = max(anchor, base, key=view.position.__getitem__)
    whole = bool(readers)
    readers += [user for form in products for user in form.node.users]
    if any(view.position[reader] < view.position[anchor] for reader in readers):
        return f"{anchor.name} comes too late"
    return Site(collective, tuple(products), total // world, columns, whole, anchor)


def _others(form: Matmul) -> list[torch.fx.Node]:
    """All operands of a product but the left one."""
    return [n for n in form.node.all_input_nodes if n is not form.left]


def _descendants(root: torch.fx.Node) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _base(operand: torch.fx.Node, wait: torch.fx.Node, view: GraphView) -> torch.fx.Node:
    """What an operand views, as far back as it was made behind ``wait``: views can be made again in front."""
    while _again(operand, wait, view):
        (operand,) = operand.all_input_nodes
    return operand


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view reads; sizes among its arguments may be nodes, too."""
    (source,) = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return source


def _again(operand: torch.fx.Node, wait: torch.fx.Node, view: GraphView) -> bool:
    return (
        view.position[operand] > view.position[wait]
        and view.role(operand) is Role.FREE
        and len(operand.all_input_nodes) == 1
        and isinstance(operand.meta.get("val"), torch.Tensor)
    )


def _scatter(collective: Collective, product: IsProduct) -> Site | str:
    if collective.kind != CollectiveKind.REDUCE_SCATTER:
        return f"{collective.kind} has no operator of its own"
    node, reader = collective.inputs[0], collective.start
    while _in_order(node):
        if set(node.users) != {reader}:
            return "its matmul has other users"
        node, reader = _viewed(node), node
    form = product(node)
    if form is None:
        return "what it sends is no matmul of two matrices"
    if set(node.users) != {reader}:
        return "its matmul has other users"
    total, columns = node.meta["val"].shape
    if not _are_blocks(total, collective.group.size):
        return f"{total} rows are no blocks of rows of {collective.group.size} ranks"
    return Site(collective, (form,), total // collective.group.size, columns, False, collective.start)


#: (emitter, two-dimensional shard) -> (one node per product, gathered matrix or None)
MakeGather = Callable[[Emitter, torch.fx.Node], tuple[list[torch.fx.Node], torch.fx.Node | None]]
#: emitter -> this rank's rows
MakeScatter = Callable[[Emitter], torch.fx.Node]


class Replacement:
    """Puts operators in the place of sites, one after the other, and says what became of what.

    Args:
        position: of every node that was in the graph before any lowering.
        moved: nodes that earlier lowerings replaced, with what holds their value now; this one adds its own.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        region: Region,
        view: GraphView,
        position: dict[torch.fx.Node, int],
        moved: dict[torch.fx.Node, torch.fx.Node],
    ) -> None:
        self.graph, self.region, self.view, self.position, self.moved = graph, region, view, position, moved
        self.result = Lowered()

    def products(self, site: Site) -> list[Matmul]:
        """The site's matmuls with the operands that they have now."""
        found = [matmul.canonical(form.node) for form in site.products]
        return [form for form in found if form is not None]

    def operand(self, emit: Emitter, site: Site, node: torch.fx.Node) -> torch.fx.Node:
        """An operand as it can be read at the site's place: views made behind the wait are made again."""
        wait = site.collective.waits[0]
        if not site.gathers or node not in self.position or not _again(node, wait, self.view):
            return node
        (source,) = node.all_input_nodes
        base = self.operand(emit, site, source)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: base if n is source else n)
        return emit.call(node.target, *args, **kwargs)

    def gather(self, site: Site, make: MakeGather) -> None:
        """Replace a gather site."""
        collective = site.collective
        wait, start = collective.waits[0], collective.start
        emit = self._emitter(site)
        with emit.standing_for(site.products[0].node):
            shard = _reshaped(emit, start.args[0], [site.rows, site.columns])
            left = self.products(site)[0].left
            made, gathered = make(emit, _called(emit, shard, left.meta["val"].dtype))
            if gathered is not None:
                gathered = _called(emit, gathered, wait.meta["val"].dtype)
                gathered = _reshaped(emit, gathered, list(wait.meta["val"].shape))
        self._keep_keys(emit, site)
        for form, new in zip(site.products, made):
            self._replace(form.node, new)
            self.graph.erase_node(form.node)
        if gathered is not None:
            self._replace(wait, gathered)
        self._erase_unread_views(wait)
        self.graph.erase_node(wait)
        self.graph.erase_node(start)

    def scatter(self, site: Site, make: MakeScatter) -> None:
        """Replace a scatter site."""
        collective = site.collective
        wait, start = collective.waits[0], collective.start
        emit = self._emitter(site)
        with emit.standing_for(site.products[0].node):
            new = _reshaped(emit, make(emit), list(wait.meta["val"].shape))
        self._keep_keys(emit, site)
        self._replace(wait, new)
        node: torch.fx.Node = start.args[0]  # type: ignore[assignment]
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
        while node is not site.products[0].node:
            source = _viewed(node)
            self.graph.erase_node(node)
            node = source
        self.graph.erase_node(node)

    def _emitter(self, site: Site) -> Emitter:
        return Emitter(self.graph, self.moved.get(site.anchor, site.anchor))

    def _keep_keys(self, emit: Emitter, site: Site) -> None:
        for number, new in enumerate(emit.made):
            self.result.keys[new] = (self.position[site.anchor], 1, number)

    def _replace(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.moved[old] = new
        self.result.replaced.append((old.name, new.name))

    def _erase_unread_views(self, root: torch.fx.Node) -> None:
        for user in list(root.users):
            self._erase_unread_views(user)
            if not user.users:
                self.graph.erase_node(user)


def _reshaped(emit: Emitter, node: object, shape: list[int]) -> torch.fx.Node:
    assert isinstance(node, torch.fx.Node)
    if _torch.same_sizes(node.meta["val"].shape, shape):
        return node
    return emit.call(aten.reshape.default, node, shape)


def _called(emit: Emitter, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """The same bytes as elements of another dtype of the same size."""
    return node if node.meta["val"].dtype == dtype else emit.call(aten.view.dtype, node, dtype)
