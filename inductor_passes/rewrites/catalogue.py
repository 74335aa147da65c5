"""The catalogue. Where two rewrites save equally much, the one that comes first here is applied first.

What makes collectives simple comes first, then what removes them, then what makes them smaller, then what makes
reductions fewer, then what merges neighbours.
"""

from __future__ import annotations

from inductor_passes.rewrites.r0_repeated_waits import WaitOnce
from inductor_passes.rewrites.r1_nested_gathers import MergeNestedGathers
from inductor_passes.rewrites.r2_nested_reductions import MergeNestedReductions
from inductor_passes.rewrites.r3_nested_scatters import MergeNestedScatters
from inductor_passes.rewrites.r4_scatter_first import ReduceOnShards
from inductor_passes.rewrites.r5_added_reductions import AddBeforeReducing
from inductor_passes.rewrites.r6_reduced_slices import ReduceWhatIsKept
from inductor_passes.rewrites.r7_cast_before_gather import CastBeforeGather
from inductor_passes.rewrites.r8_uneven_packs import PackOnce
from inductor_passes.rewrites.r9_permuted_rows import KeepRowsPermuted
from inductor_passes.rewrites.r10_packs_that_are_views import ViewInsteadOfPack
from inductor_passes.rewrites.r11_planned_chains import PlanChains
from inductor_passes.rewrites.r12_visible_exchange import VisibleExchange
from inductor_passes.rewrites.r13_pinned_storage import ReleaseStorage
from inductor_passes.rewrites.r14_duplicate_gathers import ShareGathers
from inductor_passes.rewrites.r15_needless_collectives import DropNeedless
from inductor_passes.rewrites.r16_rows_on_shards import RowsOnShards
from inductor_passes.rewrites.r17_planned_redistributions import PlanRedistributions
from inductor_passes.rewrites.r18_columns_on_shards import ColumnsOnShards
from inductor_passes.rewrites.work import Rewrite

REWRITES: tuple[Rewrite, ...] = (
    WaitOnce(),
    DropNeedless(),
    ShareGathers(),
    CastBeforeGather(),
    AddBeforeReducing(),
    ReduceOnShards(),
    ReduceWhatIsKept(),
    MergeNestedScatters(),
    MergeNestedReductions(),
    MergeNestedGathers(),
    PlanRedistributions(),
    PlanChains(),
    VisibleExchange(),
    ViewInsteadOfPack(),
    PackOnce(),
    ColumnsOnShards(),
    RowsOnShards(),
    KeepRowsPermuted(),
    ReleaseStorage(),
)
