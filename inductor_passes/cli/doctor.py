"""``inductor-passes doctor``: looks at the environment and says what will work, and what to do where it will not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from inductor_passes.cli import terminal
from inductor_passes.records.json_text import RecordError

app = typer.Typer(add_completion=False)

Status = Literal["ok", "warn", "fail"]
#: The range in pyproject.toml: from the first, below the second.
TORCH_RANGE = ((2, 11), (2, 16))
MIN_FREE_BYTES = 2**30
_CACHE_ADVICE = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to"


@dataclass(frozen=True)
class Check:
    """One line of the result; ``advice`` says what to do unless the status is ``ok``."""

    status: Status
    name: str
    found: str
    advice: str = ""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON instead of a table.")] = False,
) -> None:
    """Check the environment and say what will work.

    Example: inductor-passes doctor

    Exit status: 0 everything works, 1 something is broken.
    """
    checks = run_checks()
    if as_json:
        import dataclasses
        import json

        print(json.dumps({"schema_version": 1, "checks": [dataclasses.asdict(c) for c in checks]}, indent=1))
    else:
        _print(checks)
    if any(check.status == "fail" for check in checks):
        failed = ", ".join(check.name for check in checks if check.status == "fail")
        raise terminal.CommandError(f"not everything works: {failed}", status=1)


def run_checks(environ: Mapping[str, str] | None = None) -> list[Check]:
    """All checks. One that breaks counts as failed itself, so the others are still seen."""
    environ = os.environ if environ is None else environ
    checks: list[Check] = []
    groups: list[Callable[[Mapping[str, str]], Iterator[Check]]] = [_python, _torch_version]
    if importlib.util.find_spec("torch") is not None:
        groups += [_features, _backends, _in_tree, _caches, _compilers, _device]
    for group in [*groups, _settings, _trace, _extras]:
        try:
            checks += group(environ)
        except Exception as error:
            name = group.__name__.strip("_").replace("_", " ")
            checks.append(Check("fail", name, f"{type(error).__name__}: {error}", "the check itself failed"))
    return checks


def _python(environ: Mapping[str, str]) -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 10)
    yield Check("ok" if good else "fail", "Python", version, "" if good else "use Python 3.10 or newer")


def _torch_version(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Check("fail", "torch", "not installed", "install torch first")
        return
    low, high = (".".join(map(str, v)) for v in TORCH_RANGE)
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if TORCH_RANGE[0] <= number < TORCH_RANGE[1]:
        yield Check("ok", "torch", version)
    elif number >= TORCH_RANGE[1]:
        yield Check("warn", "torch", version, f"tested from {low} to below {high}; private API may have moved")
    else:
        yield Check("fail", "torch", version, f"install torch from {low} to below {high}")


def _features(environ: Mapping[str, str]) -> Iterator[Check]:
    from inductor_passes._torch import features

    found = features()
    needed = ("graph passes", "scheduler hook", "distributed")
    for name in needed:
        if not found[name]:
            yield Check("fail", name, "missing in this torch", "use a torch build that has it")
    yield Check("ok", "torch features", ", ".join(name for name, has in found.items() if has))
    lacking = [name for name, has in found.items() if not has and name not in needed]
    if lacking:
        yield Check("ok", "not in this torch", ", ".join(lacking))


def _backends(environ: Mapping[str, str]) -> Iterator[Check]:
    import torch

    names = ("gloo", "nccl", "xccl", "mpi")
    if not torch.distributed.is_available():
        return
    found = [name for name in names if getattr(torch.distributed, f"is_{name}_available")()]
    advice = "" if found else "without a communication backend only a single process can run"
    yield Check("ok" if found else "warn", "process groups", ", ".join(found) or "none", advice)
    device = _accelerator()
    library = {"cuda": "nccl", "xpu": "xccl"}.get(device)
    if library is not None and library not in found:
        name = library.upper()
        yield Check("warn", name, f"missing although there is a {device} device", f"install a torch build with {name}")


def _accelerator() -> str:
    """Type of the accelerator that this machine has, "" without."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    here = torch.accelerator.current_accelerator(check_available=True)
    return here.type if here is not None else ""


def _in_tree(environ: Mapping[str, str]) -> Iterator[Check]:
    from inductor_passes.engine import in_tree, options

    clashing = in_tree.clashes(in_tree.overlay({}))
    if clashing:
        advice = 'switch them off, or set in_tree_passes="warn" to leave the graphs to them'
        yield Check("warn", "Inductor's own communication passes", ", ".join(clashing), advice)
    else:
        yield Check("ok", "Inductor's own communication passes", "off")
    if options.has_simple_overlap():
        yield Check("ok", options.SIMPLE_OVERLAP, "in this torch; switched off for graphs that we plan")


def _caches(environ: Mapping[str, str]) -> Iterator[Check]:
    from inductor_passes._torch import compile_cache_dir

    folder = Path(compile_cache_dir())
    try:
        existing = next(p for p in (folder, *folder.parents) if p.exists())
    except (OSError, ValueError) as error:
        yield Check("fail", "compile cache", f"{folder}: {getattr(error, 'strerror', None) or error}", _CACHE_ADVICE)
        return
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Check("fail", "compile cache", f"{folder} cannot be written to", _CACHE_ADVICE)
    else:
        free = shutil.disk_usage(existing).free
        state = "exists" if folder.exists() else "will be created"
        small = free < MIN_FREE_BYTES
        yield Check(
            "warn" if small else "ok",
            "compile cache",
            f"{folder} ({state}, {free / 2**30:.1f} GiB free)",
            "less than 1 GiB is free: compiled graphs may fail to be stored" if small else "",
        )
    for name in ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
        value = environ.get(name)
        disables = name.endswith("DISABLE_CACHES")
        if value is not None and (value == "1") == disables:
            yield Check("warn", name, value, "every start compiles everything again; unset it for production")


