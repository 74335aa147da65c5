"""``inductor-passes calibrate``: measure this machine's links and compute once, under torchrun."""

from __future__ import annotations

import math
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from inductor_passes.cli import terminal
from inductor_passes.cli.terminal import CommandError
from inductor_passes.records.convert import shown
from inductor_passes.records.json_text import RecordError
from inductor_passes.records.text import printable, printable_lines

#: More samples than this take longer than anyone waits.
MAX_REPEATS = 1_000
MAX_DIMENSIONS = 8
MAX_RANKS = 1_000_000
#: For ranks to come, and for each collective.
TIMEOUT = timedelta(minutes=10)

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Where rank 0 writes the profile (JSON).")],
    device: Annotated[str, typer.Option(help="Device type: cpu, cuda or xpu.")] = "cpu",
    backend: Annotated[
        str, typer.Option(help='Backend of the default group, e.g. gloo, nccl, "emulated"; default: the device\'s.')
    ] = "",
    mesh: Annotated[str, typer.Option(help="Shape of a device mesh whose groups are measured too, e.g. 4x2.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=MAX_REPEATS, help="Samples per size; the median counts.")] = 7,
    name: Annotated[str, typer.Option(help="Name of the profile in reports.")] = "",
) -> None:
    """Measure this machine's links once and write a cost profile.

    Example: torchrun --nproc-per-node 2 -m inductor_passes.cli.main calibrate --out profile.json

    Exit status: 0 the profile was written, 2 it was not.
    """
    shape = _shape(mesh)
    _check(out, name)
    import torch
    import torch.distributed as dist

    from inductor_passes.cost.calibrate import calibrate as measure

    place = _device(device)
    if place.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    elif place.type != "cpu":
        torch.accelerator.set_device_index(place.index or 0)
    per_host, timed = _join(backend)
    try:
        _check_world(shape, dist.get_world_size())
        profile = measure(
            _groups(shape, place.type),
            device=place,
            repeats=repeats,
            ranks_per_host=per_host,
            name=name,
            timed=timed,
            progress=_say if dist.get_rank() == 0 else _silent,
        )
        if dist.get_rank() == 0:
            with terminal.naming(out):
                profile.save(out)
            terminal.say(f"wrote {out}: {printable(profile.name)}")
    except (RecordError, RuntimeError) as error:
        raise CommandError(f"calibration failed: {_first_line(error)}; all ranks must run to the end") from error
    finally:
        dist.destroy_process_group()


def _join(backend: str) -> tuple[Any, Any]:
    """Make the default process group; ranks per host and a stopwatch where the backend has its own, else None.

    Raises:
        CommandError: there is no such backend, or ranks do not meet.
    """
    import torch.distributed as dist

    per_host = timed = None
    try:
        if backend == "emulated":
            from inductor_passes.emulation import link as emulated_link

            emulated_link.register()
            per_host, timed = emulated_link.ranks_per_host(), emulated_link.timed
        _check_backend(backend)
        dist.init_process_group(backend or None, timeout=TIMEOUT)
    except (ValueError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        wanted = f"--backend {backend}" if backend else "the default backend"
        raise CommandError(
            f"no process group can be made with {wanted}: {_first_line(error)}; expected a backend of this torch, and "
            "torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
        ) from error
    return per_host, timed


def _check_backend(backend: str) -> None:
    """``gloo``, or per device ``cpu:gloo,cuda:nccl``."""
    import torch.distributed as dist

    for part in backend.split(",") if backend else ():
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name) or name not in dist.Backend.backend_list:
            known = [one for one in dist.Backend.backend_list if one != "undefined" and dist.is_backend_available(one)]
            raise CommandError(f"--backend is {shown(backend)}; expected one of {', '.join(known)}")


def _check(out: Path, name: str) -> None:
    """Before minutes of measuring: is it started on ranks, and can the result be written?"""
    ranks = _variable("WORLD_SIZE", 1, MAX_RANKS)
    _variable("RANK", 0, ranks - 1)
    _variable("MASTER_PORT", 0, 65_535)
    if name != printable(name):
        raise CommandError(f"--name is {shown(name)}; expected a line of printable characters")
    with terminal.naming(out):
        if out.is_dir():
            raise CommandError(f"--out {out} is a directory; expected the path of a file")
        if not out.absolute().parent.is_dir():
            raise CommandError(f"--out {out} cannot be written: {out.absolute().parent} is no directory")
        if not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
            raise CommandError(f"--out {out} cannot be written: no permission")


def _variable(name: str, least: int, most: int) -> int:
    """One of torchrun's variables; with a wrong one the process group waits for ranks that never come."""
    value = os.environ.get(name)
    if value is None:
        raise CommandError(
            f"{name} is not set: start it on all ranks, "
            "torchrun --nproc-per-node N -m inductor_passes.cli.main calibrate --out FILE"
        )
    if not re.fullmatch("[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise CommandError(f"{name} is {shown(value)}; expected {least} to {most}")
    return int(value)


def _device(name: str) -> Any:
    import torch

    try:
        place = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise CommandError(f"--device is {shown(name)}; expected cpu, cuda or xpu") from error
    if place.type == "cpu":
        return place
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != place.type:
        has = "cpu" if here is None else f"cpu or {here.type}"
        raise CommandError(f"--device is {shown(name)}; this machine has {has}")
    return torch.device(place.type, _variable("LOCAL_RANK", 0, torch.accelerator.device_count() - 1))


def _shape(mesh: str) -> tuple[int, ...]:
    if not mesh:
        return ()
    parts = mesh.lower().split("x")
    if not all(re.fullmatch("[1-9][0-9]{0,6}", p) for p in parts) or len(parts) > MAX_DIMENSIONS:
        raise CommandError(f"--mesh is {shown(mesh)}; expected up to {MAX_DIMENSIONS} sizes joined by x, e.g. 4x2")
    return tuple(int(p) for p in parts)


def _check_world(shape: tuple[int, ...], ranks: int) -> None:
    if shape and math.prod(shape) != ranks:
        text = "x".join(map(str, shape))
        raise CommandError(f"--mesh {text} has {math.prod(shape)} ranks; {ranks} were started")


def _first_line(error: Exception) -> str:
    lines = printable_lines(str(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _groups(shape: tuple[int, ...], device_type: str) -> list[Any]:
    """The default group, and this rank's group along each dimension of a mesh of ``shape``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    groups: list[Any] = [dist.group.WORLD]
    if shape:
        mesh = init_device_mesh(device_type, shape)
        groups += [mesh.get_group(dim) for dim in range(len(shape))]
    return groups


def _say(what: str) -> None:
    # On stderr: whoever stops reading stdout (`| head`) would end a rank, and the others would wait for it.
    terminal.say(f"measuring {what}", err=True)


def _silent(what: str) -> None:
    pass
