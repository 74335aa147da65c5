"""Which tests the suite leaves out: a list that is measured, names what exists, and leaves something of each file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.generate import slow_tests

ROOT = Path(__file__).resolve().parents[1]


def test_the_list_names_tests_that_there_are() -> None:
    listed = slow_tests.read_list()
    assert list(listed) == sorted(listed) and all(s >= slow_tests.SLOW_S for s in listed.values())
    assert [node for node in listed if not slow_tests.exists(node)] == []
    assert not slow_tests.exists("tests/test_slow_tests.py::test_that_nobody_wrote")


def test_the_quickest_of_a_file_and_what_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tests, "ALWAYS", ("tests/test_fuzz.py::test_named*",))
    monkeypatch.setattr(slow_tests, "exists", lambda node: "gone" not in node)
    measured = {
        "tests/test_soak.py::test_first": 40.0,
        "tests/test_soak.py::test_second[a]": 30.0,
        "tests/test_fuzz.py::test_named[b]": 90.0,
        "tests/test_fuzz.py::test_other": 80.0,
        "tests/test_fuzz.py::test_quick": 1.0,
    }
    before = {"tests/test_fuzz.py::test_not_measured": 20.0, "tests/test_fuzz.py::test_gone": 20.0}
    assert slow_tests.chosen(measured, before) == {
        "tests/test_soak.py::test_first": 40.0,
        "tests/test_fuzz.py::test_other": 80.0,
        "tests/test_fuzz.py::test_not_measured": 20.0,
    }


def test_times_are_read_from_results(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_fuzz" name="test_a[x.y]" time="1.5"/>'
        '<testcase classname="tests.test_fuzz.TestB" name="test_c" time="2"/></testsuite></testsuites>'
    )
    expected = {"tests/test_fuzz.py::test_a[x.y]": 1.5, "tests/test_fuzz.py::TestB::test_c": 2.0}
    assert slow_tests.times(path) == expected


def collected(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_slow_tests_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    """Where a whole folder runs. Its tests are of this suite by their names, and of another folder."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "tests" / "slow.txt").write_text("20 tests/test_it.py::test_listed[1]\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n"
        '@pytest.mark.parametrize("n", [0, 1])\ndef test_listed(n): pass\n'
        "@pytest.mark.slow\ndef test_marked(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    here = ("--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"))
    folder, file = str(tmp_path / "tests"), str(tmp_path / "tests" / "test_it.py")
    quick, everything = {"test_listed[0]"}, {"test_listed[0]", "test_listed[1]", "test_marked"}

    def names(*arguments: str) -> set[str]:
        return {line.split("::")[1] for line in collected(*here, *arguments).splitlines() if "::" in line}

    assert names(folder) == quick
    assert names(folder, "--slow") == everything
    assert names(file) == everything
    assert names(f"{file}::test_marked") == {"test_marked"}
    assert names(folder, "-m", "slow") == everything - quick
