"""Names for fused kernels that survive another compilation.

Inductor numbers its buffers, so a name like ``op17`` means something else as soon as one node is added. A kernel is
named after the FX nodes that it computes instead: ``mm_3``, ``add_2+relu_1``, ``mul_4..sum_9 (12, 5f0c)`` with the
number of nodes and a hash of their names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from inductor_passes import _torch
from inductor_passes.ir import ops

_DIGITS = re.compile(r"(\d+)")


def kernel_names(nodes: Sequence[Any]) -> list[str]:
    """A unique name per scheduler node, in their order."""
    seen: dict[str, int] = {}
    result = []
    for node in nodes:
        base = _base(node)
        count = seen[base] = seen.get(base, 0) + 1
        result.append(base if count == 1 else f"{base} #{count}")
    return result


def _base(node: Any) -> str:
    kind = _torch.snode_kind(node)
    origins = _torch.snode_origins(node)
    # A start that writes into its input counts its wait among what it computes.
    starts = [o.name for o in origins if ops.role(o) is ops.Role.START] if kind == "start" else []
    if len(starts) == 1:
        return starts[0]
    origin = _torch.snode_origin(node) if kind not in ("fused", "group") else None
    if origin is not None:
        return origin.name
    names = sorted({o.name for o in origins}, key=_natural)
    if not names:
        return f"{kind} kernel"
    if len(names) <= 2:
        return "+".join(names)
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:4]
    return f"{names[0]}..{names[-1]} ({len(names)}, {digest})"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]
