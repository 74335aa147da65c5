"""All pages of the link benchmark in one table: ours at its defaults and with everything on, model by link."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tools.link.lab import CONTENDERS, RATES
from tools.link.models import LAYOUTS
from tools.link.summary import (
    BUSY,
    HEADER,
    NEVER_BELOW,
    TUNING_HEADER,
    Standing,
    behind,
    extremes,
    means,
    missing,
    newest,
    tuning_means,
    tuning_where_off,
    tunings,
)
from tools.shared.record import RESULTS, ROOT, Provenance, markdown_table, write

#: Contenders of ours that are summed up, side by side.
OURS = ("ours", "ours-all")
#: The plan before and after its first steps were timed.
TUNED = ("ours", "ours-tuned")
#: Links on which every model should have been measured.
ASKED = ("latency-bound", "balanced", "bandwidth-bound", "fast")

Stored = tuple[str, Provenance, list[dict[str, Any]]]


def load(folder: Path) -> list[Stored]:
    """Name, provenance and contents of every stored page of the link benchmark, the oldest first.

    Age is the date, then the time of the commit where git knows it, then the name.

    Raises:
        ValueError: a file is not what the link benchmark writes.
    """
    found: list[Stored] = []
    for file in sorted(folder.glob("link*.json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        try:
            found.append((file.stem, Provenance(**stored["provenance"]), stored["data"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file.name} is no result of tools/bench link: {error!r}") from error
    return sorted(found, key=lambda one: (one[1].date, _committed(one[1].commit), one[0]))


def _committed(commit: str) -> int:
    """When a commit was made, in seconds; 0 where that is not known."""
    command = ["git", "show", "--no-patch", "--format=%ct", commit.removesuffix("+")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    said = done.stdout.strip()
    return int(said) if done.returncode == 0 and said.isdigit() else 0


def standings(pages: list[Stored], name: str) -> dict[tuple[str, str], Standing]:
    """(layout, rate) -> how ``name`` stands, models and links in their usual order."""
    found = newest([(page, data) for page, _, data in pages], name)
    keys = [(layout, rate) for layout in LAYOUTS for rate in RATES]
    return {key: found[key] for key in keys if key in found}


def sentences(by_name: dict[str, dict[tuple[str, str], Standing]]) -> dict[str, str]:
    """Contender -> its means; besides over the rows that all of them have, where those are fewer."""
    said = {name: means(found.values()) for name, found in by_name.items()}
    shared = set.intersection(*(set(found) for found in by_name.values()))
    for name, found in by_name.items():
        if 0 < len(shared) < len(found):
            said[f"{name}, shared rows"] = means(one for key, one in found.items() if key in shared)
    return said


def page(pages: list[Stored]) -> list[str]:
    """The page's lines."""
    by_name = {name: standings(pages, name) for name in OURS}
    titles = {name: layout.title for name, layout in LAYOUTS.items()}
    text = [
        "Every row compares contenders that took turns in one run. Where pages hold the same model on the same link, "
        "the newest one that has the contender counts, but none that left out who was the fastest other contender on "
        "the page before. `best other` is the fastest contender that is not ours, `in-tree` the fastest in-tree "
        "setting that ran. What the columns and the limit mean is on the pages:",
        "",
    ]
    text += [f"- [{name}]({name}.md): {source.date}, commit {source.commit}" for name, source, _ in reversed(pages)]
    text += ["", "## Means", ""]
    text += [f"- {titled(name)}: {sentence}" for name, sentence in sentences(by_name).items()]
    whole = len(LAYOUTS) * len(BUSY)
    text += ["", f"All {len(LAYOUTS)} models on both links would be {whole} rows."]
    header = ["model", "link"]
    for name in OURS:
        header += [f"{CONTENDERS[name].title}: {HEADER[0]}", *HEADER[1:], "page"]
    rows = []
    for key in [(layout, rate) for layout in LAYOUTS for rate in RATES]:
        mine = [by_name[name].get(key) for name in OURS]
        if any(mine):
            cells = [[*one.cells(), f"[{one.page}]({one.page}.md)"] if one else ["-"] * 6 for one in mine]
            rows.append([titles[key[0]], key[1], *cells[0], *cells[1]])
    text += ["", "## Model by link", "", *markdown_table(header, rows)]
    text += _tuned(pages)
    for name, found in by_name.items():
        text += ["", f"## {CONTENDERS[name].title.capitalize()}: where others are faster, and extremes", ""]
        text += [f"The goal is never below {NEVER_BELOW} of the best other contender.", ""]
        text += [*behind(found.values()), *extremes(list(found.values()))]
        text += ["", "Not measured:", "", *missing(found, titles, ASKED)]
    return text


def _tuned(pages: list[Stored]) -> list[str]:
    """What timing the first steps changes; nothing where no page has it."""
    found = tunings([(name, data) for name, _, data in pages], *TUNED)
    if not found:
        return []
    ordered = [(layout, rate) for layout in LAYOUTS for rate in RATES if (layout, rate) in found]
    rows = [
        [found[key].standing.title, key[1], *found[key].cells(), f"[{page}]({page}.md)"]
        for key in ordered
        for page in (found[key].standing.page,)
    ]
    return [
        *("", "## Before and after the first steps were timed (`tune`)", "", tuning_means([found[k] for k in ordered])),
        *("", tuning_where_off([found[k] for k in ordered])),
        *("", *markdown_table(["model", "link", *TUNING_HEADER, "page"], rows)),
    ]


def titled(name: str) -> str:
    """A key of :func:`sentences` in words."""
    contender, comma, rest = name.partition(",")
    return CONTENDERS[contender].title + comma + (" on rows that all have" if rest else "")


def summary(
    results: Annotated[Path, typer.Option(help="Folder with the pages of tools/bench link.")] = RESULTS,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """All pages of the link benchmark in one: means, rows that lose, links that are missing. Measures nothing."""
    try:
        pages = load(results)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not pages:
        raise typer.BadParameter(f"{results.name} holds no link*.json; run tools/bench link first")
    console = Console(width=max(180, Console().width))
    by_name = {name: standings(pages, name) for name in OURS}
    for name, found in by_name.items():
        view = Table("model", "link", *HEADER, "page", title=CONTENDERS[name].title)
        for one in found.values():
            view.add_row(one.title, one.rate, *one.cells(), one.page)
        console.print(view)
    for name, sentence in sentences(by_name).items():
        console.print(f"{titled(name)}: {sentence}")
    data = {
        "means": sentences(by_name),
        "standings": {name: [one.to_json() for one in found.values()] for name, found in by_name.items()},
        "pages": {name: {"date": source.date, "commit": source.commit} for name, source, _ in pages},
    }
    written = write("summary", "The emulated link, summed up", page(pages), data, folder=out)
    console.print(f"written: {written.name}")
