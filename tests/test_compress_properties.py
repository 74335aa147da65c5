"""Every element that arrives is within its bound, for values of every kind: worked out here, element by element.

Each value is carried as a number, how far what arrives may be from it, and whether it may or has to be other than
finite. A message rounds by a share of each block's largest element. Nothing here knows how a message is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.engine.pipeline import run_passes
from tests.support.bucket_graphs import Program, assert_same_bits, inputs_by_rank, run_all_ranks
from tests.support.world import fake_world
from tests.test_compress import MOVED, NAMES, config, link
from tests.test_compress_levels import links

#: As docs/compress.md has it.
ERRORS = {"bf16": 0.004, "int8": 0.004, "e4m3": 0.037, "e5m2": 0.073}
#: Above these a number may become infinite.
LIMITS = {"bf16": 3.39e38, "int8": 0.93 * 2.0**128, "e4m3": 0.93 * 2.0**128, "e5m2": 0.93 * 2.0**128}
LARGEST = float(torch.finfo(torch.float32).max)
#: Values that a block may be full of, or hold among others.
SPECIAL = (
    *(0.0, -0.0, 1.0, -7.0, 2.0**-149, -(2.0**-140), 2.0**-126, 2.0**-119, 2.0**-110, 2.0**-109, 2.0**100),
    *(LARGEST, -LARGEST, 3.3e38, 3.1e38, -3.392e38, math.inf, -math.inf, math.nan),
)


@dataclass
class Carried:
    """What is known about each element of a flat tensor, in float64.

    Attributes:
        value: what it is without any rounding.
        off: how far what there is may be from it.
        may: it may be infinite or no number; ``must``: it has to be.
    """

    value: torch.Tensor
    off: torch.Tensor
    may: torch.Tensor
    must: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Carried:
        flat = x.reshape(-1).double()
        odd = ~flat.isfinite()
        return cls(flat.nan_to_num(0.0, 0.0, 0.0), torch.zeros_like(flat), odd, odd)

    def part(self, begin: int, end: int) -> Carried:
        return Carried(*(t[begin:end] for t in (self.value, self.off, self.may, self.must)))

    @property
    def size(self) -> torch.Tensor:
        return self.value.abs() + self.off


def joined(parts: list[Carried]) -> Carried:
    return Carried(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("value", "off", "may", "must"))
    )


def total(terms: list[Carried]) -> Carried:
    """Added in float32, in any order."""
    size = torch.stack([t.size for t in terms]).sum(0)
    any_of = [torch.stack([getattr(t, name) for t in terms]).any(0) for name in ("may", "must")]
    off = torch.stack([t.off for t in terms]).sum(0) + size * 2.0**-22 + 2.0**-148
    return Carried(torch.stack([t.value for t in terms]).sum(0), off, any_of[0] | (size > LARGEST * 0.999), any_of[1])


def rounded(x: Carried, name: str, block: int) -> Carried:
    """Sent as blocks from its beginning."""
    if name == "bf16":
        off = torch.clamp(ERRORS[name] * x.size, min=2.0**-134)
        return Carried(x.value, x.off + off, x.may | (x.size > LIMITS[name]), x.must)
    done = []
    for begin in range(0, len(x.value), block):
        part = x.part(begin, begin + block)
        peak = float(part.size.max())
        error = ERRORS[name] * peak
        if peak < 2.0**-109:
            error = max(1.5 * error, 2.0**-123)
        may = bool(part.may.any()) or peak > LIMITS[name]
        done.append(Carried(part.value, part.off + error, part.may | may, part.must | bool(part.must.any())))
    return joined(done)


def pieces(x: Carried, count: int, block: int) -> list[Carried]:
    """Equal parts; of what has none, whole blocks, and the last ones are shorter or empty."""
    size = len(x.value)
    each = size // count if size % count == 0 else math.ceil(math.ceil(size / count) / block) * block
    return [x.part(k * each, (k + 1) * each) for k in range(count)]


def reduced(terms: list[Carried], name: str, block: int, ranks: int) -> list[Carried]:
    """Each rank's piece of a sum, rounded once per term."""
    apart = [pieces(term, ranks, 1 if name == "bf16" else block) for term in terms]
    return [total([rounded(p[k], name, block) for p in apart]) for k in range(ranks) if len(apart[0][k].value)]


def expected(kind: str, name: str, block: int, inputs: list[torch.Tensor]) -> list[Carried]:
    """What each rank gets."""
    ranks, sent = len(inputs), [Carried.of(x) for x in inputs]
    if kind == "all_gather":
        return [joined([rounded(x, name, block) for x in sent])] * ranks
    if kind == "all_to_all":
        apart = [pieces(x, ranks, block) for x in sent]
        return [joined([rounded(p[k], name, block) for p in apart]) for k in range(ranks)]
    sums = reduced(sent, name, block, ranks)
    return sums if kind == "reduce_scatter" else [joined([rounded(x, name, block) for x in sums])] * ranks


