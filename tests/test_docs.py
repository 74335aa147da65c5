"""The documentation is true where a machine can tell: links lead somewhere, names exist, code compiles, and what is
marked as runnable runs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command

from tests.support.processes import LIMIT_S, ROOT, environment

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)(```+)([^\n]*)\n(.*?)^\1\2 *$", re.M | re.S)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
#: Stands in front of a Python block that is run; all of a page run in order in one process.
RUNS = "<!-- runs -->\n"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    """The contents of fenced blocks of a language, unindented."""
    return [
        re.sub(rf"^{found[1]}", "", found[4], flags=re.M)
        for found in FENCE.finditer(text)
        if found[3].split()[:1] == [language]
    ]


def prose(text: str) -> str:
    """The text without fenced blocks and code spans."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What ``#anchor`` may name, by the rule that GitHub and mkdocs share for plain headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", text), re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        name = plain.strip().replace(" ", "-")
        number = 0
        while (name if not number else f"{name}-{number}") in found:
            number += 1
        found.add(name if not number else f"{name}-{number}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_is_named_exists(page: Path) -> None:
    """Files under tools/, tests/ and inductor_passes/, subcommands, and settings."""
    from inductor_passes.cli.main import app
    from inductor_passes.config import FIELDS

    text = page.read_text(encoding="utf-8")
    missing = [name for name in re.findall(r"\b(?:tools|tests|inductor_passes)/[\w./-]*\w", text) if not _exists(name)]
    group = get_command(app)
    commands = set(group.list_commands(Context(group)))  # type: ignore[attr-defined]
    used = re.findall(r"^(?:\$ )?inductor-passes ([a-z][\w-]*)", "\n".join(blocks(text, "bash")), re.M)
    missing += [f"inductor-passes {name}" for name in used if name not in commands]
    options = re.findall(r"(?<![\w.])options\(([a-z_]+)=", text)
    missing += [f"options({name}=)" for name in options if name not in FIELDS and name not in ("mode", "inductor")]
    assert missing == []


def _exists(name: str) -> bool:
    # "inductor_passes/" also starts cache directories and artifact names; only what looks like a module is meant.
    if name.startswith("inductor_passes/") and not name.endswith(".py"):
        return True
    return (ROOT / name).exists()


def _runnable(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return "\n".join(re.findall(rf"{RUNS}```python\n(.*?)```", text, re.S))


@pytest.mark.parametrize("page", [p for p in PAGES if _runnable(p)], ids=page_id)
def test_what_is_marked_as_runnable_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(_runnable(page), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_is_in_the_contents() -> None:
    """A page that the site's contents do not list is found by nobody."""
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in PAGES if (ROOT / "docs") in p.parents]
    assert [page for page in pages if f" {page}\n" not in contents] == []
    listed = re.findall(r": ([\w/]+\.md)$", contents, re.M)
    assert sorted(set(listed) - set(pages)) == []


def test_every_cell_of_the_comparison_names_its_source() -> None:
    """What is said of other systems has a source, every source is listed, and every listed one is used."""
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    tables, _, listed = text.partition("## Sources")
    rows = [line.strip("|").split("|") for line in tables.splitlines() if line.startswith("| ")]
    others = [cell.strip() for row in rows if row[0].strip() for cell in row[2:]]
    assert len(others) > 80
    assert [c for c in others if c not in ("-", "no") and not re.search(r"\[[A-Z]\d\]", c)] == []
    assert set(re.findall(r"\[([A-Z]\d)\]", tables)) == set(re.findall(r"^- \[([A-Z]\d)\]", listed, re.M))


def test_pages_name_no_place_of_a_machine() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users)/", text), page_id(page)


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    text = "# A b\n\n## A b\n\n```python\nx = [y](z.md)\n```\n\n[a](#a-b-1) [c](missing.md)\n"
    assert anchors(text) == {"a-b", "a-b-1"}
    assert LINK.findall(prose(text)) == ["#a-b-1", "missing.md"]
    assert blocks(text, "python") == ["x = [y](z.md)\n"]
