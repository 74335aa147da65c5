"""R18 in compiled models on real gloo ranks: loss and gradients beside eager's, also out of a cache and on a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import inductor_passes
from inductor_passes.models import LlamaConfig, language_batch, language_model, tensor_parallel
from inductor_passes.report import GraphReport, Verdict
from inductor_passes.trace.collector import collect
from tests.support.compiled import dotted, save_profile
from tests.support.ranks import Ranks
from tests.test_sequence_parallel_ranks import ATOL, RTOL, gradients

SETTINGS = {"numerics": "reassociate", "memory_budget": "unlimited", "verify": "strict"}


def model_of(shape: tuple[int, ...], sequence_parallel: bool, adopted: bool = False) -> torch.nn.Module:
    """A Llama whose caller sees whole logits; on a mesh of two dimensions FSDP2 shards what is left."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    model: torch.nn.Module = tensor_parallel(
        language_model(LlamaConfig(layers=1, heads=4, kv_heads=4)), mesh["tp"], sequence_parallel=sequence_parallel
    )
    if len(shape) > 1:
        model = fully_shard(model, mesh=mesh["dp"])
    return inductor_passes.adopt(model) if adopted else model


def found(reports: list[GraphReport]) -> tuple[list[str], list[str]]:
    """Details of what R18 applied, and passes that were undone."""
    passes = [p for r in reports for p in r.passes]
    decisions = [d for p in passes for d in p.decisions if d.subject == "R18" and d.verdict is Verdict.APPLIED]
    return [d.detail for d in decisions], [f"{p.name}: {p.detail}" for p in passes if p.rolled_back is not None]


