"""What a report says about narrowed messages, held against its settings and against the graph."""

from __future__ import annotations

from collections import Counter

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.engine.compilation import Compilation
from inductor_passes.ir.view import GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import PassReport, Reason, Verdict

#: Types in which messages travel.
_NARROW = {torch.uint8, torch.bfloat16}
#: Reasons that docs/compress.md names, but for compute that hides a message.
_LEFT_ALONE = {
    *(Reason.NOT_PROFITABLE, Reason.DISABLED, Reason.DIFFERENT_GROUP, Reason.NUMERICS, Reason.UNSUPPORTED),
    *(Reason.MIXED_REDUCE_OP, Reason.RANGE, Reason.RANKS_DIFFER),
}
#: In the verifier's message about an operator that is not in place but may become so.
IN_PLACE = "Inductor may do it in place"


def wrong_claims(done: Compilation, gm: torch.fx.GraphModule, settings: PassConfig, apart: bool) -> str:
    """What a report says and is not so; "" when there is nothing.

    Args:
        apart: no later pass merges or splits messages: each one that was narrowed is in the graph as it was sent.
    """
    report = done.report
    passes = [one for one in report.passes if one.name == "compress"]
    if settings.narrowing.is_off:
        return "compress is off, and the report has something about it" if passes or report.narrowed else ""
    (one,) = passes
    if said := _not_as_asked(one, settings):
        return said
    applied = [d for d in one.decisions if d.verdict is Verdict.APPLIED]
    # A graph in which nothing is narrowed may have lost its calls of ``sent``.
    kept = one.changed and one.rolled_back is None and bool(applied)
    if len(report.narrowed) != (len(applied) if kept else 0) or (not kept and applied):
        return f"{len(report.narrowed)} messages are reported as narrowed, and {len(applied)} decisions say so"
    about = [note for note in report.notes if note.startswith("compress: ")]
    nothing = [note for note in about if note.startswith("compress: 0 of ")]
    asked = one.rolled_back is None and any(d.reason is not Reason.DISABLED for d in one.decisions)
    if kept != (len(about) > len(nothing)) or len(nothing) != (asked and not kept):
        return f"the notes {report.notes} are not those of {len(applied)} narrowed messages"
    if kept and (said := _totals(one, done)):
        return said
    here = {node.name for node in gm.graph.nodes}
    for message in report.narrowed:
        if message.bytes_after >= message.bytes_before:
            return f"{message.name} is narrowed from {message.bytes_before} to {message.bytes_after} bytes"
        if message.bound > float(settings.narrowing.error):
            return f"{message.name} errs by up to {message.bound}, where {settings.compress_error} is allowed"
        if message.name in here:
            return f"{message.name} is narrowed, and still there"
    return _sent(done, gm) if apart else ""


def _not_as_asked(one: PassReport, settings: PassConfig) -> str:
    """What was left alone or undone for a reason that the documentation does not name.

    Where a type is asked for, memory alone undoes it, or that Inductor might do an operator in place now; compute that
    hides a message is no reason to leave it.
    """
    modes = {mode for _, mode in settings.narrowing.rules} - {"off"}
    reasons = {d.reason for d in one.decisions if d.verdict is not Verdict.APPLIED}
    if one.rolled_back is None:
        unknown = reasons - _LEFT_ALONE - ({Reason.HIDDEN} if "auto" in modes else set())
        return f"messages are left alone for {unknown}" if unknown else ""
    if "auto" not in modes and one.rolled_back is not Reason.OVER_BUDGET and IN_PLACE not in one.detail:
        return f"compress={settings.compress!r} was undone: {one.rolled_back} ({one.detail})"
    return ""


def _totals(one: PassReport, done: Compilation) -> str:
    narrowed = done.report.narrowed
    sums = {
        "narrowed": len(narrowed),
        "bytes_before": sum(n.bytes_before for n in narrowed),
        "bytes_after": sum(n.bytes_after for n in narrowed),
        "link_before_ns": sum(n.link_before_ns for n in narrowed),
        "link_after_ns": sum(n.link_after_ns for n in narrowed),
    }
    found = {key: one.metrics[key] for key in sums}
    return f"the totals {found} are not {sums}" if found != sums else ""


def _sent(done: Compilation, gm: torch.fx.GraphModule) -> str:
    """Whether the messages are as long as the report says; a reduction to all ranks sends its own twice."""
    messages = Counter(
        c.input_bytes or 0
        for c in GraphView(gm.graph).collectives
        if c.dtypes[0] in _NARROW and c.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
    )
    said = Counter(n.bytes_after // (2 if n.kind == "all_reduce" else 1) for n in done.report.narrowed)
    missing = said - messages
    return f"messages of {sorted(missing)} bytes are reported; there are {sorted(messages)}" if missing else ""
