"""Runs graphs on all ranks in one process, each rank with its own graph if need be.

Ranks take turns, one node each. In ``prompt`` runs a collective's result is there before its rank goes on; in ``late``
runs it holds poison until the wait, and what is sent is read at the first wait of any rank. A legal program cannot tell
the difference, a read before the wait or a write to a buffer in flight can. Collectives of a group are matched by their
number, as communication libraries do: a mismatch is reported, and so are ranks that all wait for each other.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.fx

from tests.support.graphs import aten, c10d

Timing = Literal["prompt", "late"]
Observer = Callable[[torch.fx.Node, Any], None]
POISON = 99
#: The host reads an element of a tensor.
SEEN = aten._local_scalar_dense.default
TRANSFERS = {c10d.isend.default, c10d.irecv.default, c10d.batch_p2p_ops.default}
_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class HangError(RuntimeError):
    """Ranks wait for each other, or issue different collectives."""


def inputs_of(gm: torch.fx.GraphModule, ranks: int, special: int = 0) -> list[list[torch.Tensor]]:
    """Integers per placeholder and rank, different on every rank.

    Args:
        special: seed of which elements are not finite; 0: none.
    """
    generator = torch.Generator().manual_seed(0)
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    drawn = [[torch.randint(-2, 3, f.shape, generator=generator).to(f.dtype) for _ in range(ranks)] for f in fakes]
    if special:
        chosen = random.Random(special)
        for tensors in drawn:
            x = chosen.choice(tensors).view(-1)
            if x.numel() and x.is_floating_point() and chosen.random() < 0.5:
                x[chosen.randrange(x.numel())] = chosen.choice((math.inf, -math.inf, math.nan))
    return drawn


def execute(gm: torch.fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], timing: Timing) -> list[torch.Tensor]:
    """Outputs, and inputs as they are afterwards, of all ranks one after the other."""
    each = execute_ranks([gm] * len(inputs[0]), inputs, timing)
    return [t for results in zip(*each) for t in results]


@torch.no_grad()
def execute_ranks(
    modules: Sequence[torch.fx.GraphModule],
    inputs: Sequence[Sequence[torch.Tensor]],
    timing: Timing,
    observe: Observer | None = None,
) -> list[list[torch.Tensor]]:
    """Per rank the outputs of its graph, and its inputs as they are afterwards.

    Args:
        observe: is shown what each node of every rank comes to, and its operands after it.

    Raises:
        HangError: no rank can go on, or ranks issue collectives that do not fit.
    """
    net = _Net()
    late = timing == "late"
    ranks = [_Rank(gm, [x[r] for x in inputs], r, net, late, observe) for r, gm in enumerate(modules)]
    running = list(ranks)
    while running:
        if not [rank for rank in running if rank.advance()]:
            where = ", ".join(f"rank {r.number} at {r.nodes[r.at]}" for r in running)
            raise HangError(f"ranks wait for each other: {where}")
        running = [rank for rank in running if rank.at < len(rank.nodes)]
    return [[*rank.outputs, *rank.held] for rank in ranks]


def leaves(value: Any) -> list[Any]:
    """Elements of a list, or the value alone."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


@functools.lru_cache(maxsize=4096)
def _is_start(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "_c10d_functional"
        and not target._opname.startswith("wait_tensor")
    )


