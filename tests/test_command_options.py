"""What `simulate`, `check` and `calibrate` are given: each bad option, value and file is named in one sentence."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.records.text import printable
from tests.support.commands import ESCAPE, run, sentence, shows_text_only
from tests.support.trace_samples import fsdp_problem
from tools.fuzzing import command_corpus as real
from tools.fuzzing import commands as fuzz
from tools.fuzzing.hostile import EVIL_TEXTS


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(fsdp_problem(3).to_json()))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth-scale", "1e400"], "no number"),
        (["--bandwidth-scale", "1e999999999"], "no number"),
        (["--bandwidth-scale", "9" * 5000], "no number"),
        (["--bandwidth-scale", "nan"], "no number"),
        (["--compute-scale", "10000000"], "out of range"),
        (["--compute-scale", "1/99999999"], "out of range"),
        (["--latency-scale", "-0.5"], "negative"),
        (["--latency", "9" * 15 + "s"], "too long"),
        (["--latency", "9" * 400 + "s"], "no duration"),
        (["--budget", "9" * 400 + "GiB"], "--budget"),
        (["--budget", "+" + "9" * 5000 + "%"], "--budget"),
        (["--budget", f"x{ESCAPE}"], "--budget"),
        (["--effort", "1000000000"], "--effort"),
        (["--latency-scale", ",".join("1" * 40), "--compute-scale", ",".join("1" * 40)], "1600 combinations"),
        (["--svg", "/proc/x.svg"], "/proc/x.svg cannot be written"),
        (["--perfetto", "/dev/full"], "/dev/full cannot be written: No space left on device"),
        (["--svg", ""], "cannot be written"),
        (["--nonsense"], "No such option"),
    ],
)
def test_simulate_names_the_option(problem: Path, arguments: list[str], message: str) -> None:
    done = run("simulate", problem, *arguments)
    assert done.exit_code == 2
    sentence(done, message)


def _problem_with(change: Callable[[dict[str, Any]], Any]) -> bytes:
    data = copy.deepcopy(fsdp_problem(3).to_json())
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"schema_version": 1, "name": ' + b"[" * 60 + b"]" * 60 + b"}", "nested too deeply"),
        (_problem_with(lambda d: d["tasks"][0].__setitem__(2, -5)), "tasks[0][2] is -5; expected a whole number"),
        (_problem_with(lambda d: d["tasks"][0].__setitem__(2, 10**400)), "tasks[0][2] is 1000"),
        (_problem_with(lambda d: d["tasks"][0].__setitem__(2, float("nan"))), "tasks[0][2] is nan"),
        (_problem_with(lambda d: d["tasks"][0].__setitem__(1, 9)), "tasks[0][1] is 9; expected one of 0, 1, 2"),
        (_problem_with(lambda d: d["tasks"][0].pop()), "expected a list of 11 values"),
        (_problem_with(lambda d: d["storages"][0].__setitem__(2, "x")), "storages[0][2] is 'x'; expected a list"),
        (_problem_with(lambda d: d["preds"].pop()), "predecessor lists"),
        (_problem_with(lambda d: d.pop("lanes")), "lanes is missing"),
        (_problem_with(lambda d: d.update(base_bytes="0")), "base_bytes is '0'"),
        (_problem_with(lambda d: d.update(schema_version=2)), "schema_version 2; expected 1"),
    ],
)
def test_simulate_names_what_is_wrong_in_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    done = run("simulate", path)
    assert done.exit_code == 2
    sentence(done, "broken.json", message)


@pytest.mark.parametrize("text", [t for t in EVIL_TEXTS if t and len(t) < 100])
def test_text_from_a_problem_is_only_text(tmp_path: Path, text: str) -> None:
    data = fsdp_problem(3).to_json()
    data["name"] = text
    for task in data["tasks"]:
        for k in (0, 7, 8):
            task[k] += text
    path, svg, perfetto = (tmp_path / name for name in ("p.json", "chart.svg", "perfetto.json"))
    path.write_text(json.dumps(data))
    done = run("simulate", path, "--svg", svg, "--perfetto", perfetto)
    assert done.exit_code == 0, done.output
    assert shows_text_only(done)
    assert fuzz.WELL_FORMED[svg.name](svg.read_text()) == "" == fuzz.WELL_FORMED[perfetto.name](perfetto.read_text())
    titles = [e.text or "" for e in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert any(printable(text).strip() in title for title in titles)


def test_the_largest_numbers_that_a_problem_may_hold_are_planned(tmp_path: Path) -> None:
    data = fsdp_problem(3).to_json()
    for row in data["tasks"]:
        row[2] = row[5] = row[6] = 0 if row[1] == 2 else 2**62
    for row in data["storages"]:
        row[0] = 2**62
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    options = ("--bandwidth-scale", "1/1000000", "--latency", "1000000s", "--budget", "999999GiB")
    for extra in ((), ("--json",), ("--svg", tmp_path / "c.svg"), ("--perfetto", tmp_path / "t.json")):
        done = run("simulate", path, *options, *extra)
        assert done.exit_code == 0, done.output


def test_check_refuses_arguments_that_no_operator_takes(tmp_path: Path) -> None:
    def refused(change: Callable[[dict[str, Any]], Any], *parts: str) -> None:
        data = real.graphs()[0]
        node = next(n for n in data["nodes"] if n["target"] == "_c10d_functional::all_gather_into_tensor.default")
        change(node)
        path = tmp_path / f"g{ESCAPE}.json"
        path.write_text(json.dumps(data))
        done = run("check", path)
        assert done.exit_code == 2
        sentence(done, printable(path.name), node["name"], *parts)

    refused(lambda n: n.update(args=[]), "needs the argument 'input'")
    refused(lambda n: n["args"].append(1), "takes 3 arguments by position, found 4")
    refused(lambda n: n.update(kwargs={f"x{ESCAPE}": 1}), "takes no further argument", "\\x1b")
    refused(lambda n: n["args"].__setitem__(0, [1]), "takes a Tensor as 'input', found a list")
    refused(lambda n: n["args"].__setitem__(2, [[]]), "as 'group_name', found a list")
    refused(lambda n: n.update(target="operator.getitem", args=[3, 0]), "operator.getitem takes a node, found 3")
    refused(lambda n: n.update(target="operator.getitem"), "operator.getitem", "argument")


def test_findings_do_not_steer_the_terminal(tmp_path: Path) -> None:
    tensor = {"value": {"dtype": "float32", "shape": [4], "storage": 16}, "source": f"m{ESCAPE}.py:3"}
    gather = "_c10d_functional::all_gather_into_tensor.default"
    nodes = [
        {"name": "x", "op": "placeholder", "target": "x", "args": [], **tensor},
        {"name": "ag", "op": "call_function", "target": gather, "args": [{"node": "x"}, 1, f"g{ESCAPE}"], **tensor},
        {"name": "output", "op": "output", "target": "output", "args": [[]]},
    ]
    data = {"schema_version": 1, "groups": {f"g{ESCAPE}": [0]}, "nodes": nodes}
    path = tmp_path / "g.json"
    path.write_text(json.dumps(data))
    done = run("check", path)
    assert done.exit_code == 1 and "missing-wait" in done.stdout and "\\x1b]0;owned" in done.stdout
    assert shows_text_only(done)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"RANK": None}, "WORLD_SIZE is not set"),
        ([], {"RANK": "x"}, "RANK is 'x'; expected 0 to 0"),
        ([], {"RANK": "-1"}, "RANK is '-1'"),
        ([], {"WORLD_SIZE": ESCAPE}, "WORLD_SIZE is"),
        ([], {"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'; expected 0 to 65535"),
        (["--device", "tpu"], {}, "--device is 'tpu'; expected cpu, cuda or xpu"),
        (["--device", "meta"], {}, "--device is 'meta'; this machine has"),
        (["--backend", f"nope{ESCAPE}"], {}, "--backend is 'nope"),
        (["--mesh", "0x2"], {}, "--mesh is '0x2'"),
        (["--mesh", "9" * 400], {}, "--mesh is"),
        (["--repeats", "0"], {}, "--repeats"),
        (["--name", ESCAPE], {}, "--name is"),
        (["--out", "/no/folder/x.json"], {}, "/no/folder is no directory"),
        (["--out", "/proc"], {}, "is a directory"),
    ],
)
def test_calibrate_says_what_is_wrong_before_it_measures(
    arguments: list[str],
    environment: dict[str, str | None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inductor_passes.cost.calibrate.calibrate", lambda *a, **k: pytest.fail("measured"))
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if environment == {"RANK": None}:
        good, environment = {}, {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**good, **environment}.items():
        assert value is not None
        monkeypatch.setenv(name, value)
    done = run("calibrate", "--out", tmp_path / "p.json", *arguments)
    assert done.exit_code == 2
    sentence(done, message)
