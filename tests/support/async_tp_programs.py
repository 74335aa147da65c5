"""Small tensor-parallel programs around one or two collectives, as Inductor's post-grad passes see them.

Each is a function of (this rank's inputs); ``trace`` gives its functional graph. Sizes are small multiples of the world
size, so that everything can be cut; inputs are small integers, so that every sum is exact in every order and dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.fx
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.config import PassConfig
from inductor_passes.engine.gloo import respell
from tests.support.device import on_device

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Ranks that the programs are written for.
WORLD = 2
GROUP = "0"


def ag(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return funcol.all_gather_tensor(x, dim, GROUP)


def rs(x: torch.Tensor, dim: int = 0, op: str = "sum") -> torch.Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, GROUP)


def ar(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return funcol.all_reduce(x, op, GROUP)


def a2a(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_to_all_single(x, None, None, GROUP)


def uneven_ag(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Padded shards gathered and trimmed to ``size``: what DTensor does with a dimension that does not divide."""
    return ag(x, dim).narrow(dim, 0, size)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        shapes: of the inputs.
        fused: how many of its collectives our pass takes part by part in ``force`` mode.
        refused: the reason for each other one, in graph order.
        dots: which dimensions of dots are cut.
        world: ranks.
    """

    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fused: int = 1
    refused: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    world: int = WORLD


def inputs(program: Program, rank: int) -> list[torch.Tensor]:
    """Small integers, different on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    drawn = (torch.randint(-1, 2, shape, generator=generator) for shape in program.shapes)
    return [on_device(value.to(program.dtype)) for value in drawn]


def trace(program: Program) -> torch.fx.GraphModule:
    """The program's functional graph, decomposed as Inductor does."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    gm = make_fx(program.fn, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs(program, 0))
    out = gm.graph.output_node()
    if isinstance(out.args[0], torch.fx.Node):
        out.args = ((out.args[0],),)
    view_to_reshape(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def on_gloo(gm: torch.fx.GraphModule, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph eagerly on a real rank, as ``options()`` would: torch's gathers damage gloo's heap side by side."""
    gm = copy.deepcopy(gm)
    respell(gm.graph, PassConfig(codegen="aot_eager"))
    gm.recompile()
    return list(gm(*values))


