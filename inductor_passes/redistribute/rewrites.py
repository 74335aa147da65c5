"""The catalogue. Where two rewrites save equally much, the one that comes first here is applied first.

What makes collectives simple comes first, then what removes them, then what makes them smaller, then what makes
reductions fewer, then what merges neighbours.
"""

from __future__ import annotations

from .rewrite_r0_repeated_waits import WaitOnce
from .rewrite_r1_nested_gathers import MergeNestedGathers
from .rewrite_r2_nested_reductions import MergeNestedReductions
from .rewrite_r3_nested_scatters import MergeNestedScatters
from .rewrite_r4_scatter_first import ReduceOnShards
from .rewrite_r5_added_reductions import AddBeforeReducing
from .rewrite_r6_reduced_slices import ReduceWhatIsKept
from .rewrite_r7_cast_before_gather import CastBeforeGather
from .rewrite_r8_uneven_packs import PackOnce
from .rewrite_r9_permuted_rows import KeepRowsPermuted
from .rewrite_r10_packs_that_are_views import ViewInsteadOfPack
from .rewrite_r11_planned_chains import PlanChains
from .rewrite_r12_visible_exchange import VisibleExchange
from .rewrite_r13_pinned_storage import ReleaseStorage
from .rewrite_r14_duplicate_gathers import ShareGathers
from .rewrite_r15_needless_collectives import DropNeedless
from .rewriting import Rewrite

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
    PlanChains(),
    VisibleExchange(),
    ViewInsteadOfPack(),
    PackOnce(),
    KeepRowsPermuted(),
    ReleaseStorage(),
)
