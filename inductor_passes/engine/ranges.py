"""For which sizes a plan of a graph with symbolic sizes holds, for people."""

from __future__ import annotations

import torch
import torch.fx

from inductor_passes import _torch

#: Symbols that the note names.
_MOST = 6


def notes(graph: torch.fx.Graph) -> list[str]:
    """The symbols of a graph's inputs, their bounds and divisors, and the hints that the plan is priced at."""
    found: dict[str, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                for name, said in _symbols(size):
                    found.setdefault(name, said)
    if not found:
        return []
    named = [f"{name} {said}" for name, said in sorted(found.items())]
    more = f", and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return [f"holds for {', '.join(named[:_MOST])}{more}; durations and memory are those of the example"]


def _symbols(size: torch.SymInt) -> list[tuple[str, str]]:
    found = []
    for symbol in _torch.size_expression(size).free_symbols:
        low, high, period = _torch.symbol_range(size, symbol)
        bounds = f"from {low}" if high is None else f"from {low} to {high}"
        example = _torch.size_hint(size) if _torch.size_expression(size) == symbol else None
        steps = f" in steps of {period}" if period > 1 else ""
        found.append((str(symbol), bounds + steps + ("" if example is None else f" (example {example})")))
    return found