def _compilers(environ: Mapping[str, str]) -> Iterator[Check]:

    from inductor_passes._torch import cpp_compiler

    try:
        yield Check("ok", "C++ compiler", cpp_compiler())
    except RuntimeError as error:
        status: Status = "warn" if _accelerator() else "fail"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        yield Check(status, "C++ compiler", first_line, "install g++ or set CXX: Inductor needs it for CPU code")
    try:
        yield Check("ok", "Triton", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        gpu = bool(_accelerator())
        yield Check(
            "fail" if gpu else "ok",
            "Triton",
            "not installed" + ("" if gpu else "; only GPU code needs it"),
            "install the Triton version that belongs to this torch" if gpu else "",
        )


def _device(environ: Mapping[str, str]) -> Iterator[Check]:
    import torch

    device = _accelerator()
    if not device:
        yield Check("ok", "GPU", "none: CPU code and gloo")
        return
    if device != "cuda":
        yield Check("ok", device.upper(), f"{torch.accelerator.device_count()} devices")
        return
    names = sorted({torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())})
    yield Check("ok", "GPU", f"{torch.cuda.device_count()} x {', '.join(names)}")
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections == "1":
        advice = (
            "one hardware queue: kernels start in launch order over all streams, so a collective behind a kernel "
            "waits for it; unset it unless another library demands it"
        )
        yield Check("warn", "CUDA_DEVICE_MAX_CONNECTIONS", connections, advice)
    else:
        yield Check("ok", "CUDA_DEVICE_MAX_CONNECTIONS", connections or "not set")
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"):
        if environ.get(name) == "1":
            yield Check("warn", name, "1", "makes every launch or wait synchronous: nothing overlaps; unset it")


def _settings(environ: Mapping[str, str]) -> Iterator[Check]:
    from inductor_passes.config import ENV, PassConfig
    from inductor_passes.settings.errors import ConfigError

    yield _switch(environ)
    try:
        config = PassConfig.from_env({name: value for name, value in environ.items() if name != ENV})
    except ConfigError as error:
        yield Check("fail", "settings from the environment", str(error), "correct or unset the variable")
        return
    changed = [f"{k}={v!r}" for k, v in config.to_json().items() if v != PassConfig().to_json()[k]]
    yield Check("ok", "settings from the environment", ", ".join(changed) or "none, defaults")
    from inductor_passes.cost.profile import CostProfile
    from inductor_passes.pin.file import load as load_plan

    if config.cost_profile:
        advice = "run `inductor-passes calibrate`, or correct the path"
        yield _loads("cost profile", lambda: CostProfile.load(config.cost_profile).name, advice)
    if config.plan:
        advice = "write it again with `inductor-passes report --plans`, or correct the path"
        yield _loads("plan", lambda: f"{len(load_plan(config.plan).graphs)} graphs", advice)


def _loads(name: str, load: Callable[[], str], advice: str) -> Check:
    """Whether a file that a setting names can be used."""
    try:
        return Check("ok", name, load())
    except RecordError as error:
        return Check("fail", name, str(error), advice)


def _switch(environ: Mapping[str, str]) -> Check:
    from inductor_passes.switch import ALLOWED, ENV, parse

    value = environ.get(ENV)
    if value is None:
        return Check("ok", ENV, "not set: enabled by options, backend or flag only")
    meant = parse(value)
    if meant is None:
        return Check("fail", ENV, f"{value!r} is not allowed", f"expected {ALLOWED}; the passes are off")
    if meant and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        found = f"{value}, and TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from looking at it"
        return Check("warn", ENV, found, "set that to 1, or `import inductor_passes.config` before compiling")
    return Check("ok", ENV, value)


def _trace(environ: Mapping[str, str]) -> Iterator[Check]:
    directory = environ.get("TORCH_TRACE")
    if directory is None:
        yield Check("ok", "TORCH_TRACE", "not set: no trace is written")
        return
    path = Path(directory).absolute()
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        yield Check("fail", "TORCH_TRACE", f"{directory}: {reason}", "name a directory that can be written to")
        return
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        yield Check("fail", "TORCH_TRACE", f"{directory} cannot be written to", "name a directory that can be")
    elif path.is_dir() and any(path.glob("*.log")):
        yield Check("warn", "TORCH_TRACE", f"{directory} holds logs already", "use a fresh directory for each run")
    else:
        yield Check("ok", "TORCH_TRACE", directory)


def _extras(environ: Mapping[str, str]) -> Iterator[Check]:
    has_tlparse = (Path(sys.executable).parent / "tlparse").is_file() or shutil.which("tlparse") is not None
    for name, present, use, extra in (
        ("jinja2", importlib.util.find_spec("jinja2") is not None, "the HTML report", "report"),
        ("tlparse", has_tlparse, "`report --tlparse`", "report"),
        ("ortools", importlib.util.find_spec("ortools") is not None, "exact planning of windows", "exact"),
    ):
        if present:
            yield Check("ok", name, "installed")
        else:
            yield Check("ok", name, f"not installed; {use} needs it: pip install 'inductor-passes[{extra}]'")


def _print(checks: list[Check]) -> None:
    from rich.text import Text

    from inductor_passes.trace.table import PlainTable

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = PlainTable(show_header=False)
    for column in ("status", "what", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="yellow")
        table.add_row(Text(check.status, style=styles[check.status]), check.name, found)
    console = terminal.console(140)
    console.print(table)
    counts = {status: sum(check.status == status for check in checks) for status in styles}
    console.print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
