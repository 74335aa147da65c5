"""The command line: quick help, clear errors, planning a captured problem again, generated pages."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

import inductor_passes
from inductor_passes.cli.main import COMMANDS, app
from inductor_passes.config import FIELDS
from inductor_passes.schedule.curve import with_curve
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Problem
from inductor_passes.schedule.simulate import simulate
from inductor_passes.trace.svg import line_chart
from tests.support.commands import in_a_process
from tests.support.processes import LIMIT_S, ROOT
from tests.support.trace_samples import fsdp_problem
from tools.generate import config_docs
from tools.link import start

run = CliRunner().invoke


@pytest.fixture
def problem_file(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fsdp_problem(6).to_json()))
    return path


def test_help_names_every_command() -> None:
    done = run(app, ["--help"])
    assert done.exit_code == 0
    for name in ("report", "simulate", "doctor"):
        assert name in done.output and COMMANDS[name][1].split()[0] in done.output


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "inductor_passes", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == f"inductor-passes {inductor_passes.__version__}"


def test_version_is_that_of_the_package() -> None:
    done = run(app, ["--version"])
    assert done.exit_code == 0 and done.output.strip() == f"inductor-passes {inductor_passes.__version__}"


def test_help_of_the_demo_needs_nothing_and_names_its_options(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "demo", tmp_path / "tools" / "demo")
    done = subprocess.run(
        ["bash", str(tmp_path / "tools" / "demo"), "--steps", "1", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith("Usage: tools/demo [OPTIONS]") and "python" not in done.stdout
    for name, parameter in inspect.signature(start.main).parameters.items():
        (line,) = (one for one in done.stdout.splitlines() if one.startswith(f"  --{name} "))
        assert line.endswith(f"Default: {parameter.default}")


def test_who_stops_reading_still_gets_the_files(problem_file: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    chart, timeline = tmp_path / "chart.svg", tmp_path / "timeline.json"
    arguments = ["simulate", problem_file, "--svg", chart, "--perfetto", timeline]
    for extra in ((), ("--json",)):
        done = in_a_process(*arguments, *extra, stdout=write)
        assert done.returncode == 141
        # Where output is buffered, the pipe is found closed after the files are named.
        assert all(line.startswith("wrote ") for line in done.stderr.splitlines())
        chart.unlink()
        timeline.unlink()
    os.close(write)


def test_help_imports_no_sub_command() -> None:
    code = (
        "import sys\nfrom inductor_passes.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "shared = ('inductor_passes.cli.main', 'inductor_passes.cli.terminal')\n"
        "loaded = [m for m in sys.modules if m.startswith('inductor_passes.cli.') and m not in shared]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def test_unknown_command() -> None:
    done = run(app, ["reprot"])
    assert done.exit_code == 2 and "reprot" in done.output


def test_simulate_sweeps_all_combinations(problem_file: Path) -> None:
    arguments = ["simulate", str(problem_file), "--budget", "0,unlimited", "--bandwidth-scale", "1,2", "--json"]
    done = run(app, arguments)
    assert done.exit_code == 0, done.output
    cases = json.loads(done.output)["cases"]
    swept = [(c["budget"], c["bandwidth_scale"]) for c in cases]
    assert swept == [("0", 1), ("0", 2), ("unlimited", 1), ("unlimited", 2)]
    problem = fsdp_problem(6)
    for case in cases:
        assert case["budget"] == "unlimited" or case["peak_after_bytes"] <= case["budget_bytes"]
        assert case["lower_bound_ns"] <= case["makespan_after_ns"] <= case["makespan_before_ns"]
    assert cases[0]["makespan_before_ns"] == simulate(problem).makespan_ns
    assert cases[2]["makespan_after_ns"] == plan(problem, None).makespan_ns
    assert cases[1]["makespan_before_ns"] == simulate(problem).makespan_ns - 6 * 50_000


def test_simulate_shows_the_curve_of_the_step(tmp_path: Path) -> None:
    curve = [(700, 40_000), (1000, 30_000)]
    problem = with_curve(fsdp_problem(3), curve)
    assert problem.digest() == fsdp_problem(3).digest() and with_curve(problem, ()) is problem
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem.to_json()))
    done = run(app, ["simulate", str(path), "--budget", "0", "--json"])
    assert json.loads(done.output)["step_curve"] == [list(point) for point in curve]
    done = run(app, ["simulate", str(path), "--budget", "0"])
    assert "the whole step over its peak" in done.output and "+33.3%" in done.output
    path.write_text(json.dumps({**problem.to_json(), "meta": {"step_curve": "700:40000,much"}}))
    done = run(app, ["simulate", str(path)])
    assert done.exit_code == 2 and "meta step_curve is no curve; expected bytes:ns" in done.output


def test_simulate_prints_a_table_and_writes_chart_and_timeline(problem_file: Path, tmp_path: Path) -> None:
    svg, perfetto = tmp_path / "chart.svg", tmp_path / "trace.json"
    done = run(
        app,
        ["simulate", str(problem_file), "--latency", "0us,20us", "--svg", str(svg), "--perfetto", str(perfetto)],
    )
    assert done.exit_code == 0, done.output
    assert "forward_0" in done.output and "20 us" in done.output
    budget = int(simulate(fsdp_problem(6)).peak_bytes * 1.05)
    assert plan(fsdp_problem(6), budget).method in done.output
    root = ElementTree.fromstring(svg.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3
    assert len(json.loads(perfetto.read_text())["traceEvents"]) > 20


def test_simulate_says_which_budget_no_order_keeps(problem_file: Path) -> None:
    done = run(app, ["simulate", str(problem_file), "--budget", "0,=1KiB"])
    kept, above = (line for line in done.output.splitlines() if " us" in line or " ms" in line)
    assert "above the budget" in above and "above the budget" not in kept


def test_simulate_compute_and_latency_scales(problem_file: Path) -> None:
    done = run(app, ["simulate", str(problem_file), "--compute-scale", "2", "--latency-scale", "0", "--json"])
    (case,) = json.loads(done.output)["cases"]
    assert case["makespan_before_ns"] == simulate(fsdp_problem(6)).makespan_ns - 6 * 40_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "7"], "--budget='7'"),
        (["--bandwidth-scale", "0"], "above 0"),
        (["--bandwidth-scale", "-1"], "above 0"),
        (["--bandwidth-scale", "fast"], "no number"),
        (["--latency-scale", "-1"], "negative"),
        (["--latency", "20"], "no duration"),
        (["--compute-scale", "1/0"], "no number"),
    ],
)
def test_simulate_refuses_bad_values(problem_file: Path, arguments: list[str], message: str) -> None:
    done = run(app, ["simulate", str(problem_file), *arguments])
    assert done.exit_code == 2
    text = " ".join(done.output.replace("│", " ").split())
    assert message in text, done.output


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema_version": 99}', "not json"])
def test_simulate_refuses_a_broken_problem_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    done = run(app, ["simulate", str(path)])
    assert done.exit_code == 2 and "broken.json" in done.output


def test_a_problem_artifact_is_a_problem_file() -> None:
    data = {**fsdp_problem(2).to_json(), "phase": "forward", "graph_index": 0, "compile_id": "0/0", "rank": 0}
    assert Problem.from_json(data) == fsdp_problem(2)


def test_chart_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(ValueError, match="2 values for 1"):
        line_chart("t", "x", ["1"], {"a": [1, 2]}, str)
    with pytest.raises(ValueError, match="at least one"):
        line_chart("t", "x", [], {}, str)
    text = line_chart("<&>", "x", ["<1>"], {"a<b": [0.0]}, lambda v: f"{v}<")
    assert ElementTree.fromstring(text) is not None and "<1>" not in text


def test_configuration_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == config_docs.page(), "run tools/gen config_docs"
    for name, field in FIELDS.items():
        assert f"## `{name}`" in page and field.metadata["doc"] in page
