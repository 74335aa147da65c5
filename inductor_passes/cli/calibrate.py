"""``inductor-passes calibrate``: measure this machine's links and compute once, under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Where rank 0 writes the profile (JSON).")],
    device: Annotated[str, typer.Option(help="Device type: cpu, cuda or xpu.")] = "cpu",
    backend: Annotated[
        str, typer.Option(help='Backend of the default group, e.g. gloo, nccl, "emulated"; default: the device\'s.')
    ] = "",
    mesh: Annotated[str, typer.Option(help="Shape of a device mesh whose groups are measured too, e.g. 4x2.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Samples per size; the median counts.")] = 7,
    name: Annotated[str, typer.Option(help="Name of the profile in reports.")] = "",
) -> None:
    """Measure collectives and compute, and write one cost profile that all ranks load.

    torchrun --nproc-per-node 2 -m inductor_passes.cli.main calibrate --out profile.json
    """
    if "RANK" not in os.environ:
        raise typer.BadParameter(
            "start it on all ranks: torchrun --nproc-per-node N -m inductor_passes.cli.main calibrate ..."
        )
    shape = _shape(mesh)
    import torch
    import torch.distributed as dist

    from inductor_passes.cost.calibrate import calibrate as measure

    place = torch.device(device)
    if place.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    elif place.type != "cpu":
        place = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(place.index or 0)
    per_host = timed = None
    if backend == "emulated":
        from inductor_passes import emulated_link

        emulated_link.register()
        per_host, timed = emulated_link.ranks_per_host(), emulated_link.timed
    dist.init_process_group(backend or None)
    try:
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
            profile.save(out)
            typer.echo(f"wrote {out}: {profile.name}")
    finally:
        dist.destroy_process_group()


def _shape(mesh: str) -> tuple[int, ...]:
    if not mesh:
        return ()
    parts = mesh.lower().split("x")
    if not all(p.isdigit() and int(p) > 0 for p in parts):
        raise typer.BadParameter(f"mesh is {mesh!r}; expected sizes joined by x, e.g. 4x2")
    return tuple(int(p) for p in parts)


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
    typer.echo(f"measuring {what}")


def _silent(what: str) -> None:
    pass
