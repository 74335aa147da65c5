"""Two levels on real ranks, two hosts of two: what arrives is what eager code gives, within the stated bounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import inductor_passes
from inductor_passes.models import LlamaConfig, MLPConfig, cross_entropy, llama, llama_batch, mlp, mlp_batch
from inductor_passes.report import Decision, GraphReport
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks, run_ranks
from tests.test_compress_levels import error_of, links
from tests.test_compress_ranks import apart, local, train

pytestmark = pytest.mark.ranks

LLAMA = LlamaConfig(layers=1)
MLP = MLPConfig(width=32, hidden=48)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Ranks]:
    """Ranks of their own: whether groups exist is what the tests are about."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two ranks share a host, and the network is slower than the host."""
    file = tmp_path_factory.mktemp("costs") / "profile.json"
    links(2, 2, 10.0, 0.001).save(file)
    return str(file)


def compiled(of: Any, backend: str, **settings: Any) -> Any:
    torch._dynamo.reset()
    whole = {"verify": "strict", "memory_budget": "unlimited", **settings}
    if backend == "inductor":
        return torch.compile(of, fullgraph=True, options=inductor_passes.options(**whole))
    options = {f"inductor_passes.{key}": value for key, value in {**whole, "codegen": "aot_eager"}.items()}
    return torch.compile(of, fullgraph=True, backend=backend, options=options)


def decisions(reports: list[GraphReport]) -> list[Decision]:
    return [d for report in reports for one in report.passes if one.name == "compress" for d in one.decisions]


def moved(kind: str, x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    if kind == "all_gather":
        return funcol.all_gather_tensor(x, 0, group) * 1.0
    if kind == "reduce_scatter":
        return funcol.reduce_scatter_tensor(x, "sum", 0, group) * 1.0
    return funcol.all_reduce(x, "sum", group) * 1.0


def both(rank: int, world_size: int, kind: str, shape: tuple[int, int], mode: str, profile: str, backend: str) -> Any:
    """What this rank puts in, what it gets eagerly, what compiled, and why."""
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "devices"))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 8
    step = compiled(lambda x: moved(kind, x), backend, compress={"*": mode}, cost_profile=profile)
    with collect(what_if=False) as reports:
        found = step(x)
    return x, moved(kind, x), found, [d.detail for d in decisions(reports)]