def trained(
    rank: int, world: int, profile: str, shape: tuple[int, ...], sequence_parallel: bool
) -> list[tuple[list[str], list[str]]]:
    """What was done when the step was compiled, and when it came out of a cache."""
    batch = language_batch(LlamaConfig(layers=1), seed=rank // shape[-1])
    plain = model_of(shape, sequence_parallel)
    wanted = gradients(plain, batch, plain)
    options = inductor_passes.options(**SETTINGS, cost_profile=profile)
    results = []
    for _ in range(2):
        model = model_of(shape, sequence_parallel, adopted=len(shape) > 1)
        with collect(what_if=False) as reports:
            got = gradients(model, batch, torch.compile(model, options=options, fullgraph=True))
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(b, a, rtol=RTOL, atol=ATOL)
        results.append(found(reports))
    return results


def evaluated(rank: int, world: int, profile: str) -> tuple[list[str], list[str]]:
    """The loss alone, operator by operator; every rank has targets of its own."""
    model = model_of((world,), False)
    tokens, targets = language_batch(LlamaConfig(layers=1))
    targets = (targets + rank) % 32
    settings = dotted(**SETTINGS, cost_profile=profile)
    with torch.no_grad(), collect(what_if=False) as reports:
        wanted = model(tokens, targets)
        got = torch.compile(model, backend="inductor_passes", options=settings, fullgraph=True)(tokens, targets)
    torch.testing.assert_close(got, wanted, rtol=RTOL, atol=ATOL)
    return found(reports)


def of_any_size(rank: int, world: int, profile: str, counts: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Batches of several even sizes through one graph: of odd ones torch compiles another."""
    model = model_of((world,), False)
    step = torch.compile(
        model, backend="inductor_passes", options=dotted(**SETTINGS, cost_profile=profile), fullgraph=True
    )
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad(), collect(what_if=False) as reports:
        for count in counts:
            batch = [torch.randint(0, 64, (count, 16), generator=draw) for _ in range(2)]
            for one in batch:
                torch._dynamo.mark_dynamic(one, 0)
            torch.testing.assert_close(step(*batch), model(*batch), rtol=RTOL, atol=ATOL)
    assert len(reports) == 1, "compiled again"
    return found(reports)


class Narrow(nn.Module):
    """A tensor-parallel model in a narrow type, whose loss converts nothing; ``cap``: logits stay below it."""

    def __init__(self, dtype: torch.dtype, cap: float = 0.0) -> None:
        super().__init__()
        self.cap = cap
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(64, 32, dtype=dtype), nn.Linear(32, 64, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.words(tokens)).flatten(0, -2)
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return nn.functional.cross_entropy(logits, targets.flatten())


def trained_narrow(
    rank: int, world: int, profile: str, dtype: torch.dtype, cap: float = 0.0
) -> tuple[list[str], list[str]]:
    """Loss and gradients beside those of ``torch.compile``, which rounds where Inductor does."""
    mesh = init_device_mesh("cpu", (world,))
    batch = language_batch(LlamaConfig(layers=1), seed=3)
    results = []
    for options in ({}, inductor_passes.options(**SETTINGS, cost_profile=profile)):
        torch._dynamo.reset()
        model = Narrow(dtype, cap)
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        with collect(what_if=False) as reports:
            results.append(gradients(model, batch, torch.compile(model, options=options, fullgraph=True)))
    exact = {"rtol": RTOL, "atol": ATOL}
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, **exact if dtype is torch.float32 else {"rtol": 0.02, "atol": 5e-4})
    return found(reports)


def with_a_bad_label(rank: int, world: int, profile: str, label: int) -> list[str]:
    """What is said of a label that names no class, on one rank only: in training and in evaluation."""
    mesh = init_device_mesh("cpu", (world,))
    tokens, targets = language_batch(LlamaConfig(layers=1), seed=3)
    if rank == 0:
        targets[0, 0] = label
    said = []
    for training in (True, False):
        torch._dynamo.reset()
        model = Narrow(torch.float32)
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        step = torch.compile(model, options=inductor_passes.options(**SETTINGS, cost_profile=profile), fullgraph=True)
        with torch.set_grad_enabled(training), pytest.raises(RuntimeError) as error:
            step(tokens, targets)
        said.append(str(error.value))
    return said


def profile_in(folder: Path, ranks: int = 2) -> str:
    return save_profile(folder / "costs.json", 0.0, 1000.0, 10.0, 0.0, ranks=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training(two_ranks: Ranks, tmp_path: Path, sequence_parallel: bool) -> None:
    for results in two_ranks.run(trained, profile_in(tmp_path), (2,), sequence_parallel):
        assert [undone for _, undone in results] == [[], []]
        for applied, _ in results:
            assert applied == ["64 columns on 2 ranks: 2 reductions, 1 elements per row"]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_training_in_a_narrow_type(two_ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    for applied, undone in two_ranks.run(trained_narrow, profile_in(tmp_path), dtype):
        assert (applied, undone) == (["64 columns on 2 ranks: 2 reductions, 1 elements per row"], [])


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_training_with_capped_logits(two_ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    """Inductor asks of scaled logits whether a row is finite."""
    for applied, undone in two_ranks.run(trained_narrow, profile_in(tmp_path), dtype, 3.0):
        assert (applied, undone) == (["64 columns on 2 ranks: 4 reductions, 1 elements per row"], [])


@pytest.mark.ranks
@pytest.mark.parametrize("label", [64, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_that_names_no_class(two_ranks: Ranks, tmp_path: Path, label: int) -> None:
    """An error on both ranks, although one has it: alone it would end, and the other wait for it."""
    for said in two_ranks.run(with_a_bad_label, profile_in(tmp_path), label):
        assert len(said) == 2 and all("index out of bounds" in one for one in said), said


@pytest.mark.slow
@pytest.mark.ranks
def test_training_on_a_square_mesh(four_ranks: Ranks, tmp_path: Path) -> None:
    """Both groups have two ranks: what the graph notes of layouts says along which a gradient is cut."""
    for results in four_ranks.run(trained, profile_in(tmp_path), (2, 2), True):
        for applied, undone in results:
            assert (applied, undone) == (["64 columns on 2 ranks: 2 reductions, 1 elements per row"], [])


@pytest.mark.ranks
def test_evaluation(four_ranks: Ranks, tmp_path: Path) -> None:
    for applied, undone in four_ranks.run(evaluated, profile_in(tmp_path, 4)):
        assert (applied, undone) == (["64 columns on 4 ranks: 2 reductions, 1 elements per row"], [])


@pytest.mark.ranks
def test_batches_of_several_sizes(two_ranks: Ranks, tmp_path: Path) -> None:
    for applied, undone in two_ranks.run(of_any_size, profile_in(tmp_path), (4, 2, 8)):
        assert (applied, undone) == (["64 columns on 2 ranks: 2 reductions, 1 elements per row"], [])
