"""The benchmarks behind one command; start it with ``tools/bench``.

Each subcommand prints a table and writes a page in Markdown, its figures as JSON and a chart as SVG, all with the
commit, versions, machine, date and command that they come from.
"""

from __future__ import annotations

import typer
from bench_async_tp import async_tp
from bench_best import best
from bench_compile import compile_time
from bench_gpu import gpu
from bench_link import link
from bench_packs import packs
from bench_plan import plan
from bench_record import provenance
from bench_redistribute import redistribute
from bench_scale import scale
from bench_summary import summary

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
app.command()(link)
app.command()(summary)
app.command()(plan)
app.command()(best)
app.command(name="compile")(compile_time)
app.command(name="async-tp")(async_tp)
app.command()(redistribute)
app.command()(packs)
app.command()(gpu)
app.command()(scale)

if __name__ == "__main__":
    provenance()
    app()
