"""What a real compilation writes for people who debug: the graphs, and which collectives carry several."""

from __future__ import annotations

from pathlib import Path

from inductor_passes.trace.reader import read_trace
from tests.support.scripts import run_script

_SCRIPT = """
import sys, torch
import inductor_passes
from tests.support.world import fake_world
from tests.test_trace_plan_file import make, model

torch._inductor.config.fx_graph_cache = False
codegen = sys.argv[1]
with fake_world(2):
    settings = {"memory_budget": "unlimited", "codegen": codegen, "rank_agreement": "trust"}
    options = {f"inductor_passes.{key}": value for key, value in settings.items()}
    x, weights = make(4)
    loss = torch.compile(model, backend="inductor_passes", options=options)(x, weights)
    loss.backward()
"""


def traced(directory: Path, codegen: str, **logs: str) -> None:
    done = run_script(_SCRIPT, codegen, TORCH_TRACE=str(directory), **{"TORCH_LOGS": "", **logs})
    assert done.returncode == 0, done.output[-3000:]


def test_graphs_before_and_after_are_written_at_debug_level(tmp_path: Path) -> None:
    traced(tmp_path, "inductor", TORCH_LOGS="+inductor_passes")
    graphs = read_trace(tmp_path).graphs
    assert [g.phase for g in graphs] == ["forward", "backward"]
    for graph in graphs:
        before, after = graph.artifacts["graph_before"], graph.artifacts["graph_after"]
        assert f"# phase: {graph.phase}\n" in before and f"# phase: {graph.phase}\n" in after
        assert "graph():" in before and "return" in after
    forward = graphs[0]
    assert forward.report is not None
    bucketed = [p.metrics for p in forward.report.passes if p.name == "bucket" and p.changed]
    merged = sum(m["collectives_before"] - m["collectives_after"] for m in bucketed)
    texts = forward.artifacts["graph_before"], forward.artifacts["graph_after"]
    starts = [text.count("_c10d_functional.all_gather_into_tensor") for text in texts]
    assert merged > 0 and starts[0] - starts[1] == merged


def test_a_merged_collective_says_what_it_carries(tmp_path: Path) -> None:
    traced(tmp_path, "aot_eager")
    found = []
    for graph in read_trace(tmp_path).graphs:
        assert not {"graph_before", "graph_after", "problem"} & set(graph.artifacts)
        assert graph.report is not None
        (bucketed,) = [p for p in graph.report.passes if p.name == "bucket"]
        applied = sum(d.verdict.value == "applied" for d in bucketed.decisions)
        said = [c.bucket for c in graph.report.collectives if c.bucket]
        assert sum(int(text.removeprefix("bucket of ")) for text in said) == applied
        found += said
    assert found
