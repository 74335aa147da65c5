"""The pass as a whole: settings, the cost gate, the order of parts, chains of layout changes, real models."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.async_tp.slab import Slab, through_view
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost, MatmulPoint
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.report import PassReport, Reason, Verdict
from inductor_passes.settings.errors import ConfigError
from tests.support.async_tp_programs import BY_NAME, GROUP, Program, ag, ar, c10d, inputs, rs, run_ranks, trace
from tests.support.bucket_graphs import assert_same_bits, check_fakes, inputs_by_rank, output_layouts, run_all_ranks
from tests.support.world import fake_world

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def link(ns_per_byte: float, alpha_ns: float = 1_000.0) -> CostProfile:
    """Two ranks on a link of choice, a matmul of 1 GFLOP/s."""
    costs = tuple(CollectiveCost(kind, alpha_ns, ns_per_byte, 100.0, 0.0) for kind in KINDS)
    return CostProfile(
        name="test",
        device="cpu",
        measured=True,
        ranks_per_host=2,
        matmul=(MatmulPoint("float32", 1e3, 1e3), MatmulPoint("float32", 1e9, 1e9)),
        memory_bytes_per_s=1e11,
        kernel_ns=10.0,
        groups=(GroupCost(GroupLayout(2, 1, 2), "test", "wire", costs),),
    )


def run(
    gm: torch.fx.GraphModule, profile: CostProfile, budget: str = "unlimited", **options: object
) -> PassReport:
    config = PassConfig(verify="strict", memory_budget=budget)
    done = run_passes(gm.graph, [AsyncTpPass(**options)], config, profile)  # type: ignore[arg-type]
    gm.graph.lint()
    gm.recompile()
    return done.report.passes[0]


def small(gm: torch.fx.GraphModule) -> str:
    """Collectives, waits and matmuls of a graph in order."""
    view = GraphView(gm.graph)
    words = []
    for node in gm.graph.nodes:
        if node in view.by_start:
            words.append(view.by_start[node].label)
        elif node in view.collectives_of_wait:
            words.append(f"W{view.collectives_of_wait[node][0].index}")
        elif getattr(node.target, "_opname", "") in ("mm", "addmm", "bmm", "cat"):
            words.append(node.target._opname)
    return " ".join(words)


BIG = Program("big", lambda x, w: ag(x) @ w, ((256, 64), (64, 64)))
BIG_RS = Program("big_rs", lambda x, w: rs(x @ w), ((512, 64), (64, 64)))
PAIR = Program("pair", lambda x, w, v: rs(torch.relu(ag(x) @ w) @ v), ((256, 64), (64, 64), (64, 64)))


def test_order_of_a_gather() -> None:
    with fake_world(2):
        gm = trace(BIG)
        report = run(gm, link(32.0))
    assert_expected_inline(
        small(gm), """AG0 AG1 AG2 AG3 AG4 AG5 AG6 AG7 W0 mm W1 mm W2 W3 mm W4 W5 mm W6 W7 mm mm mm mm cat"""
    )
    (decision,) = report.decisions
    assert decision.verdict is Verdict.APPLIED and decision.gain_ns > 0 and decision.group == GROUP
    assert "free-left" in decision.detail


def test_order_of_a_scatter() -> None:
    with fake_world(2):
        gm = trace(BIG_RS)
        run(gm, link(32.0), parts=(4,))
    assert_expected_inline(small(gm), """mm RS0 mm RS1 mm RS2 mm RS3 W0 W1 W2 W3 cat""")


def test_order_of_a_pair() -> None:
    with fake_world(2):
        gm = trace(PAIR)
        report = run(gm, link(64.0), parts=(2,))
    assert_expected_inline(small(gm), """AG0 AG1 W0 mm W1 mm RS2 mm mm RS3 W2 W3 cat""")
    assert [d.verdict for d in report.decisions] == [Verdict.APPLIED] * 2


@pytest.mark.parametrize(
    ("ns_per_byte", "alpha_ns", "reason"),
    [
        (0.001, 0.0, Reason.NOT_PROFITABLE),  # nothing to hide
        (32.0, 1e9, Reason.NOT_PROFITABLE),  # each part would pay the latency
        (32.0, 1e3, Reason.PROFITABLE),
    ],
)
def test_gate(ns_per_byte: float, alpha_ns: float, reason: Reason) -> None:
    with fake_world(2):
        gm = trace(BIG)
        (decision,) = run(gm, link(ns_per_byte, alpha_ns)).decisions
    assert decision.reason is reason
    if reason is not Reason.PROFITABLE:
        assert decision.setting == 'async_tp="force"'


def test_what_is_hidden_already_stays() -> None:
    """An independent matmul hides the whole gather, so that parts gain nothing."""

    def fn(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ag(x) @ w, other @ other

    with fake_world(2):
        gm = trace(Program("hidden", fn, ((256, 64), (64, 64), (256, 256))))
        (decision,) = run(gm, link(32.0)).decisions
    assert decision.reason is Reason.HIDDEN, decision


def test_above_the_memory_budget_everything_is_undone() -> None:
    """Putting a gathered value that is also returned together again takes memory that budget "0" does not allow."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = ag(x)
        return full, full @ w

    with fake_world(2):
        gm = trace(Program("tight", fn, ((256, 64), (64, 64))))
        before = str(gm.graph)
        tight = run(gm, link(32.0), budget="0")
        assert str(gm.graph) == before
        free = run(gm, link(32.0))
    assert tight.rolled_back is Reason.OVER_BUDGET
    assert [(d.verdict, d.reason) for d in tight.decisions] == [(Verdict.REFUSED, Reason.OVER_BUDGET)]
    assert free.decisions[0].verdict is Verdict.APPLIED