def run_ranks(gm: torch.fx.GraphModule, per_rank: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Outputs by output and rank, all ranks in this process."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    world = len(per_rank)
    with LocalTensorMode(world):
        outputs = gm(*(LocalTensor({r: per_rank[r][i].clone() for r in range(world)}) for i in range(len(per_rank[0]))))
    return [[o._local_tensors[r] for r in range(world)] for o in outputs]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


def _shared(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A backward's gather of dy for dgrad and wgrad."""
    full = ag(dy)
    return full @ w.t(), full.t() @ x


def _two_users(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    return rs(y), y.sum()


def _mlp(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return rs(F.relu(torch.addmm(b1, ag(x), w1)) @ w2)


def _swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    full = ag(x, 1)
    return rs((full @ w1).relu() * (full @ w3) @ w2, 1)


def _gather_twice(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ag(x) @ w, ag(x) @ v


def _moe(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dispatch to two local experts by all_to_all, grouped product, and back."""
    got = a2a(x).view(2, 2, 4, -1).transpose(0, 1).reshape(2, 8, -1)
    done = torch.bmm(got, w).view(2, 2, 4, -1).transpose(0, 1).reshape(4, 4, -1).contiguous()
    return a2a(done)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Two groups of equal size, as far as the program knows at run time only."""
    sizes = {(2, 3): left.shape[0], (2, 2): left.shape[-1], (3, 2): right.shape[-1], (3, 3): 0}
    ragged = sizes[left.dim(), right.dim()]
    offsets = torch.arange(1, 3, dtype=torch.int32) * (ragged // 2) if ragged else None
    return torch._grouped_mm(left, right, offsets)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def _scaled_mm(x: torch.Tensor, w: torch.Tensor, rowwise: bool = False) -> torch.Tensor:
    if rowwise:
        a, b = (torch.ones(shape, device=x.device) for shape in ((x.shape[0], 1), (1, w.shape[1])))
    else:
        a = b = torch.ones((), device=x.device)
    return torch._scaled_mm(_scaled(x), _scaled(w.t().contiguous()).t(), a, b, out_dtype=torch.bfloat16)


def _ag_scaled_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    full = ag(_scaled(x).view(torch.uint8)).view(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return torch._scaled_mm(full, _scaled(w.t().contiguous()).t(), one, one, out_dtype=torch.bfloat16)


def _ag_scaled_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows and their scales are gathered."""
    full = ag(_scaled(x).view(torch.uint8)).view(torch.float8_e4m3fn)
    rows = ag(torch.ones((x.shape[0], 1), device=x.device))
    columns = torch.ones((1, w.shape[1]), device=x.device)
    return torch._scaled_mm(full, _scaled(w.t().contiguous()).t(), rows, columns, out_dtype=torch.bfloat16)


def _scaled_ag_columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A sharded weight and its scales are gathered."""
    full = ag(_scaled(w).view(torch.uint8)).view(torch.float8_e4m3fn)
    columns = ag(torch.ones((w.shape[0], 1), device=x.device)).t()
    rows = torch.ones((x.shape[0], 1), device=x.device)
    return torch._scaled_mm(_scaled(x), full.t(), rows, columns, out_dtype=torch.bfloat16)


def _scaled_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One row, whose columns are scattered: a part of the weight consists of columns of every rank's block."""
    return rs(_scaled_mm(x, w), 1)


def _int_mm_rs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return rs(torch._int_mm(x.to(torch.int8), w.to(torch.int8)))


def _scaled_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, ag(x, 1), w, beta=2)


def _heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """11 heads of 13 columns."""
    return torch.bmm(ag(x, 1)[:, :143].view(11, 11, 13).permute(1, 0, 2), w)


def _one_of_them_read(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Somebody else reads what one of two gathers brings."""
    other = ag(y)
    return torch.cat([ag(x), other], 1) @ w, other


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotated as positions in attention are: pairs of columns are complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(x.new_tensor([0.0, 1.0]))).flatten(-2)


def _groups(name: str, fn: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> Program:
    return Program(name, fn, shapes, dtype=torch.bfloat16)


X, W, B3 = (8, 16), (16, 12), (4, 8, 16)
NONE = ("no independent compute left",)

PROGRAMS: list[Program] = [
    # all_gather as the left operand
    Program("ag0_mm", lambda x, w: ag(x) @ w, (X, W)),
    Program("ag1_mm", lambda x, w: ag(x, 1) @ w, (X, (32, 12))),
    Program("ag0_mm_3d", lambda x, w: ag(x) @ w, (B3, W)),
    Program("ag1_mm_3d", lambda x, w: ag(x, 1) @ w, (B3, W)),
    Program("ag2_mm_3d", lambda x, w: ag(x, 2) @ w, (B3, (32, 12))),
    Program("ag1_mm_batch_1", lambda x, w: ag(x, 1) @ w, ((1, 8, 16), W)),
    Program("ag1_mm_4d", lambda x, w: ag(x, 1) @ w, ((2, 4, 4, 16), W)),
    Program("ag2_mm_4d", lambda x, w: ag(x, 2) @ w, ((2, 2, 4, 16), W)),
    Program("ag0_addmm", lambda x, w, b: torch.addmm(b, ag(x), w), (X, W, (12,))),
    Program("ag0_linear_bias", lambda x, w, b: F.linear(ag(x), w, b), (X, (12, 16), (12,))),
    Program("ag1_linear_bias_3d", lambda x, w, b: F.linear(ag(x, 1), w, b), (B3, (12, 16), (12,))),
    Program("ag1_linear_bias_batch_1", lambda x, w, b: F.linear(ag(x, 1), w, b), ((1, 8, 16), (12, 16), (12,))),
    Program("ag0_addmm_matrix", lambda x, w, b: torch.addmm(b, ag(x), w), (X, W, (16, 12))),
    Program("ag0_bmm", lambda x, w: torch.bmm(ag(x), w), ((2, 4, 8), (4, 8, 6))),
    Program("ag1_bmm", lambda x, w: torch.bmm(ag(x, 1), w), ((2, 4, 8), (2, 8, 6))),
    Program("ag2_bmm", lambda x, w: torch.bmm(ag(x, 2), w), ((2, 4, 8), (2, 16, 6))),
    Program("ag1_baddbmm", lambda x, w, b: torch.baddbmm(b, ag(x, 1), w), ((2, 4, 8), (2, 8, 6), (2, 8, 6))),
    # gathers of one tensor stay apart here: rewrite R14 makes one of them before this pass
    Program("ag0_three_mms", lambda x, a, b, c: tuple(ag(x) @ w for w in (a, b, c)), (X, W, W, W), fused=3),
    Program("ag0_mm_and_output", lambda x, w: (lambda f: (f @ w, f))(ag(x)), (X, W)),
    Program("ag0_mm_and_sum", lambda x, w: (lambda f: (f @ w, f.sum(0)))(ag(x)), (X, W)),
    Program("ag0_cast_mm", lambda x, w: ag(x).to(torch.float64) @ w.to(torch.float64), (X, W)),
    Program("ag0_narrow_mm", lambda x, w: ag(x).to(torch.bfloat16) @ w.to(torch.bfloat16), (X, W)),
    Program("ag0_relu_mm", lambda x, w: ag(x).relu() @ w, (X, W)),
    Program("ag0_mul_vector_mm", lambda x, v, w: (ag(x) * v) @ w, (X, (16,), W)),
    Program("ag0_mul_matrix_mm", lambda x, v, w: (ag(x) * v) @ w, (X, (16, 16), W)),
    Program("ag0_norm_mm", lambda x, v, w: _norm(ag(x), v) @ w, (X, (16,), W)),
    Program("ag0_transpose_mm", lambda x, w: ag(x).t() @ w, (X, (16, 12))),
    Program("ag0_view_permute_mm", lambda x, w: ag(x).view(8, 2, 16).permute(1, 0, 2).reshape(16, 16) @ w, (X, W)),
    Program("ag0_heads_bmm", lambda x, w: torch.bmm(ag(x).view(16, 4, 4).permute(1, 0, 2), w), (X, (4, 4, 6))),
    Program("ag0_trim_mm", lambda x, w: uneven_ag(x, 0, 15) @ w, (X, W)),
    Program("ag1_trim_mm_3d", lambda x, w: uneven_ag(x, 1, 13) @ w, (B3, W)),
    Program("ag0_byte_view_mm", lambda x, w: ag(x.view(torch.int32)).view(torch.float32) @ w, (X, W)),
    Program("ag0_gathered_twice", _gather_twice, (X, W, W), fused=2),
    Program("ag0_bf16", lambda x, w: ag(x) @ w, (X, W), dtype=torch.bfloat16),
    Program("ag0_fp16", lambda x, w: ag(x) @ w, (X, W), dtype=torch.float16),
    Program("ag1_fp64_4_ranks", lambda x, w: ag(x, 1) @ w, ((2, 4, 8), (8, 6)), dtype=torch.float64, world=4),
    Program("ag_odd", lambda x, w: ag(x) @ w, ((7, 5), (5, 3))),
    # all_gather as the right operand: sharded weights, weight gradients
    Program("mm_ag0", lambda x, w: x @ ag(w), (X, (8, 12))),
    Program("mm_ag1", lambda x, w: x @ ag(w, 1), (X, (16, 6))),
    Program("mm_ag0_transposed", lambda x, w: x @ ag(w).t(), (X, (6, 16))),
    Program("linear_ag0_bias", lambda x, w, b: F.linear(x, ag(w), b), (X, (6, 16), (12,))),
    Program("linear_ag0_ag0_bias", lambda x, w, b: F.linear(x, ag(w), ag(b)), (X, (6, 16), (6,)), fused=2),
    Program("linear_ag0_cast", lambda x, w: F.linear(x.bfloat16(), ag(w).bfloat16()), (X, (6, 16))),
    Program("bmm_ag0", lambda x, w: torch.bmm(x, ag(w)), ((4, 8, 16), (2, 16, 6))),
    Program("flat_parameter", lambda x, w: x @ ag(w).view(2, 96)[:, :].reshape(16, 12), (X, (96,))),
    Program("mm_ag0_complex", lambda x, w: _turned(x @ ag(w)), (X, (8, 12))),
    Program("ag1_mm_complex", lambda x, w: _turned(ag(x, 1) @ w), (X, (32, 12))),
    Program("wgrad", lambda x, dy: ag(dy).t() @ x, ((16, 16), (8, 12))),
    Program("wgrad_right", lambda x, dy: dy.t() @ ag(x), (X, (16, 12))),
    Program("dgrad_and_wgrad", _shared, ((16, 16), (16, 12), (8, 12))),
    Program("wgrad_3d", lambda x, dy: ag(dy, 1).reshape(32, 12).t() @ x, ((32, 16), (4, 4, 12))),
    # a bias where only the contracted dimension can be cut: the sum of the parts gets it once
    Program("ag1_addmm_of_a_row", lambda x, w, b: torch.addmm(b, ag(x, 1), w), ((1, 16), (32, 12), (12,))),
    Program("ag2_baddbmm_of_rows", lambda x, w, b: torch.baddbmm(b, ag(x, 2), w), ((1, 1, 8), (1, 16, 6), (1, 1, 6))),
    Program("ag1_linear_bias_wide", lambda x, w, b: F.linear(ag(x, 1), w, b), ((1, 17), (12, 34), (12,))),
    Program(
        "ag1_addmm_of_a_row_bf16",
        lambda x, w, b: torch.addmm(b, ag(x, 1), w),
        ((1, 16), (32, 12), (12,)),
        0,
        NONE,
        dtype=torch.bfloat16,
    ),
    Program("ag1_row_fp16", lambda x, w: ag(x, 1) @ w, ((1, 16), (32, 12)), 0, NONE, dtype=torch.float16),
    Program("ag1_addmm_scaled", _scaled_bias, ((1, 16), (32, 12), (12,)), 0, NONE),
    # sizes without a small divisor
    Program("ag0_prime_rows", lambda x, w: ag(x) @ w, ((11, 13), (13, 3))),
    Program("ag0_prime_rows_bias", lambda x, w, b: torch.addmm(b, ag(x), w), ((13, 17), (17, 11), (11,))),
    Program("ag1_prime_rows_3d", lambda x, w: ag(x, 1) @ w, ((11, 13, 17), (17, 11))),
    Program("mm_ag0_prime", lambda x, w: x @ ag(w).t(), ((11, 17), (13, 17))),
    Program("ag0_prime_heads", _heads, ((11, 143), (11, 13, 11))),
    Program("ag0_trim_prime", lambda x, w: uneven_ag(x, 0, 13) @ w, ((7, 17), (17, 13))),
    Program("mm_rs0_prime", lambda x, w: rs(x @ w), ((34, 13), (13, 17))),
    Program("mm_rs1_prime_batch", lambda x, w: rs(x @ w, 1), ((11, 26, 13), (13, 17))),
    Program("mm_ar_prime", lambda x, w: ar(x @ w), ((13, 17), (17, 11))),
    Program("a2a_mm_prime", lambda x, w: a2a(x) @ w, ((26, 17), (17, 11))),
    # gathers beside each other
    Program("ag1_ag0", lambda x, w: ag(x, 1) @ ag(w), (X, W), fused=2),
    Program("ag0_ag1", lambda x, w: ag(x) @ ag(w, 1), (X, (16, 6)), fused=2),
    Program("ag0_ag0", lambda x, w: ag(x) @ ag(w), (X, (8, 12)), fused=2),
    Program("columns_of_two_gathers", lambda x, y, w: torch.cat([ag(x), ag(y)], 1) @ w, (X, X, (32, 12)), fused=2),
    Program("rows_of_two_gathers", lambda x, y, w: torch.cat([ag(x), ag(y)]) @ w, (X, X, W), fused=2),
    Program("product_of_two_gathers", lambda x, y, w: (ag(x) * ag(y).relu()) @ w, (X, X, W), fused=2),
    Program("gathers_one_of_them_read", _one_of_them_read, (X, X, (32, 12)), fused=2),
    Program("gather_of_a_gather", lambda x, w: ag(ag(x, 1)) @ w, (X, (32, 12)), fused=2),
    Program("gather_twice_along_rows", lambda x, w: ag(ag(x)) @ w, (X, W), fused=2),
    # reduce_scatter
    Program("mm_rs0", lambda x, w: rs(x @ w), (X, W)),
    Program("mm_rs1", lambda x, w: rs(x @ w, 1), (X, W)),
    Program("mm_rs0_avg", lambda x, w: rs(x @ w, 0, "avg"), (X, W)),
    Program("mm_rs0_3d", lambda x, w: rs(x @ w, 0), (B3, W)),
    Program("mm_rs1_3d", lambda x, w: rs(x @ w, 1), (B3, W)),
    Program("mm_rs2_3d", lambda x, w: rs(x @ w, 2), (B3, W)),
    Program("mm_rs1_batch_1", lambda x, w: rs(x @ w, 1), ((1, 8, 16), W)),
    Program("addmm_rs0", lambda x, w, b: rs(torch.addmm(b, x, w)), (X, W, (12,))),
    Program("linear_rs1_bias_3d", lambda x, w, b: rs(F.linear(x, w, b), 1), (B3, (12, 16), (12,))),
    Program("mm_residual_rs0", lambda x, w, r: rs(x @ w + r), (X, W, (8, 12))),
    Program("mm_scaled_rs0", lambda x, w: rs(x @ w * 0.5), (X, W)),
    Program("mm_cast_rs0", lambda x, w: rs((x @ w).to(torch.float64)), (X, W)),
    Program("mm_narrow_rs0", lambda x, w: rs((x @ w).to(torch.bfloat16)), (X, W)),
    Program("mm_two_users_rs0", _two_users, (X, W)),
    Program("mm_plus_mm_rs0", lambda x, w, v: rs(x @ w + x @ v), (X, W, W)),
    Program("bmm_rs0", lambda x, w: rs(torch.bmm(x, w)), ((4, 8, 16), (4, 16, 6))),
    Program("bmm_rs1", lambda x, w: rs(torch.bmm(x, w), 1), ((4, 8, 16), (4, 16, 6))),
    Program("wgrad_rs0", lambda x, dy: rs(dy.t() @ x), ((16, 8), (16, 12))),
    Program("mm_transpose_rs0", lambda x, w: rs((x @ w).t().contiguous()), (X, W)),
    Program("mm_padded_rs0", lambda x, w: rs(F.pad(x @ w, (0, 0, 0, 1))), ((7, 16), W)),
    Program("mm_rs0_max", lambda x, w: rs(x @ w, 0, "max"), (X, W), 0, ("unsupported form",)),
    Program("mm_rs0_bf16", lambda x, w: rs(x @ w), (X, W), dtype=torch.bfloat16),
    # all_reduce
    Program("mm_ar", lambda x, w: ar(x @ w), (X, W)),
    Program("addmm_ar", lambda x, w, b: ar(torch.addmm(b, x, w)), (X, W, (12,))),
    Program("mm_ar_3d", lambda x, w: ar(x @ w), (B3, W)),
    Program("mm_ar_residual_norm", lambda x, w, r, v: _norm(ar(x @ w) + r, v), (X, W, (8, 12), (12,))),
    Program("mm_ar_mm", lambda x, w, v: ar(x @ w).relu() @ v, (X, W, (12, 8))),
    Program("mm_ar_max", lambda x, w: ar(x @ w, "max"), (X, W), 0, ("unsupported form",)),
    Program("wgrad_ar", lambda x, dy: ar(dy.t() @ x), ((16, 8), (16, 12))),
    # all_to_all
    Program("a2a_mm", lambda x, w: a2a(x) @ w, (X, W)),
    Program("mm_a2a", lambda x, w: a2a(x @ w), (X, W)),
    Program("a2a_bmm_a2a", _moe, ((4, 4, 8), (2, 8, 8)), fused=2),
    # products of groups: rows that offsets divide among them cannot be cut, all other dimensions can
    _groups("ag_experts_columns", lambda x, w: _grouped(x, ag(w, 2)), ((16, 32), (2, 32, 16))),
    _groups("ag_experts_rows", lambda x, w: _grouped(x, ag(w, 1)), ((16, 32), (2, 16, 16))),
    _groups("ag_experts", lambda x, w: _grouped(x, ag(w, 0)), ((16, 32), (1, 32, 16))),
    # only the contracted dimension could be cut, and its parts would be rounded
    Program(
        "ag_tokens_grouped_mm",
        lambda x, w: _grouped(ag(x), w),
        ((16, 32), (2, 32, 16)),
        0,
        NONE,
        dtype=torch.bfloat16,
    ),
    _groups("grouped_mm_rs_columns", lambda x, w: rs(_grouped(x, w), 1), ((16, 32), (2, 32, 32))),
    _groups("grouped_batches_rs", lambda x, w: rs(_grouped(x, w), 1), ((2, 16, 32), (2, 32, 16))),
    _groups("grouped_wgrad_rs", lambda x, dy: rs(_grouped(dy.t(), x), 1), ((16, 32), (16, 32))),
    _groups("ag_left_of_ragged_columns", lambda x, w: _grouped(ag(x, 1), w), ((2, 16, 32), (32, 16))),
    # pairs
    Program("ag_mm_rs", lambda x, w: rs(ag(x) @ w), (X, W), fused=2),
    Program("mlp_with_bias", _mlp, (X, W, (12,), (12, 16)), fused=2),
    Program("swiglu_3d", _swiglu, (B3, W, W, (12, 16)), fused=2),
    Program("swiglu_batch_1", _swiglu, ((1, 8, 16), W, W, (12, 16)), fused=2),
    # float8
    Program("ag0_scaled_mm", _ag_scaled_mm, ((16, 16), (16, 16)), dtype=torch.bfloat16),
    Program("ag0_scaled_mm_rows", _ag_scaled_rows, ((16, 16), (16, 16)), fused=2, dtype=torch.bfloat16),
    Program("scaled_mm_ag0_columns", _scaled_ag_columns, ((16, 16), (16, 16)), fused=2, dtype=torch.bfloat16),
    Program("int_mm_rs0", _int_mm_rs, ((64, 32), (32, 64)), dtype=torch.float32),
    Program("scaled_mm_rs1_row", _scaled_row, ((1, 16), (16, 96)), dtype=torch.bfloat16),
    Program("scaled_mm_rs0", lambda x, w: rs(_scaled_mm(x, w)), ((32, 16), (16, 32)), dtype=torch.bfloat16),
    Program("scaled_mm_rows_rs0", lambda x, w: rs(_scaled_mm(x, w, True)), ((32, 16), (16, 32)), dtype=torch.bfloat16),
    Program(
        "scaled_mm_rs1_3d_batch_2",
        lambda x, w: rs(_scaled_mm(_scaled(x).view(32, 16), w).view(2, 16, 16), 1),
        ((2, 16, 16), (16, 16)),
        dtype=torch.bfloat16,
    ),
    # nothing to fuse
    Program("ag_alone", lambda x: ag(x) * 2, (X,), 0, NONE),
    Program("ar_of_pointwise", lambda x: ar(x.relu()), (X,), 0, NONE),
    Program("ag_softmax_of_cut", lambda x: torch.softmax(ag(x), 0), (X,), 0, NONE),
    Program("rs_of_input_mm_elsewhere", lambda x, w: (rs(x), x @ w), (X, W), 0, NONE),
]
BY_NAME = {p.name: p for p in PROGRAMS}
