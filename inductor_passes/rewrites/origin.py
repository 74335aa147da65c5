"""Which call of the user's program a node was traced from.

Dynamo's graph has one node per call (``redistribute``, ``full_tensor``, ``add`` ...) and AOTAutograd notes on
everything that it traces from it, forward and backward, which one it was. A redistribution that such a call caused is
*explicit* when the call is one of DTensor's conversions, or ``simple_fsdp``'s for a parameter, and *implicit* when it
is any other operator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.parameters import is_managed

#: Calls that say what layout they want.
CONVERSIONS = frozenset({"redistribute", "full_tensor", "to_local", "from_local", "distribute_tensor"})
#: What :mod:`inductor_passes.simple_fsdp` issues for a parameter: the user asked for it by wrapping the model.
DATA_PARALLEL = "simple_fsdp"
#: What dynamo calls its operators. The call of such a node is the module that owns the parameter.
_UNSHARD = re.compile(r"(unshard|replicated)_default(_\d+)?")


@dataclass(frozen=True)
class Origin:
    """A call of the traced program.

    Attributes:
        name: of dynamo's node, unique in its graph; "" when it is not known.
        call: what was called, e.g. ``redistribute`` or ``add``.
        backward: whether the node belongs to the call's gradient.
    """

    name: str
    call: str
    backward: bool

    @property
    def explicit(self) -> bool:
        """Whether the call is one of DTensor's conversions, or of data parallelism that the user has put there."""
        return self.call in CONVERSIONS or self.call == DATA_PARALLEL

    def __str__(self) -> str:
        return f"{self.call}{' (backward)' if self.backward else ''}"


def origin_of(node: torch.fx.Node) -> Origin:
    """The call that a node was traced from; an origin without name when the graph does not say.

    What carries a managed parameter between the ranks that share it is data parallelism's, whatever the call is called.
    """
    found = _traced_from(node)
    if found.explicit or not is_managed(node):
        return found
    return Origin(found.name or node.name, DATA_PARALLEL, found.backward)


def _traced_from(node: torch.fx.Node) -> Origin:
    for key, backward in (("source_fn_stack", False), ("fwd_source_fn_stack", True)):
        stack = node.meta.get(key)
        if stack:
            name, call = stack[-1]
            return _origin(str(name), call, backward)
    sources = node.meta.get("from_node")
    if sources:
        return _origin(str(sources[-1].name), str(sources[-1].target), False)
    return Origin("", "", False)


def _origin(name: str, call: object, backward: bool) -> Origin:
    return Origin(name, DATA_PARALLEL if _UNSHARD.fullmatch(name) else _torch.called_name(call), backward)
