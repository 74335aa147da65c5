"""What the rewrites make of small DTensor models, counted on their graphs, as a markdown table.

    tools/gen redistribute_models    # prints the table, writes docs/results/redistribute_models.md

Graphs are those that Inductor's last graph pass sees on rank 0 of a fake world; nothing is generated or run. Bytes are
sent per rank (ring model); copies are packs and unpacks around collectives.
"""

from __future__ import annotations

import torch
import typer

from tests.support.redistribute_models import MODELS, Count, counted, graphs_of
from tests.support.world import mesh_world
from tools.shared.launch import ROOT

TARGET = ROOT / "docs" / "results" / "redistribute_models.md"
HEAD = """# Redistributions of small models

Written by `tools/gen redistribute_models` with torch {version}.

Bytes are sent per rank (ring model), copies are the packs and unpacks around collectives. AG, RS, AR: all_gather,
reduce_scatter, all_reduce. `exact` keeps every bit; `reassociate` also sums in another order and rewrites the joint
graph.

| model | mesh | graph | | collectives | bytes | copies |
|---|---|---|---|---|---|---|
"""
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}


def row(name: str, mesh: tuple[int, ...], phase: str, what: str, count: Count) -> str:
    """One line of the table."""
    kinds = " ".join(f"{n} {SHORT[kind]}" for kind, n in sorted(count.collectives.items()))
    shape = "x".join(map(str, mesh))
    return f"| {name} | {shape} | {phase} | {what} | {kinds} | {count.bytes} | {count.copies} |\n"


def main() -> None:
    """Count and write."""
    lines = [HEAD.format(version=torch.__version__)]
    for name, (_, shape) in MODELS.items():
        with mesh_world(shape) as mesh:
            plain, joint = graphs_of(name, mesh), graphs_of(name, mesh, joint=True)
            for backward, phase in ((False, "forward"), (True, "backward")):
                before, exact = counted(plain, "exact", backward)
                _, most = counted(joint, "reassociate", backward)
                lines.append(row(name, shape, phase, "DTensor", before))
                lines.append(row("", shape, phase, "exact", exact))
                lines.append(row("", shape, phase, "reassociate", most))
    text = "".join(lines)
    TARGET.write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
