"""How commands talk: completion, help of one style, cells that wrap, files before text, clear errors, advice."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import inductor_passes
from inductor_passes.cli.main import COMMANDS, app
from inductor_passes.report import NOTHING, Parameter, Reason
from inductor_passes.schedule.problem import Kind, Problem, Task
from inductor_passes.settings.errors import ConfigError
from inductor_passes.trace.advice import advise
from inductor_passes.trace.text import render_graph
from tests.support.processes import LIMIT_S
from tests.support.trace_samples import fsdp_problem, planned

run = CliRunner().invoke
SOURCE = "/home/somebody/a/rather/long/path/to/the/code/of/a/model/transformer_block.py:1234"
NAME = "layers.31.attention.and_something_else.projection_of_the_queries.weight"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from inductor_passes.cli.main import app; app(prog_name='inductor-passes')"]
    return subprocess.run(
        [*line, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("typed", "expected"), [("inductor-passes si", "simulate"), ("inductor-passes report --prof", "--profile")]
)
def test_shells_complete_commands_and_options(typed: str, expected: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = command(_INDUCTOR_PASSES_COMPLETE="complete_bash", **words)
    assert done.stdout.split() == [expected], done


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in run(app, ["--help"]).output


@pytest.mark.parametrize("name", [*COMMANDS, "report diff"])
def test_every_command_explains_itself_alike(name: str) -> None:
    """What it does as in the overview, an example, the exit statuses."""
    done = run(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Example: " in done.output and "Exit status: 0 " in done.output
    if name in COMMANDS:
        assert COMMANDS[name][1] in done.output


def shown(width: int) -> str:
    report, _ = planned(fsdp_problem(3))
    report.region = "Transformer"
    report.collectives = [
        replace(c, source=SOURCE, parameters=(Parameter(NAME, NAME.rpartition(".")[0]), Parameter("tied", "head")))
        for c in report.collectives
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(render_graph(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80, 120, 180, 400])
def test_no_cell_is_cut(width: int) -> None:
    text = shown(width)
    assert "\u2026" not in text
    assert all(len(line) <= width for line in text.splitlines())
    if width < 100:
        # A block: its lines one after the other are the whole.
        joined = "".join(text.split())
        assert SOURCE in joined and NAME in joined
    if width == 400:
        assert SOURCE in text and NAME in text and "tied (read in head)" in text
    assert "Transformer" in text


def reader_that_stops(arguments: Sequence[str]) -> int:
    """A command whose output nobody reads beyond its first byte."""
    line = [sys.executable, "-m", "inductor_passes.cli.main", *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        return process.wait(LIMIT_S)


@pytest.mark.parametrize("as_json", [False, True])
def test_files_are_there_before_the_text(tmp_path: Path, as_json: bool) -> None:
    problem, chart, trace = tmp_path / "problem.json", tmp_path / "chart.svg", tmp_path / "trace.json"
    problem.write_text(json.dumps(fsdp_problem(40).to_json()))
    budgets = ",".join(f"+{k}%" for k in range(1, 40))
    files = ["--svg", str(chart), "--perfetto", str(trace)]
    reader_that_stops(["simulate", str(problem), "--budget", budgets, "--effort", "0", *files, *["--json"] * as_json])
    assert chart.read_text().startswith("<") and json.loads(trace.read_text())


def test_explain_takes_what_options_returns() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    for options in (
        inductor_passes.options(bucket="off"),
        {"inductor_passes.bucket": "off"},
        {"bucket": "off", "inductor": {"max_autotune": False}},
    ):
        assert inductor_passes.explain(model, x, options=options).notes
    with pytest.raises(ConfigError, match=r"inductor_passes\.options\(bucket=\.\.\.\)"):
        inductor_passes.explain(model, x, options={**inductor_passes.options(), "bucket": "off"})
    with pytest.raises(ConfigError, match=r"an option of Inductor: pass it as inductor=\{'max_autotune'"):
        inductor_passes.explain(model, x, options={"max_autotune": True})
    with pytest.raises(ConfigError, match="did you mean 'bucket'"):
        inductor_passes.explain(model, x, options={"inductor_passes.buckt": "off"})


def test_what_is_not_profitable_says_what_would_help_or_that_nothing_would() -> None:
    problem = fsdp_problem(6)
    starts = [i for i, task in enumerate(problem.tasks) if task.kind is Kind.START]
    _, answer = planned(problem)
    asked = {Reason.NOT_PROFITABLE: starts}
    best = advise(problem, asked, answer.lower_bound_ns, answer.input_peak_bytes, answer.budget_bytes)
    assert best[Reason.NOT_PROFITABLE].setting == NOTHING and best[Reason.NOT_PROFITABLE].detail
    slow = advise(problem, asked, 2 * answer.input_makespan_ns, answer.input_peak_bytes, None)
    assert slow[Reason.NOT_PROFITABLE].setting == 'effort="high"' and slow[Reason.NOT_PROFITABLE].gain_ns > 0
    alone = Problem((Task("a", Kind.COMPUTE, 10),), ((),))
    assert advise(alone, {Reason.NOT_PROFITABLE: [0]}, 10, 0, None)[Reason.NOT_PROFITABLE].setting == NOTHING
