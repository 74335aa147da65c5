"""How commands talk: printable text, one sentence on stderr for a failure, and files that are written or named.

A command raises :class:`CommandError`; :func:`guarded` (around every command) turns it, and whatever else goes wrong,
into a sentence and an exit status. Nothing that a command was given ends in a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inductor_passes.records.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 2
#: Characters of a message on stderr.
MOST_SAID = 2000


# Typer has click's classes from click or as its own copy, depending on its version.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class CommandError(_ClickException):  # type: ignore[misc]
    """What the user asked for cannot be done; the message names what is wrong and what was expected."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = status


def guarded(run: Callable[[], Any]) -> int:
    """Call ``run`` (a click command that raises instead of exiting); the exit status of the process."""
    _never_refuse_characters()
    try:
        status = run()
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        return 130
    except (BrokenPipeError, SystemExit) as error:
        # Typer makes an exit of it, with a status that says something else.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Whoever read us has seen enough (`| head`); what is left in the buffer goes nowhere.
        _discard_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Say in one sentence what happened."""
    status = getattr(error, "exit_code", FAILED)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return int(status)
    if type(error).__name__ == "Abort":
        return 130
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "") or "inductor-passes"
    if isinstance(error, (CommandError, OSError)):
        sentence = reason(error)
    elif hasattr(error, "format_message"):
        # A usage error; click has the option's name.
        sentence = error.format_message()
    elif isinstance(error, (MemoryError, RecursionError)):
        sentence = "the input needs more memory or deeper nesting than there is; expected a smaller one"
    else:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
        sentence = f"internal error ({type(error).__name__}{where}: {error}); please report it with the input"
    with contextlib.suppress(OSError, ValueError):
        print(f"{command}: {_cut(printable(' '.join(sentence.split())))}", file=sys.stderr, flush=True)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _discard_output()
    return int(status)


def _cut(sentence: str) -> str:
    """A sentence that repeats what was typed repeats it however long that is."""
    return sentence if len(sentence) <= MOST_SAID else f"{sentence[: MOST_SAID // 2]} ... {sentence[-MOST_SAID // 2 :]}"


def reason(error: Exception) -> str:
    """An exception's message; for the operating system's errors which file, and what it said."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__


def say(text: str, *, err: bool = False) -> None:
    """Print lines."""
    print(printable_lines(text), file=sys.stderr if err else sys.stdout)


def console(width: int = 180) -> Console:
    """Where tables go; a file or a pipe gets ``width`` columns, as folding a table at 80 makes it unreadable."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Whatever is rendered, only the console's own styles reach the terminal as escapes."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable_lines(segment.text))

    result = PrintableConsole(highlight=False, markup=False, emoji=False)
    return result if result.is_terminal else PrintableConsole(highlight=False, markup=False, emoji=False, width=width)


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        CommandError: it cannot be written; names the file and why.
    """
    with naming(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns what goes wrong while ``path`` is written into a :class:`CommandError` that names it."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise CommandError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        if "null" not in str(error):
            raise
        raise CommandError(f"{path} cannot be written: a path has no zero bytes") from error


def _never_refuse_characters() -> None:
    """A terminal or file of another encoding gets escapes instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _discard_output() -> None:
    """What is left in the buffers must not raise again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
