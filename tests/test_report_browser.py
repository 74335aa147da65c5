"""The page in a real browser: it opens without an error, draws, sorts, filters, zooms, and never runs what it shows."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import tempfile
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.report import Decision, Parameter, PassReport, Reason, RedistributionReport, Verdict
from inductor_passes.trace.compare import across_ranks
from inductor_passes.trace.html import render_page
from inductor_passes.trace.profiled import Measured, Pair
from inductor_passes.trace.reader import read_trace
from tests.support.processes import LIMIT_S
from tests.support.trace_samples import fsdp_problem, planned
from tests.test_report import TraceDir, evil_trace

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1600",
    "--virtual-time-budget=20000",
    "--dump-dom",
)

#: Runs after the page: drives it like a user and leaves what it saw in the document.
DRIVER = """
<script>
(async () => {
  const seen = { errors };
  const byId = (id) => document.getElementById(id);
  const frame = () => new Promise((done) => setTimeout(done, 50));
  const rows = () => [...byId("collectives").querySelectorAll("tbody tr")];
  const labels = () => rows().map((row) => row.cells[0].firstChild.textContent);
  const pixels = (k) => {
    const c = document.querySelectorAll("canvas")[k];
    const all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
    let hash = 0;
    for (let i = 0; i < all.length; i += 4) hash = (hash * 31 + all[i] + 7 * all[i + 1] + 13 * all[i + 2]) >>> 0;
    return hash;
  };
  const press = (element, name) =>
    element.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const key = (name) => press(document.querySelectorAll("canvas")[1], name);
  await frame();
  seen.ready = document.documentElement.dataset.ready;
  seen.canvases = document.querySelectorAll("canvas").length;
  seen.graphs = [...byId("graph").options].map((o) => o.textContent);
  seen.cards = byId("cards").textContent;
  seen.redistributed = byId("redistributions").textContent; seen.asyncTp = byId("async-tp").textContent;
  seen.byExposed = labels();
  byId("collectives").querySelectorAll("th button")[0].click();
  seen.byLabel = labels();
  seen.focused = document.activeElement.textContent;
  byId("collectives").querySelectorAll("th button")[0].click();
  seen.byLabelDown = labels();
  byId("filter").value = "lane busy"; byId("filter").dispatchEvent(new Event("input"));
  seen.filtered = labels(); seen.count = byId("count").textContent;
  byId("filter").value = ""; byId("filter").dispatchEvent(new Event("input"));
  await frame(); key("0"); await frame();
  const whole = pixels(1); key("+"); await frame(); seen.zoomed = pixels(1) !== whole;
  key("ArrowRight"); await frame(); key("0"); await frame(); seen.restored = pixels(1) === whole;
  key("n"); await frame(); seen.picked = byId("picked").textContent;
  press(rows()[0], "Enter"); await frame();
  seen.jumped = byId("picked").textContent; seen.onCanvas = document.activeElement.tagName;
  key("0"); await frame();
  const c = document.querySelectorAll("canvas")[1], box = c.getBoundingClientRect();
  c.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 140, clientY: box.y + 40, bubbles: true }));
  seen.tip = byId("tip").hidden ? "" : byId("tip").textContent;
  const paper = () => getComputedStyle(document.body).backgroundColor, light = paper();
  byId("theme").click(); await frame();
  seen.dark = paper() !== light; seen.repainted = pixels(1) !== whole;
  byId("graph").value = "1"; byId("graph").dispatchEvent(new Event("change")); await frame();
  seen.second = byId("ranks").textContent; seen.evil = window.evil === undefined;
  const out = document.createElement("pre");
  out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
})();
</script>
"""
#: Runs before the page. Headless Chromium under virtual time draws no frames of its own, so timers stand in for them.
CATCH = """
<script>
const errors = [];
addEventListener("error", (e) => errors.push(e.message));
window.requestAnimationFrame = (draw) => setTimeout(draw, 1);
</script>
"""


def drive(page: str, folder: Path) -> dict[str, Any]:
    return opened(page.replace("<head>", "<head>" + CATCH, 1).replace("</body>", DRIVER + "</body>"), folder)


def opened(page: str, folder: Path, *flags: str) -> dict[str, Any]:
    """What a script in the page left in the element ``seen``."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, *flags, f"--user-data-dir={tempfile.mkdtemp(dir=folder)}", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, done.stderr[-3000:]
    return json.loads(unescape(match[1]))


