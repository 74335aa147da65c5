"""Builds wheel and sdist, looks into them, installs the wheel into a fresh environment and uses it there.

    tools/check_release            # everything, dependencies from the package index
    tools/check_release --reuse    # dependencies of this interpreter's environment, no network

What the fresh environment is asked: import, ``inductor-passes doctor``, and a compilation with our options.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from tools.shared.launch import ROOT

#: What must be in a wheel besides the modules.
DATA = (
    "inductor_passes/py.typed",
    "inductor_passes/trace/templates/report.html",
    "inductor_passes/trace/templates/report.css",
    "inductor_passes/trace/templates/report.js",
    "inductor_passes/trace/schemas/summary.json",
    "inductor_passes_autoload.py",
)
#: What must be in an sdist besides the package.
SOURCES = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "mkdocs.yml",
    "docs/design.md",
    "tests/conftest.py",
    "tests/support/ranks.py",
    "tools/bench",
    "tools/benchmarks/main.py",
    "tools/constraints.txt",
)
USE = """
import torch, inductor_passes
assert inductor_passes.PassConfig().memory_budget
compiled = torch.compile(lambda x: x.sin() + 1, options=inductor_passes.options(), fullgraph=True)
x = torch.randn(8)
torch.testing.assert_close(compiled(x), x.sin() + 1)
print("compiled with", inductor_passes.__version__, "on torch", torch.__version__)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of this tree, by its own build backend, in ``folder``; no network."""
    from build import ProjectBuilder

    builder = ProjectBuilder(ROOT)
    return Path(builder.build("wheel", folder)), Path(builder.build("sdist", folder))


def modules() -> set[str]:
    """Every file that git would ship of the package's modules."""
    found = (ROOT / "inductor_passes").rglob("*.py")
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def wheel_errors(wheel: Path) -> list[str]:
    """What is missing from a wheel, and what does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = next((archive.read(n).decode() for n in names if n.endswith("entry_points.txt")), "")
    missing = sorted((modules() | set(DATA)) - names)
    ours = ("inductor_passes/", "inductor_passes_autoload.py", "inductor_passes-")
    foreign = sorted(name for name in names if not name.startswith(ours))
    found = [f"missing in {wheel.name}: {name}" for name in missing]
    found += [f"does not belong into {wheel.name}: {name}" for name in foreign]
    groups = ("console_scripts", "torch_dynamo_backends", "torch.backends")
    return found + [f"{wheel.name} has no entry points [{g}]" for g in groups if f"[{g}]" not in points]


def sdist_errors(sdist: Path) -> list[str]:
    """What is missing from an sdist, and what is in it that nobody wrote."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = sorted((modules() | set(DATA) | set(SOURCES)) - names)
    made = sorted(n for n in names if "__pycache__" in n or n.startswith((".git/", "out/", ".venv", "site/")))
    return [f"missing in {sdist.name}: {name}" for name in missing] + [f"{name} is in {sdist.name}" for name in made]


def _run(*command: str) -> None:
    shown = ("..." if "\n" in part else Path(part).name if part.startswith("/") else part for part in command)
    print("$", " ".join(shown), flush=True)
    # Outside of the tree, so that what is imported is what was installed.
    subprocess.run(command, check=True, cwd=tempfile.gettempdir(), timeout=1800)


def try_wheel(wheel: Path, folder: Path, reuse: bool) -> None:
    """Install a wheel into a fresh environment and use it.

    Raises:
        subprocess.CalledProcessError: some step failed.
    """
    home = folder / "venv"
    venv.create(home, with_pip=True)
    bin_folder = home / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(bin_folder / "python")
    arguments = ["--quiet", "--disable-pip-version-check"]
    if reuse:
        site = next(home.rglob("site-packages"))
        (site / "reused.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        arguments += ["--no-deps", "--no-index"]
    else:
        arguments += ["--constraint", str(ROOT / "tools" / "constraints.txt")]
    _run(python, "-m", "pip", "install", *arguments, str(wheel))
    _run(python, "-c", USE)
    _run(str(bin_folder / "inductor-passes"), "doctor")


def main(
    reuse: Annotated[bool, typer.Option(help="Take dependencies from this interpreter's environment.")] = False,
) -> None:
    """Build, check the contents, install, use."""
    with tempfile.TemporaryDirectory() as name:
        wheel, sdist = build(Path(name))
        wrong = wheel_errors(wheel) + sdist_errors(sdist)
        for line in wrong:
            print(line)
        if wrong:
            raise typer.Exit(1)
        print(f"{wheel.name} and {sdist.name} hold what they should")
        try_wheel(wheel, Path(name), reuse)
    print("the wheel works in a fresh environment")


if __name__ == "__main__":
    typer.run(main)
