"""What `report` is given: traces, damaged or with texts that would act on a terminal or a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.records.text import printable
from tests.support.commands import ESCAPE, run, sentence, shows_text_only, write_trace
from tools.fuzzing import command_corpus as real
from tools.fuzzing import commands as fuzz
from tools.fuzzing.hostile import places


def test_an_index_of_5000_digits_is_no_artifact_of_ours(tmp_path: Path) -> None:
    def change(record: real.Record) -> None:
        record.head["artifact"]["name"] = record.head["artifact"]["name"][:-1] + "9" * 5000

    done = run("report", write_trace(tmp_path / "trace", change))
    assert done.exit_code == 1
    sentence(done, "holds no readable graph of inductor_passes")


def _put(kind: str, *path: Any, value: Any) -> Callable[[real.Record], None]:
    def change(record: real.Record) -> None:
        if record.is_json and f"_{kind}_" in record.head["artifact"]["name"]:
            place = record.payload
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("kind", "path", "value", "note"),
    [
        ("summary", ("nodes",), "many", "nodes is 'many'; expected a whole number of at least 0"),
        ("summary", ("passes",), {"a": 1}, "passes is {'a': 1}; expected a list"),
        ("summary", ("schedules", 0, "gap"), "large", "schedules[0].gap is 'large'; expected a finite number"),
        ("summary", ("schedules", 0, "bound_on"), "any", "schedules[0].bound_on is 'any'; expected one of any memory,"),
        ("summary", ("schedules", 0, "makespan_after_ns"), 10**400, "schedules[0].makespan_after_ns is 1000"),
        ("summary", ("schedules", 0, "tasks"), -3, "schedules[0].tasks is -3"),
        ("collectives", ("collectives", 1, "reason"), "because", "collectives[1].reason is 'because'; expected one of"),
        ("collectives", ("collectives", 0, "ranks"), 5, "collectives[0].ranks is 5; expected a list"),
        ("collectives", ("collectives", 0), None, "collectives[0] is None; expected an object"),
        ("decisions", ("passes", 0, "decisions"), [7], "passes[0].decisions[0] is 7; expected an object"),
        ("config", ("config",), [], "config is []; expected an object"),
        ("summary", ("schema_version",), 7, "schema_version 7; expected 1"),
    ],
)
def test_fields_of_the_wrong_type_become_notes(
    tmp_path: Path, kind: str, path: tuple[Any, ...], value: Any, note: str
) -> None:
    done = run("report", write_trace(tmp_path / "trace", _put(kind, *path, value=value)))
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert note in text, text
    sentence(done, "holds no readable graph")


def _everywhere(text: str) -> Callable[[real.Record], None]:
    """Append ``text`` to every string that stands for itself."""
    closed = ("bound_on", "reason", "verdict", "rolled_back", "phase", "cat", "ph", "bp", "name", "id")

    def change(record: real.Record) -> None:
        if not record.is_json:
            record.payload += text
            return
        for container, key in places(record.payload):
            if isinstance(container[key], str) and (key not in closed or isinstance(container, list)):
                container[key] += text

    return change


@pytest.mark.parametrize("text", [ESCAPE, "[red]x[/red][/]", ":bomb:", "</script><img src=x onerror=f(1)>", "\ud800"])
def test_text_from_a_trace_is_only_text(tmp_path: Path, text: str) -> None:
    trace = write_trace(tmp_path / "trace", _everywhere(text))
    done = run("report", trace)
    assert done.exit_code == 0, done.output
    assert shows_text_only(done)
    assert printable(text) in done.stdout.replace("\n", ""), "shown as it is, not interpreted"
    page, perfetto = tmp_path / "page.html", tmp_path / "perfetto.json"
    assert run("report", trace, "-o", page, "--perfetto", perfetto).exit_code == 0
    for path in (page, perfetto):
        assert fuzz.WELL_FORMED[path.name](path.read_text()) == ""
    other = write_trace(tmp_path / "other")
    done = run("report", "diff", trace, other)
    assert done.exit_code == 0 and shows_text_only(done)


def test_names_of_files_and_folders_are_only_text(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / f"tr{ESCAPE}")
    (trace / f"b{ESCAPE}.log").write_bytes(b"")
    (trace / f"c{ESCAPE}.log").symlink_to("/etc/passwd")
    done = run("report", trace, "-o", tmp_path / "page.html")
    assert done.exit_code == 0
    assert fuzz.WELL_FORMED["page.html"]((tmp_path / "page.html").read_text()) == ""
    done = run("report", trace)
    assert "not a regular file" in done.stdout and shows_text_only(done)
    sentence(run("report", tmp_path / f"no{ESCAPE}"), "does not exist", "\\x1b]0;owned")
    sentence(run("report", tmp_path / ("x" * 300)), "too long")
    sentence(run("report", tmp_path / "nul\0"), "null byte")


def test_what_is_written_cannot_be_written(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    folder = tmp_path / "folder"
    folder.mkdir()
    for option in ("-o", "--perfetto"):
        bad = {folder: "Is a directory", folder / "no" / "x": "No such file", Path("/dev/full"): "No space"}
        for target, why in bad.items():
            done = run("report", trace, option, target)
            assert done.exit_code == 2
            sentence(done, str(target), why)
    sentence(run("report", trace, "--plans", trace / "dedicated_log_torch_trace_rank_0_x.log"), "cannot be written")
    sentence(run("report", trace, "--rank", "7"), "--rank is 7; the trace has graphs of rank 0")
    sentence(run("report", trace, "--top", "0"), "--top")
    sentence(run("report", trace, "--top", "9" * 5000), "--top")
