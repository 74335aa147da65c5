"""The table of all operators that only move elements, and which of them may change the element type on the way."""

from __future__ import annotations

from inductor_passes.verify.values.access import Rule
from inductor_passes.verify.values.joining import joined, stacked
from inductor_passes.verify.values.movement import RULES

MOVES: dict[str, Rule] = {**RULES, "aten::cat": joined, "aten::stack": stacked}
CASTS = frozenset(
    {"prims::convert_element_type", *(f"aten::{name}" for name in ("_to_copy", "to", "type_as", "copy"))}
)
