"""The rewrites in the order in which the pipeline runs them.

What removes collectives comes first, then what makes them smaller, then what makes reductions fewer, then what merges
neighbours: each enlarges what the next can match.
"""

from __future__ import annotations

from collections.abc import Callable

from inductor_passes.pipeline import Pass
from inductor_passes.redistribute.rewrite_r1_nested_gathers import MergeNestedGathers
from inductor_passes.redistribute.rewrite_r2_nested_reductions import MergeNestedReductions
from inductor_passes.redistribute.rewrite_r3_nested_scatters import MergeNestedScatters
from inductor_passes.redistribute.rewrite_r4_scatter_first import ReduceOnShards
from inductor_passes.redistribute.rewrite_r5_added_reductions import AddBeforeReducing
from inductor_passes.redistribute.rewrite_r7_cast_before_gather import CastBeforeGather
from inductor_passes.redistribute.rewrite_r14_duplicate_gathers import ShareGathers
from inductor_passes.redistribute.rewrite_r15_needless_collectives import DropNeedless

REWRITES: tuple[Callable[..., Pass], ...] = (
    DropNeedless,
    ShareGathers,
    CastBeforeGather,
    AddBeforeReducing,
    ReduceOnShards,
    MergeNestedScatters,
    MergeNestedReductions,
    MergeNestedGathers,
)
