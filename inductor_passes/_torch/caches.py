"""Removing entries that must not be used from Inductor's caches of compiled graphs."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

#: Between the statement in a generated module and the look-up there are some 20 frames.
_MAX_FRAMES = 100


def forget_cached_entry() -> int:
    """Delete the local cache entry whose generated module is being loaded right now; the number of files deleted.

    Called while the module is executed. An entry that is refused would be found first again and again. Does nothing
    where this torch keeps its entries in another way: it then compiles the graph at every start.
    """
    frame: FrameType | None = sys._getframe(1)
    code, deleted = "", 0
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if not code and isinstance(frame.f_globals.get("key"), str) and "__file__" in frame.f_globals:
            code = frame.f_globals["key"]
        name, values = frame.f_code.co_name, frame.f_locals
        if code and name == "load_with_key":
            deleted += _delete("torch._inductor.codecache", "FxGraphCache", values.get("key"), code)
        elif code and name in ("try_load", "load") and "cache_key" in values:
            module = "torch._functorch._aot_autograd.autograd_cache"
            deleted += _delete(module, "AOTAutogradCache", values["cache_key"], code)
        frame = frame.f_back
    return deleted


def _delete(module: str, cache: str, key: object, code: str) -> int:
    """Delete the entries of a cache under ``key`` that hold the generated code ``code``."""
    try:
        folder = Path(getattr(importlib.import_module(module), cache)._get_tmp_dir_for_key(key))
        # An entry holds its code's key as text.
        wrong = [path for path in folder.iterdir() if path.is_file() and code.encode() in path.read_bytes()]
        for path in wrong:
            os.unlink(path)
        return len(wrong)
    except (ImportError, AttributeError, OSError, TypeError):
        return 0


def forget_loaded_modules() -> None:
    """Make Inductor execute a generated module again the next time that it is loaded in this process."""
    loaded = _loaded_modules()
    if loaded is not None:
        loaded.clear()


def forget_loaded_module(module: dict[str, Any]) -> None:
    """:func:`forget_loaded_modules` for one, given by its globals."""
    loaded = _loaded_modules() or {}
    for key, one in list(loaded.items()):
        if vars(one) is module:
            del loaded[key]


def _loaded_modules() -> dict[str, Any] | None:
    try:
        from torch._inductor.codecache import PyCodeCache
    except ImportError:
        return None
    loaded: Any = getattr(PyCodeCache, "modules_no_attr", None)
    return loaded if isinstance(loaded, dict) else None
