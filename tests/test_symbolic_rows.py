"""R16 where the number of rows is only known at run time: one graph, right at every size that its guards admit."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

from inductor_passes import _torch, verify
from inductor_passes.config import PassConfig
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.report import Decision, Reason, Verdict
from inductor_passes.rewrites.pass_ import RewriteCollectives
from tests.support.bucket_graphs import aten
from tests.support.redistribute_graphs import duplicate, ops_of
from tests.support.symbolic_graphs import SymbolicProgram, at_sizes
from tests.support.world import fake_world
from tests.test_sequence_parallel import another_piece, fast_link, missing_gather, mixed_tokens

COLUMNS = 6


def normed(p: SymbolicProgram, h: torch.fx.Node) -> torch.fx.Node:
    mean = p.call(aten.mean.dim, p.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    return p.call(aten.mul.Tensor, h, p.call(aten.rsqrt.default, p.call(aten.add.Tensor, mean, 1.0)))


def layers(world: str, *, multiple: int, middle: tuple[int, ...] = (), factor: str = "") -> tuple[Any, SymbolicProgram]:
    """Two all_reduces on one residual stream, each with a norm behind it, and the gradient of a norm's weight.

    Args:
        multiple: what the rows are known to be a multiple of.
        middle: further dimensions of rows.
        factor: "own": a value is scaled by the number of rows; "other": by the size of another input.
    """
    p = SymbolicProgram()
    x, other = p.rows(4 * multiple, *middle, COLUMNS, multiple=multiple), p.rows(4, 1)
    h = p.collective("all_reduce", x, world)
    if factor:
        h = p.call(aten.mul.Tensor, h, p.number(aten.sym_size.int, x if factor == "own" else other, 0))
    inner = p.call(aten.tanh.default, normed(p, h))
    h = p.call(aten.add.Tensor, h, p.collective("all_reduce", p.call(aten.mul.Tensor, inner, x), world))
    out = normed(p, h)
    gradient = p.call(aten.sum.dim_IntList, p.call(aten.mul.Tensor, out, h), list(range(1 + len(middle))), True)
    return p.done(out, gradient, p.call(aten.neg.default, other)), p


def rewritten(gm: torch.fx.GraphModule, ranks: int) -> list[Decision]:
    """What R16 decided, proven by the verifier."""
    config = PassConfig(memory_budget="unlimited", verify="strict")
    report = run_passes(gm.graph, [RewriteCollectives("reassociate", ("R16",))], config, fast_link(ranks)).report
    gm.graph.lint()
    gm.recompile()
    assert not report.passes[0].findings
    return report.passes[0].decisions


@pytest.mark.parametrize(
    "ranks, multiple, middle, factor",
    [(2, 2, (), ""), (2, 2, (5,), ""), (2, 6, (3, 5), ""), (3, 3, (), "own"), (4, 4, (2,), ""), (4, 8, (), "own")],
)
def test_right_at_every_size(ranks: int, multiple: int, middle: tuple[int, ...], factor: str) -> None:
    with fake_world(ranks) as world:
        gm, p = layers(world, multiple=multiple, middle=middle, factor=factor)
        before, guards = duplicate(gm), len(p.env.guards)
        decisions = rewritten(gm, ranks)
        assert [(d.verdict, d.subject) for d in decisions] == [(Verdict.APPLIED, "R16")]
        assert ops_of(gm).count("reduce_scatter_tensor") == 2
        assert len(p.env.guards) == guards, p.env.guards[guards:]
        for times in (1, 2, 7):
            sizes = (times * multiple, 3)
            wanted, got = at_sizes(before, sizes, ranks), at_sizes(gm, sizes, ranks)
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "multiple, middle, factor, reason",
    [
        # An odd number of rows.
        (1, (), "", Reason.RANGE),
        # An odd number of first dimensions: a share may begin in the middle of one.
        (1, (4,), "", Reason.RANGE),
        # Ranks may have another number of rows in an input that they do not send.
        (2, (), "other", Reason.NOT_PROFITABLE),
    ],
)
def test_what_is_not_known_is_left_alone(multiple: int, middle: tuple[int, ...], factor: str, reason: Reason) -> None:
    with fake_world(2) as world:
        gm, _ = layers(world, multiple=multiple, middle=middle, factor=factor)
        decisions = rewritten(gm, 2)
    assert ops_of(gm).count("reduce_scatter_tensor") == 0, decisions
    assert {d.reason for d in decisions} == {reason}


def test_which_symbol_follows_from_a_size() -> None:
    """A padded size is equal for several lengths, and one size of two symbols for several pairs."""
    p = SymbolicProgram()
    s, t = (p.rows(rows, 2).meta["val"].shape[0] for rows in (8, 5))
    for size in (s, 4 * s, s * s + 3 * s, 6 * s + 2):
        assert _torch.determined_symbol(size) == s.node.expr
    for size in (7, 2 * ((s + 1) // 2), s % 3, s * t, 2 * s + t, s * s - s):
        assert _torch.determined_symbol(size) is None


def next_rows(gm: torch.fx.GraphModule) -> None:
    """A share that begins one row later."""
    start = next(n for n in gm.graph.nodes if "reduce_scatter" in str(n.target))
    whole = start.args[0]
    with gm.graph.inserting_before(start):
        rolled = gm.graph.call_function(aten.roll.default, (whole, [1], [0]))
    rolled.meta["val"] = whole.meta["val"].clone()
    start.replace_input_with(whole, rolled)


@pytest.mark.parametrize("forge", [another_piece, missing_gather, mixed_tokens, next_rows])
@pytest.mark.parametrize("middle", [(), (3,)], ids=["tokens", "sequences"])
def test_forgeries_are_found(forge: Callable[[torch.fx.GraphModule], None], middle: tuple[int, ...]) -> None:
    """With a residual of which each rank reads its own rows."""
    with fake_world(4, 1) as world:
        p = SymbolicProgram()
        x = p.rows(16, *middle, COLUMNS, multiple=4)
        h = p.call(aten.add.Tensor, p.call(aten.neg.default, x), p.collective("all_reduce", x, world))
        gm = p.done(normed(p, h))
        before = verify.snapshot(gm.graph)
        config = PassConfig(memory_budget="unlimited", verify="strict", replicas="implied")
        done = run_passes(gm.graph, [RewriteCollectives("reassociate", ("R16",))], config, fast_link(4))
        assert done.report.passes[0].changed
        assert forged_values(gm, before) == set()
        forge(gm)
        gm.graph.lint()
        assert forged_values(gm, before)


def forged_values(gm: torch.fx.GraphModule, before: verify.ReferenceSnapshot) -> set[str]:
    """What the verifier finds about values."""
    certificates = (verify.Certificate("R16", tuple(before.nodes), tuple(n.name for n in gm.graph.nodes), ()),)
    found = verify.check(
        gm.graph, reference=before, numerics="reassociate", group_order="any", certificates=certificates,
        replicas="implied",
    )  # fmt: skip
    return {f.rule for f in found} & {"value-changed", "value-unproven"}


class Random:
    """A random residual stream behind an all_reduce: norms, sums over rows, views of rows, further all_reduces."""

    def __init__(self, seed: int, world: str, ranks: int) -> None:
        draw = self.draw = random.Random(seed)
        self.multiple = draw.choice([ranks, ranks, 2 * ranks])
        self.middle = draw.choice([(), (2,), (3,), (2, 3)])
        self.p = p = SymbolicProgram()
        self.x = p.rows(4 * self.multiple, *self.middle, COLUMNS, multiple=self.multiple)
        self.world, self.outputs = world, []
        stream = [p.collective("all_reduce", self.x, world)]
        steps = [self.norm, self.norm, self.variance, self.add, self.reduce, self.pointwise, self.flat, self.sums,
                 self.scale, self.turned, self.largest, self.mean]  # fmt: skip
        for _ in range(draw.randint(3, 9)):
            stream.append(draw.choice(steps)(stream))
        self.outputs.append(p.call(aten.neg.default, normed(p, stream[-1])))

    def rows(self) -> torch.fx.Node:
        return self.p.number(aten.sym_size.int, self.x, 0)

    def norm(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        return normed(self.p, stream[-1])

    def variance(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        both = self.p.call(aten.var_mean.correction, stream[-1], [-1], correction=0, keepdim=True)
        variance, mean = (self.p.call(operator.getitem, both, i) for i in range(2))
        spread = self.p.call(aten.rsqrt.default, self.p.call(aten.add.Tensor, variance, 1.0))
        return self.p.call(aten.mul.Tensor, self.p.call(aten.sub.Tensor, stream[-1], mean), spread)

    def add(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        return self.p.call(aten.add.Tensor, stream[-1], self.draw.choice(stream))

    def reduce(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        own = self.p.call(aten.mul.Tensor, self.p.call(aten.tanh.default, stream[-1]), self.x)
        return self.p.call(aten.add.Tensor, stream[-1], self.p.collective("all_reduce", own, self.world))

    def pointwise(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        return self.p.call(self.draw.choice([aten.relu.default, aten.tanh.default, aten.neg.default]), stream[-1])

    def flat(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        rows = self.p.number(operator.mul, self.rows(), math.prod(self.middle))
        tokens = self.p.call(aten.sigmoid.default, self.p.call(aten.view.default, stream[-1], [rows, COLUMNS]))
        return self.p.call(aten.view.default, tokens, [self.rows(), *self.middle, COLUMNS])

    def sums(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        dims = list(range(1 + len(self.middle)))
        self.outputs.append(self.p.call(aten.sum.dim_IntList, stream[-1], dims, self.draw.random() < 0.5))
        return stream[-1]

    def scale(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        return self.p.call(aten.mul.Tensor, stream[-1], self.draw.choice([0.5, 3.0, self.rows()]))

    def turned(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        self.outputs.append(self.p.call(aten.neg.default, self.p.call(aten.transpose.int, stream[-1], 0, 1)))
        return stream[-1]

    def largest(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        return self.p.call(aten.sub.Tensor, stream[-1], self.p.call(aten.amax.default, stream[-1], [-1], True))

    def mean(self, stream: list[torch.fx.Node]) -> torch.fx.Node:
        mean = self.p.call(aten.mean.dim, stream[-1], [-1], True)
        if self.draw.random() < 0.5:
            mean = self.p.call(aten.expand.default, mean, [self.rows(), *self.middle, COLUMNS])
        return self.p.call(aten.add.Tensor, stream[-1], mean)


@pytest.mark.parametrize("seed", range(16))
def test_random_streams(seed: int) -> None:
    """Found: of terms that are read at one place, ``y / 2 + y`` say, the verifier compared the wrong two."""
    ranks = (2, 3, 4)[seed % 3]
    with fake_world(ranks) as world:
        program = Random(seed, world, ranks)
        gm = program.p.done(*program.outputs)
        before = duplicate(gm)
        decisions = rewritten(gm, ranks)
        assert any(d.verdict is Verdict.APPLIED for d in decisions)
        for times in (1, 3):
            wanted, got = (at_sizes(one, (times * program.multiple,), ranks) for one in (before, gm))
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
