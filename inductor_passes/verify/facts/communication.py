"""Which operators communicate, derived from their names and arguments.

A functional collective is named ``<kind><form>``. The form says whether its results are new memory, the operands
(``_``), or a buffer that is passed in (``_out``), and whether it takes several tensors (``_coalesced``). Any other
operator that takes a process group communicates in an unknown way.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch.fx

from inductor_passes import _torch

NAMESPACE = "_c10d_functional::"
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
#: Operators that communicate and compute in one call, until they are done.
_BLOCKING = re.compile(
    r"_dtensor::shard_dim_alltoall"
    r"|inductor_passes::((symm_)?(gathered_mm|mm_scattered)|all_reduce_residual_rms_norm)"
    r"|symm_mem::fused_(all_gather_(scaled_)?matmul|(scaled_)?matmul_reduce_scatter)"
)
#: The gather that gloo gets, see ``engine/gloo.py``.
_OWN_GATHER = "inductor_passes::all_gather"
_START = re.compile(rf"{NAMESPACE}({'|'.join(_KINDS)})(_coalesced)?(_out|_)?")
#: Names of arguments that are process groups.
_GROUPS = frozenset({"group", "group_name", "group_names", "process_group", "process_groups", "pg", "mesh"})


@dataclass(frozen=True)
class Form:
    """A functional collective's kind and form."""

    kind: str
    coalesced: bool
    in_place: bool
    out: bool


@functools.lru_cache(maxsize=1024)
def form_of(name: str) -> Form | None:
    """The form of the collective that an operator (``namespace::name``) issues; None when it issues none."""
    if name == _OWN_GATHER:
        return Form("all_gather", coalesced=False, in_place=False, out=False)
    match = _START.fullmatch(name)
    if match is None:
        return None
    return Form(_KINDS[match[1]], match[2] is not None, match[3] == "_", match[3] == "_out")


def is_wait(name: str) -> bool:
    """Whether an operator waits for collectives and transfers; its results are its operands."""
    return name in (NAMESPACE + "wait_tensor", NAMESPACE + "wait_tensors")


def blocks(name: str) -> bool:
    """Whether an operator is a collective that a rank leaves only when all ranks have entered it."""
    return _BLOCKING.fullmatch(name) is not None


def is_transfer(name: str) -> bool:
    """Whether an operator sends to or receives from single ranks."""
    return name.startswith(NAMESPACE) and name.endswith(("::isend", "::irecv", "::batch_p2p_ops"))


@functools.lru_cache(maxsize=4096)
def takes_a_group(target: object) -> bool:
    """Whether an operator overload takes a process group, or the name of one: then it communicates."""
    # A group of channels is a number.
    numbers = ("int", "Optional[int]")
    arguments = _torch.op_schema(target).arguments
    return any(argument.name in _GROUPS and str(argument.type) not in numbers for argument in arguments)


def received(name: str, arguments: dict[str, object]) -> list[torch.fx.Node | None]:
    """Per result of a transfer the buffer that it fills and returns, None where it sends."""
    if name.endswith("::batch_p2p_ops"):
        kinds, tensors = arguments.get("op_list"), arguments.get("tensors")
        if not isinstance(kinds, (list, tuple)) or not isinstance(tensors, (list, tuple)):
            return []
        return [_node(t) if "recv" in str(kind) else None for kind, t in zip(kinds, tensors)]
    return [_node(arguments.get("tensor")) if name.endswith("::irecv") else None]


def _node(value: object) -> torch.fx.Node | None:
    return value if isinstance(value, torch.fx.Node) else None
