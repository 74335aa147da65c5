"""Scripts in processes of their own that begin with torch and this package imported: forked, as ranks are.

For tests whose subject is another process: what it finds in a cache, what it leaves in a trace. Those whose subject is
what a process imports start an interpreter.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import LATE, forks
from tests.support.processes import LIMIT_S
from tests.support.ranks import FORKED

_count = itertools.count()


@dataclass(frozen=True)
class Ended:
    """How a script ended, and what it wrote to stdout and stderr."""

    returncode: int
    output: str

    def result(self) -> Any:
        """What the script printed as JSON behind ``RESULT``."""
        assert self.returncode == 0, self.output[-3000:]
        line = next(line for line in self.output.splitlines() if line.startswith("RESULT "))
        return json.loads(line.removeprefix("RESULT "))


def run_script(code: str, *arguments: object, **variables: str) -> Ended:
    """Run ``code`` as ``python -c`` would, with ``arguments`` in ``sys.argv``.

    Of two scripts in succession each has another seed of hashes.

    Args:
        variables: of ``forked.LATE`` only.
    """
    late = {key: os.environ[key] for key in LATE if key in os.environ}
    chosen = {**FORKED[0], **late, **variables}
    server = forks(next(_count), chosen, FORKED)
    assert server is not None, f"some of {sorted(variables)} are read too early"
    ours, theirs = socket.socketpair()
    with tempfile.NamedTemporaryFile(prefix="script_", suffix=".log") as log, ours:
        with theirs:
            child = server.start(__name__, "serve", theirs.fileno(), log.name, chosen)
        ours.sendall(json.dumps([code, [str(a) for a in arguments], sys.path]).encode())
        ours.shutdown(socket.SHUT_WR)
        status = child.wait(LIMIT_S)
        return Ended(status, Path(log.name).read_text(errors="replace"))


def serve(descriptor: int) -> None:
    """In the forked process: take a script, run it and end."""
    with socket.socket(fileno=descriptor) as given:
        code, arguments, sys.path[:] = json.load(given.makefile())
    sys.argv[1:] = arguments
    from tests.support.joint_kernels import kernels_together

    status = 1
    try:
        with kernels_together():
            exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    # A forked process ends without what an interpreter does at its end.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