def between(kind: str, name: str, block: int, inputs: list[torch.Tensor]) -> list[Carried]:
    """What each of 2 x 2 ranks gets where it is narrow between the hosts only."""
    sent = [Carried.of(x) for x in inputs]
    if kind == "all_gather":
        # Each shard by itself, or both of a host as one, which the price decides.
        one = joined([rounded(x, name, block) for x in sent])
        other = joined([rounded(joined(sent[k : k + 2]), name, block) for k in (0, 2)])
        known = Carried(one.value, torch.maximum(one.off, other.off), one.may | other.may, one.must & other.must)
        return [known] * 4
    near = [total(sent[:2]), total(sent[2:])]
    if kind == "reduce_scatter":
        apart = [pieces(x, 4, block) for x in near]
        return [total([rounded(p[k], name, block) for p in apart]) for k in range(4)]
    size = len(near[0].value)
    half = -(-size // 2)
    done = []
    for begin in (0, half):
        sums = reduced([x.part(begin, begin + half) for x in near], name, block, 2)
        done += [rounded(x, name, block) for x in sums]
    return [joined(done)] * 4


def wrong(found: torch.Tensor, known: Carried, mean_of: int) -> str:
    """What does not hold of a result; "" when all does."""
    f = found.reshape(-1).double() * mean_of
    finite = f.isfinite()
    off = (f - known.value).abs().nan_to_num(0.0, 0.0, 0.0)
    if bool((finite & known.must).any()):
        return "what is not finite arrives finite"
    if bool((~finite & ~known.may).any()):
        return f"{known.value[~finite & ~known.may][0]} arrives as {f[~finite & ~known.may][0]}"
    far = finite & (off > known.off * 1.0001 + known.size * 2.0**-22 + 2.0**-145 * mean_of)
    if bool(far.any()):
        return f"{known.value[far][0]} is off by {off[far][0]}, where {known.off[far][0]} is allowed"
    return ""


@st.composite
def messages(draw: st.DrawFn, kinds: tuple[str, ...], worlds: tuple[int, ...]) -> tuple[str, str, int, int, int, int]:
    """Kind, type, block, ranks, rows and columns: sizes that neither blocks nor, where they need not, ranks divide."""
    kind, world = draw(st.sampled_from(kinds)), draw(st.sampled_from(worlds))
    rows, columns = draw(st.integers(1, 24)), draw(st.integers(1, 48))
    if kind in ("reduce_scatter", "all_to_all"):
        rows = -(-rows // world) * world
    return kind, draw(st.sampled_from(NAMES)), draw(st.sampled_from([64, 128, 256])), world, rows, columns


RUNS = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL), st.integers(1, 300)), max_size=4)


def check(
    message: tuple[str, str, int, int, int, int],
    runs: list[tuple[int, float, int]],
    scale: int,
    op: str,
    seed: int,
    levels: bool,
) -> None:
    kind, name, block, world, rows, columns = message
    with fake_world(world) as group:
        if levels:
            init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("hosts", "devices"))
        p = Program()
        gm = p.done(p.collective(kind, p.input(rows, columns), group, op))
        values = inputs_by_rank(gm, world, seed)
        for x in values[0]:
            x *= 2.0**scale
        for place, value, length in runs:
            x = values[0][place % world].view(-1)
            x[place % x.numel() :][:length] = value
        before = run_all_ranks(gm, values)
        chosen = config({"*": name + "/between" * levels}, compress_block=str(block))
        profile = links(2, world // 2) if levels else link(world, 1.0)
        done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, profile)
        gm.recompile()
        found = run_all_ranks(gm, values)
    if not done.report.passes[0].changed:
        # A message that gets no smaller.
        assert rows * columns < 3 * block * world
        assert_same_bits(before, found)
        return
    known = (between if levels else expected)(kind, name, block, values[0])
    mean_of = world if op == "avg" and kind in ("reduce_scatter", "all_reduce") else 1
    for rank in range(world):
        assert not (said := wrong(found[0][rank], known[rank], mean_of)), f"rank {rank}: {said}"
    if kind in ("all_gather", "all_reduce"):
        assert_same_bits([found[0]], [[found[0][0]] * world])


@settings(max_examples=80, deadline=None)
@given(
    messages(MOVED, (2, 3, 4)), RUNS, st.integers(-140, 120), st.sampled_from(["sum", "avg"]), st.integers(0, 2**31 - 1)
)
def test_any_values_of_any_size(
    message: tuple[str, str, int, int, int, int], runs: list[tuple[int, float, int]], scale: int, op: str, seed: int
) -> None:
    """Proven under `verify="strict"`, and within the bounds beside zero, tiny, equal, huge and infinite runs."""
    check(message, runs, scale, op, seed, levels=False)


@settings(max_examples=25, deadline=None)
@given(
    messages(("all_gather", "reduce_scatter", "all_reduce"), (4,)),
    RUNS,
    st.integers(-140, 120),
    st.sampled_from(["sum", "avg"]),
    st.integers(0, 2**31 - 1),
)
def test_any_values_between_hosts(
    message: tuple[str, str, int, int, int, int], runs: list[tuple[int, float, int]], scale: int, op: str, seed: int
) -> None:
    check(message, runs, scale, op, seed, levels=True)


def test_bounds_are_those_of_the_documentation() -> None:
    """And what they forbid is noticed."""
    x = torch.linspace(-1.0, 1.0, 128)
    known = rounded(Carried.of(x), "int8", 64)
    assert wrong(x + 0.0039, known, 1) == ""
    assert "off by" in wrong(x + 0.0041, known, 1)
    x[70] = math.inf
    known = rounded(Carried.of(x), "int8", 64)
    assert "arrives finite" in wrong(x, known, 1)
    x[64:] = math.inf
    assert wrong(x, known, 1) == ""
    x[3] = math.nan
    assert "arrives as nan" in wrong(x, known, 1)
    assert Fraction(ERRORS["e5m2"]).limit_denominator(1000) == Fraction(73, 1000)
