"""Graph files: what is written is what is read, nothing in a file can do harm, and the command line checks them."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from typer.testing import CliRunner

from inductor_passes import ConfigError, verify
from inductor_passes.cli import check as check_command
from inductor_passes.cli.check import app
from inductor_passes.report import Finding
from inductor_passes.verify import graph_json
from tests.support.verify_graphs import c10d, random_program
from tests.support.verify_mutations import MUTATIONS, Case, inject
from tests.support.world import grouped_world


@pytest.fixture(scope="module")
def groups():
    with grouped_world() as names:
        yield names


@pytest.fixture(scope="module")
def program(groups):
    return random_program(random.Random(1), groups)


def round_trip(graph):
    return graph_json.from_json(json.loads(json.dumps(graph_json.to_json(graph))))


def rules(findings) -> set[str]:
    return {f.rule for f in findings}


def test_a_cast_in_a_file_is_a_cast():
    """Constants of torch come back as they were: else nothing is known of an operator that takes one."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "memory_format": torch.contiguous_format}
    cast = graph.call_function(torch.ops.aten._to_copy.default, (x,), options)
    cast.meta["val"] = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    graph.output(cast)
    assert {n.name: n.kwargs for n in round_trip(graph).graph.nodes}[cast.name] == options


def test_round_trip_keeps_what_the_verifier_looks_at(groups):
    for seed in range(20):
        graph = random_program(random.Random(seed), groups).graph
        file = round_trip(graph)
        assert graph_json.to_json(file.graph)["nodes"] == graph_json.to_json(graph)["nodes"]
        assert verify.check(file.graph) == []
        assert verify.peak_bytes(file.graph) == verify.peak_bytes(graph)
        assert verify.digest(verify.snapshot(file.graph).events) == verify.digest(verify.snapshot(graph).events)
        expected = {groups["world"]: 8, groups["row"]: 4, groups["column"]: 4, groups["other"]: 4}
        assert file.groups and all(len(ranks) == expected[name] for name, ranks in file.groups.items())


#: Kinds of change for which this program offers no place.
NO_PLACE = frozenset(
    {
        "read_after_the_write_instead_of_before",
        "swap_asserts",
        "swap_fences",
        "write_before_the_read_instead_of_after",
    }
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_illegal_changes_are_found_in_files_too(program, groups, mutation):
    reference = round_trip(program.graph).graph
    for seed in range(200):
        case = Case(program, groups, random.Random(seed))
        if inject(mutation, case):
            break
    else:
        assert mutation.name in NO_PLACE
        return
    assert mutation.name not in NO_PLACE
    graph = round_trip(case.graph).graph
    assert rules(verify.check(graph, reference=reference, certificates=case.certificates)) & mutation.rules


def test_unknown_targets_are_fences(program):
    data = graph_json.to_json(program.graph)
    next(n for n in data["nodes"] if n["target"].startswith("aten::relu"))["target"] = "os::system.default"
    file = graph_json.from_json(data)
    unknown = next(n for n in file.graph.nodes if isinstance(n.target, graph_json.UnknownTarget))
    assert unknown.name in verify.snapshot(file.graph).fences
    with pytest.raises(TypeError, match="cannot run"):
        unknown.target()


def test_bodies_are_checked_on_their_own(groups):
    inner = random_program(random.Random(2), groups, length=16).graph
    root = torch.nn.Module()
    root.body = torch.fx.GraphModule(torch.nn.Module(), inner)
    outer = torch.fx.Graph()
    x = outer.placeholder("x")
    outer.get_attr("body")
    outer.output(x)
    module = torch.fx.GraphModule(root, outer)
    assert verify.check(module.graph) == []
    wait = next(n for n in module.body.graph.nodes if n.target is c10d.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0])
    module.body.graph.erase_node(wait)
    found = verify.check(module.graph)
    assert found and all(f.node.startswith("body/") for f in found)
    assert "body" in round_trip(module.graph).bodies


