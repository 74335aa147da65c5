"""Which passes a configuration switches on, and in which order."""

from __future__ import annotations

from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.bucket.unpack_pass import UnpackPass
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.config import PassConfig
from inductor_passes.reorder.pass_ import ReorderPass
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewrites.scatter_by_exchange import ScatterByExchange
from inductor_passes.rewriting.contract import Pass

#: Passes that merge and reorder collectives and change nothing else about them.
NO_REWRITES = (BucketPass, UnpackPass, ReorderPass)
#: The other ones, as a plan file's ``left_out`` names them, and those of them that have parts.
REWRITES = (RewriteCollectives.name, AsyncTpPass.name, CompressPass.name, ScatterByExchange.name)
PARTED: tuple[Pass, ...] = (RewriteCollectives(), ScatterByExchange())


def passes_of(settings: PassConfig, like: tuple[tuple[str, ...], ...] = ()) -> list[Pass]:
    """The FX passes that a configuration switches on, in order.

    Args:
        like: messages in the order in which the graph has to send them, see ``messages.order_like``; empty: in any.
    """
    passes: list[Pass] = [RewriteCollectives(settings.tier)]
    if settings.uses_async_tp:
        overrides = settings.async_tp_overrides
        passes.append(
            AsyncTpPass(
                mode=settings.async_tp_mode,
                parts=overrides.parts,
                groups=overrides.groups,
                sizes=overrides.sizes,
                lowering=settings.async_tp_lowering,
            )
        )
    if not settings.narrowing.is_off:
        passes.append(CompressPass(settings.narrowing))
    if settings.bucket == "on":
        passes.append(BucketPass(exact=settings.numerics == "exact", call_copies=settings.codegen == "inductor"))
        if settings.unpack == "kernel":
            passes.append(UnpackPass())
    passes.append(ScatterByExchange(settings.tier))
    if settings.schedule == "on":
        passes.append(ReorderPass(settings.effort, like))
    return passes
