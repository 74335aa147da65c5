"""What decides a node's role besides the operator that it calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from inductor_passes.verify.facts.operators import Values

_ARITHMETIC = frozenset({abs, bool, divmod, float, int, len, max, min, pow, range, round, slice, sum})


def leaves_the_device(node: torch.fx.Node, values: Values) -> bool:
    """Whether data go from an accelerator to the host."""
    if not values.accelerated or "cpu" not in values.of(node).devices:
        return False
    return any(device not in ("cpu", "meta") for n in node.all_input_nodes for device in values.of(n).devices)


def only_calculates(target: Any) -> bool:
    """Whether a Python function is arithmetic on numbers, and has no effect when it gets none but numbers."""
    module = str(getattr(target, "__module__", "") or "")
    if module in ("_operator", "operator", "math", "sympy") or str(getattr(target, "__name__", "")).startswith("sym_"):
        return True
    known = ("torch.fx.experimental.sym_node", "torch.utils._sympy", "torch.sym_")
    return target in _ARITHMETIC or module.startswith(known)


def tensors(value: Any) -> Iterable[torch.Tensor]:
    """All tensors inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
