"""Which tests need a torch that traces messages between two ranks as operators: 2.12 and later do."""

from __future__ import annotations

import pytest
import torch

needs_transfers = pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "isend"), reason="this torch traces no messages between two ranks"
)
