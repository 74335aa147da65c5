"""The Triton kernel under its interpreter; the environment variable has to be there before Triton is imported."""

from __future__ import annotations

import torch

from inductor_passes.kernels import unpack as kernel

for rows, columns, firsts, widths, dtype in (
    (4, 30, [0, 7, 27], [7, 20, 3], torch.float32),
    (2, 5000, [10, 1034, 4000], [1024, 2049, 1], torch.bfloat16),
    (3, 64, [0, 5, 5], [5, 0, 6], torch.int64),
    (2, 400, [8 * k for k in range(40)], [8] * 40, torch.uint8),
):
    message = torch.randint(0, 100, (rows, columns)).to(dtype)
    results = kernel.unpacked(message, firsts, widths)
    for result, first, width in zip(results, firsts, widths, strict=True):
        assert result.is_contiguous() and torch.equal(result, message[:, first : first + width]), (first, width)
print("equal")
