"""Several pages of the link benchmark summed up, on made-up figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tools.benchmarks import main as bench
from tools.benchmarks import summary as bench_summary
from tools.link import summary as link_summary
from tools.shared import record as bench_record

Steps = dict[str, int]
FAMILY = {"inductor": "inductor", "fsdp2": "eager", "reorder": "in-tree", "both": "in-tree"}


def results(layout: str, rate: str, steps: Steps, sharded: bool = False) -> dict[str, Any]:
    """What one run found: contender -> ns of its only step; the limit is 100 ns."""
    rows = [
        {"name": name, "title": f"<{name}>", "family": FAMILY.get(name, "ours"), "virtual_ns": [ns], "peak_bytes": ns}
        for name, ns in steps.items()
    ]
    return {
        "layout": layout,
        "title": layout.upper(),
        "rate": rate,
        "rows": rows,
        "sharded": sharded,
        "compute_alone_ns": 100,
        "communication_alone_ns": 90,
        "head_ns": 0,
        "tail_ns": 0,
    }


def store(folder: Path, name: str, date: str, commit: str, *data: dict[str, Any]) -> None:
    provenance = {"command": "c", "commit": commit, "date": date, "versions": {}, "machine": {}}
    (folder / f"{name}.json").write_text(json.dumps({"provenance": provenance, "data": data}))


def test_a_standing_compares_within_one_run() -> None:
    steps = {"inductor": 200, "fsdp2": 140, "reorder": 160, "both": 150, "ours": 125}
    one = link_summary.standing(results("fsdp", "balanced", steps, True), "ours", "p")
    assert one is not None
    assert (one.default, one.in_tree, one.other, one.other_title) == (1.6, 1.2, 1.12, "<fsdp2>")
    assert (one.limit, one.peak, one.page) == (1.25, 0.625, "p")
    assert one.cells() == ["1.600", "1.200", "1.120", "<fsdp2>", "1.250"]
    assert link_summary.standing(results("fsdp", "balanced", steps), "ours-all") is None
    del steps["reorder"], steps["both"]
    alone = link_summary.standing(results("fsdp", "balanced", steps), "ours")
    assert alone is not None and alone.in_tree is None and alone.cells()[1] == "-"
    del steps["inductor"]
    assert link_summary.standing(results("fsdp", "balanced", steps), "ours") is None


def test_tuned_plans_stand_beside_what_they_were() -> None:
    slow = results("fsdp", "fast", {"inductor": 300, "reorder": 250, "ours": 200, "ours-tuned": 160}, True)
    for one, predicted in zip(slow["rows"][2:], (100, 152)):
        one["predicted_ns"] = predicted
    without = results("tp", "fast", {"inductor": 300, "ours": 100})
    unknown = results("moe", "fast", {"inductor": 200, "ours": 100, "ours-tuned": 125})
    found = link_summary.tunings([("p", [slow, without, unknown])], "ours", "ours-tuned")
    assert [*found] == [("fsdp", "fast"), ("moe", "fast")]
    one, other = found.values()
    assert (one.before_ns, one.after_ns, one.off_before, one.off_after) == (200, 160, 0.5, 0.05)
    assert one.cells() == ["0", "0", "1.250", "1.562", "50.0%", "5.0%", "-"]
    assert other.cells()[2:] == ["0.800", "1.600", "-", "-", "-"]
    assert link_summary.tuning_means([one, other]) == (
        "Geometric mean over 2 rows: 1.000 times as fast as before. The predicted step was off by 50.0% (50.0% at "
        "most) in the median, tuned by 5.0% (5.0% at most)."
    )
    assert link_summary.tuning_where_off([one, other]) == (
        "Over the 1 rows whose prediction was off by 10% or more: 1.250 times. Tuned, it is off by as much in 0 rows."
    )
    assert link_summary.tuning_where_off([other]) == ""
    assert link_summary.tuning_means([other]) == "Geometric mean over 1 rows: 0.800 times as fast as before."


def test_how_far_single_stalls_are_off() -> None:
    assert link_summary.stalls_off([[10, 20], [30, 30], [0, 40], [1, 3]], 1000) == 0.5
    assert link_summary.stalls_off([[1, 3], [0, 0]], 1000) is None
    slow = results("fsdp", "fast", {"inductor": 3000, "reorder": 2500, "ours": 2000, "ours-tuned": 1600}, True)
    slow["rows"][2]["predicted_ns"] = slow["rows"][3]["predicted_ns"] = 1600
    slow["rows"][3]["stalls"] = [[10, 20], [12, 16], [7, 1]]
    (one,) = link_summary.tunings([("p", [slow])], "ours", "ours-tuned").values()
    assert one.cells()[-1] == "37.5%"
    assert link_summary.tuning_means([one]).endswith(
        "Of 1 tuned plans single stalls of at least 0.5% of the step are known: in the median of a plan they are off "
        "by 37.5% (37.5% at most)."
    )


def test_the_newest_page_counts_and_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"aaa": 50, "bbb": 40, "ccc": 0}
    monkeypatch.setattr(bench_summary, "_committed", lambda commit: times[commit.removesuffix("+")])
    base = {"inductor": 200, "reorder": 160}
    old = [results("fsdp", "balanced", {**base, "ours": 160, "ours-all": 80})]
    store(tmp_path, "link_z", "2026-01-01", "aaa", *old)
    store(tmp_path, "link", "2026-01-02", "bbb+", results("fsdp", "balanced", {**base, "ours": 100}))
    assert [name for name, *_ in bench_summary.load(tmp_path)] == ["link_z", "link"]
    pages = bench_summary.load(tmp_path)
    ours, everything = (bench_summary.standings(pages, name) for name in bench_summary.OURS)
    # By contender: the newer page did not run it with everything on.
    assert {key: (s.page, s.default) for key, s in ours.items()} == {("fsdp", "balanced"): ("link", 2.0)}
    assert {key: (s.page, s.default) for key, s in everything.items()} == {("fsdp", "balanced"): ("link_z", 2.5)}
    # On one day the commit decides, and then the name.
    store(tmp_path, "link", "2026-01-01", "bbb", *old)
    assert [name for name, *_ in bench_summary.load(tmp_path)] == ["link", "link_z"]
    monkeypatch.setattr(bench_summary, "_committed", lambda commit: 0)
    assert [name for name, *_ in bench_summary.load(tmp_path)] == ["link", "link_z"]


def test_a_page_without_the_strongest_rival_stands_for_none_that_had_it() -> None:
    """Else leaving a contender out would make ours look better."""
    full = {"inductor": 200, "both": 150, "reorder": 110, "ours": 100, "ours-tuned": 90}
    fewer = {"inductor": 200, "both": 150, "ours": 90, "ours-tuned": 80}
    pages = [(name, [results("fsdp", "fast", times)]) for name, times in (("full", full), ("fewer", fewer))]
    (one,) = link_summary.newest(pages, "ours").values()
    assert (one.page, one.in_tree, one.rivals) == ("full", 1.1, ("<inductor>", "<both>", "<reorder>"))
    (tuned,) = link_summary.tunings(pages, "ours", "ours-tuned").values()
    assert tuned.standing.page == "full" and tuned.before_ns == 100
    (one,) = link_summary.newest([*pages, ("again", pages[0][1])], "ours").values()
    assert one.page == "again"
    # As many others, and not the fastest one of before; then that one alone.
    for name, rivals, counts in (("eager", {"fsdp2": 150, "both": 150}, "full"), ("alone", {"reorder": 120}, "alone")):
        page = name, [results("fsdp", "fast", {"inductor": 200, **rivals, "ours": 90})]
        (one,) = link_summary.newest([pages[0], page], "ours").values()
        assert one.page == counts


def test_means_go_over_busy_links_and_say_of_how_many_rows() -> None:
    found = [
        link_summary.standing(results("tp", rate, {"inductor": 200, "reorder": in_tree, "ours": 100}), "ours")
        for rate, in_tree in (("balanced", 100), ("bandwidth-bound", 400), ("fast", 900))
    ]
    found.append(link_summary.standing(results("moe", "balanced", {"inductor": 1600, "ours": 100}), "ours"))
    assert link_summary.means(one for one in found if one) == (
        "Geometric mean over balanced and bandwidth-bound: 4.000 times default Inductor's speed (3 rows), "
        "2.000 times the best in-tree setting's (2 rows)."
    )


def test_rows_that_lose_are_named_the_worst_first() -> None:
    rows = [
        link_summary.standing(results(layout, "fast", {"inductor": 200, "both": both, "ours": 100}, True), "ours")
        for layout, both in (("tp", 99), ("moe", 90), ("fsdp", 120))
    ]
    found = [one for one in rows if one]
    assert link_summary.behind(found) == [
        "- MOE, fast: 0.900 of our step by <both>, below 0.98",
        "- TP, fast: 0.990 of our step by <both>",
    ]
    assert link_summary.behind(found[2:]) == ["- nobody was faster in any row"]
    assert link_summary.extremes(found) == [
        "- farthest from a limit that can be reached: 1.000 (TP, fast)",
        "- highest peak over default Inductor's: 0.500 (TP, fast)",
    ]


def test_what_was_not_measured_is_listed() -> None:
    one = link_summary.standing(results("tp", "fast", {"inductor": 2, "ours": 1}), "ours")
    assert one is not None
    titles = {"tp": "TP", "moe": "MoE"}
    assert link_summary.missing({("tp", "fast"): one}, titles, ["balanced", "fast"]) == [
        "- TP: balanced",
        "- MoE: balanced, fast",
    ]
    assert link_summary.missing({("tp", "fast"): one}, {"tp": "TP"}, ["fast"]) == ["- none"]


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    both = {"inductor": 200, "reorder": 150, "ours": 100, "ours-all": 80}
    store(tmp_path, "link", "2026-01-01", "x", results("fsdp", "balanced", both))
    store(tmp_path, "link_b", "2026-01-02", "x", results("tp", "balanced", {"inductor": 100, "ours": 100}))
    arguments = ["summary", "--results", str(tmp_path), "--out", str(tmp_path)]
    done = CliRunner().invoke(bench.app, arguments)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    row = "| FSDP | balanced | 2.000 | 1.500 | 1.500 | <reorder> | 1.000 | [link](link.md) | 2.500 | 1.875 | 1.875 | "
    assert row + "<reorder> | 0.800 | [link](link.md) |" in text
    assert "| TP | balanced | 1.000 | - | 1.000 | <inductor> | 1.000 | [link_b](link_b.md) | - | - | - | - |" in text
    assert "- ours, default: Geometric mean over balanced and bandwidth-bound: 1.414 times" in text
    shared = "- ours, default, on rows that all have: Geometric mean over balanced and bandwidth-bound: 2.000 times"
    assert shared in text
    assert "- MoE: latency-bound, balanced, bandwidth-bound, fast" in text
    data = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["data"]
    assert data["pages"]["link_b"] == {"date": "2026-01-02", "commit": "x"}
    assert [one["layout"] for one in data["standings"]["ours"]] == ["fsdp", "tp"]


def test_what_cannot_be_summed_up_is_refused(tmp_path: Path) -> None:
    arguments = ["summary", "--results", str(tmp_path), "--out", str(tmp_path)]
    empty = CliRunner().invoke(bench.app, arguments)
    assert empty.exit_code == 2 and "holds no link" in empty.output
    (tmp_path / "link.json").write_text('{"rows": []}')
    wrong = CliRunner().invoke(bench.app, arguments)
    assert wrong.exit_code == 2 and "link.json is no result" in wrong.output


def test_the_stored_summary_says_what_its_pages_say() -> None:
    """Every model on every link of the pages is in it, with the figures of the page that it names."""
    stored = json.loads((bench_record.RESULTS / "summary.json").read_text(encoding="utf-8"))["data"]
    pages = {name: data for name, _, data in bench_summary.load(bench_record.RESULTS)}
    assert set(stored["pages"]) == set(pages)
    for name in bench_summary.OURS:
        measured = {
            (r["layout"], r["rate"]) for data in pages.values() for r in data if link_summary.standing(r, name)
        }
        assert {(one["layout"], one["rate"]) for one in stored["standings"][name]} == measured
        for one in stored["standings"][name]:
            (run,) = [r for r in pages[one["page"]] if (r["layout"], r["rate"]) == (one["layout"], one["rate"])]
            again = link_summary.standing(run, name, one["page"])
            assert again is not None and again.to_json() == one
