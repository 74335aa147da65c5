"""All-gathers over gloo: torch's operator corrupts memory beside other collectives, ours takes its place.

With torch's operator, eight gathers in flight end in SIGABRT within 20 s in most runs ("malloc(): unaligned tcache
chunk detected"). ``test_many_at_once`` is shorter: it shows that results are right, and finds the defect only now and
then. That the defect cannot be met is shown by ``test_another_gather_of_gloo``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx

import inductor_passes
from inductor_passes import _torch, emulated_link, verify
from inductor_passes._torch import gather_op
from inductor_passes.config import PassConfig
from inductor_passes.engine import gloo
from inductor_passes.trace.collector import collect
from tests.support.graphs import GraphBuilder
from tests.support.ranks import Ranks
from tests.support.redistribute_programs import world

c10d = torch.ops._c10d_functional


def _many_at_once(rank: int, world: int) -> int:
    group = dist.group.WORLD.group_name
    sent = [torch.arange(64.0) + 1000 * i + rank for i in range(8)]
    whole = [torch.cat([torch.arange(64.0) + 1000 * i + r for r in range(world)]) for i in range(8)]
    for _ in range(1500):
        started = [gather_op.OPERATOR(x * 1, world, group) for x in sent]
        for got, expected in zip(started, whole):
            assert torch.equal(c10d.wait_tensor(got), expected)
    return 1500


def test_many_at_once(two_ranks: Ranks) -> None:
    assert two_ranks.run(_many_at_once) == [1500, 1500]


def _of_dtype(rank: int, world: int, dtype: torch.dtype) -> list[bool]:
    """Each of two gathers of a compiled function, and an all_reduce of the group behind them."""
    torch._dynamo.reset()

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD), funcol.all_gather_tensor(y, 0, dist.group.WORLD)

    parts = [torch.arange(6).reshape(3, 2).to(dtype) * (r + 1) for r in range(world)]
    call = torch.compile(both, options=inductor_passes.options(bucket="off"))
    found = call(parts[rank], parts[rank].t())
    count = torch.ones(1)
    dist.all_reduce(count)
    whole = torch.cat(parts), torch.cat([p.t() for p in parts])
    return [*(torch.equal(a.to(b.dtype), b) for a, b in zip(found, whole)), int(count) == world]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.int8, torch.uint8])
def test_what_torchs_gather_carries_is_carried(two_ranks: Ranks, dtype: torch.dtype) -> None:
    assert two_ranks.run(_of_dtype, dtype) == [[True] * 3] * 2


def _operators_run(rank: int, world: int, ours: bool) -> set[str]:
    start = gather_op.OPERATOR if ours else c10d.all_gather_into_tensor
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        c10d.wait_tensor(start(torch.ones(4), world, dist.group.WORLD.group_name))
    return {event.name for event in profile.events() or [] if event.name.startswith("c10d::")}


def test_another_gather_of_gloo(two_ranks: Ranks) -> None:
    # Gloo keeps the name of each of them: the first is too long for a std::string's own memory, the second is not.
    assert two_ranks.run(_operators_run, False) == [{"c10d::allgather_into_tensor_coalesced_"}] * 2
    assert two_ranks.run(_operators_run, True) == [{"c10d::_allgather_base_"}] * 2


def _beside_torchs(rank: int, world: int) -> bool:
    group = dist.group.WORLD.group_name
    x = torch.full((3, 2), float(rank), dtype=torch.bfloat16)
    started = (c10d.all_gather_into_tensor if rank else gather_op.OPERATOR)(x.t(), world, group)
    expected = torch.cat([torch.full((2, 3), float(r), dtype=torch.bfloat16) for r in range(world)])
    return torch.equal(c10d.wait_tensor(started), expected)


def test_a_rank_that_starts_torchs_operator_is_understood(two_ranks: Ranks) -> None:
    assert two_ranks.run(_beside_torchs) == [True, True]


def _model(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for full in [funcol.all_gather_tensor(w, 0, dist.group.WORLD) for w in weights]:
        x = torch.relu(x @ (full * 2))
    return x


def _compiled(rank: int, world: int, options: dict[str, Any], dynamic: bool) -> tuple[bool, list[str]]:
    torch._dynamo.reset()
    weights = [torch.randn(8, 16, generator=torch.Generator().manual_seed(rank + i)) for i in range(5)]
    given = {f"inductor_passes.{k}": v for k, v in {"bucket": "off", "redistribute": "off", **options}.items()}
    call = torch.compile(_model, backend="inductor_passes", options=given, dynamic=dynamic)
    equal = True
    with collect() as reports:
        for rows in (4, 6) if dynamic else (4,):
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(9))
            equal &= torch.allclose(call(weights, x), _model(weights, x), rtol=1e-5)
    return equal, [note for report in reports for note in report.notes if "gloo" in note]


@pytest.mark.parametrize(
    ("options", "dynamic"), [({}, False), ({}, True), ({"codegen": "aot_eager"}, False), ({"schedule": "off"}, False)]
)
def test_compiled_code_starts_ours(options: dict[str, Any], dynamic: bool, two_ranks: Ranks) -> None:
    said = "5 all_gathers run as inductor_passes::all_gather: torch's own is not safe beside others on gloo"
    assert two_ranks.run(_compiled, options, dynamic) == [(True, [said])] * 2


def _gathers(group: str, count: int) -> torch.fx.Graph:
    b = GraphBuilder()
    x = b.placeholder("x", 4, 4)
    started = [b.call(c10d.all_gather_into_tensor.default, x, 2, group) for _ in range(count)]
    b.graph.output(tuple(b.call(c10d.wait_tensor.default, s) for s in started))
    return b.graph


def _respelled(rank: int, world: int, count: int, cpp_wrapper: bool = False) -> int:
    graph = _gathers(dist.group.WORLD.group_name, count)
    names = [n.name for n in graph.nodes]
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        gloo.respell(graph, PassConfig())
    assert names == [n.name for n in graph.nodes]
    return sum(n.target is gather_op.OPERATOR.default for n in graph.nodes)


def test_one_gather_alone_stays(two_ranks: Ranks) -> None:
    assert two_ranks.run(_respelled, 1) == [0, 0]
    assert two_ranks.run(_respelled, 2) == [2, 2]


def test_code_that_is_all_cpp_keeps_torchs(two_ranks: Ranks) -> None:
    assert two_ranks.run(_respelled, 2, True) == [0, 0]


def test_groups_that_are_not_gloos_keep_torchs() -> None:
    with world() as groups:
        graph = _gathers(groups[(0,)], 2)
        assert gloo.respell(graph, PassConfig()) == ""
    assert not _torch.moves_with_gloo("no such group")


def _threads(rank: int, world: int) -> int:
    # A thread has its name once it has done something.
    dist.all_reduce(torch.ones(1))
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return names.count("pt_gloo_runloop")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks the system for the names of threads")
def test_one_thread_does_the_work_of_the_emulated_link() -> None:
    with Ranks(2, backend=emulated_link.BACKEND, setup=_emulated) as pool:
        assert pool.run(_threads) == [1, 1]


def _emulated(rank: int, world: int) -> None:
    emulated_link.register()


def test_a_graph_file_with_it_is_checked_as_with_torchs(tmp_path: Path) -> None:
    """In a process of its own: the operator has to be known where nothing was compiled."""
    names = []
    for operator in (c10d.all_gather_into_tensor.default, gather_op.OPERATOR.default):
        graph = _gathers("0", 3)
        for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
            node.target = operator
        names.append(str(tmp_path / f"{len(names)}.json"))
        verify.save(graph, names[-1])
    script = "from inductor_passes.cli.main import app; app()"
    done = subprocess.run([sys.executable, "-c", script, "check", *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing found") == 2
