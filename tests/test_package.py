"""What is published: wheel and sdist hold what they should; built without a network."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")


from tools.release import check as check_release


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return check_release.build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_is_whole(built: tuple[Path, Path]) -> None:
    assert check_release.wheel_errors(built[0]) == []


def test_the_sdist_is_whole(built: tuple[Path, Path]) -> None:
    assert check_release.sdist_errors(built[1]) == []


def test_what_is_missing_or_foreign_is_named(built: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / built[0].name
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(broken, "w") as part:
        for name in whole.namelist():
            if not name.endswith(("py.typed", "entry_points.txt")):
                part.writestr(name, whole.read(name))
        part.writestr("tests/conftest.py", "")
    found = "\n".join(check_release.wheel_errors(broken))
    assert f"missing in {broken.name}: inductor_passes/py.typed" in found
    assert f"does not belong into {broken.name}: tests/conftest.py" in found
    assert "no entry points [torch_dynamo_backends]" in found


def test_versions_agree() -> None:
    import inductor_passes

    text = (check_release.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{inductor_passes.__version__}"' in text
    assert f"## {inductor_passes.__version__}" in (check_release.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _imports(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Foreign packages imported when a module is imported, and those imported later (in functions, or guarded)."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            root = name.partition(".")[0]
            if root not in sys.stdlib_module_names and not root.startswith("inductor_passes"):
                found[id(node) in at_once].add(root)
    return found[True], found[False]


def test_what_is_imported_is_declared() -> None:
    text = (check_release.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    extras = re.search(r"^\[project.optional-dependencies\](.*?)^\[", text, re.M | re.S)
    assert required and extras
    # functorch is a part of torch, Triton comes with it where there is a GPU.
    needed = set(re.findall(r'"([A-Za-z0-9_-]+)', required[1])) | {"functorch"}
    optional = needed | set(re.findall(r'"([A-Za-z0-9_-]+)', extras[1])) | {"triton"}
    for path in sorted((check_release.ROOT / "inductor_passes").rglob("*.py")):
        now, later = _imports(ast.parse(path.read_text(encoding="utf-8")))
        where = path.relative_to(check_release.ROOT).as_posix()
        # An integration is imported by those who have its framework.
        own = {path.stem, f"lightning_{path.stem}"} if "integrations" in path.parts else set()
        assert now <= needed | own | ({"triton"} if "kernels" in path.parts else set()), where
        assert later <= optional, where
