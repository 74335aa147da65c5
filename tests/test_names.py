"""Every name that tools and tests take from our own modules exists.

Imports inside functions, and attributes of imported modules, fail only when somebody runs that line: a tool whose
helper was renamed stays broken until then.
"""

from __future__ import annotations

import ast
import functools
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

OURS = ("inductor_passes", "tests", "tools")
FILES = sorted([*(ROOT / "tools").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    """A module of ours; None where an optional package that it needs is missing, or where it is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None if error.name != name and (error.name or "").split(".")[0] not in OURS else _absent(name)


def _absent(name: str) -> None:
    parent, _, attribute = name.rpartition(".")
    if parent and hasattr(importlib.import_module(parent), attribute):
        return None
    raise AssertionError(f"there is no module {name}")


def _has(module: types.ModuleType, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def _expects_an_error(node: ast.AST) -> bool:
    """``with pytest.raises(...)``: what it asks for may be missing on purpose."""
    return isinstance(node, ast.With) and any("raises" in ast.unparse(item.context_expr) for item in node.items)


def missing(source: str) -> Iterator[str]:
    """The names that a file takes from modules of ours and that are not there."""
    tree = ast.parse(source)
    aliases: dict[str, types.ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OURS:
            continue
        module = _module(node.module or "")
        for alias in node.names if module is not None else ():
            assert module is not None
            if not _has(module, alias.name):
                yield f"line {node.lineno}: {node.module}.{alias.name}"
            elif isinstance(getattr(module, alias.name, None), types.ModuleType):
                aliases[alias.asname or alias.name] = getattr(module, alias.name)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    meant = {inner for node in ast.walk(tree) if _expects_an_error(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in aliases and name not in bound and node not in meant and not _has(aliases[name], node.attr):
                yield f"line {node.lineno}: {aliases[name].__name__}.{node.attr}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_every_name_of_ours_exists(file: Path) -> None:
    assert list(missing(file.read_text(encoding="utf-8"))) == []


def test_a_missing_name_is_found() -> None:
    source = (
        "from tests.support import world\n"
        "def late():\n"
        "    from tests.support.world import no_such_world\n"
        "    return world.fake_world, world.another_world\n"
    )
    assert list(missing(source)) == [
        "line 3: tests.support.world.no_such_world",
        "line 4: tests.support.world.another_world",
    ]
