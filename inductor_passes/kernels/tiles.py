"""Tile sizes by device and dtype: a table, so that all ranks launch alike and nothing is measured while running."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """How a matmul is cut.

    Attributes:
        m / n / k: a tile of the result, and the step along the contraction.
        group: rows of tiles that are taken together, column by column, for reuse in the cache.
        warps / stages: launch parameters; without meaning in the interpreter.
    """

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"tile size {name}={size}; expected a power of two of at least 16")


_INTERPRETED = Tiles(32, 32, 32, group=2)
_HALF = Tiles(128, 256, 64, warps=8, stages=3)
_SINGLE = Tiles(128, 128, 32, warps=8, stages=3)
#: Of a block's shared memory, what Triton needs besides operands.
_RESERVED_BYTES = 1 << 10


def tiles_for(device: torch.device, dtype: torch.dtype, shared_bytes: int | None = None) -> Tiles:
    """The tiles of a matmul of ``dtype`` on ``device``, with as many stages as fit, up to the fastest number.

    Args:
        shared_bytes: shared memory that one block may have; default: the device's.
    """
    if device.type == "cpu":
        return _INTERPRETED
    if shared_bytes is None:
        properties = torch.cuda.get_device_properties(device)
        shared_bytes = int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))
    tiles = _HALF if dtype.itemsize <= 2 else _SINGLE
    stage = (tiles.m + tiles.n) * tiles.k * dtype.itemsize
    return replace(tiles, stages=max(1, min(tiles.stages, (shared_bytes - _RESERVED_BYTES) // stage)))


def precision() -> str:
    """How float32 operands are multiplied: as torch's own matmuls are."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def widened(operand: torch.Tensor) -> bool:
    """Whether operands become float32 before they are multiplied: the interpreter multiplies no bfloat16."""
    return operand.device.type == "cpu" and operand.dtype is torch.bfloat16


def programs_for(device: torch.device, tiles: int, reserved: int = 0) -> int:
    """How many persistent programs to launch for so many tiles.

    As few as need no more rounds than all multiprocessors but ``reserved`` would: one more that has a tile in the last
    round only takes a multiprocessor from whoever sends meanwhile.
    """
    if device.type == "cpu":
        return min(2, tiles)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    rounds = -(-tiles // max(1, count - reserved))
    return -(-tiles // rounds)
