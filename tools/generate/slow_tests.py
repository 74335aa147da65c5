"""Writes tests/slow.txt: ``tools/gen slow_tests RESULTS.xml``, of ``tools/test --slow --junitxml=RESULTS.xml``.

Listed is what took longer than :data:`SLOW_S`. What :data:`ALWAYS` names is not, nor is the quickest test of a file in
which all are slow: every feature keeps tests in the suite that runs by default. Tests that are not in the results keep
their lines.
"""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

#: A test that takes longer is left out of ``tools/test``, on two cores that three workers share.
SLOW_S = 10.0
#: What stays in, however long it takes: patterns of node ids.
ALWAYS = (
    "tests/test_alias_ranks.py::test_lists_of_views_and_what_is_written_through_them?unbind-inductor?",
    "tests/test_end_to_end.py::test_two_ranks?fsdp?",
    "tests/test_end_to_end.py::test_two_ranks?tp?",
    "tests/test_environment_variable.py::test_the_first_compilation_uses_our_passes",
    "tests/test_first_saved.py::test_a_rank_that_is_alone_sends_what_the_first_graph_sends?words--35%-True?",
    "tests/test_memory_cap.py::test_the_cap_holds_after_all_passes",
    "tests/test_memory_measured.py::test_predicted_peak_is_the_measured_one?fsdp?",
    "tests/test_redistribute_execute.py::test_all_pairs_are_bit_for_bit_dtensor_on_all_ranks?(2, 4)-(13, 11)?",
    "tests/test_step_recompute.py::test_a_model_within_less_than_it_needs",
)
LIST = Path(__file__).resolve().parents[2] / "tests" / "slow.txt"


def read_list(path: Path = LIST) -> dict[str, float]:
    """Node id -> seconds.

    Raises:
        FileNotFoundError: there is no list.
    """
    lines = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {node: float(seconds) for seconds, node in lines}


def times(results: Path) -> dict[str, float]:
    """Node id -> seconds, set-up included, of the tests in a file of pytest's ``--junitxml``."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        module, *classes = case.attrib["classname"].split(".test_", 1)[1].split(".")
        node = "::".join([f"tests/test_{module}.py", *classes, case.attrib["name"]])
        found[node] = found.get(node, 0.0) + float(case.attrib["time"])
    return found


def exists(node: str, root: Path = LIST.parents[1]) -> bool:
    """Whether the file of a node id has a function of its name."""
    file, *_, name = node.split("[", 1)[0].split("::")
    path = root / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in ast.walk(tree))


def chosen(measured: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What the list shall hold, given what it held."""
    known = {node: s for node, s in {**before, **measured}.items() if exists(node)}
    quickest: dict[str, str] = {}
    for node in sorted(known, key=lambda n: (known[n], n)):
        quickest.setdefault(node.split("::")[0], node)
    stays = {node for node in known if any(fnmatchcase(node, pattern) for pattern in ALWAYS)} | {*quickest.values()}
    return {node: s for node, s in known.items() if s > SLOW_S and node not in stays}


def main() -> int:
    """Write the list, and say what it leaves."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("usage: tools/gen slow_tests RESULTS.xml, of tools/test --slow --junitxml=RESULTS.xml", file=sys.stderr)
        return 2
    measured = times(Path(sys.argv[1]))
    slow = chosen(measured, read_list() if LIST.exists() else {})
    lines = [f"{slow[node]:.0f} {node}\n" for node in sorted(slow)]
    LIST.write_text("".join(lines), encoding="utf-8")
    left = sum(s for node, s in measured.items() if node not in slow)
    print(f"{len(slow)} slow tests, {sum(slow.values()):.0f} s; the others of these results take {left:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
