"""Whether anybody can still call generated code.

Torch calls a graph through the entry of its generated module, which the module's own globals hold as well. Where nobody
else refers to that entry, ``torch._dynamo.reset()`` (or what else throws graphs away) has been everywhere: no compiled
function, no backward that is still to run, and no call under way.
"""

from __future__ import annotations

import sys
from typing import Any

#: What refers to the entry of a generated module is only known where every reference is counted.
_COUNTED = getattr(sys, "_is_gil_enabled", lambda: True)() and hasattr(sys, "getrefcount")


def nobody_calls(module: dict[str, Any]) -> bool:
    """Whether it is certain that nobody can call the graph of a generated module any more.

    What torch threw away and Python has not collected yet counts as a caller.

    Args:
        module: its globals.
    """
    entry = module.get("call")
    # A plain function is also what a stand-in puts its code into: it has other references.
    if not _COUNTED or entry is None or not hasattr(entry, "__self__"):
        return False
    del entry
    return _references(module) <= _ALONE


def _references(module: dict[str, Any]) -> int:
    entry = module["call"]
    return sys.getrefcount(entry)


_ALONE = _references({"call": object()})
