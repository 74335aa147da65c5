"""What is published: wheel and sdist hold what they should; built without a network."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import check_release


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
