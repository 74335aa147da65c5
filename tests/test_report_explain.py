"""``explain``: the report of forward and backward without a step, in one process and on two ranks."""

from __future__ import annotations

import json
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import ConfigError, _torch
from inductor_passes.report import GraphReport
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.models import MLPConfig, mlp, mlp_batch
from tests.support.ranks import Ranks
from tests.support.world import fake_world

CONFIG = MLPConfig(width=16, layers=3)


def sharded() -> tuple[Any, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return simple_fsdp(mlp(CONFIG), mesh), mlp_batch(CONFIG)[0]


def test_forward_and_backward_are_explained_and_nothing_runs() -> None:
    torch._dynamo.reset()
    with fake_world(2):
        model, x = sharded()
        before = [p.detach().clone() for p in model.parameters()]
        found = inductor_passes.explain(model, x, options={"memory_budget": "+100%"})
        assert [p.grad for p in model.parameters()] == [None] * len(before)
    assert [r.phase for r in found.reports] == ["forward", "backward"]
    assert all(r.collectives and r.order_check == "as planned" for r in found.reports)
    assert all(r.config["memory_budget"] == "+100%" for r in found.reports)
    text = str(found)
    assert text == repr(found) and "forward_" in text and "all_gather" in text and "exposed communication" in text
    html = found._repr_html_()
    assert html.startswith("<pre") and "all_gather" in html and "<script" not in html
    data = json.loads(json.dumps(found.to_json()))
    assert GraphReport.from_json(data["graphs"][1]).collectives == found.reports[1].collectives
    with pytest.raises(ConfigError, match="memory_budgte"):
        inductor_passes.explain(model, x, options={"memory_budgte": "0"})


def test_a_model_that_does_not_fit_is_explained_as_fake_tensors() -> None:
    """Found by an outsider: of meta tensors all communication was said to disappear."""
    torch._dynamo.reset()
    with fake_world(2):
        model, x = sharded()
        wanted = inductor_passes.explain(model, x)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = simple_fsdp(mlp(CONFIG).to("meta"), mesh)
        with pytest.raises(ValueError, match=r"meta device.*FakeTensorMode"):
            inductor_passes.explain(model, x.to("meta"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            found = inductor_passes.explain(model, torch.empty(x.shape))
    assert [r.phase for r in found.reports] == ["forward", "backward"]
    assert [r.collectives for r in found.reports] == [r.collectives for r in wanted.reports]


def test_no_compiler_gets_what_is_only_explained() -> None:
    torch._dynamo.reset()
    loaded = mock.Mock(side_effect=AssertionError("generated code is loaded, which compiles its kernels"))
    seen: list[str] = []
    with fake_world(2), mock.patch.object(GraphLowering, "save_output_code", seen.append):
        with mock.patch.object(PyCodeCache, "load_by_key_path", loaded):
            found = inductor_passes.explain(*sharded())
        assert GraphLowering.save_output_code == seen.append, "whoever looks at generated code still sees it"
    assert [r.order_check for r in found.reports] == ["as planned"] * 2
    assert len(seen) == 2 and all("all_gather_into_tensor" in code for code in seen)
    assert GraphLowering.save_output_code is None
    with pytest.raises(Exception, match="is loaded"), mock.patch.object(PyCodeCache, "load_by_key_path", loaded):
        torch.compile(torch.sin, options={"fx_graph_cache": False})(torch.ones(3))


def test_another_thread_compiles_what_is_going_to_run() -> None:
    """As the second plan of a graph that was timed is compiled in the background."""
    torch._dynamo.reset()
    found: list[Any] = []

    def other() -> None:
        try:
            gm = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
            found.append(_torch.compile_fx(gm, [torch.ones(3)], {"fx_graph_cache": False})(torch.ones(3)))
        except Exception as error:
            found.append(error)

    def meanwhile(code: str) -> None:
        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with fake_world(2), mock.patch.object(GraphLowering, "save_output_code", meanwhile):
        assert len(inductor_passes.explain(*sharded()).reports) == 2
    (result,) = found
    assert isinstance(result, (tuple, list, torch.Tensor)), result


def test_the_report_says_what_all_passes_gain() -> None:
    """Found by an outsider: "before" had its messages merged already, so that the gain looked like nothing."""
    came = {}
    for bucket in ("on", "off"):
        torch._dynamo.reset()
        with fake_world(2):
            explained = inductor_passes.explain(*sharded(), options={"bucket": bucket, "memory_budget": "unlimited"})
        planned = [next(s for s in report.schedules if s.level == "fx") for report in explained.reports]
        came[bucket] = [s.came_ns for s in planned]
        shown = "step with all passes" in str(explained)
        assert shown == (planned[0].came_ns != planned[0].makespan_before_ns) == (bucket == "on")
        assert shown == ("peak memory with all passes" in str(explained))
        assert all(s.came_peak_bytes > 0 for s in planned)
        if bucket == "on":
            assert planned[0].came_peak_bytes < planned[0].peak_before_bytes, "merged messages take memory"
            assert all(s.came_ns > s.makespan_before_ns >= s.makespan_after_ns for s in planned)
    assert came["on"] == came["off"], "the graph as it came is one, whatever the passes make of it"


def test_what_is_measured_is_compiled() -> None:
    torch._dynamo.reset()
    with fake_world(2), mock.patch.object(PyCodeCache, "load_by_key_path", wraps=PyCodeCache.load_by_key_path) as load:
        found = inductor_passes.explain(*sharded(), options={"inductor": {"max_autotune": True}})
    assert load.call_count >= 2 and [r.phase for r in found.reports] == ["forward", "backward"]


def test_an_error_of_the_compiler_passes_through() -> None:
    torch._dynamo.reset()

    def broken(graph: torch.fx.Graph) -> None:
        raise RuntimeError("this pass is broken")

    options = inductor_passes.options(inductor={"post_grad_custom_pre_pass": broken})
    with fake_world(2), pytest.raises(Exception, match="this pass is broken"):
        inductor_passes.explain(*sharded(), options=options)


def test_graph_breaks_and_compiled_models_and_no_collectives() -> None:
    torch._dynamo.reset()
    calls = []

    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        calls.append(float(x.abs().sum()))
        return x + 1

    def function(x: torch.Tensor) -> torch.Tensor:
        return outside(torch.relu(x) + 1) @ x

    with torch.no_grad():
        found = inductor_passes.explain(torch.compile(function, backend="eager"), torch.ones(3, 3))
    assert found.reports == [] and "No graph with collectives" in str(found)
    assert calls == [0.0], "zeros stand in for what was not computed"


def explained(rank: int, world_size: int) -> tuple[list[str], int]:
    model, x = sharded()
    launched = []
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    found = inductor_passes.explain(model, x)
    launched.append(group._get_sequence_number_for_group() - before)
    return [r.digest for r in found.reports], launched[0]


@pytest.mark.ranks
def test_two_ranks_explain_alike_and_launch_nothing(two_ranks: Ranks) -> None:
    answers = two_ranks.run(explained)
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 2 and answers[0][1] == 0
