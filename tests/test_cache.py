"""Warm caches: hits as without us, the same plan, and a report although no pass runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.processes import LIMIT_S
from tests.support.scripts import run_script
from tests.support.world import fake_world

#: Trains one step of a data-parallel model in a fake world; prints what happened as one line of JSON.
SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from tests.support.models import MLPConfig, fake_world, mlp, mlp_batch
import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect

budget, world_size = sys.argv[1], int(sys.argv[2])
with fake_world(world_size):
    model = simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
    options = {} if budget == "none" else inductor_passes.options(memory_budget=budget)
    with collect() as reports:
        torch.compile(model, fullgraph=True, options=options)(mlp_batch(MLPConfig())[0]).sum().backward()
print("RESULT " + json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
    "reports": [[r.phase, r.digest, r.from_cache, r.order_check, len(r.collectives)] for r in reports],
}))
"""


def run(cache: Path, budget: str = "+5%", world_size: int = 2, trace: Path | None = None) -> dict[str, Any]:
    traced = {} if trace is None else {"TORCH_TRACE": str(trace)}
    return run_script(SCRIPT, budget, world_size, TORCHINDUCTOR_CACHE_DIR=str(cache), **traced).result()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, Any]:
    return run(cache)


def test_a_cold_run_misses_and_reports(cold: dict[str, Any]) -> None:
    assert cold["bypasses"] == 0 and cold["hits"] == 0 and cold["misses"] > 0
    assert [r[0] for r in cold["reports"]] == ["forward", "backward"]
    assert [r[2:4] for r in cold["reports"]] == [[False, "as planned"]] * 2


def test_a_warm_run_hits_as_without_us_and_replays_the_report(
    cache: Path, cold: dict[str, Any], tmp_path: Path
) -> None:
    from inductor_passes.trace.reader import read_trace

    plain = tmp_path / "plain"
    run(plain, "none")
    without = run(plain, "none")
    trace = tmp_path / "trace"
    warm = run(cache, trace=trace)
    for count in ("hits", "misses", "bypasses"):
        assert warm[count] == without[count], count
    assert warm["hits"] > 0
    assert [r[2] for r in warm["reports"]] == [True, True]
    for before, after in zip(cold["reports"], warm["reports"]):
        assert before[:2] == after[:2] and before[3:] == after[3:]
    shown = read_trace(trace).graphs
    assert [graph.report.phase for graph in shown if graph.report] == ["forward", "backward"]
    assert all(graph.report.from_cache for graph in shown if graph.report)
    assert all("chrome_trace_after" in " ".join(graph.artifacts) for graph in shown)


@pytest.mark.parametrize("change", [{"budget": "0"}, {"world_size": 4}], ids=["setting", "groups"])
def test_another_setting_or_world_is_another_entry(cache: Path, cold: dict[str, Any], change: dict[str, Any]) -> None:
    assert cold["reports"]
    other = run(cache, **change)
    assert other["misses"] > 0
    assert all(not r[2] for r in other["reports"])


def test_what_was_said_of_a_graph_is_said_out_of_a_warm_cache(tmp_path: Path) -> None:
    """Found: a job that was started again was not told that its memory budget cannot be reached."""
    told = []
    for _ in range(2):
        done = run_script(SCRIPT, "-99%", 2, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        told.append([line for line in done.output.splitlines() if "inductor_passes:" in line])
    assert done.result()["hits"] > 0 and all(r[2] for r in done.result()["reports"])
    assert told[0] == told[1] and any("no plan was found that needs less" in line for line in told[0])


#: Trains a step with a budget that shrinks; its plans and problems are asked for in the folder that is given.
DUMPING = """
import os, sys
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from tests.support.models import MLPConfig, fake_world, mlp, mlp_batch
import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp

os.chdir(sys.argv[1])
with fake_world(2):
    model = simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    options = inductor_passes.options(memory_budget="-10%", dump_plan="plans", dump_problem="problems")
    torch.compile(model, fullgraph=True, options=options)(mlp_batch(MLPConfig())[0]).sum().backward()
print("RESULT " + str(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]))
"""


def _dumped(cache: Path, folder: Path) -> tuple[int, dict[str, str]]:
    """Hits of the cache, and text by name of what one process wrote into an empty folder."""
    folder.mkdir()
    done = run_script(DUMPING, folder, TORCHINDUCTOR_CACHE_DIR=str(cache))
    found = sorted(folder.rglob("*.json"))
    return int(done.result()), {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in found}


def test_files_that_were_asked_for_come_out_of_a_warm_cache(tmp_path: Path) -> None:
    """Found: on a warm cache neither ``dump_plan`` nor ``dump_problem`` wrote anything."""
    cold, expected = _dumped(tmp_path / "cache", tmp_path / "cold")
    warm, found = _dumped(tmp_path / "cache", tmp_path / "warm")
    assert not cold and warm
    assert {Path(name).parent.name for name in expected} == {"plans", "problems"}
    assert sum("_step_" in name for name in expected) == 1 and len(expected) == 5
    assert found == expected


def test_whoever_looks_into_a_cache_has_every_operator_of_ours() -> None:
    """Found: code from a cache called an operator of a pass that nobody had imported, and the step ended in an error.

    Operators are named where they are registered, in the package's source. A look begins with the key of the passes.
    """
    package = Path(inductor_passes.__file__).parent
    texts = [path.read_text() for path in sorted(package.rglob("*.py"))]
    named = {name for text in texts for name in re.findall(r'custom_op\(\s*"inductor_passes::(\w+)"', text)}
    assert len(named) >= 6
    script = (
        "import torch, inductor_passes; options = inductor_passes.options();"
        "passes = options['post_grad_custom_post_pass'];"
        "assert all(one.uuid() for one in (passes if isinstance(passes, list) else [passes]));"
        f"print([n for n in {sorted(named)} if not hasattr(torch.ops.inductor_passes, n)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_ranks_of_other_groups_have_other_keys() -> None:
    """What torch caches for one rank names its groups: the traced program must differ where the groups do."""

    class Seen(Exception):
        pass

    def stop(gm: torch.fx.GraphModule, _: object) -> None:
        raise Seen(str(gm.graph))

    def traced(rank: int, mode: str) -> str:
        torch._dynamo.reset()
        with fake_world(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            part = mesh if mode == "hybrid_shard" else mesh["shard"]
            model = simple_fsdp(nn.Linear(8, 8, bias=False), part, mode=mode)  # type: ignore[arg-type]
            with pytest.raises(Exception, match="unshard") as raised:
                torch.compile(model, backend=stop, fullgraph=True)(torch.ones(2, 8))
        return next(line for line in str(raised.value).splitlines() if "unshard" in line)

    for mode in ("hybrid_shard", "fully_shard"):
        assert traced(0, mode) == traced(0, mode) != traced(3, mode)
