"""Files that are written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Make a file, and its folder, of what ``write`` writes. Nobody finds half of it, an error leaves what was there.

    Args:
        write: gets the path of another file in the same folder, which ranks of several hosts may share; ``path`` itself
            where that is no file but a device or a pipe.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        write(partial)
        os.replace(partial, path)
