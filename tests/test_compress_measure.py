"""Measured errors of narrowed messages: what they are, who sees them, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import inductor_passes
from inductor_passes import PassConfig
from inductor_passes._torch import measure_op
from inductor_passes.compress.form import form_of
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.engine import measuring
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.report import GraphReport
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from inductor_passes.trace.reader import read_trace
from inductor_passes.trace.text import render_graph
from tests.support.bucket_graphs import Program, assert_same_bits, inputs_by_rank, run_all_ranks
from tests.support.graphs import aten
from tests.support.ranks import Ranks
from tests.support.scripts import run_script
from tests.support.world import fake_world
from tests.test_compress import MOVED, NAMES, blocks, config, link, round_trip, traced

MLP = MLPConfig(width=32, hidden=48)


def message_of(name: str, rows: torch.Tensor) -> torch.Tensor:
    """What is sent of some blocks."""
    module = traced(form_of(name, rows.shape[1]), *rows.shape)
    sent = next(n for n in reversed(module.graph.nodes) if n.target is aten.cat.default or n.op == "placeholder")
    if name == "bf16":
        return rows.to(torch.bfloat16)
    (output,) = module.graph.find_nodes(op="output")
    output.args = (sent,)
    module.recompile()
    return module(rows)  # type: ignore[no-any-return]


def by_numpy(name: str, rows: torch.Tensor) -> float:
    """Largest relative error over the blocks (or elements) that have a bound, from what arrives."""
    x, arrived = rows.double().numpy(), round_trip(form_of(name, rows.shape[1]), rows).double().numpy()
    largest = np.abs(x) if name == "bf16" else np.broadcast_to(np.abs(x).max(1, keepdims=True), x.shape)
    counted = np.isfinite(largest) & (largest >= 2.0**-109)
    with np.errstate(all="ignore"):
        off = np.abs(arrived - x) / largest
    return float(off[counted].max(initial=0.0))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    st.integers(-120, 20),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([0.0, math.inf, math.nan]),
)
def test_the_measured_error_is_what_numpy_finds(
    name: str, values: list[float], exponent: int, size: int, other: float
) -> None:
    rows = blocks(form_of(name, size), [*(v * 2.0**exponent for v in values), other])
    if name == "bf16":
        rows = rows[rows.isfinite().all(1)]
        if not rows.numel():
            return
    found = float(measure_op.error(rows, message_of(name, rows), name))
    assert found == pytest.approx(by_numpy(name, rows), rel=1e-6)
    assert found <= float(form_of(name, size).error)


def test_what_is_forged_is_measured() -> None:
    """A scale, a code and an element that are not those of the message."""
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        message = message_of(name, rows).clone()
        assert float(measure_op.error(rows, message, name)) <= float(form_of(name, 64).error)
        if name == "bf16":
            message[0, 3] *= 1.1
        else:
            message[0, -2] ^= 64
        assert float(measure_op.error(rows, message, name)) > float(form_of(name, 64).error)
    infinite = rows.to(torch.bfloat16)
    infinite[0, 0] = math.inf
    assert float(measure_op.error(rows, infinite, "bf16")) == measure_op.INFINITE


def test_every_so_many_runs_and_a_warning_above_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    rows, result, place = torch.randn(2, 64), torch.zeros(()), "a place of this test"
    message = rows.to(torch.bfloat16)
    measure = torch.ops.inductor_passes.measure_rounding
    heard: list[float] = []
    about = measure_op.figure(place)
    about.heard.append(lambda: heard.append(about.last))
    for _ in range(7):
        measure(rows, message, result, "bf16", 0.004, 3, place)
    assert (about.calls, about.runs, len(heard)) == (7, 3, 3)
    assert 0 < about.last == float(result) == heard[-1] <= about.largest <= 0.004
    assert not caplog.records
    for _ in range(6):
        measure(rows, message * 2, result, "bf16", 0.004, 3, place)
    assert about.largest == pytest.approx(1, rel=0.01)
    (said,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert place in said.message and "0.004" in said.message


def measured_graph(kind: str, name: str, group: str, every: str) -> tuple[torch.fx.GraphModule, GraphReport]:
    p = Program()
    gm = p.done(p.call(aten.neg.default, p.collective(kind, p.input(16, 72), group, "avg")))
    chosen = config({"*": name}, compress_measure=every, codegen="aot_eager")
    done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, link(4, 1.0))
    assert measuring.insert(gm.graph, done) == ""
    gm.graph.lint()
    gm.recompile()
    return gm, done.report


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("kind", MOVED)
def test_measuring_changes_no_result_and_no_collective(kind: str, name: str) -> None:
    with fake_world(4) as group:
        plain, untouched = measured_graph(kind, name, group, "off")
        gm, report = measured_graph(kind, name, group, "1")
        operators = [n for n in gm.graph.nodes if "measure_rounding" in str(n.target)]
        assert len(operators) == len(report.narrowed[0].places) == (2 if kind == "all_reduce" else 1)
        # Without the setting there is no trace of it.
        assert not any("measure" in str(n.target) for n in plain.graph.nodes) and not untouched.narrowed[0].places
        rest = [(n.name, n.target) for n in gm.graph.nodes if n not in operators and n.args != ([], 0.0)]
        assert rest == [(n.name, n.target) for n in plain.graph.nodes]
        # Nothing reads it, and it stays all the same.
        gm.graph.eliminate_dead_code()
        assert sum("measure_rounding" in str(n.target) for n in gm.graph.nodes) == len(operators)
        values = inputs_by_rank(gm, 4)
        assert_same_bits(run_all_ranks(plain, values), run_all_ranks(gm, values))


def test_settings() -> None:
    assert PassConfig().measured_every == 0
    assert PassConfig.from_mapping({"compress_measure": "100"}).measured_every == 100
    for bad in ("0", "-1", "on", 1, True, "1.5", "10000000", ""):
        with pytest.raises(inductor_passes.ConfigError, match="compress_measure="):
            PassConfig.from_mapping({"compress_measure": bad})


# -- real ranks --------------------------------------------------------------------------------------------------


def trained(
    rank: int, world_size: int, measure: str, settings: dict[str, Any]
) -> tuple[list[float], list[tuple[Any, ...]], list[list[str]]]:
    """Losses of three steps, what was measured, and the final collectives in their order."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    batch = mlp_batch(MLP, 1)
    model: nn.Module = simple_fsdp(copy.deepcopy(mlp(MLP)), mesh, mode="fully_shard")
    torch._dynamo.reset()
    chosen = {"verify": "strict", "memory_budget": "unlimited", "compress": {"*": "int8"}, "compress_measure": measure}
    keyed = {f"inductor_passes.{key}": value for key, value in {**chosen, **settings}.items()}
    step = torch.compile(model, fullgraph=True, backend="inductor_passes", options=keyed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    with collect(what_if=False) as reports:
        for _ in range(3):
            optimizer.zero_grad()
            loss = mse_loss(step(batch[0]), batch[1])
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    found = [
        (r.phase, one.label, one.bound, one.measured, one.largest, one.runs) for r in reports for one in r.narrowed
    ]
    order = [[c.kind for c in r.collectives] for r in reports]
    assert not any(p.rolled_back for r in reports for p in r.passes)
    assert all(r.order_check in ("as planned", "") for r in reports), [r.order_check for r in reports]
    return losses, found, order


@pytest.mark.ranks
@pytest.mark.parametrize("settings", [{}, {"codegen": "aot_eager"}], ids=str)
def test_on_real_ranks(two_ranks: Ranks, settings: dict[str, Any]) -> None:
    """Errors are there after the steps, within bounds; losses and collectives are those without measuring."""
    plain = two_ranks.run(trained, "off", settings)
    measured = two_ranks.run(trained, "2", settings)
    for (losses, nothing, order), (same, found, as_before) in zip(plain, measured, strict=True):
        assert losses == same and order == as_before
        assert nothing and all(one[3] is None and one[5] == 0 for one in nothing)
        assert {one[0] for one in found} == {"forward", "backward"}
        for *_, bound, last, largest, runs in found:
            # Of the steps 1, 2, 3 the first and the last one are measured.
            assert runs == 2 and 0.0005 < last <= largest <= bound == 0.004


# -- caches, traces, reports -------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from tests.support.models import MLPConfig, fake_world, mlp, mlp_batch
import inductor_passes
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect

with fake_world(2):
    model = simple_fsdp(mlp(MLPConfig()), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    options = inductor_passes.options(compress={"*": "int8"}, memory_budget="unlimited", compress_measure="1")
    step = torch.compile(model, fullgraph=True, options=options)
    with collect(what_if=False) as reports:
        for _ in range(3):
            step(mlp_batch(MLPConfig())[0]).sum().backward()
print("RESULT " + json.dumps([
    [r.from_cache, r.phase, [[n.name, n.measured, n.largest, n.runs] for n in r.narrowed]] for r in reports
]))
"""


def in_a_process(cache: Path, trace: Path) -> list[Any]:
    found = run_script(SCRIPT, TORCHINDUCTOR_CACHE_DIR=str(cache), TORCH_TRACE=str(trace)).result()
    return found  # type: ignore[no-any-return]


def test_code_from_a_warm_cache_measures_and_the_trace_shows_it(tmp_path: Path) -> None:
    cold = in_a_process(tmp_path / "cache", tmp_path / "cold")
    warm = in_a_process(tmp_path / "cache", tmp_path / "warm")
    assert [one[0] for one in cold] == [False, False] and [one[0] for one in warm] == [True, True]
    for reports, trace in ((cold, tmp_path / "cold"), (warm, tmp_path / "warm")):
        read = [graph.report for graph in read_trace(trace).graphs]
        assert [r.phase for r in read if r is not None] == ["forward", "backward"]
        for (_, _, found), report in zip(reports, read, strict=True):
            assert report is not None and found and all(0 < one[1] <= one[2] <= 0.004 and one[3] == 3 for one in found)
            # The last record of the trace is that of the end of the process.
            assert [[n.name, n.measured, n.largest, n.runs] for n in report.narrowed] == found
    forward = [one[2] for one in (cold[0], warm[0])]
    assert forward[0] == forward[1], "the same weights"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_graph(read[0]))  # type: ignore[arg-type]
    shown = console.export_text()
    assert "measured last" in shown and "largest of 3" in shown and "0.004" in shown, shown
