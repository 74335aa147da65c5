"""Calls that Inductor's kernels make to operators: the FX node behind one, and its effects."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.fx

from inductor_passes import _torch
from inductor_passes.ir import ops


def origin_of(node: Any) -> torch.fx.Node | None:
    """The FX node that an extern kernel stands for, as far as it can be known.

    Inductor names none for a kernel with several results (attention, ``native_dropout``).
    """
    return _torch.snode_origin(node) or _torch.snode_call(node)


def is_call(node: Any) -> bool:
    """Whether a scheduler node calls an operator; a result taken out of a multi-output kernel does nothing itself."""
    return _torch.snode_kind(node) == "extern" and not any(packed for _, _, _, packed in _torch.snode_buffers(node))


def effect_channel(node: Any) -> str:
    """The effect channel (``ops.order_channel``) of a call; "" where nothing says what it calls."""
    origin, called = origin_of(node), _torch.snode_op(node)
    if origin is not None:
        return ops.order_channel(origin, ops.role(origin))
    return "" if called is None else ops.op_channel(called, ops.op_role(called))


def in_order(nodes: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(before, after) for calls that draw random numbers or have unknown effects, one behind the other as they are."""
    calls = [node for node in nodes if is_call(node) and effect_channel(node) in ("random", "fence")]
    return list(itertools.pairwise(calls))
