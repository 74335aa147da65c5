"""The benchmarks behind one command; start it with ``tools/bench``.

Each subcommand prints a table and writes a page in Markdown, its figures as JSON and a chart as SVG, all with the
commit, versions, machine, date and command that they come from.
"""

from __future__ import annotations

import typer

from tools.benchmarks.adopt import adopt
from tools.benchmarks.assemble import assemble
from tools.benchmarks.async_tp import async_tp
from tools.benchmarks.best import best
from tools.benchmarks.budget_scale import budget_scale
from tools.benchmarks.budgets import budgets
from tools.benchmarks.compile import compile_time
from tools.benchmarks.gpu import gpu
from tools.benchmarks.link import link
from tools.benchmarks.memory import memory
from tools.benchmarks.numerics import numerics
from tools.benchmarks.packs import packs
from tools.benchmarks.plan import plan
from tools.benchmarks.reach import reach
from tools.benchmarks.redistribute import redistribute
from tools.benchmarks.scale import scale
from tools.benchmarks.summary import summary
from tools.benchmarks.train import train_run
from tools.benchmarks.trainer import trainer
from tools.shared.record import provenance

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
app.command()(link)
app.command()(adopt)
app.command()(trainer)
app.command()(summary)
app.command()(plan)
app.command()(best)
app.command()(budgets)
app.command(name="budget-scale")(budget_scale)
app.command(name="compile")(compile_time)
app.command(name="async-tp")(async_tp)
app.command()(redistribute)
app.command()(reach)
app.command()(packs)
app.command()(memory)
app.command()(numerics)
app.command(name="train")(train_run)
app.command()(gpu)
app.command()(assemble)
app.command()(scale)

if __name__ == "__main__":
    provenance()
    app()