#: A page in a frame, because windows have a least width; then what a reader of the frame sees.
FRAME = """
<!DOCTYPE html><body><iframe id="frame" style="width: {width}px; height: 4000px; border: 0" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => setTimeout(() => {{
  const doc = byFrame().contentDocument, all = [...doc.querySelectorAll("main *")];
  const seen = {{
    ready: doc.documentElement.dataset.ready, width: doc.documentElement.clientWidth,
    needed: doc.documentElement.scrollWidth,
    scrolled: [...doc.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id),
    outside: all.filter((e) => e.getBoundingClientRect().right > doc.documentElement.clientWidth + 1).length,
    paper: getComputedStyle(doc.body).backgroundColor, ink: getComputedStyle(doc.body).color,
    text: doc.querySelector("main").textContent,
    heads: [...doc.querySelectorAll("#collectives th")].map((e) => e.textContent),
    cards: doc.querySelector("#cards").textContent,
  }};
  const out = document.createElement("pre");
  out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
}}, 500));
const byFrame = () => document.getElementById("frame");
</script></body>
"""


def in_a_frame(page: str, folder: Path, width: int, *flags: str) -> dict[str, Any]:
    return opened(FRAME.format(width=width, page=escape(page)), folder, *flags)


LONG = "/home/somebody/a/rather/long/path/to/the/code/of/a/model/that/has/many/parts/transformer_block.py:1234"
NAME = "layers.31.attention.and_something_else.projection_of_the_queries.weight"


def named_page(folder: Path, monkeypatch: pytest.MonkeyPatch, *, measured: bool = False) -> str:
    """A page whose collectives carry parameters of long names."""
    traces = TraceDir(folder / "trace", monkeypatch)
    problem = fsdp_problem(4)
    report, answer = planned(problem)
    report.region = "Transformer"
    report.collectives = [
        dataclasses.replace(c, source=LONG, parameters=(Parameter(NAME, "head"), Parameter(f"norm.{k}", "norm")))
        for k, c in enumerate(report.collectives)
    ]
    decision = Decision("bucket", "ag_1", Verdict.REFUSED, Reason.NOT_PROFITABLE, setting="nothing", source=LONG)
    report.passes.append(PassReport("bucket", decisions=[decision]))
    traces.add(report, problem, answer.order)
    trace = read_trace(traces.path)
    pairs = [
        Pair("step", "", 2_000_000, 3_000_000),
        Pair("exposed", report.collectives[0].label, 1_000, 4_567_000),
        Pair("transfer", report.collectives[0].label, 1_000, 7_654_000),
    ]
    found = [Measured(trace.graphs[0], 3, pairs)] if measured else []
    return render_page(across_ranks(trace.graphs), trace.notes, title="a run of a model", measured=found)


def test_the_page_is_read_on_a_narrow_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = in_a_frame(named_page(tmp_path, monkeypatch, measured=True), tmp_path, 420)
    # A scroll bar takes some of it.
    assert seen["ready"] == "yes" and 400 <= seen["width"] <= 420
    assert seen["needed"] <= seen["width"] and seen["scrolled"] == [] and seen["outside"] == 0
    assert LONG in seen["text"] and f"{NAME} (read in head)" in seen["text"] and "a Transformer" in seen["text"]


def test_the_page_follows_a_dark_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = named_page(tmp_path, monkeypatch)
    light = in_a_frame(page, tmp_path, 420)
    dark = in_a_frame(page, tmp_path, 420, "--blink-settings=preferredColorScheme=0")

    def brightness(color: str) -> int:
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    assert brightness(light["paper"]) > 600 > 200 > brightness(light["ink"])
    assert brightness(dark["paper"]) < 200 < 600 < brightness(dark["ink"])


