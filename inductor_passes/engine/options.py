"""Which of Inductor's options our passes need, on top of what the user has set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes import _torch
from inductor_passes.engine.ours import is_ours, users

_PASSES = "post_grad_custom_post_pass"
_DYNAMO_PASSES = "pre_grad_custom_pass"
_JOINT_PASSES = "joint_custom_post_pass"
_PARTITIONER = "custom_partitioner_fn"
_BEFORE_FUSION = "_pre_fusion_custom_pass"
_REORDER = "reorder_for_compute_comm_overlap"
_REORDER_PASSES = "reorder_for_compute_comm_overlap_passes"
_REUSE = "allow_buffer_reuse"
_PARTITIONS = "triton.reorder_for_reducing_graph_partitions"
#: On by default from torch 2.14 on: edits the order last, after us. We switch it off; forced on, it counts as
#: in-tree.
SIMPLE_OVERLAP = _torch.SIMPLE_OVERLAP


def has_simple_overlap() -> bool:
    """Whether this torch has the pass that edits the order after everybody else."""
    return _torch.inductor_option(SIMPLE_OVERLAP, None) is not None


@dataclass(frozen=True)
class Hooks:
    """What makes our objects for one configuration, each around the user's hooks that it is given.

    Attributes:
        joint_pass: None where no joint rewrite is on.
    """

    graph_pass: Callable[[Sequence[Any]], Any]
    dynamo_pass: Callable[[Sequence[Any]], Any]
    joint_pass: Callable[[Sequence[Any]], Any] | None
    partitioner: Callable[[Sequence[Any]], Any]
    scheduler: Callable[[], Any]
    fusion: Callable[[Sequence[Any]], Any]


def with_ours(own: dict[str, Any], lookup: Callable[[str], Any], hooks: Hooks) -> dict[str, Any]:
    """Options with our objects in them.

    Args:
        own: options that the user gives for this compilation; kept.
        lookup: current value of an option, those of ``own`` included; None when it does not exist.
        hooks: of ours.
    """
    result = dict(own)
    ours = ((_PASSES, hooks.graph_pass), (_DYNAMO_PASSES, hooks.dynamo_pass), (_JOINT_PASSES, hooks.joint_pass))
    for name, make in ours:
        existing = [p for one in _torch.as_pass_list(lookup(name)) for p in users(one)]
        if make is not None:
            result[name] = [*existing, make(())] if _torch.accepts_pass_lists() else make(existing)
    partitioner = lookup(_PARTITIONER)
    result[_PARTITIONER] = hooks.partitioner(() if partitioner is None else users(partitioner))
    if _BEFORE_FUSION in _torch.inductor_option_names():
        before_fusion = lookup(_BEFORE_FUSION)
        result[_BEFORE_FUSION] = hooks.fusion(() if before_fusion is None else users(before_fusion))
    foreign = [p for p in lookup(_REORDER_PASSES) or [] if not is_ours(p)]
    kept = foreign if lookup(_REORDER) else []
    result[_REORDER] = True
    result[_REORDER_PASSES] = [*kept, hooks.scheduler()]
    if _torch.inductor_option(_PARTITIONS) is not None and _PARTITIONS not in own:
        # With CUDA graphs Inductor would move nodes once more to have fewer partitions, after the order is planned.
        result[_PARTITIONS] = False
    if has_simple_overlap() and not own.get(SIMPLE_OVERLAP):
        result[SIMPLE_OVERLAP] = False
    if _REUSE not in own:
        # Generated code would keep freed buffers for later ones of equal size, up to what Inductor believes the peak
        # to be; it counts buffers that never leave a kernel, so that peak is above the budget that we keep.
        result[_REUSE] = False
    return result
