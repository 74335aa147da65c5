"""A process whose graphs hold no collectives is told so once, with the reason: log, trace, report and ``explain``."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.engine import complain
from inductor_passes.engine import nothing as engine_nothing
from inductor_passes.explanation import Explanation
from inductor_passes.report import NothingPlanned
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace import nothing
from inductor_passes.trace.reader import read_trace
from tests.support.commands import run, sentence
from tests.support.ranks import Ranks
from tests.support.scripts import run_script
from tests.support.world import fake_world
from tools.fuzzing import command_corpus

ADOPT = "add: model = inductor_passes.adopt(model)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def plain() -> nn.Module:
    return Net()


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.first)
    return fully_shard(model)


def fsdp2_children_alone() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.last)
    return model


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net())


def replicated() -> nn.Module:
    from torch.distributed._composable import replicate

    return replicate(Net())


def broken() -> nn.Module:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    return Broken()


def visible() -> nn.Module:
    return simple_fsdp(Net(), init_device_mesh("cpu", (dist.get_world_size(),)))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start_again() -> None:
    """As in a new process."""
    nothing._seen = nothing._Seen()
    complain._warned.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Models of earlier tests may be in circles of references.
    gc.collect()


def told(rank: int, world_size: int, makers: list[Callable[[], nn.Module]], caches: bool = False) -> list[str]:
    """What is logged while one training step of each model is compiled, in a process that compiled nothing before."""
    start_again()
    log, handler = logging.getLogger("inductor_passes"), _Lines()
    log.addHandler(handler)
    try:
        for make in makers:
            torch._dynamo.reset()
            torch.manual_seed(0)
            if caches:
                model = torch.compile(make(), options=inductor_passes.options(inductor={"fx_graph_cache": True}))
            else:
                # Told before code is generated.
                options = {"inductor_passes.codegen": "aot_eager"}
                model = torch.compile(make(), backend="inductor_passes", options=options)
            for _ in range(2):
                model(torch.ones(4, 8)).sum().backward()
    finally:
        log.removeHandler(handler)
    return [line for line in handler.lines if "nothing to plan" in line]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            fsdp2,
            f"FSDP2 (fully_shard) runs its collectives in hooks, outside of compiled graphs. After wrapping and"
            f" before torch.compile, {ADOPT}",
        ),
        (fsdp2_children_alone, "FSDP2 (fully_shard)"),
        (ddp, "DDP (DistributedDataParallel) runs its collectives in hooks"),
        (replicated, "replicate runs its collectives in hooks"),
        (fsdp1, "FSDP1 (FullyShardedDataParallel) runs its collectives in hooks and is not supported"),
        (plain, "nothing distributed was found in them. That is right for a function that does not communicate"),
        (broken, "there were graph breaks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rank_0_is_told_once_why_no_graph_has_collectives(pool: Ranks, make: Any, part: str) -> None:
    (line,), other = pool.run(told, [make, make])
    assert part in line and "\n" not in line and line.startswith("inductor_passes: ")
    assert other == [], "one rank of a job speaks"


def managed_step(rank: int, world_size: int, how: str) -> list[str]:
    """Lines of ``explain`` about graphs of an adopted DDP model that send nothing, and then about those that do."""
    start_again()
    model: Any = inductor_passes.adopt(ddp())
    options = {"inductor_passes.codegen": "aot_eager"}
    step = torch.compile(model.module if how == "inner" else model, backend="inductor_passes", options=options)
    with nothing.listen() as lines, torch.set_grad_enabled(how != "eval"):
        with model.no_sync() if how == "no_sync" else contextlib.nullcontext():
            out = step(torch.ones(4, 8)).sum()
        if how != "eval":
            out.backward()
    assert lines, how
    return sorted(set(lines))


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["no_sync", "eval", "inner"])
def test_an_adopted_model_is_not_called_unsharded(pool: Ranks, how: str) -> None:
    for lines in pool.run(managed_step, how):
        assert len(lines) == 1 and "A model is managed by inductor_passes.adopt" in lines[0], lines
    # It may be right, so nobody is warned.
    assert pool.run(told, [visible]) == [[], []]


@pytest.mark.ranks
def test_graphs_with_collectives_leave_no_line(pool: Ranks) -> None:
    assert pool.run(told, [visible]) == [[], []]
    assert pool.run(told, [visible, plain]) == [[], []], "a metric after the model does not nag"
    assert pool.run(told, [visible, ddp]) == [[], []]


@pytest.mark.ranks
def test_a_warm_cache_tells_it_too(pool: Ranks) -> None:
    cold, warm = (pool.run(told, [ddp], True)[0] for _ in range(2))
    assert len(cold) == 1 and warm == cold
    assert pool.run(told, [visible, plain], True) == pool.run(told, [visible, plain], True) == [[], []]


# -- trace and report -----------------------------------------------------------------------------------

_PROGRAM = """
import contextlib, sys, torch, inductor_passes
from tests.support.world import fake_world
from tests.test_nothing_planned import fsdp2, plain
ranks, model, ours = int(sys.argv[1]), {"fsdp2": fsdp2, "plain": plain}[sys.argv[2]], sys.argv[3] == "on"
with fake_world(ranks) if ranks > 1 else contextlib.nullcontext(), torch.no_grad():
    torch.compile(model(), options=inductor_passes.options() if ours else {})(torch.ones(4, 8))