@functools.lru_cache(maxsize=4096)
def _is_wait(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._opname.startswith("wait_tensor")


@functools.lru_cache(maxsize=4096)
def _draws(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


class _Rank:
    """One rank: how far it is, and what it holds."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        feed: list[torch.Tensor],
        number: int,
        net: _Net,
        late: bool,
        observe: Observer | None,
    ) -> None:
        self.nodes = list(gm.graph.nodes)
        self.outputs: list[torch.Tensor] = []
        self.held: list[torch.Tensor] = []
        self.number, self.at = number, 0
        self._gm, self._feed, self._net, self._late = gm, iter(feed), net, late
        self._observe = observe
        self._env: dict[torch.fx.Node, Any] = {}
        self._pending: dict[torch.fx.Node, Callable[[], bool]] = {}
        self._blocked: Callable[[], bool] | None = None
        self._draws = 0

    def advance(self) -> bool:
        """Do the next node, or what is left of it; False: it has to wait for other ranks."""
        node = self.nodes[self.at]
        if self._blocked is None:
            self._blocked = self._do(node)
        if self._blocked is not None:
            if not self._blocked():
                return False
            self._blocked = None
        if _is_wait(node.target):
            # A wait returns the memory that is waited for.
            self._env[node] = self._env[node.args[0]]  # type: ignore[index]
        if self._observe is not None:
            self._observe(node, self._env.get(node))
            for operand in node.all_input_nodes:
                # What it may have written to.
                self._observe(operand, self._env[operand])
        self.at += 1
        return True

    def _do(self, node: torch.fx.Node) -> Callable[[], bool] | None:
        """Do a node; what is returned has to succeed before the next one."""
        if node.op == "placeholder":
            self._env[node] = next(self._feed).clone()
            self.held.append(self._env[node])
            return None
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(self._gm)
            self._env[node] = held.clone() if isinstance(held, torch.Tensor) else held
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._env.__getitem__)
        if node.op == "output":
            self.outputs += [t for t in leaves(args[0]) if t is not None]
            return None
        target: Any = node.target
        if _is_wait(target):
            operand = node.args[0]
            assert isinstance(operand, torch.fx.Node)
            source = self._source(operand)
            return None if source is None else self._pending.pop(source)
        if target is SEEN:
            self.outputs.append(args[0].clone())
            return None
        if target in TRANSFERS or _is_start(target):
            begin = self._net.transfer if target in TRANSFERS else self._net.start
            self._env[node], arrive = begin(self.number, target, args, kwargs, self._late)
            if not self._late:
                return arrive
            self._pending[node] = arrive
            return None
        if _draws(target):
            # Draws keep their order among each other; every rank has numbers of its own.
            torch.manual_seed(1000 * self._draws + self.number)
            self._draws += 1
        self._env[node] = target(*args, **kwargs)
        return None

    def _source(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The open start behind a wait's operand."""
        seen: torch.fx.Node | None = node
        while seen is not None and seen not in self._pending:
            operand = seen.args[0] if seen.args and not _is_start(seen.target) else None
            seen = operand if isinstance(operand, torch.fx.Node) else None
        return seen


class _Letter:
    """A message: what it says is read from the sender's memory when it travels, at the first wait of either side."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._read: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self._read is None:
            self._read = self._tensor.clone()
        return self._read


@dataclass
class _Call:
    """One collective of a group: who has issued it with what, and the results once it has happened."""

    members: tuple[int, ...]
    what: tuple[Any, ...]
    arguments: dict[str, Any]
    posted: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class _Net:
    """All collectives and transfers between the ranks."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, tuple[int, ...]], list[_Call]] = {}
        self._issued: dict[tuple[str, int], int] = {}
        self._letters: dict[tuple[int, int], list[_Letter]] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def start(
        self, rank: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: bool
    ) -> tuple[Any, Callable[[], bool]]:
        """Issue a collective: its results, and what finishes it once everybody has issued it."""
        given = {a.name: v for a, v in zip(target._schema.arguments, args)} | kwargs
        kind, in_place = _kind(target)
        name = given["group_name"]
        members = _members(_ranks_of(name), rank)
        sent = leaves(args[0])
        # What a collective overwrites in place it has to remember; everything else is read when the data travel.
        posted = [t.clone() for t in sent] if in_place else sent
        shapes = () if kind == "all_to_all_single" else tuple((tuple(t.shape), t.dtype) for t in sent)
        what = (kind, str(given.get("reduce_op", "")), shapes)
        number = self._issued[name, rank] = self._issued.get((name, rank), -1) + 1
        calls = self._calls.setdefault((name, members), [])
        if number == len(calls):
            calls.append(_Call(members, what, given))
        call = calls[number]
        if call.what != what:
            raise HangError(f"collective {number} of ranks {members} is {call.what} on one, {what} on rank {rank}")
        call.posted[rank] = posted
        if in_place:
            outs = sent
        elif "out" in given:
            outs = [given["out"]]
        else:
            outs = [t.new_empty(_shape(kind, t, given)) for t in sent]
        if late:
            for out in outs:
                _bytes(out).fill_(POISON)

        def arrive() -> bool:
            if len(call.posted) < len(members):
                return False
            if not call.results:
                call.results = _happened(kind, call)
            for out, value in zip(outs, call.results[rank]):
                out.copy_(value)
            return True

        return outs if isinstance(args[0], (list, tuple)) else outs[0], arrive

    def transfer(
        self, rank: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: bool
    ) -> tuple[Any, Callable[[], bool]]:
        """What rank r sends, rank r ^ 1 receives; in order per tag."""
        if target is c10d.batch_p2p_ops.default:
            kinds, tags, tensors = args[0], args[2], args[3]
        else:
            kinds, tags, tensors = ["isend" if target is c10d.isend.default else "irecv"], [args[2]], [args[0]]
        own: list[_Letter] = []
        expected: list[tuple[tuple[int, int], int, torch.Tensor]] = []
        for kind, tag, tensor in zip(kinds, tags, tensors):
            if kind == "isend":
                own.append(_Letter(tensor))
                self._letters.setdefault((rank, tag), []).append(own[-1])
            else:
                key = (rank ^ 1, tag)
                number = self._taken[key] = self._taken.get(key, -1) + 1
                expected.append((key, number, tensor))
                if late:
                    _bytes(tensor).fill_(POISON)

        def arrive() -> bool:
            if any(len(self._letters.get(key, [])) <= number for key, number, _ in expected):
                return False
            for letter in own:
                letter.read()
            for key, number, tensor in expected:
                tensor.copy_(self._letters[key][number].read())
            return True

        results = [t.new_empty(0) if kind == "isend" else t for kind, t in zip(kinds, tensors)]
        return (results if target is c10d.batch_p2p_ops.default else results[0]), arrive


@functools.lru_cache(maxsize=64)
def _kind(target: Any) -> tuple[str, bool]:
    """Name of a collective without its variants, and whether it writes to what it sends."""
    name = str(target._opname)
    in_place = name.endswith("_")
    return name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced"), in_place


def _ranks_of(name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))


def _members(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The group of a rank that lies as the group of rank 0 does: dimensions of a mesh are powers of two."""
    return tuple(sorted(rank ^ one for one in ranks))


def _shape(kind: str, tensor: torch.Tensor, given: dict[str, Any]) -> list[int]:
    shape = list(tensor.shape)
    if kind == "all_gather_into_tensor":
        shape[0] *= given["group_size"]
    elif kind == "reduce_scatter_tensor":
        shape[0] //= given["group_size"]
    elif kind == "all_to_all_single":
        shape[0] = sum(given["output_split_sizes"])
    return shape


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What can be filled with poison: 8-bit floats cannot as such."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _happened(kind: str, call: _Call) -> dict[int, list[torch.Tensor]]:
    """Results of a collective per rank and tensor."""
    found: dict[int, list[torch.Tensor]] = {rank: [] for rank in call.members}
    given, size = call.arguments, len(call.members)
    for k in range(len(call.posted[call.members[0]])):
        sent = [call.posted[rank][k] for rank in call.members]
        if kind == "broadcast":
            values = [call.posted[given["src"]][k].clone()] * size
        elif kind == "all_gather_into_tensor":
            values = [torch.cat([_bytes(t) for t in sent]).view(sent[0].dtype)] * size
        elif kind == "all_to_all_single":
            split = given["input_split_sizes"]
            pieces = [t.split(list(split)) for t in sent]
            values = [torch.cat([row[i] for row in pieces]) for i in range(size)]
        elif kind in ("all_reduce", "reduce_scatter_tensor"):
            whole = functools.reduce(_REDUCE[given["reduce_op"]], sent)
            whole = whole / size if given["reduce_op"] == "avg" else whole.clone()
            scattered = kind == "reduce_scatter_tensor" and whole.numel()
            values = list(whole.chunk(size)) if scattered else [whole] * size
        else:
            raise NotImplementedError(kind)
        for rank, value in zip(call.members, values):
            found[rank].append(value)
    return found


def differs(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    signed_zeros: bool = True,
    allowed: Sequence[float] | None = None,
) -> str:
    """The first difference, bit by bit; "" when there is none. Without ``signed_zeros`` 0.0 equals -0.0.

    Args:
        allowed: how far each tensor may be off; 0: not at all.
    """
    if len(before) != len(after):
        return f"{len(before)} tensors before, {len(after)} after"
    for i, (b, a) in enumerate(zip(before, after)):
        if b.shape != a.shape or b.dtype != a.dtype:
            return f"tensor {i}: {b.dtype} {tuple(b.shape)} before, {a.dtype} {tuple(a.shape)} after"
        if not signed_zeros and torch.equal(b, a):
            continue
        if allowed is not None and allowed[i]:
            apart = _apart(b, a) if math.isfinite(allowed[i]) else 0.0
            if not apart <= allowed[i]:
                return f"tensor {i} is off by {apart}, where {allowed[i]} is allowed: {b.tolist()}, {a.tolist()}"
            continue
        if not torch.equal(_bits(b), _bits(a)):
            return f"tensor {i}: {b.tolist()} before, {a.tolist()} after"
    return ""


def _apart(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far numbers are apart. What is not finite may be any of that kind, and may have made others so, not fewer."""
    apart = (before.double() - after.double()).abs()
    apart[~after.double().isfinite()] = 0.0
    apart[~before.double().isfinite() & after.double().isfinite()] = math.inf
    return float(apart.max()) if apart.numel() else 0.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes; one of the numbers that are none is as good as another."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_floating_point() and flat.dtype.itemsize > 1:
        flat = flat.nan_to_num(math.nan, math.inf, -math.inf)
    return flat.view(torch.uint8)