def test_modes() -> None:
    cheap = link(0.001)

    def verdict(**options: object) -> Verdict:
        with fake_world(2):
            gm = trace(BIG)
            return run(gm, cheap, **options).decisions[0].verdict

    assert verdict() is Verdict.REFUSED
    assert verdict(mode="force") is Verdict.APPLIED
    assert verdict(mode="force", groups=((GROUP, "off"),)) is Verdict.REFUSED
    assert verdict(groups=((GROUP, "force"),)) is Verdict.APPLIED
    assert verdict(groups=(("other", "force"),)) is Verdict.REFUSED
    size = 512 * 64 * 4
    assert verdict(sizes=((size, "force"),)) is Verdict.APPLIED
    assert verdict(sizes=((size + 1, "force"),)) is Verdict.REFUSED
    assert verdict(mode="force", sizes=((0, "force"), (size, "off"))) is Verdict.REFUSED


@pytest.mark.parametrize("options", [{"mode": "on"}, {"parts": ()}, {"parts": (1,)}, {"groups": (("0", "yes"),)}])
def test_bad_settings(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="async_tp"):
        AsyncTpPass(**options)  # type: ignore[arg-type]


def test_off_says_so() -> None:
    with fake_world(2):
        gm = trace(BIG)
        before = str(gm.graph)
        (decision,) = run(gm, link(32.0), mode="off").decisions
    assert decision.reason is Reason.DISABLED and str(gm.graph) == before


def test_no_sums_of_parts_on_request() -> None:
    with fake_world(2):
        gm = trace(BY_NAME["ag0_trim_mm"])
        (decision,) = run(gm, link(32.0), mode="force", contracting=False).decisions
    assert decision.reason is Reason.NO_INDEPENDENT_COMPUTE


@pytest.mark.parametrize(("dtype", "adds"), [(torch.float32, 3), (torch.bfloat16, 0), (torch.float16, 0)])
def test_no_part_of_a_sum_is_rounded(dtype: torch.dtype, adds: int) -> None:
    """Only the contracted axis can be cut. In half precision the library rounds once, and so do we."""
    with fake_world(2):
        gm = trace(Program("half", lambda x, w: ag(x).narrow(0, 0, 15) @ w, ((8, 16), (16, 12)), dtype=dtype))
        run(gm, link(32.0), mode="force", parts=(4,))
    found = [n for n in gm.graph.nodes if getattr(n.target, "_opname", "") == "add"]
    assert len(found) == adds and all(n.meta["val"].dtype == torch.float32 for n in found)


def test_decisions_do_not_depend_on_the_rank() -> None:
    texts = []
    for rank in (0, 1):
        from tests.support.world import fake_world

        with fake_world(2, rank):
            gm = trace(PAIR)
            report = run(gm, link(64.0))
        texts.append((str(gm.graph), [(d.node, d.reason, d.detail, d.gain_ns) for d in report.decisions]))
    assert texts[0] == texts[1]