"""


def traced(folder: Path, *arguments: object) -> Path:
    """The trace of a program that compiles one model."""
    done = run_script(_PROGRAM, *arguments, TORCH_TRACE=str(folder))
    assert done.returncode == 0, done.output
    return folder


def test_report_says_why_and_does_not_ask(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace", 2, "fsdp2", "on")
    found = read_trace(trace)
    assert found.graphs == [] and len(found.nothing_planned) == 1 and found.notes == found.nothing_planned
    done = run("report", trace)
    assert done.exit_code == 1 and "FSDP2 (fully_shard)" in done.stdout and ADOPT in " ".join(done.stdout.split())
    sentence(done, "holds no planned graph; the note says why")
    done = run("report", trace, "--json")
    (note,) = json.loads(done.stdout)["notes"]
    assert "FSDP2 (fully_shard)" in note
    run("report", trace, "-o", tmp_path / "page.html")
    assert "FSDP2 (fully_shard)" in (tmp_path / "page.html").read_text()


def test_report_knows_a_run_without_the_plugin(tmp_path: Path) -> None:
    sentence(run("report", traced(tmp_path / "off", 1, "plain", "off")), "Inductor compiled 1 graph without it; add")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.log").write_text("nothing\n")
    sentence(run("report", tmp_path / "none"), "Inductor compiled none in this run")


def test_report_knows_code_from_a_cache_that_does_not_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    first, second = (traced(tmp_path / name, 1, "plain", "on") for name in ("first", "second"))
    sentence(run("report", first), "holds no planned graph; the note says why")
    sentence(run("report", second), "1 came out of a cache: with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 a run says why")


def test_one_rank_is_a_reason_that_does_not_show_beside_planned_graphs(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace", 1, "plain", "on")
    (note,) = read_trace(trace).notes
    assert note.startswith("nothing to plan: there was one rank")
    records = command_corpus.corpus().logs[0]
    (trace / "dedicated_log_torch_trace_rank_0_y.log").write_bytes(command_corpus.log_bytes(records))
    found = read_trace(trace)
    assert found.graphs and not found.nothing_planned and not any("nothing to plan" in n for n in found.notes)


# -- explain --------------------------------------------------------------------------------------------


def explained(make: Callable[[], nn.Module]) -> Explanation:
    start_again()
    return inductor_passes.explain(make(), torch.ones(4, 8))


def test_explain_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(2):
        for _ in range(2):
            found = inductor_passes.explain(fsdp2(), torch.ones(4, 8))
            assert found.reports == [] and len(found.notes) == 1 and ADOPT in found.notes[0]
            assert "FSDP2 (fully_shard)" in " ".join(str(found).split())
        assert "nothing distributed" in explained(plain).notes[0]
        assert explained(visible).notes == []
    assert "one rank" in explained(plain).notes[0]
    assert "nothing to plan" not in caplog.text, "who asks gets the answer, nobody else"


def test_one_rank_is_not_told_anything(caplog: pytest.LogCaptureFixture) -> None:
    start_again()
    torch.compile(plain(), options=inductor_passes.options())(torch.ones(4, 8)).sum().backward()
    assert "nothing to plan" not in caplog.text


def test_graphs_left_to_inductor_say_so() -> None:
    start_again()
    options = inductor_passes.options(in_tree_passes="warn", inductor={"bucket_all_gathers_fx": "all"})
    with fake_world(2), nothing.listen() as lines:
        torch.compile(visible(), options=options)(torch.ones(4, 8))
    assert lines and "Inductor's own communication passes were on" in lines[0]


def test_every_reason_has_one_printable_line() -> None:
    assert set(engine_nothing._LINES) == set(NothingPlanned)
    assert all(line.isprintable() for line in engine_nothing._LINES.values())
