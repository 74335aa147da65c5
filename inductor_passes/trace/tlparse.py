"""Runs tlparse for the user, with our page linked from its index (``--custom-header-html``).

tlparse is a binary: one log in single-rank mode, a directory of ``rank_N`` logs with ``--all-ranks-html``. Its index
and each rank's index get the same header, so the page is put next to each of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from inductor_passes.trace.html import write_page
from inductor_passes.trace.reader import Trace

PAGE = "inductor_passes.html"
HEADER = f'<p><a href="{PAGE}"><b>inductor_passes report</b></a>: schedules before and after, exposed collectives</p>'
TIMEOUT_SECONDS = 600


class TlparseError(RuntimeError):
    """tlparse is missing or failed; the message says what to do."""


def find_tlparse() -> str:
    """Path of the tlparse binary: next to the running Python, else on PATH.

    Raises:
        TlparseError: there is none.
    """
    beside = Path(sys.executable).parent / "tlparse"
    found = str(beside) if beside.is_file() else shutil.which("tlparse")
    if found is None:
        raise TlparseError("tlparse is not installed: pip install 'inductor-passes[report]'")
    return found


def run_tlparse(source: Path, output: Path, trace: Trace, *, page: Path | None = None) -> Path:
    """Render ``source`` (a log, or a directory of logs) with tlparse into ``output`` and return its index.

    Args:
        output: a directory that does not exist yet or is empty.
        trace: what was read from ``source``, for our page.
        page: a page written already, copied instead of rendered again.

    Raises:
        TlparseError: no tlparse, ``output`` is in use, or tlparse failed (with what it printed).
    """
    binary = find_tlparse()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TlparseError(f"{output} exists and is not an empty directory; expected a new one")
    logs = [source] if source.is_file() else sorted(source.glob("*.log"))
    several = len(logs) > 1
    if several and not all("rank_" in log.name for log in logs):
        raise TlparseError(
            f"{source} holds {len(logs)} logs without a rank in their names; expected one, or one per rank. Give one "
            "log, or start the process group before the first compilation."
        )
    command = [binary, str(source if several else logs[0]), "-o", str(output), "--no-browser", "--overwrite"]
    command += ["--custom-header-html", HEADER] + (["--all-ranks-html"] if several else [])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL, check=False
    )
    index = output / "index.html"
    if done.returncode != 0 or not index.is_file():
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise TlparseError(f"tlparse failed with status {done.returncode}:\n{last}")
    folders = {found.parent for found in output.glob("*/index.html")} | {output}
    for folder in sorted(folders):
        if page is not None:
            shutil.copyfile(page, folder / PAGE)
        else:
            write_page(trace, folder / PAGE, title=source.name)
            page = folder / PAGE
    return index