# -- cuts through views ------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_of_a_view_is_the_view_of_the_cut(data: st.DataObject) -> None:
    """Parts by the transported cut hold the same elements as parts by the original one."""
    parts = data.draw(st.sampled_from([2, 3]))
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5)) + [parts]
    data.draw(st.randoms(use_true_random=False)).shuffle(factors)

    def shape() -> list[int]:
        sizes, left = [], list(factors)
        while left:
            take = data.draw(st.integers(1, len(left)))
            size = 1
            for f in left[:take]:
                size *= f
            sizes.append(size)
            left = left[take:]
        return sizes

    before, after = shape(), shape()
    dim = data.draw(st.sampled_from(range(len(before))))
    if before[dim] % parts:
        return
    per = before[dim] // parts
    outer = data.draw(st.sampled_from([o for o in range(1, per + 1) if per % o == 0]))
    cut = Slab(dim, outer, per // outer)
    moved = through_view(cut, before, after, parts)
    if moved is None:
        return
    assert moved.fits(after, parts)
    whole = torch.arange(torch.Size(before).numel())

    def part(tensor: torch.Tensor, c: Slab) -> set[int]:
        split = tensor.reshape(*tensor.shape[: c.dim], c.outer, parts, c.inner, *tensor.shape[c.dim + 1 :])
        return set(split.select(c.dim + 1, 0).flatten().tolist())

    assert part(whole.view(before), cut) == part(whole.view(after), moved)


@pytest.mark.parametrize(
    ("cut", "before", "after", "moved"),
    [
        (Slab(0, 1, 4), (8, 3), (2, 4, 3), Slab(0, 1, 1)),  # rows split: the outer half of them
        (Slab(0, 1, 1), (2, 4, 3), (8, 3), Slab(0, 1, 4)),
        (Slab(0, 4, 1), (8, 3), (4, 2, 3), Slab(1, 1, 1)),  # every other row
        (Slab(1, 1, 3), (4, 6), (24,), Slab(0, 4, 3)),
        (Slab(0, 1, 3), (6,), (3, 2), None),  # three rows of two: no half of six
    ],
)
def test_known_cuts_of_views(cut: Slab, before: tuple[int, ...], after: tuple[int, ...], moved: Slab | None) -> None:
    assert through_view(cut, list(before), list(after), 2) == moved


def _chain(x: torch.Tensor, choices: list[int]) -> torch.Tensor:
    """Layout changes and row-local operators picked by numbers; the shape keeps its elements."""
    for choice in choices:
        kind = choice % 7
        if kind == 0:
            x = x.transpose(0, x.dim() - 1)
        elif kind == 1:
            x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 2 else x.reshape(-1, 2, x.shape[1])
        elif kind == 2:
            x = x.unsqueeze(1)
        elif kind == 3:
            x = torch.cat(x.chunk(2, dim=-1), dim=0) if x.shape[-1] % 2 == 0 else x
        elif kind == 4:
            x = x.to(torch.float64).relu().to(torch.float32)
        elif kind == 5:
            x = x.flatten(0, 1) if x.dim() > 2 else x.unsqueeze(0)
        else:
            x = x * 2 + 1
    return x


@pytest.mark.parametrize("seed", range(16))
def test_random_chains_between_gather_and_matmul(seed: int) -> None:
    choices = [random.Random(seed).randrange(7) for _ in range(4)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = _chain(ag(x, seed % 2), choices)
        y = y.reshape(-1, y.shape[-1])
        weight = torch.ones(y.shape[1], 3)
        return rs(y @ weight, 0) if y.shape[0] % 2 == 0 else y @ weight

    program = Program("chain", fn, ((4, 6, 4),))
    with fake_world(2):
        gm = trace(program)
        per_rank = [inputs(program, rank) for rank in range(2)]
        expected, layouts = run_ranks(gm, per_rank), output_layouts(gm)
        report = run(gm, link(32.0), mode="force")
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        assert_same_bits(expected, run_ranks(gm, per_rank))
    assert any(d.verdict is Verdict.APPLIED for d in report.decisions), report.decisions


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_parallel_module_with_bias_forward_and_backward(batch: int) -> None:
    """``parallelize_module`` on an attention block and an MLP with biases: every collective next to a matmul."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.support.models import capture_graphs

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.down(F.gelu(self.up(self.out(y))))

    plan = {
        "qkv": ColwiseParallel(input_layouts=Shard(1)),
        "out": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    with fake_world(2):
        torch.manual_seed(0)
        model = parallelize_module(Block(), init_device_mesh("cpu", (2,)), plan)
        x = torch.randn(batch, 8, 16, requires_grad=True)
        torch._dynamo.reset()
        graphs = capture_graphs(model, (x,), dynamic=False)
        assert len(graphs.forward) == len(graphs.backward) == 1
        for gm in (*graphs.forward, *graphs.backward):
            # Small, so that the exponential of a saved maximum that does not belong to its scores stays finite.
            values = [[t if t is None else t.mul_(0.05) for t in ranks] for ranks in inputs_by_rank(gm, 2)]
            expected = run_all_ranks(gm, values)
            report = run(gm, link(32.0), mode="force")
            check_fakes(gm)
            for one, other in zip(expected, run_all_ranks(gm, values), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            refused = [d for d in report.decisions if d.verdict is Verdict.REFUSED]
            # A bias gradient's reduction has no matmul, nor has what a rank does to an incoming gradient alone.
            assert all(d.reason in (Reason.NO_INDEPENDENT_COMPUTE, Reason.DATA_DEPENDENCY) for d in refused), refused
            collectives = [d for d in report.decisions if d.subject == "async_tp"]
            assert collectives
            assert len(refused) <= len(collectives) // 3, [(d.node, d.verdict, d.detail) for d in collectives]


def test_all_reduce_with_residual_and_norm_flows_into_the_next_matmul() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = ar(x @ w) + r
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)) @ v

    with fake_world(2):
        gm = trace(Program("norm", fn, ((256, 64), (64, 64), (256, 64), (64, 64))))
        run(gm, link(32.0), parts=(2,))
    assert_expected_inline(small(gm), """mm AR0 mm AR1 W0 mm W1 mm cat""")


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_dynamic_batch(kind: str) -> None:
    """A symbolic dimension is carried along; one graph serves two batch sizes."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    from tests.support.models import capture_graphs

    def gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ag(x, 1) @ w

    def scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return rs(x @ w, 1)

    def results(gm: torch.fx.GraphModule, batch: int) -> list[torch.Tensor]:
        values = {"x": integers((batch, 8, 16)), "w": integers((16, 12))}
        with LocalTensorMode(2):
            sizes = {n.name: batch for n in gm.graph.find_nodes(op="placeholder") if "val" in n.meta}
            arguments = [
                sizes[n.name] if isinstance(n.meta["val"], torch.SymInt) else values["wx"[n.meta["val"].dim() == 3]]
                for n in gm.graph.find_nodes(op="placeholder")
            ]
            (out,) = [o for o in gm(*arguments) if isinstance(o, LocalTensor)]
        return [out._local_tensors[r] for r in range(2)]

    def integers(shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return LocalTensor({r: torch.randint(-2, 3, shape, generator=generator).float() for r in range(2)})

    with fake_world(2):
        torch._dynamo.reset()
        example = torch.randn(6, 8, 16)
        torch._dynamo.mark_dynamic(example, 0)
        program = {"gather": gather, "scatter": scatter}[kind]
        (gm,) = capture_graphs(program, (example, torch.randn(16, 12)), dynamic=None).inference
        view_to_reshape(gm)
        expected = [results(gm, batch) for batch in (6, 5)]
        (decision,) = run(gm, link(32.0), mode="force", parts=(2,)).decisions
        assert decision.verdict is Verdict.APPLIED
        assert_same_bits(expected, [results(gm, batch) for batch in (6, 5)])


def _coalesced(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One gather of the operand of a matmul and of a tensor that is only scaled."""
    a, b = (c10d.wait_tensor(t) for t in c10d.all_gather_into_tensor_coalesced([x, v], 2, GROUP))
    return a @ w, b * 2


COALESCED = Program("coalesced", _coalesced, ((256, 64), (8, 64), (64, 64)))


def test_a_member_of_a_coalesced_gather_is_computed_in_parts() -> None:
    with fake_world(2):
        gm = trace(COALESCED)
        before = trace(COALESCED)
        report = run(gm, link(32.0), parts=(2,))
        assert report.changed and small(gm).count("mm") >= 2, small(gm)
        values = [inputs(COALESCED, rank) for rank in range(2)]
        wanted, got = (run_ranks(one, values) for one in (before, gm))
        for a, b in zip(wanted, got, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    applied = [d for d in report.decisions if d.verdict is Verdict.APPLIED]
    assert len(applied) == 1


@pytest.mark.parametrize("ns_per_byte", [0.001, 0.1])
def test_a_coalesced_gather_stays_whole_when_no_member_gains(ns_per_byte: float) -> None:
    with fake_world(2):
        gm = trace(COALESCED)
        names = [n.name for n in gm.graph.nodes]
        report = run(gm, link(ns_per_byte, 50_000.0))
    assert not report.changed and [n.name for n in gm.graph.nodes] == names
    (decision,) = report.decisions
    assert decision.detail.endswith("coalesced collective")


@pytest.mark.parametrize("form", ["wait", "view"])
def test_a_second_wait_costs_its_own_region_only(form: str) -> None:
    """``wait_tensor(reduce_scatter_tensor(...))`` waits twice where it is compiled."""
    wait = torch.ops._c10d_functional.wait_tensor.default

    def twice(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        once = rs(torch.relu(x @ a))
        again = wait(once) if form == "wait" else wait(once.view(16, 2, 64)).view(32, 64)
        return rs(torch.flip(again, (0, 1)) @ b)

    with fake_world(2):
        gm = trace(Program("twice", twice, ((64, 64), (64, 64), (64, 64))))
        found = run_passes(gm.graph, [AsyncTpPass(mode="force")], PassConfig(verify="strict"), link(16.0))
    (report,) = found.report.passes
    assert report.rolled_back is None and report.changed
    assert [d.verdict for d in report.decisions] == [Verdict.REFUSED, Verdict.APPLIED]
    assert "waited for again" in report.decisions[0].detail
