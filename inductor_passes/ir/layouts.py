"""What is noted at the nodes of a redistribution: the layouts that the program's call is between.

One rank's graph does not show them. ``redistribute.noted`` enters them in Dynamo's graph, and torch copies them to
everything that it traces from the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Annotation (in ``meta["custom"]``) of all that was traced from a call that redistributes.
LAYOUTS_KEY = "inductor_passes_layouts"
#: The same of a node that a pass made in the place of one of these, or as a copy of one: it is not of the call.
COPY_KEY = "inductor_passes_layouts_of_copy"


class Noted(NamedTuple):
    """The layouts that one call of the program is between, as Dynamo's graph has them.

    Attributes:
        call: name of Dynamo's node, unique in its graph.
        mesh, ranks: shape of the mesh, and its global ranks in row-major order.
        shape: of the whole tensor.
        before, after: a placement per mesh dimension: ``S(0)``, ``_S(0, 2)``, ``R``, ``P(sum)``. A gradient is brought
            to ``before``.
        orders: of ``before`` and ``after``: (tensor dimension, mesh dimensions from the outermost cut on) where that
            is not left to right.
    """

    call: str
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    orders: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ((), ())


def noted(meta: Mapping[str, Any], key: str = LAYOUTS_KEY) -> Noted | None:
    """The note of the call that a node was traced from; None where there is none."""
    found = (meta.get("custom") or {}).get(key)
    return found if isinstance(found, Noted) else None


def as_copy(custom: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a node made for one with these."""
    return {COPY_KEY if name == LAYOUTS_KEY else name: value for name, value in custom.items()}
