"""Fused attention in parts: along batches and heads, forward and backward, masks, and what kernels keep beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.async_tp.rules import rule_of
from inductor_passes.async_tp.rules_attention import RULES
from inductor_passes.async_tp.slab import Slab, Uniform
from inductor_passes.ir import ops
from inductor_passes.report import Verdict
from tests.support.async_tp_programs import Program, ag, inputs, rs, run_ranks, trace
from tests.support.bucket_graphs import assert_same_bits, check_fakes, output_layouts
from tests.support.world import fake_world
from tests.test_async_tp_pass import link, run

aten = torch.ops.aten
BATCH, HEADS, SEQUENCE, WIDTH = 4, 2, 8, 8
HIDDEN = HEADS * WIDTH


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, -1, HEADS, WIDTH).transpose(1, 2)


def _training_step(masked: bool) -> Callable[..., torch.Tensor]:
    """Gathered activations and gradient, attention, its gradient, and a scattered product of that."""

    def fn(
        x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        query = _heads(ag(x, 1).reshape(-1, HIDDEN) @ w)
        key, value, causal = query * 0.5, query + 1.0, not masked
        out, scores = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask)
        gradient = _heads(ag(dy, 1).reshape(-1, HIDDEN) @ v)
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, scores, 0.0, causal, attn_mask=mask
        )
        back = (parts[0] + parts[1] + parts[2]).transpose(1, 2).reshape(-1, HIDDEN)
        return rs((back @ w.t()).reshape(BATCH, -1, HIDDEN), 1)

    return fn if masked else lambda x, dy, w, v: fn(x, dy, w, v)


#: Shapes of what is added to the scores.
MASKS = {
    "none": (),
    "per position": ((2 * SEQUENCE, 2 * SEQUENCE),),
    "per batch": ((BATCH, 1, 2 * SEQUENCE, 2 * SEQUENCE),),
    "broadcast": ((1, 1, 2 * SEQUENCE, 2 * SEQUENCE),),
}


@pytest.mark.parametrize("mask", MASKS)
def test_forward_and_backward_in_one_region(mask: str) -> None:
    shapes = ((BATCH, SEQUENCE, HIDDEN), (BATCH, SEQUENCE, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), *MASKS[mask])
    program = Program("attention", _training_step(bool(MASKS[mask])), shapes)
    with fake_world(2):
        gm = trace(program)
        per_rank = [[t * 0.25 for t in inputs(program, rank)] for rank in range(2)]
        expected, layouts = run_ranks(gm, per_rank), output_layouts(gm)
        report = run(gm, link(32.0), mode="force", parts=(2,))
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        assert_same_bits(expected, run_ranks(gm, per_rank))
    assert all(d.verdict is Verdict.APPLIED for d in report.decisions), report.decisions
    names = [n.target._opname for n in gm.graph.nodes if "attention" in getattr(n.target, "_opname", "")]
    assert sorted(names) == sorted(2 * [n.partition("::")[2] for n in RULES if "for_cpu" in n])


def _cuda_graph(kind: str) -> torch.fx.GraphModule:
    """A training step of one of CUDA's kernels; nothing is run."""

    def flash(q: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        out, scores, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
        grads = aten._scaled_dot_product_flash_attention_backward(
            dy, q, q, q, out, scores, cq, ck, mq, mk, 0.0, True, seed, offset
        )
        return [out, seed, *grads]

    def efficient(q: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        out, scores, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            dy, q, q, q, None, out, scores, seed, offset, 0.0, [True, True, True, False], True
        )
        return [out, seed, *grads[:3]]

    def cudnn(q: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        out, scores, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, q, q, None, True, 0.0, True
        )
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, q, q, out, scores, seed, offset, None, cq, ck, mq, mk, 0.0, True
        )
        return [out, seed, *grads]

    fn = {"flash": flash, "efficient": efficient, "cudnn": cudnn}[kind]
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, 128, 64, device="cuda", dtype=torch.bfloat16)
        return make_fx(fn, tracing_mode="real")(q, torch.empty_like(q))


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_kernels_of_cuda(kind: str) -> None:
    """Every operand and result with batches is cut along them; a generator's state is everybody's."""
    gm = _cuda_graph(kind)
    cut = Slab(0, 1, BATCH // 2)
    nodes = [n for n in gm.graph.nodes if "attention" in getattr(n.target, "_opname", "")]
    assert len(nodes) == 2
    for node in nodes:
        rule = rule_of(node)
        assert rule is not None
        needs = rule.needs(node, cut, 2)
        assert needs is not None
        for operand, part in needs.items():
            assert (part == cut) == (operand.meta["val"].dim() >= 3), (operand, part)
        first = next(n for n in needs if needs[n] == cut)
        assert rule.result(node, first, cut, 2) == cut
        for picked in node.users:
            value = picked.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            found = rule_of(picked).result(picked, node, cut, 2)  # type: ignore[union-attr]
            batched = value.dim() >= 3 and value.shape[0] == BATCH
            assert found == (cut if batched else Uniform(cut)), picked
            assert rule_of(picked).needs(picked, found, 2) == {node: cut}  # type: ignore[union-attr]
    assert not any(ops.role(n) is ops.Role.FENCE for n in nodes)


def test_dropout_leaves_attention_whole() -> None:
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, 128, 64, device="cuda", dtype=torch.bfloat16)
        gm = make_fx(lambda q: aten._scaled_dot_product_flash_attention(q, q, q, 0.1, True)[0], tracing_mode="real")(q)
    (node,) = [n for n in gm.graph.nodes if "attention" in getattr(n.target, "_opname", "")]
    rule = rule_of(node)
    assert rule is not None and rule.needs(node, Slab(0, 1, BATCH // 2), 2) is None
