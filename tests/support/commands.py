"""Calling commands in this process and in others, and a trace to give them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from inductor_passes.cli.main import app
from inductor_passes.records.text import printable
from tests.support.processes import ROOT
from tools.fuzzing import command_corpus as real

#: Sets a window's title, clears the screen, changes the colour, turns the direction of text.
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def sentence(done: Result, *parts: str) -> str:
    """The one line on stderr; nothing on it or on stdout steers a terminal."""
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert "Traceback" not in done.output and "internal error" not in done.stderr, done.stderr
    for text in (done.stdout, done.stderr):
        assert all(c == "\n" or printable(c) == c for c in text), repr(text)
    (line,) = done.stderr.strip().splitlines()
    for part in parts:
        assert part in line, line
    return line


def shows_text_only(done: Result) -> bool:
    """Whether nothing that was printed steers a terminal."""
    return all(c == "\n" or printable(c) == c for c in done.stdout + done.stderr)


def write_trace(folder: Path, change: Callable[[real.Record], None] | None = None) -> Path:
    """A trace of two graphs on one rank; ``change`` may damage each record."""
    folder.mkdir()
    records = real.corpus().logs[0]
    for record in records:
        if change is not None:
            change(record)
    (folder / "dedicated_log_torch_trace_rank_0_x.log").write_bytes(real.log_bytes(records))
    return folder


def in_a_process(*arguments: object, limit_bytes: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with bounded memory when a limit is given."""
    code = "import sys; from inductor_passes.cli.main import app; app()"
    if limit_bytes:
        code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit_bytes},) * 2); {code}"
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 300}
    settings["env"] = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, **{**settings, **options}, check=False)