@pytest.mark.parametrize("backend", ["inductor_passes", "inductor"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_collectives_in_two_levels(hosts: Ranks, profile: str, kind: str, backend: str) -> None:
    by_rank = hosts.run(both, kind, (24, 37) if kind != "all_reduce" else (23, 37), "int8/between", profile, backend)
    sent = [x for x, *_ in by_rank]
    allowed = error_of("int8", 128, kind, sent, 2) * 1.001
    for _, wide, found, said in by_rank:
        assert len(said) == 1 and "between 2 hosts, wide inside each one (2 ranks)" in said[0]
        assert 0 < float((wide - found).abs().max()) <= allowed
    if kind != "reduce_scatter":
        assert all(torch.equal(found, by_rank[0][2]) for _, _, found, _ in by_rank)


def test_auto_takes_two_levels(hosts: Ranks, profile: str) -> None:
    """The network costs ten thousand times what the host costs."""
    by_rank = hosts.run(both, "all_gather", (64, 256), "auto", profile, "inductor_passes")
    for x, wide, found, said in by_rank:
        assert "between 2 hosts" in said[0]
        assert 0 < float((wide - found).abs().max()) <= 0.004 * 1.001 * 5 * 8 and x.shape == (64, 256)


def lopsided(rank: int, world_size: int, profile: str) -> Any:
    """Only the first host has a group of its ranks."""
    for ranks in ([0, 1], [0, 2], [1, 3]):
        dist.new_group(ranks)
    x = torch.arange(64.0 * 32).view(64, 32) + rank
    rules = "*=int8/between"
    step = compiled(lambda x: moved("all_gather", x), "inductor_passes", compress=rules, cost_profile=profile)
    with collect(what_if=False) as reports:
        found = step(x)
    told = [one.detail for report in reports for one in report.passes if one.name == "agreement"]
    return torch.equal(found, moved("all_gather", x)), told, [d.detail for d in decisions(reports)]


def test_a_group_that_some_ranks_lack_changes_nothing(profile: str) -> None:
    """The ranks compare what they did, and all of them undo it: nobody waits for a message that nobody sends."""
    by_rank = run_ranks(lopsided, 4, profile)
    assert all(same for same, *_ in by_rank)
    assert all(any("undone on all ranks" in line for line in told) for _, told, _ in by_rank)


def trained(rank: int, world_size: int, layout: str, rules: dict[str, str], backend: str, profile: str) -> Any:
    """Three steps on one batch, eagerly and compiled."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "devices"))
    if layout == "fully_shard":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    reference, batch, loss_of = (
        (llama(LLAMA), llama_batch(LLAMA, 1), cross_entropy)
        if backend == "inductor_passes"
        else (mlp(MLP), mlp_batch(MLP, 1), functional.mse_loss)
    )
    eager, model = (simple_fsdp(copy.deepcopy(reference), mesh, mode=layout) for _ in range(2))  # type: ignore[arg-type]
    step = compiled(model, backend, compress=rules, cost_profile=profile)
    return train(eager, eager, batch, loss_of, 3), train(model, step, batch, loss_of, 3)


@pytest.mark.parametrize(
    ("layout", "rules", "backend"),
    [
        ("fully_shard", {"*": "int8/between"}, "inductor_passes"),
        ("fully_shard", {"*": "int8/between"}, "inductor"),
        # Hybrid sharding: an entry for the replicas' dimension, or one for whatever goes between hosts.
        ("hybrid_shard", {"hosts": "int8"}, "inductor_passes"),
        ("hybrid_shard", {"*": "int8/between"}, "inductor_passes"),
    ],
)
def test_training(hosts: Ranks, profile: str, layout: str, rules: dict[str, str], backend: str) -> None:
    by_rank = hosts.run(trained, layout, rules, backend, profile)
    for eager, narrow in by_rank:
        assert narrow[2]
        if layout == "hybrid_shard":
            # Gradients between hosts only; gathers of weights and scattered gradients stay inside, and wide.
            assert all(line.startswith("backward AR") for line in narrow[2])
            assert narrow[0][0] == pytest.approx(eager[0][0], rel=1e-6)
        else:
            assert all("between 2 hosts, wide inside" in line for line in narrow[2])
            assert {line.split()[0] for line in narrow[2]} == {"forward", "backward"}
        assert 0 < apart(narrow[1], eager[1]) < 0.1
        assert narrow[0] == pytest.approx(eager[0], rel=2e-2)
    losses = [narrow[0] for _, narrow in by_rank]
    assert all(one == losses[0] for one in losses), "ranks read different weights"


def with_feedback(rank: int, world_size: int, layout: str, profile: str) -> Any:
    """Three steps whose losses of gradients are kept; what was narrowed, and the largest that is kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "devices"))
    if layout == "fully_shard":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = simple_fsdp(mlp(MLP), mesh, mode=layout)  # type: ignore[arg-type]
    inductor_passes.add_feedback(model)
    rules = {"*": "int8/between"}
    step = compiled(model, "inductor_passes", compress=rules, compress_feedback="on", cost_profile=profile)
    losses, _, narrowed = train(model, step, mlp_batch(MLP, 1), functional.mse_loss, 3)
    kept = [float(local(b).abs().max()) for name, b in model.named_buffers() if "residual" in name]
    return losses, narrowed, max(kept)


def test_beside_error_feedback(hosts: Ranks, profile: str) -> None:
    """In two levels go weights only; between replicas, one rank per host, what gradients lose is kept."""
    for losses, narrowed, kept in (whole := hosts.run(with_feedback, "fully_shard", profile)):
        assert narrowed and all("between 2 hosts, wide inside" in line for line in narrowed)
        assert all(line.split()[1].startswith("AG") for line in narrowed)
        assert kept == 0.0 and losses == whole[0][0]
    for losses, narrowed, kept in (whole := hosts.run(with_feedback, "hybrid_shard", profile)):
        assert narrowed and all(line.startswith("backward") and "hosts" not in line for line in narrowed)
        assert kept > 0.0 and losses == whole[0][0]
