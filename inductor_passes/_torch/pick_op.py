"""``inductor_passes::pick``: of every row the column that an index names, where a rank holds some columns only.

What a loss over classes reads of its logits is one element per row. A rank that holds columns ``[first, first + n)``
reads it where it is among them, and gives 0 elsewhere: over the ranks these add up to the element. In aten's operators
this is a comparison of every column with the index; here it is one read per row.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define("pick(Tensor values, Tensor columns, Tensor index, int of) -> Tensor")


def _pick(values: torch.Tensor, columns: torch.Tensor, index: torch.Tensor, of: int) -> torch.Tensor:
    """``where(columns == index, values, 0).sum(-1, keepdim=True)``.

    Args:
        values: ``[*rows, n]``.
        columns: ``[n]`` consecutive whole numbers.
        index: ``[*more, *rows, 1]``.
        of: how many columns the ranks have together.

    Raises:
        RuntimeError: an index is none of these: as a read of the whole tensor does (on a device, as that does there).
    """
    within = ((index >= 0) & (index < of)).all()
    torch._assert_async(within, f"index out of bounds: a row names none of the {of} columns that the ranks hold")
    at = index - columns[0]
    inside = (at >= 0) & (at < columns.shape[0])
    rows = values.expand(*index.shape[:-1], values.shape[-1])
    found = rows.gather(-1, at.clamp(0, columns.shape[0] - 1))
    return torch.where(inside, found, torch.zeros((), dtype=values.dtype, device=values.device))


def _shape(values: torch.Tensor, columns: torch.Tensor, index: torch.Tensor, of: int) -> torch.Tensor:
    return values.new_empty(index.shape)


_LIBRARY.impl("pick", _pick, "CompositeExplicitAutograd")
_LIBRARY.impl("pick", _shape, "Meta")
OPERATOR = torch.ops.inductor_passes.pick
