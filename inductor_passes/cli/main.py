"""The command ``inductor-passes``. A sub-command is imported when it runs, so that ``--help`` needs none of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from inductor_passes import __version__
from inductor_passes.cli.terminal import guarded

#: Sub-command -> (module with a typer ``app``, one line for the overview).
COMMANDS = {
    "report": ("inductor_passes.cli.report", "What happened to each graph of a TORCH_TRACE directory, and why."),
    "simulate": ("inductor_passes.cli.simulate", "Plan a captured graph again for other links, budgets and devices."),
    "check": ("inductor_passes.cli.check", "Verify graph files, alone, against a reference, or between ranks."),
    "calibrate": ("inductor_passes.cli.calibrate", "Measure this machine's links once and write a cost profile."),
    "doctor": ("inductor_passes.cli.doctor", "Check the environment and say what will work."),
}


class LazyGroup(TyperGroup):
    """Knows its sub-commands by name and imports one only to run it.

    Contexts are typed ``Any``: their class is click's or typer's own copy of it, depending on typer's version.
    """

    _overview = False

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line; ends the process unless ``standalone_mode`` is off."""
        main: Any = super().main
        run = functools.partial(main, args, *rest, standalone_mode=False, **extra)
        return run() if not standalone_mode else sys.exit(guarded(run))

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, line = COMMANDS[cmd_name]
        if self._overview:
            return TyperCommand(cmd_name, help=line)
        app: Any = importlib.import_module(module).app
        return typer.main.get_command(app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._overview = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._overview = False


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    help="Compiler passes for torch.compile that make distributed graphs faster: reports and tools.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"inductor-passes {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