def test_measured_stands_beside_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = in_a_frame(named_page(tmp_path, monkeypatch, measured=True), tmp_path, 1300)
    assert [h for h in seen["heads"] if "measured" in h] == ["Exposed, measured", "Transfer, measured"]
    assert "4.57 ms" in seen["text"] and "7.65 ms" in seen["text"]
    assert "Measured step" in seen["cards"] and "predicted 2" in seen["cards"]
    (tmp_path / "without").mkdir()
    without = in_a_frame(named_page(tmp_path / "without", monkeypatch), tmp_path / "without", 1300)
    assert not [h for h in without["heads"] if "measured" in h] and "Measured step" not in without["cards"]


def test_a_user_can_read_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = TraceDir(tmp_path / "trace", monkeypatch)
    report = traces.sample(layers=12)
    traces.sample(phase="backward", layers=3)
    traces.sample(phase="backward", layers=4, rank=1)
    trace = read_trace(traces.path)
    seen = drive(render_page(across_ranks(trace.graphs), trace.notes, title="run"), tmp_path)
    assert seen["errors"] == [] and seen["ready"] == "yes"
    assert seen["canvases"] == 2 and seen["graphs"] == ["forward_0 [0/0]", "backward_0 [0/0]"]
    assert report.digest in seen["cards"]
    exposed = {c.label: c.exposed_ns for c in report.collectives}
    assert [exposed[label] for label in seen["byExposed"]] == sorted(exposed.values(), reverse=True)
    assert seen["byLabel"] == [f"AG{k}" for k in range(12)] and seen["byLabelDown"] == seen["byLabel"][::-1]
    assert seen["focused"].startswith("Collective"), "sorting keeps the keyboard focus"
    busy = [c.label for c in report.collectives if "lane busy" in c.reason.value]
    assert sorted(seen["filtered"]) == sorted(busy) and seen["count"] == f"{len(busy)} of 12"
    assert seen["zoomed"] and seen["restored"]
    assert "wait AG" in seen["picked"] and "AG" in seen["jumped"] and seen["onCanvas"] == "CANVAS"
    assert "from" in seen["tip"]
    assert seen["dark"] and seen["repainted"]
    assert "schedule" in seen["second"], "the second graph's ranks differ"


def test_what_the_page_shows_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = TraceDir(tmp_path / "trace", monkeypatch)
    evil_trace(traces)
    traces.sample(phase="backward")
    trace = read_trace(traces.path)
    seen = drive(render_page(across_ranks(trace.graphs), trace.notes, title="<b>run"), tmp_path)
    assert seen["errors"] == [] and seen["evil"] is True and seen["canvases"] == 2


def test_redistributions_and_async_tp_have_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = TraceDir(tmp_path / "trace", monkeypatch)
    problem = fsdp_problem(3)
    report, answer = planned(problem)
    report.redistributions = [
        RedistributionReport(
            names=("all_reduce_3",),
            call="add (backward)",
            explicit=False,
            source="model.py:31",
            placements=("P(sum) -> R over 4 ranks",),
            bytes_before=8 << 20,
            bytes_after=4 << 20,
            rewrites=("R5",),
        )
    ]
    refused = Decision("gather-matmul", "mm_4", Verdict.REFUSED, Reason.NOT_PROFITABLE, setting='async_tp="force"')
    report.passes.append(PassReport("async_tp", decisions=[refused]))
    traces.add(report, problem, answer.order)
    traces.sample(phase="backward")
    seen = drive(render_page(across_ranks(read_trace(traces.path).graphs), [], title="run"), tmp_path)
    assert seen["errors"] == []
    for expected in ("add (backward)", "model.py:31", "P(sum) -> R over 4 ranks", "implicit", "8 MiB", "4 MiB", "R5"):
        assert expected in seen["redistributed"], expected
    assert "gather-matmul" in seen["asyncTp"] and 'async_tp="force"' in seen["asyncTp"]
