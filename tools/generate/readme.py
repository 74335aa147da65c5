"""Writes the README's table of measurements out of docs/results/link.json, and the means over all models out of
docs/results/summary.json, so that all say the same.

    tools/gen readme
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from tools.benchmarks.summary import titled
from tools.link.report import COLUMNS, lines
from tools.shared.record import RESULTS, ROOT, Provenance, markdown_table

README = ROOT / "README.md"
BEGIN, END = "<!-- measured: tools/gen readme -->", "<!-- end -->"
#: Columns of the results page that the README quotes, by position: step, then ratios, then peak memory.
SHOWN = (0, 5, 6, 7, 9)


def block(stored: dict[str, Any], summed_up: dict[str, Any]) -> list[str]:
    """The README's lines: the FSDP model on the balanced link, and the means over all models that were measured."""
    source, everything = Provenance(**stored["provenance"]), stored["data"]
    (results,) = [r for r in everything if (r["layout"], r["rate"]) == ("fsdp", "balanced")]
    header = ["", "step ms", "to default Inductor", "to the best in-tree setting", "to the limit", "peak memory"]
    rows = [[cells[0], *(cells[1 + k] for k in SHOWN)] for cells in lines(results)]
    assert [COLUMNS[k] for k in SHOWN] == ["step ms", "/ default", "/ in-tree", "/ limit", "/ default"]
    machine = ", ".join(source.machine.values())
    layers, torch = results["sizes"]["layers"], source.versions["torch"]
    apart = max(r["worst_loss_difference"] for r in results["rows"] if r["family"] == "ours")
    losses = "are default Inductor's bit for bit" if apart == 0 else f"differ from default Inductor's by {apart:.0e}"
    return [
        f"Measured on 2 real gloo ranks over an emulated link, communication about equal to compute (a {layers}-layer "
        f"Llama under `simple_fsdp`, {source.date}, commit {source.commit}, torch {torch}, {machine}):",
        "",
        *markdown_table(header, rows),
        "",
        f"The losses of our rows {losses}. Measured by:",
        "",
        "```bash",
        *" \\\n".join(textwrap.wrap(source.command, 112, subsequent_indent="    ", break_on_hyphens=False)).split("\n"),
        "```",
        "",
        "Over [all models and links](docs/results/summary.md), by `tools/bench summary`:",
        "",
        *(f"- {titled(name)}: {sentence}" for name, sentence in summed_up["means"].items()),
    ]


def written(text: str, stored: dict[str, Any], summed_up: dict[str, Any]) -> str:
    """``text`` with the block between the markers replaced."""
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"the text has no block between {BEGIN!r} and {END!r}")
    return "\n".join([head + BEGIN, *block(stored, summed_up), END]) + tail


def sources() -> tuple[dict[str, Any], dict[str, Any]]:
    """The stored link page and the stored summary; the latter without its provenance."""
    files = (RESULTS / f"{name}.json" for name in ("link", "summary"))
    link, summary = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return link, summary["data"]


def main() -> None:
    """Rewrite the README."""
    README.write_text(written(README.read_text(encoding="utf-8"), *sources()), encoding="utf-8")


if __name__ == "__main__":
    main()
