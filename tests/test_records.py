"""Plain data in and out: every text printable, every value in bounds, every error with its place."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import unicodedata
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_passes.cost.profile import CostProfile
from inductor_passes.pin.file import GraphPlan
from inductor_passes.records import json_text
from inductor_passes.records.convert import convert, plain
from inductor_passes.records.json_text import RecordError, parse
from inductor_passes.records.limits import Count, Integer, NotNegative, Number, Positive, one_of
from inductor_passes.records.text import printable, printable_lines
from inductor_passes.records.whole_file import write_whole
from inductor_passes.report import (
    CollectiveReport,
    Decision,
    Finding,
    GraphReport,
    PassReport,
    Reason,
    RedistributionReport,
    ScheduleReport,
    Verdict,
)
from inductor_passes.schedule.problem import Kind, Lane, Problem, Storage, Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def texts(value: Any) -> list[str]:
    """All strings in plain data, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *(t for v in value.values() for t in texts(v))]
    return [t for v in value for t in texts(v)] if isinstance(value, list) else []


# -- text --------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text: str) -> None:
    found = printable(text)
    assert printable(found) == found
    for c in found:
        # Neither a control or format character nor a surrogate, and no line break.
        assert unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"), repr(c)
    found.encode()
    assert "\x1b" not in found and "\u202e" not in found
    assert printable_lines(text).count("\n") == text.count("\n")


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("model.py:12", "größe 数据 😀 naïve", "a\\b [x] <y> {z} 'q' \"r\"", ""):
        assert printable(text) == text
    assert printable("a\x1b[31m\n\x9b\u202e\ud800") == "a\\x1b[31m\\n\\x9b\\u202e\\ud800"


# -- JSON text ---------------------------------------------------------------------------------------------------------


@given(JSON, st.booleans())
def test_parsed_data_are_the_same_but_for_what_cannot_be_shown(value: Any, ascii_only: bool) -> None:
    try:
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    try:
        found = parse(data, "a thing")
    except RecordError as error:
        # The one thing that Python writes and we refuse: integers beyond what anybody counts.
        assert any(isinstance(v, int) and abs(v) >= 2**63 for v in _leaves(value)), error
        return
    assert all(printable(t) == t for t in texts(found))
    expected = [printable(t) for t in texts(value)]
    # Two keys may become one.
    assert set(texts(found)) <= set(expected)
    if len(set(expected)) == len(expected):
        assert texts(found) == expected


def _leaves(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if children is None else [leaf for child in children for leaf in _leaves(child)]


def test_escapes_are_found_where_they_are() -> None:
    text = rb'{"a\u001b": "\\u001b \u001b \ud83d\ude00 \ud800x \"\n\\\n\/", "b": "' + "\x9b\u202e é".encode() + b'"}'
    assert parse(text, "x") == {
        "a\\x1b": "\\u001b \\x1b 😀 \\ud800x \"\\n\\\\n/",
        "b": "\\x9b\\u202e é",
    }
    assert parse(b'["\\u001b"]', "x", verbatim=True) == ["\x1b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off"),
        (b"[1, 2", "cut off"),
        (b"[1,]", "trailing comma"),
        (b"{} {}", "trailing characters"),
        (b"\xff\xfe", "no UTF-8 text at byte 0"),
        (b'{"a": [1, NaN]}', r"a\[1\] is nan; expected a finite number"),
        (b'{"a": {"b": -Infinity}}', r"a\.b is -inf; expected a finite number"),
        (b"[1e400]", r"\[0\] is inf; expected a finite number"),
        (b"[" * 300_000, "nested too deeply; expected at most 40 levels"),
        (b"[" * 50 + b"]" * 50, "nested too deeply; expected at most 40 levels"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "nested too deeply"),
        (b'"\x01"', "invalid character"),
        (b"9" * 5000, "out of range"),
    ],
)
def test_what_is_no_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse(data, "a thing")


def test_more_than_memory_holds_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MAX_CONTAINERS", 100)
    monkeypatch.setattr(json_text, "MAX_VALUES", 100)
    monkeypatch.setattr(json_text, "MAX_ESCAPES", 100)
    monkeypatch.setattr("msgspec.json.decode", lambda text: pytest.fail("decoded what is too large"))
    for data, message in ((b"[[],", "objects and lists"), (b"1,", "values"), (b"\\n", "escapes")):
        with pytest.raises(RecordError, match=message):
            parse(data * 200, "a thing")
    with pytest.raises(RecordError, match="escapes"):
        parse("\x9b".encode() * 200, "a thing")


def test_files_that_are_none(tmp_path: Any) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, message in (
        (tmp_path, "it is a directory"),
        (tmp_path / "none", "it is missing"),
        (tmp_path / "loop", "cannot be read as a thing"),
        (tmp_path / ("x" * 300), "too long"),
        (tmp_path / "nul\0", "cannot be read as a thing"),
    ):
        with pytest.raises(RecordError, match=message):
            json_text.read(path, "a thing")
    (tmp_path / "large").write_bytes(b"1" * 100)
    with pytest.raises(RecordError, match="100 bytes are too many for a thing; expected at most 99"):
        json_text.read(tmp_path / "large", "a thing", max_bytes=99)


