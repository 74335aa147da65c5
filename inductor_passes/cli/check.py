"""``inductor-passes check``: verify graph files, alone, against a reference, or between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inductor_passes.cli.terminal import CommandError, say
from inductor_passes.records.convert import shown
from inductor_passes.records.text import printable

if TYPE_CHECKING:
    from inductor_passes.report import Finding
    from inductor_passes.verify.events import Event
    from inductor_passes.verify.graph_json import GraphFile

app = typer.Typer(add_completion=False)


@app.command()
def check(
    graphs: Annotated[
        list[Path], typer.Argument(metavar="GRAPHS", help="Graph files; with --ranks one per rank, rank 0 first.")
    ],
    reference: Annotated[
        Path | None, typer.Option(help="Graph file that the graphs were made from: finds what was lost or reordered.")
    ] = None,
    memory_budget: Annotated[int | None, typer.Option(min=0, help="Cap on the peak in bytes.")] = None,
    donated: Annotated[
        list[str] | None, typer.Option(help="Graph input that is freed after its last use; may be repeated.")
    ] = None,
    any_group_order: Annotated[
        bool, typer.Option("--any-group-order", help="Allow another order of collectives on a group than before.")
    ] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="Also check that the graphs fit between ranks.")] = False,
    max_in_flight: Annotated[
        int, typer.Option(min=0, help="Collectives that the backend is sure to run at a time; 0: any number.")
    ] = 1,
) -> None:
    """Verify graph files, alone, against a reference, or between ranks.

    Files are written by inductor_passes.verify.save(graph, path); opening one runs no code from it.

    Example: inductor-passes check after.json --reference before.json

    Exit status: 0 nothing found, 1 findings, 2 a file cannot be read.
    """
    from inductor_passes.verify import check as verify

    before = _load(reference).graph if reference is not None else None
    programs: list[tuple[Event, ...]] = []
    count = 0
    files = [(path, _load(path)) for path in graphs]
    _check_donated(donated or (), [file for _, file in files])
    for path, file in files:
        try:
            found = verify(
                file.graph,
                reference=before,
                memory_budget=memory_budget,
                donated=tuple(donated or ()),
                group_order="any" if any_group_order else "kept",
            )
        except ValueError as error:
            raise CommandError(f"{path}: {error}") from error
        for name, body in file.bodies.items():
            found += [dataclasses.replace(f, node=f"{name}/{f.node}") for f in verify(body)]
        _print(str(path), found)
        count += len(found)
        if ranks and not any(f.rule == "topology" for f in found):
            programs.append(_program(path, file))
    if ranks and len(programs) == len(graphs):
        count += _between_ranks(programs, max_in_flight or None)
    raise typer.Exit(1 if count else 0)


def _between_ranks(programs: Sequence[tuple[Event, ...]], max_in_flight: int | None) -> int:
    """Say whether the graphs of all ranks fit together; the number of findings."""
    from inductor_passes.verify import certify

    certification = certify(programs, max_in_flight=max_in_flight)
    _print("between ranks", list(certification.findings))
    for what, lines in (("proven", certification.proven), ("assumed", certification.assumed)):
        for line in lines:
            say(f"  {what}: {printable(line)}")
    return len(certification.findings)


def _program(path: Path, file: GraphFile) -> tuple[Event, ...]:
    """What a graph communicates, with the ranks of its groups as the file has them."""
    from inductor_passes.verify import snapshot

    try:
        events = snapshot(file.graph).events
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from error
    return tuple(dataclasses.replace(e, ranks=file.groups.get(e.group, e.ranks)) for e in events)


def _check_donated(names: Sequence[str], files: Sequence[GraphFile]) -> None:
    inputs = list(dict.fromkeys(n.name for file in files for n in file.graph.nodes if n.op == "placeholder"))
    for name in names:
        if name not in inputs:
            known = ", ".join(map(printable, inputs)) or "none"
            raise CommandError(f"--donated is {shown(name)}; the graph inputs are: {known}")


def _load(path: Path) -> GraphFile:
    from inductor_passes.verify.graph_json import GraphFileError, load

    try:
        return load(path)
    except GraphFileError as error:
        # The loader says the file's name; which one of several that is, only its path tells.
        raise CommandError(str(error).replace(path.name, str(path), 1)) from error


def _print(where: str, findings: list[Finding]) -> None:
    count = len(findings)
    found = "nothing found" if not count else "1 finding" if count == 1 else f"{count} findings"
    say(f"{printable(where)}: {found}")
    for f in findings:
        source = f" ({f.source})" if f.source else ""
        say(f"  {printable(f'{f.rule}: {f.message}{source}')}")
