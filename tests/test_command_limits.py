"""Every command: defects, usage, size, pipes and disks; and some of what the fuzzer tries."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.cli import main as cli_main
from inductor_passes.cli.main import app
from inductor_passes.schedule.problem import Problem
from inductor_passes.trace import reader
from tests.support.commands import ESCAPE, in_a_process, run, sentence, write_trace
from tests.support.processes import ROOT
from tests.support.trace_samples import fsdp_problem
from tools.fuzzing import command_corpus as real
from tools.fuzzing import commands as fuzz


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fsdp_problem(3).to_json()))
    return path


def test_a_defect_of_ours_is_a_sentence_too(problem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **settings: object) -> None:
        raise TypeError(f"oh{ESCAPE}\nno")

    monkeypatch.setattr("inductor_passes.schedule.plan.plan", broken)
    done = run("simulate", problem)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    (line,) = done.stderr.strip().splitlines()
    assert "internal error (TypeError at test_command_limits.py:" in line and "\\x1b" in line
    with pytest.raises(TypeError):
        cli_main.typer.main.get_command(app).main(["simulate", str(problem)], standalone_mode=False)


def test_usage_errors_are_one_sentence() -> None:
    for arguments in (["nope"], ["report"], ["simulate"], ["check", "--nope"], ["report", "diff", "x"], ["--nope"]):
        done = run(*arguments)
        assert done.exit_code == 2
        sentence(done, *(["nope"] if "nope" in "".join(arguments) else ["Missing argument"]))


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("simulate", lambda f: f.truncate(2**34), "are too many for a problem; expected at most"),
        ("report", lambda f: f.truncate(2**34), "larger than"),
        ("simulate", lambda f: f.write(b"[" * (2**26 - 1)), "objects and lists"),
        ("simulate", lambda f: f.write(b"{}," * 2**24), "objects and lists"),
        ("simulate", lambda f: f.write(b'{"a":[' + b"1," * 2**24), "values"),
        ("simulate", lambda f: f.write(b'{"a":"' + b"\\n" * 2**24), "escapes"),
        ("report", lambda f: f.write(b"\t" + b"x" * 2**26), "holds no readable graph"),
        (
            "report",
            lambda f: f.write(b'V0101 00:00:00.000000 1 x.py:1] {"artifact":{"name":"inductor_passes_' + b"[" * 2**25),
            "holds no readable graph",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_huge_and_deep_files_are_refused_in_bounded_memory(
    tmp_path: Path, command: str, content: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "huge.log"
    with path.open("wb") as file:
        content(file)
    done = in_a_process(command, path, limit_bytes=2**30)
    assert done.returncode in (1, 2), done.stderr
    assert message in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_many_records_leave_few_notes_and_a_bounded_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = b'V0101 00:00:00.000000 1 x.py:1] {"artifact": {"name": "inductor_passes_\n'
    (tmp_path / "x.log").write_bytes(bad * 5000)
    notes = reader.read_trace(tmp_path).notes
    assert len(notes) == reader.MAX_NOTES + 1 and "others are left out" in notes[-1]
    records = real.corpus().logs[0]
    (tmp_path / "x.log").write_bytes(real.log_bytes(records))
    monkeypatch.setattr(reader, "MAX_TOTAL_BYTES", 5000)
    trace = reader.read_trace(tmp_path)
    assert sum(len(t) for g in trace.graphs for t in g.artifacts.values()) <= 5000
    assert any("a trace may hold 5000 bytes" in note for note in trace.notes)


def test_a_reader_that_has_seen_enough_ends_thein_a_process(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    code = "from inductor_passes.cli.main import app; app()"
    command = f'"{sys.executable}" -c "{code}" report --json "{trace}" | head -c 1; echo "${{PIPESTATUS[0]}}"'
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)
    assert done.stderr == "" and done.stdout.strip("{\n") in ("0", "141")


def test_a_full_disk_and_another_encoding_are_no_tracebacks(problem: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = in_a_process("simulate", problem, stdout=full)
    assert done.returncode == 2 and done.stderr.strip() == "inductor-passes: No space left on device"
    data = fsdp_problem(2).to_json()
    data["name"] = "größe 数据"
    problem.write_text(json.dumps(data))
    done = in_a_process("simulate", problem, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "gr\\xf6\\xdfe" in done.stdout, done.stderr


def test_damaged_files_and_odd_arguments() -> None:
    """Some of what tools/fuzz_commands tries; see it for repeating one."""
    counts: collections.Counter[str] = collections.Counter()
    for command, inputs in (("report", 50), ("simulate", 50), ("check", 50), ("calibrate", 20), ("doctor", 3)):
        for number in range(inputs):
            made, outcome, wrong, _ = fuzz.one(20, number, command)
            assert not wrong, f"seed 20, input {number} of {command}: {made}\n{wrong}"
            counts[f"{command} {'works' if outcome.status == 0 else 'refuses'}"] += 1
    # The damage is neither too small to be noticed nor so large that nothing behind the reader is reached.
    assert all(counts[f"{c} {w}"] for c in ("report", "simulate", "check", "calibrate") for w in ("works", "refuses"))


def test_a_problem_artifact_with_everything_undamaged_is_planned(tmp_path: Path) -> None:
    """The fuzzer's undamaged files are good ones: what it finds is the damage's."""
    corpus = real.corpus()
    assert Problem.from_json(corpus.problem) == fsdp_problem(3)
    trace = write_trace(tmp_path / "trace")
    done = run("report", trace)
    assert done.exit_code == 0 and "note:" not in done.stdout, done.stdout
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(corpus.chrome))
    done = run("report", trace, "--profile", profile)
    assert done.exit_code == 0 and "relative error" in done.stdout, done.output
    for number, graph in enumerate(real.graphs()):
        (tmp_path / f"{number}.json").write_text(json.dumps(graph))
        assert run("check", tmp_path / f"{number}.json").exit_code == 0