# -- records -----------------------------------------------------------------------------------------------------------


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Leaf:
    kind: Annotated[str, one_of("a", "b")]
    color: Color
    count: Count = 0
    share: NotNegative = 0.0


@dataclasses.dataclass(frozen=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...]
    rows: list[tuple[str, Integer]] = dataclasses.field(default_factory=list)
    sizes: dict[str, Positive] = dataclasses.field(default_factory=dict)
    note: str | None = None
    flag: bool = False
    mode: Literal["x", "y"] = "x"
    value: Number = 0.0

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("a tree is not called bad")


LEAF = {"kind": "a", "color": "red"}
TREE = {"name": "t", "leaves": [LEAF]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 7}, "name is 7; expected text"),
        ({"name": "bad"}, "a tree is not called bad"),
        ({"leaves": {}}, "leaves is {}; expected a list"),
        ({"leaves": [LEAF, 3]}, "leaves[1] is 3; expected an object"),
        ({"leaves": [{"kind": "a"}]}, "leaves[0].color is missing"),
        ({"leaves": [{**LEAF, "kind": "c"}]}, "leaves[0].kind is 'c'; expected one of a, b"),
        ({"leaves": [{**LEAF, "color": "green"}]}, "leaves[0].color is 'green'; expected one of red, blue"),
        ({"leaves": [{**LEAF, "count": -1}]}, "leaves[0].count is -1; expected a whole number of at least 0"),
        ({"leaves": [{**LEAF, "count": 1.5}]}, "leaves[0].count is 1.5; expected a whole number of at least 0"),
        ({"leaves": [{**LEAF, "count": True}]}, "leaves[0].count is True; expected a whole number"),
        ({"leaves": [{**LEAF, "count": 10**400}]}, "leaves[0].count is 1000"),
        ({"leaves": [{**LEAF, "count": 10**5000}]}, "leaves[0].count is a number of 16610 bits; expected"),
        ({"leaves": [{**LEAF, "share": float("nan")}]}, "leaves[0].share is nan; expected a finite number"),
        ({"rows": [["x", 1], ["y"]]}, "rows[1] is ['y']; expected a list of 2 values"),
        ({"rows": [["x", 1], ["y", "z"]]}, "rows[1][1] is 'z'; expected a whole number"),
        ({"sizes": {"a": 1, "b\x1b": 0}}, "sizes.b\\x1b is 0; expected a finite number above 0"),
        ({"note": 3}, "note is 3; expected text or null"),
        ({"flag": 0}, "flag is 0; expected true or false"),
        ({"mode": "z"}, "mode is 'z'; expected one of x, y"),
        ({"value": 1e301}, "value is 1e+301; expected a finite number"),
        ({"name": "x" * 500 + "\x1b", "leaves": 1}, "leaves is 1"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        convert({**TREE, **change}, Tree, "a tree")
    assert message in str(caught.value) and printable(str(caught.value)) == str(caught.value)
    with pytest.raises(RecordError, match=r"^at\[3\]"):
        convert({**TREE, **change}, Tree, "a tree", place="at[3]")


def test_keys_that_are_unknown_or_missing() -> None:
    more = {**TREE, "leaves": [{**LEAF, "size": 1}]}
    assert convert(more, Tree, "a tree") == convert(TREE, Tree, "a tree")
    with pytest.raises(RecordError, match=r"leaves\[0\]\.size is unknown; expected one of color, count, kind, share"):
        convert(more, Tree, "a tree", keys="known")
    with pytest.raises(RecordError, match="is missing"):
        convert(TREE, Tree, "a tree", keys="all")
    with pytest.raises(RecordError, match="a tree is 3; expected an object"):
        convert(3, Tree, "a tree")


@given(JSON)
def test_anything_is_converted_or_refused_with_a_sentence(value: Any) -> None:
    for type_ in (GraphReport, CostProfile, GraphPlan, Tree, list[Leaf], Decision):
        try:
            convert(value, type_, "a thing")
        except RecordError as error:
            assert printable(str(error)) == str(error) and len(str(error)) < 600


def test_every_field_is_written_whether_it_was_set_or_not() -> None:
    tree = convert(TREE, Tree, "a tree")
    assert plain(tree).keys() == {f.name for f in dataclasses.fields(Tree)}
    assert plain(tree)["leaves"] == [{"kind": "a", "color": "red", "count": 0, "share": 0.0}]
    assert plain({"n": float("inf"), "t": (1,), "o": Color.BLUE, 3: object}) == {
        "n": None, "t": [1], "o": "blue", "3": "<class 'object'>",
    }  # fmt: skip


counts = st.integers(0, 2**62)
words = st.text(max_size=8).map(printable)
times = st.integers(-(2**62), 2**62)
decisions = st.builds(
    Decision, words, words, st.sampled_from(Verdict), st.sampled_from(Reason), words, words, words, times, words
)
reports = st.builds(
    GraphReport,
    words,
    counts,
    words,
    counts,
    counts,
    words,
    st.dictionaries(words, words | st.none()),
    counts,
    st.lists(
        st.builds(
            PassReport,
            words,
            st.booleans(),
            st.lists(decisions, max_size=2),
            st.none() | st.sampled_from(Reason),
            words,
            st.lists(st.builds(Finding, words, words, words, words, words), max_size=2),
            st.dictionaries(words, st.floats(-1e300, 1e300)),
            counts,
        ),
        max_size=2,
    ),
    st.lists(
        st.builds(
            ScheduleReport,
            *(words, counts, counts, counts, counts, counts, counts, st.floats(-1, 1e9), times, times, counts, counts),
            *(st.none() | counts, words, words, words, words),
        ),
        max_size=2,
    ),
    st.lists(
        st.builds(
            CollectiveReport,
            *(words, words, words, words, st.lists(counts, max_size=3).map(tuple), counts, counts, times, times, times),
            *(st.sampled_from(Reason), words, words, times, words, words),
        ),
        max_size=2,
    ),
    st.lists(
        st.builds(
            RedistributionReport,
            *(st.lists(words, max_size=2).map(tuple), words, st.none() | st.booleans(), words),
            *(st.lists(words, max_size=2).map(tuple), counts, counts),
            *(st.lists(words, max_size=2).map(tuple), st.lists(words, max_size=2).map(tuple)),
        ),
        max_size=2,
    ),
)


@given(reports)
def test_reports_come_back_as_they_were(report: GraphReport) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    assert GraphReport.from_json(parse(text.encode(), "a report")) == report


def test_reports_of_older_writers_load_and_of_newer_ones_do_not() -> None:
    data = GraphReport("forward", 0).to_json()
    older = {key: data[key] for key in ("schema_version", "phase", "graph_index", "passes")}
    older["passes"] = [{"name": "reorder", "decisions": [], "from_the_future": [1]}]
    assert GraphReport.from_json({**older, "unknown": {}}).passes == [PassReport("reorder")]
    for version in (2, "1", None, True):
        with pytest.raises(RecordError, match=r"schema_version .*; expected 1"):
            GraphReport.from_json({**data, "schema_version": version})


@given(st.data())
def test_problems_come_back_as_they_were(data: st.DataObject) -> None:
    lanes = data.draw(st.lists(st.builds(Lane, words, words, st.booleans()), max_size=3))
    number = data.draw(st.integers(0, 5))
    task = st.builds(Task, words, st.just(Kind.COMPUTE), counts, st.just(-1), st.just(-1), counts, counts, words, words)
    tasks = data.draw(st.lists(task, min_size=number, max_size=number))
    storage = st.builds(Storage, counts, st.just(-1), st.just(()), st.booleans(), words)
    storages = data.draw(st.lists(storage, max_size=2))
    preds = tuple(tuple(range(k)) for k in range(number))
    problem = Problem(tuple(tasks), preds, tuple(lanes), tuple(storages), data.draw(counts), "p", {"a": "b"})
    text = json.dumps(problem.to_json(), allow_nan=False)
    assert Problem.from_json(parse(text.encode(), "a problem")) == problem


def test_the_library_is_asked_for_nothing_private() -> None:
    assert msgspec.convert({"x": 1}, dict[str, int]) == {"x": 1}
    with pytest.raises(msgspec.ValidationError, match=r"at `\$\.leaves\[0\]\.count`"):
        msgspec.convert({**TREE, "leaves": [{**LEAF, "count": "x"}]}, Tree)


RACE = """
from __future__ import annotations
import dataclasses, sys, threading
from inductor_passes.records.convert import convert

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = dataclasses.make_dataclass("Inner", [(f"g{k}", "tuple[int, ...]", ()) for k in range(20)])
    fields = [(f"f{k}", inner, dataclasses.field(default_factory=inner)) for k in range(20)]
    outer = dataclasses.make_dataclass("Outer", fields)
    gate = threading.Barrier(4)

    def run():
        gate.wait()
        convert({}, outer, "a record")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_convert_to_a_type_for_the_first_time() -> None:
    """msgspec alone ends the process with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Found: a cost profile whose disk is full left half of a file in the place of the one that was there."""
    file = tmp_path / "new" / "profile.json"
    CostProfile.default("cpu").save(file)
    before = file.read_text()

    def half(path: Path) -> None:
        path.write_text(before[:10])
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_whole(file, half)
    assert file.read_text() == before and [one.name for one in file.parent.iterdir()] == [file.name]
    write_whole(Path("/dev/null"), lambda path: path.write_text(before))
    assert not Path("/dev/null").is_file()
