"""What every benchmark writes: figures as JSON, a page in Markdown, a chart as SVG, each with where it comes from.

A result without its commit, versions, machine and command cannot be repeated, so they are written by one function and
not by hand. A page's part from ``## Findings`` on is written by people and kept when the page is written again.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from tools.shared.launch import ROOT

RESULTS = ROOT / "docs" / "results"
FINDINGS = "## Findings"
#: Options that say where files go.
_PLACES = ("--out=", "--kept=")


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from.

    Attributes:
        command: what repeats it.
        commit: of this repository, with "+" when tracked files differ from it; "unknown" without git.
        date: ISO.
        versions: of Python, torch and the packages that matter to the benchmark.
        machine: processor, cores, memory, load; nothing that names it.
    """

    command: str
    commit: str
    date: str
    versions: dict[str, str]
    machine: dict[str, str]

    def sentence(self) -> str:
        """One paragraph for a page."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        machine = ", ".join(self.machine.values())
        return f"`{self.command}`, {self.date}, commit {self.commit}; {versions}; {machine}."


@cache
def provenance() -> Provenance:
    """Of this process, as it was at the first call: the tree may change while a benchmark runs.

    The command is how the process was called.
    """
    versions = {"Python": platform.python_version(), "torch": metadata.version("torch")}
    return Provenance(_command(), _commit(), date.today().isoformat(), versions, _machine())


def _command() -> str:
    # Where results go does not change them, and would be a path of this machine.
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.startswith(_PLACES):
            skip = False
            continue
        skip = argument in ("--out", "--kept")
        if not skip:
            arguments.append(argument if argument and " " not in argument else repr(argument))
    return " ".join(["tools/bench", *arguments])


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str:
    found = _git("rev-parse", "--short", "HEAD")
    if not found:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "inductor_passes", "tools")
    return found + ("+" if changed else "")


def _machine() -> dict[str, str]:
    found = {"cores": f"{os.cpu_count()} CPU cores"}
    if model := _processor():
        found["processor"] = model
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    if hasattr(os, "getloadavg"):
        found["load"] = f"load average {os.getloadavg()[0]:.1f}"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def chosen(given: Iterable[str] | None, known: Iterable[str], what: str) -> list[str]:
    """Names from the command line, all when none was given; refuses those that do not exist."""
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise typer.BadParameter(f"{what} {', '.join(unknown)} is not known; expected some of {', '.join(known)}")
    return list(given or known)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values; NaN for none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def write(
    name: str,
    title: str,
    body: Sequence[str],
    data: Any,
    draw: Callable[[Path], None] | None = None,
    *,
    folder: Path = RESULTS,
    source: Provenance | None = None,
) -> Path:
    """Write ``name.json``, ``name.md`` and, with ``draw`` (which saves a chart to a path), ``name.svg``.

    Args:
        body: the page's lines after title and provenance.
        data: plain data, what the page was made of.
        source: of figures that were taken earlier; default: of this process.

    Returns:
        The page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = source or provenance()
    contents = {"provenance": asdict(source), "data": data}
    (folder / f"{name}.json").write_text(json.dumps(contents, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    lines = [f"# {title}", "", source.sentence(), ""]
    if draw is not None:
        draw(folder / f"{name}.svg")
        lines += [f"![{title}]({name}.svg)", ""]
    page = folder / f"{name}.md"
    kept = page.read_text(encoding="utf-8").partition(FINDINGS)[2] if page.exists() else ""
    text = "\n".join([*lines, *body]).rstrip() + "\n"
    page.write_text(text + (f"\n{FINDINGS}{kept}" if kept else ""), encoding="utf-8")
    return page
