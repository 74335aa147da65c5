"""Moving blocks in and out of local tensors: ascending index intervals per dimension, row-major memory."""

from __future__ import annotations

import itertools
import math

import torch

from inductor_passes.redistribute.spec import Block, Intervals, intersect, length


def shape_of(block: Block) -> tuple[int, ...]:
    """Extents of a block."""
    return tuple(length(part) for part in block)


def numel(block: Block) -> int:
    """Elements of a block."""
    return math.prod(shape_of(block))


def common(a: Block, b: Block) -> Block:
    """The elements in both."""
    return tuple(intersect(x, y) for x, y in zip(a, b))


def offsets(have: Intervals, want: Intervals) -> list[tuple[int, int]]:
    """(local offset, length) in the index list ``have`` of every run of ``want``, which ``have`` must contain."""
    runs: list[tuple[int, int]] = []
    passed = 0
    k = 0
    for start, stop in have:
        while k < len(want) and want[k][1] <= start:
            k += 1
        j = k
        while j < len(want) and want[j][0] < stop:
            lo, hi = max(start, want[j][0]), min(stop, want[j][1])
            at = passed + lo - start
            if runs and runs[-1][0] + runs[-1][1] == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + hi - lo)
            else:
                runs.append((at, hi - lo))
            j += 1
        passed += stop - start
    return runs


def select(tensor: torch.Tensor, have: Block, want: Block) -> torch.Tensor:
    """The part ``want`` of a tensor that holds ``have``: a view where it can be one."""
    for d, (a, b) in enumerate(zip(have, want)):
        if a == b:
            continue
        runs = offsets(a, b)
        pieces = [tensor.narrow(d, at, n) for at, n in runs]
        if not pieces:
            tensor = tensor.narrow(d, 0, 0)
        else:
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=d)
    return tensor


def place(out: torch.Tensor, block: Block, piece: torch.Tensor, part: Block) -> None:
    """Write ``piece``, which holds ``part``, to its place in ``out``, which holds ``block``."""
    per_dim = []
    for a, b in zip(block, part):
        done = 0
        runs = []
        for at, n in offsets(a, b):
            runs.append((at, done, n))
            done += n
        per_dim.append(runs)
    for box in itertools.product(*per_dim):
        to, source = out, piece
        for d, (at, done, n) in enumerate(box):
            to = to.narrow(d, at, n)
            source = source.narrow(d, done, n)
        to.copy_(source)