HOSTILE = {
    "other version": lambda d: d.update(schema_version=99),
    "no nodes": lambda d: d.update(nodes=[]),
    "nodes are text": lambda d: d.update(nodes="x"),
    "node is a number": lambda d: d["nodes"].insert(0, 7),
    "name with code": lambda d: d["nodes"][0].update(name="x = __import__('os')"),
    "duplicate name": lambda d: d["nodes"][1].update(name=d["nodes"][0]["name"]),
    "unknown op": lambda d: d["nodes"][0].update(op="exec"),
    "attribute path": lambda d: d["nodes"][0].update(op="get_attr", target="../../etc/passwd"),
    "missing operand": lambda d: d["nodes"][9].update(args=[{"node": "nowhere"}]),
    "form of argument": lambda d: d["nodes"][9].update(args=[{"pickle": "gASV"}]),
    "deep argument": lambda d: d["nodes"][9].update(args=[nest(40)]),
    "negative shape": lambda d: d["nodes"][0].update(value={"dtype": "float32", "shape": [-1], "storage": 4}),
    "huge shape": lambda d: d["nodes"][0].update(value={"dtype": "float32", "shape": [2**62, 2**62], "storage": 4}),
    "dtype is a function": lambda d: d["nodes"][0].update(value={"dtype": "load", "shape": [1], "storage": 4}),
    "value is text": lambda d: d["nodes"][0].update(value="float32"),
    "ranks are text": lambda d: d.update(groups={"g": ["0"]}),
    "bodies are a list": lambda d: d.update(bodies=[]),
    "pair of three": lambda d: d["nodes"][9].update(args=[{"dict": [[1, 2, 3]]}]),
}


def nest(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_files_are_refused(program, tmp_path, what):
    data = copy.deepcopy(graph_json.to_json(program.graph))
    HOSTILE[what](data)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(verify.GraphFileError, match=r"graph\.json"):
        verify.load(path)
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95", b"[" * 200_000, b"{}", b"null", b'{"schema_version": 1}'])
def test_what_is_no_graph_file_is_refused(tmp_path, content):
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(verify.GraphFileError):
        verify.load(path)


def test_too_large_a_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_json, "MAX_BYTES", 10)
    path = tmp_path / "graph.json"
    path.write_text("x" * 11)
    with pytest.raises(verify.GraphFileError, match="at most 10"):
        verify.load(path)


def test_command_line(program, groups, tmp_path):
    run = CliRunner().invoke
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    verify.save(program.graph, good)
    result = run(app, [str(good), "--reference", str(good)])
    assert result.exit_code == 0 and "nothing found" in result.output, result.output
    case = Case(program, groups, random.Random(0))
    next(m for m in MUTATIONS if m.name == "lose_the_update_of_an_input").apply(case)
    verify.save(case.graph, bad)
    assert run(app, [str(bad)]).exit_code == 0
    result = run(app, [str(bad), "--reference", str(good)])
    assert result.exit_code == 1 and "side-effect-lost" in result.output
    peak = verify.peak_bytes(program.graph)
    assert run(app, [str(good), "--memory-budget", str(peak)]).exit_code == 0
    result = run(app, [str(good), "--memory-budget", str(peak - 1)])
    assert result.exit_code == 1 and str(peak) in result.output
    assert run(app, [str(tmp_path / "none.json")]).exit_code == 2
    named = next(n.name for n in program.graph.nodes if n.op == "placeholder")
    assert run(app, [str(good), "--donated", named]).exit_code == 0
    result = run(app, [str(good), "--donated", "nope"])
    assert result.exit_code == 2 and "--donated is 'nope'; the graph inputs are:" in " ".join(result.output.split())


def test_findings_are_counted(capsys):
    for count, text in ((0, "x: nothing found"), (1, "x: 1 finding"), (2, "x: 2 findings")):
        check_command._print("x", [Finding("rule", "node", "message")] * count)
        assert capsys.readouterr().out.splitlines()[0] == text


def test_save_says_what_it_needs(program, tmp_path):
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    with pytest.raises(ConfigError, match=r"graph=GraphModule.*expected a torch\.fx\.Graph; a GraphModule has one"):
        verify.save(module, tmp_path / "x.json")
    with pytest.raises(ConfigError, match="path='' is not allowed; expected the path of the file to write"):
        verify.save(program.graph)
    with pytest.raises(ConfigError, match="path=5 is not allowed"):
        verify.save(program.graph, 5)


def test_command_line_between_ranks(groups, tmp_path):
    groups = {**groups, "column": groups["row"]}
    program = random_program(random.Random(1), groups)
    case = Case(program, groups, random.Random(0))
    next(m for m in MUTATIONS if m.name == "change_the_reduce_op").apply(case)
    paths = []
    for rank, graph in enumerate([program.graph, program.graph, case.graph]):
        paths.append(str(tmp_path / f"rank{rank}.json"))
        verify.save(graph, paths[-1])
    result = CliRunner().invoke(app, ["--ranks", *paths[:2]])
    assert result.exit_code == 0 and "proven: the order per group is equal on all ranks" in result.output
    assert "assumed: ranks" in result.output
    result = CliRunner().invoke(app, ["--ranks", *paths])
    assert result.exit_code == 1 and "ranks-differ" in result.output and "rank 2" in result.output
