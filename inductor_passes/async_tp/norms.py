"""All-reduce, residual and RMSNorm as one kernel: what follows a row-parallel matmul, twice per transformer layer.

before::

    s = all_reduce(x); w = wait(s); h = w + residual
    f = float32(h); n = f * rsqrt(mean(f * f, -1) + eps); y = cast(n) * weight

after::

    h, y = all_reduce_residual_rms_norm(x, residual, weight, eps, ...)

For small messages: one exchange and one kernel instead of a collective with its latency and the kernels behind it.
The match follows the users of the awaited value, in whatever order the factors come, with and without casts, with the
sum ``h`` read elsewhere or not, and through ``_fused_rms_norm`` where it was kept. Correct up to rounding: the sum is
normed before it is rounded, so the result is at least as exact as before; terms are added in rank order, so all ranks
get the same bits.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.fx

import inductor_passes.async_tp.kernel_ops  # noqa: F401  registers the operator
from inductor_passes import _torch
from inductor_passes.async_tp.kernel_ops import KERNEL_DTYPES
from inductor_passes.async_tp.region import unsupported
from inductor_passes.cost.fused import norm_ns
from inductor_passes.cost.profile import CostProfile
from inductor_passes.cost.values import dtype_name, value_bytes
from inductor_passes.groups.availability import availability
from inductor_passes.ir import ops
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.rewriting.emit import Emitter

aten = torch.ops.aten
_CAST = "prims::convert_element_type"
_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view"})


@dataclass(frozen=True, eq=False)
class Norm:
    """A match.

    Attributes:
        sent: what every rank sends.
        residual / weight / eps: the other operands.
        hidden: the node of the sum; inner: nodes between the wait and the results that nobody else reads.
        y: the node of the result.
    """

    collective: Collective
    sent: torch.fx.Node
    residual: torch.fx.Node
    weight: torch.fx.Node
    eps: float
    hidden: torch.fx.Node
    inner: tuple[torch.fx.Node, ...]
    y: torch.fx.Node


def _name(node: torch.fx.Node) -> str:
    return _torch.op_name(node.target) if node.op == "call_function" else ""


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: torch.fx.Node, one: torch.fx.Node) -> object:
    """The second operand of a commutative binary operator."""
    left, right = node.args[:2]
    return right if left is one else left


def match(collective: Collective, view: GraphView) -> Norm | None:
    """The norm behind an all-reduce, None when there is none."""
    sums = collective.kind is CollectiveKind.ALL_REDUCE and collective.reduce_op == "sum"
    if not sums or unsupported(collective, view) is not None:
        return None
    inner: list[torch.fx.Node] = []
    value = collective.waits[0]
    while True:
        user = _only_user(value)
        if user is None:
            return None
        if _name(user) == "aten::add" and not user.kwargs and len(user.args) == 2:
            break
        if _name(user) not in _VIEWS and _name(user) != _CAST:
            return None
        inner.append(user)
        value = user
    residual = _other(user, value)
    if not isinstance(residual, torch.fx.Node) or residual is value:
        return None
    shapes = {str(n.meta["val"].shape) for n in (user, residual, value)}
    if len(shapes) > 1 or not all(isinstance(s, int) and s for s in user.meta["val"].shape):
        return None
    return _behind(collective, user, residual, inner, view)


def _behind(
    collective: Collective,
    hidden: torch.fx.Node,
    residual: torch.fx.Node,
    inner: list[torch.fx.Node],
    view: GraphView,
) -> Norm | None:
    casts = [u for u in hidden.users if _name(u) == _CAST and u.meta["val"].dtype is torch.float32]
    for value in (hidden, *casts):
        found = _normed(value)
        if found is None:
            continue
        eps, weight, y, nodes = found
        weight = _exact(weight)
        dtypes = {n.meta["val"].dtype for n in (collective.inputs[0], residual, weight, y)}
        if (
            tuple(weight.meta["val"].shape) != (hidden.meta["val"].shape[-1],)
            or not dtypes <= set(KERNEL_DTYPES)
            or hidden.meta["val"].dtype != residual.meta["val"].dtype
            or view.position[weight] > view.position[hidden]
        ):
            return None
        own = value if value is not hidden and all(u in nodes for u in value.users) else None
        gone = (*inner, *((own,) if own is not None else ()), *nodes)
        return Norm(collective, collective.inputs[0], residual, weight, eps, hidden, gone, y)
    return None


def _exact(weight: torch.fx.Node) -> torch.fx.Node:
    """What a widening cast read: the kernel widens by itself."""
    while _name(weight) == _CAST:
        (source,) = weight.all_input_nodes
        before, after = source.meta["val"].dtype, weight.meta["val"].dtype
        if torch.promote_types(before, after) != after:
            break
        weight = source
    return weight


_Normed = tuple[float, torch.fx.Node, torch.fx.Node, list[torch.fx.Node]]


def _normed(value: torch.fx.Node) -> _Normed | None:
    """(eps, weight, result, nodes up to and without the result) of the norm of a value over its last dimension."""
    for user in value.users:
        if _name(user) == "aten::_fused_rms_norm":
            return _kept(user, value)
        power = _name(user) == "aten::pow" and user.args[1] in (2, 2.0)
        if not power and not (_name(user) == "aten::mul" and user.args[0] is value and user.args[1] is value):
            continue
        found = _from_square(user, value)
        if found is not None:
            return found
    return None


def _kept(norm: torch.fx.Node, value: torch.fx.Node) -> _Normed | None:
    arguments = _torch.op_arguments(norm)
    weight = arguments.get("weight")
    shape = list(arguments.get("normalized_shape", ()))
    user = _only_user(norm)
    if (
        arguments["input"] is not value
        or not isinstance(weight, torch.fx.Node)
        or shape != [value.meta["val"].shape[-1]]
        or user is None
        or user.target is not operator.getitem
        or user.args[1] != 0
    ):
        return None
    eps = arguments.get("eps")
    return float(torch.finfo(value.meta["val"].dtype).eps if eps is None else eps), weight, user, [norm]


def _from_square(square: torch.fx.Node, value: torch.fx.Node) -> _Normed | None:
    nodes = [square]
    rank = value.meta["val"].dim()

    def step(*names: str) -> torch.fx.Node | None:
        user = _only_user(nodes[-1])
        if user is None or _name(user) not in names:
            return None
        nodes.append(user)
        return user

    mean = step("aten::mean")
    if mean is None or [d % rank for d in _dims(mean)] != [rank - 1] or not _keeps_dim(mean):
        return None
    added = step("aten::add")
    eps = _other(added, mean) if added is not None else None
    if added is None or not isinstance(eps, (int, float)) or added.kwargs:
        return None
    inverse = step("aten::rsqrt")
    scaled = step("aten::mul")
    if inverse is None or scaled is None or _other(scaled, inverse) is not value:
        return None
    step(_CAST)
    last = nodes[-1]
    weighted = step("aten::mul")
    weight = _other(weighted, last) if weighted is not None else None
    if weighted is None or not isinstance(weight, torch.fx.Node) or weight is last:
        return None
    step(_CAST)
    y = nodes.pop()
    return float(eps), weight, y, nodes


def _dims(mean: torch.fx.Node) -> list[int]:
    dims = _torch.op_arguments(mean).get("dim")
    return [d for d in dims if isinstance(d, int)] if isinstance(dims, (list, tuple)) else []


def _keeps_dim(mean: torch.fx.Node) -> bool:
    return bool(_torch.op_arguments(mean).get("keepdim", False))


def _before_ns(profile: CostProfile, size_bytes: int, ranks: tuple[int, ...]) -> int:
    """Time of the collective, and of the kernels that Inductor makes of sum and norm: a reduction and what uses it."""
    link = profile.communication_ns(CollectiveKind.ALL_REDUCE, size_bytes, size_bytes, ranks)
    issue = profile.issue_ns(CollectiveKind.ALL_REDUCE, size_bytes, size_bytes, ranks)
    return link + issue + profile.compute_ns(0, 5 * size_bytes, "float32", 1)


@dataclass
class Fused:
    """What :func:`fuse` did: one decision per match, (old, new) names, how many."""

    decisions: list[Decision]
    replaced: list[tuple[str, str]]
    count: int = 0
    gain_ns: int = 0


def fuse(
    graph: torch.fx.Graph,
    view: GraphView,
    profile: CostProfile,
    wanted: dict[Collective, Literal["auto", "force"]],
) -> Fused:
    """Replace the norms behind the all-reduces in ``wanted`` (``auto``: where the cost model says that it pays)."""
    result = Fused([], [])
    for collective, mode in wanted.items():
        norm = match(collective, view)
        if norm is None:
            continue
        why = availability(collective.group.name).kernels or _unfit(norm)
        if why:
            result.decisions.append(_refused(norm, Reason.UNSUPPORTED, f"kernels: {why}"))
            continue
        size, ranks = value_bytes(norm.sent.meta["val"]), collective.group.ranks
        before = _before_ns(profile, size, ranks)
        width = norm.sent.meta["val"].element_size()
        after, two_shot = min((norm_ns(profile, size, width, ranks, shots), shots) for shots in (False, True))
        said = f"{'two shots' if two_shot else 'one shot'} of {size} bytes: {before} -> {after} ns"
        if mode == "auto" and after >= before:
            result.decisions.append(_refused(norm, Reason.NOT_PROFITABLE, said))
            continue
        result.replaced += _replace(graph, norm, two_shot)
        result.count += 1
        result.gain_ns += before - after
        result.decisions.append(_applied(norm, said, before - after))
    return result


def _unfit(norm: Norm) -> str:
    if not isinstance(norm.collective.group_argument, str):
        return "the group is an object that the graph computes"
    value = norm.sent.meta["val"]
    established = availability(norm.collective.group.name).device
    if value.device.type != established:
        return f"tensors on {value.device.type}; kernels were established for {established}"
    return ""


def _replace(graph: torch.fx.Graph, norm: Norm, two_shot: bool) -> list[tuple[str, str]]:
    collective, wait = norm.collective, norm.collective.waits[0]
    shape = list(norm.hidden.meta["val"].shape)
    emit = Emitter(graph, norm.hidden.prev)
    with emit.standing_for(norm.hidden):
        sent = norm.sent
        if list(sent.meta["val"].shape) != shape:
            sent = emit.call(aten.reshape.default, sent, shape)
        both = emit.call(
            torch.ops.inductor_passes.all_reduce_residual_rms_norm.default,
            sent,
            norm.residual,
            norm.weight,
            norm.eps,
            norm.y.meta["val"].dtype,
            collective.group.size,
            _torch.op_arguments(collective.start)["group_name"],
            two_shot,
        )
        hidden = emit.call(operator.getitem, both, 0)
    with emit.standing_for(norm.y):
        y = emit.call(operator.getitem, both, 1)
    for old, new in ((norm.y, y), (norm.hidden, hidden)):
        old.replace_all_uses_with(new)
    gone = {norm.y, norm.hidden, *norm.inner, wait, collective.start}
    for node in reversed([n for n in graph.nodes if n in gone]):
        graph.erase_node(node)
    return [(norm.y.name, y.name), (norm.hidden.name, hidden.name)]


def _applied(norm: Norm, said: str, gain_ns: int) -> Decision:
    start = norm.collective.start
    return Decision(
        "async_tp",
        start.name,
        Verdict.APPLIED,
        Reason.PROFITABLE,
        f"kernels, all-reduce with residual and RMSNorm of {dtype_name(norm.sent.meta['val'])} in {said}",
        source=ops.source_line(start),
        group=norm.collective.group.name,
        gain_ns=gain_ns,
        setting='async_tp_lowering="decompose"',
    )


def _refused(norm: Norm, reason: Reason, detail: str) -> Decision:
    start = norm.collective.start
    return Decision(
        "async_tp/norm",
        start.name,
        Verdict.REFUSED,
        reason,
        f"{norm.collective.label} with residual and RMSNorm, {detail}",
        source=ops.source_line(start),
        group=norm.collective.group.name,
        setting='async_tp="force", async_tp_lowering="kernels"' if reason is Reason.NOT_PROFITABLE else "",
    )
