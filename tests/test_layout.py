"""The structure of the package: floors, no circle of files, a small root."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import networkx
import pytest

PACKAGE = "inductor_passes"
#: From the ground up. A package imports from floors below its own; packages of one floor do not import each other.
FLOORS: list[set[str]] = [
    {"operators", "records"},
    {"_torch", "kernels", "switch"},
    {"schedule", "settings"},
    {"config", "report"},
    {"ir", "groups", "models"},
    {"agreement"},
    {"cost", "simple_fsdp", "verify"},
    {"adoption"},
    {"problems", "redistribute", "pin", "emulation"},
    {"trace"},
    {"rewriting", "tuning"},
    {"rewrites", "bucket", "async_tp", "compress", "reorder", "replay", "step"},
    {"engine"},
    {"plugin", "authoring"},
    {"explanation", "integrations"},
    {"cli"},
    {"__main__"},
]


@pytest.fixture(scope="module")
def imports() -> networkx.DiGraph:
    """Module -> modules that it imports, wherever the import stands."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    edges = ((module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module))
    return networkx.DiGraph(edges)


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_circle_of_files(imports: networkx.DiGraph) -> None:
    circles = [sorted(c) for c in networkx.strongly_connected_components(imports) if len(c) > 1]
    assert circles == []


def test_imports_go_down(imports: networkx.DiGraph) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {_room(module) for module in imports} - {""}
    assert rooms == set(floor), "every room has its floor"
    up = [
        f"{module} imports {other}"
        for module, other in imports.edges
        if _room(module) and _room(other) and _room(module) != _room(other)
        if floor[_room(module)] <= floor[_room(other)]
    ]
    assert up == []


def test_the_root_is_small() -> None:
    root = Path(__file__).resolve().parent.parent / PACKAGE
    assert len([file for file in root.glob("*.py") if file.stem not in ("__init__", "__main__")]) <= 6


def test_the_planner_knows_no_compiler(imports: networkx.DiGraph) -> None:
    """``schedule`` imports nothing of ours but records, and no torch."""
    graph = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
    for module in graph.modules:
        if _room(module) == "schedule":
            others = graph.find_modules_directly_imported_by(module)
            ours = (f"{PACKAGE}.schedule", f"{PACKAGE}.records")
            assert {o for o in others if not o.startswith(ours)} <= {"numpy", "ortools", "filelock"} | {
                o for o in others if o.split(".")[0] in __import__("sys").stdlib_module_names
            }


def test_the_verifier_imports_no_pass(imports: networkx.DiGraph) -> None:
    """Neither a pass nor the planner, directly or through others."""
    reached = set().union(*(networkx.descendants(imports, m) for m in imports if _room(m) == "verify"))
    allowed = {"", "operators", "_torch", "config", "settings", "switch", "records", "report", "ir", "agreement"}
    allowed.add("verify")
    assert {_room(m) for m in reached} <= allowed


def test_nobody_draws_from_the_generators_of_the_program() -> None:
    """What a program draws must not depend on whether it is planned, nor on how long ranks wait for each other.

    Models are the program.
    """
    own = {"Random", "Generator", "fork_rng"}
    found = []
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        if path.parts[1] == "models":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, (ast.Name, ast.Attribute)):
                continue
            owner = ast.unparse(node.value)
            drawn = owner in {"random", "np.random", "numpy.random", "torch.random"} and node.attr not in own
            if drawn or (owner == "torch" and (node.attr.startswith("rand") or node.attr == "manual_seed")):
                found.append(f"{path}:{node.lineno} {owner}.{node.attr}")
    assert found == []
