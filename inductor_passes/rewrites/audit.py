"""Every redistribution of a graph, for the report: where it comes from, what it is, what it sends before and after.

The collectives that were traced from one call of the user's program are one redistribution; collectives without a known
call are listed one by one. Bytes are those that one rank sends (ring model). What a rewrite made of several
redistributions is shared out among them by what they sent before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.fx

from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import wire_bytes
from inductor_passes.ir.ops import source_line
from inductor_passes.ir.parameters import names_of
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.records.errors import MeantError
from inductor_passes.report import Decision, GraphReport, RedistributionReport, Verdict
from inductor_passes.rewrites.origin import Origin, origin_of
from inductor_passes.rewrites.packing import joined_split
from inductor_passes.verify import Certificate


class LargeRedistributionError(MeantError, RuntimeError):
    """``redistribute="error-above:..."`` and an operator redistributes more than that without being asked to."""


def listed(view: GraphView) -> list[RedistributionReport]:
    """The redistributions of a graph before it is rewritten, in graph order."""
    by_origin: dict[tuple[object, ...], list[Collective]] = {}
    origins: dict[tuple[object, ...], Origin] = {}
    for collective in view.collectives:
        if collective.kind is CollectiveKind.BROADCAST:
            continue
        origin = origin_of(collective.start)
        # Calls in checkpointed regions have equal names: parameters tell them apart.
        names = names_of([collective.start])
        key = (origin.name, origin.backward, names) if origin.name else ("", collective.start.name)
        by_origin.setdefault(key, []).append(collective)
        origins[key] = origin
    return [_record(origins[key], found) for key, found in by_origin.items()]


def _record(origin: Origin, found: Sequence[Collective]) -> RedistributionReport:
    size = sum(sent_bytes(c) for c in found)
    return RedistributionReport(
        names=tuple(c.start.name for c in found),
        call=str(origin) if origin.name else "",
        explicit=origin.explicit if origin.name else None,
        source=next((line for c in found if (line := source_line(c.start))), ""),
        placements=tuple(_placements(c) for c in found),
        bytes_before=size,
        bytes_after=size,
        parameters=names_of(c.start for c in found),
    )


def sent_bytes(collective: Collective) -> int:
    """Bytes that one rank sends, by hint; 0 without one."""
    if not collective.group.size:
        return 0
    return wire_bytes(
        collective.kind, collective.input_bytes or 0, collective.output_bytes or 0, collective.group.size
    )


def _placements(collective: Collective) -> str:
    """What a collective does to the placement along its group, e.g. ``S(1) -> R over 4 ranks``."""
    partial = "P" if collective.reduce_op == "sum" else f"P({collective.reduce_op})"
    size = f"over {collective.group.size} ranks"
    if collective.kind == CollectiveKind.ALL_GATHER:
        return f"S({_unpacked_dim(collective)}) -> R {size}"
    if collective.kind == CollectiveKind.REDUCE_SCATTER:
        packed = joined_split(collective.inputs[0]) if len(collective.inputs) == 1 else None
        dim = packed.split_dim if packed is not None and packed.cat_dim == 0 else 0
        return f"{partial} -> S({dim}) {size}"
    return f"{partial} -> R {size}" if collective.kind == CollectiveKind.ALL_REDUCE else f"exchange {size}"


def _unpacked_dim(gather: Collective) -> int:
    """The dimension along which the pieces of a gather are joined."""
    for wait in gather.waits:
        for split in wait.users:
            piece = next(iter(split.users), None)
            cat = next(iter(piece.users), None) if piece is not None else None
            joined = joined_split(cat) if isinstance(cat, torch.fx.Node) else None
            if joined is not None and joined.source is wait and joined.split_dim == 0:
                return joined.cat_dim
    return 0


def settled(
    records: Sequence[RedistributionReport],
    decisions: Sequence[Decision],
    certificates: Sequence[Certificate],
    after: GraphView,
) -> list[RedistributionReport]:
    """The records with what became of them."""
    sent = {c.start.name: sent_bytes(c) for c in after.collectives}
    step_of = {name: k for k, c in enumerate(certificates) for name in c.removed}
    before: dict[int, int] = {}
    owned: list[dict[int, int]] = []
    for record in records:
        steps: dict[int, int] = {}
        share = record.bytes_before // max(1, len(record.names))
        for name in record.names:
            if name in step_of:
                steps[step_of[name]] = steps.get(step_of[name], 0) + share
        owned.append(steps)
        for step, size in steps.items():
            before[step] = before.get(step, 0) + size
    made = {k: sum(sent.get(n, 0) for n in certificates[k].added) for k in before}
    result = []
    for record, steps in zip(records, owned):
        left = sum(sent.get(name, 0) for name in record.names if name not in step_of)
        came = sum(made[k] * size // max(1, before[k]) for k, size in steps.items())
        mine = [d for d in decisions if d.node in record.names]
        rewrites = {d.subject for d in mine if d.verdict is Verdict.APPLIED}
        rewrites |= {s for k in steps for s in certificates[k].rewrite.split("+")}
        refused = [f"{d.subject}: {d.reason.value}{f' ({d.detail})' if d.detail else ''}" for d in mine]
        result.append(
            replace(
                record,
                bytes_after=left + came,
                rewrites=tuple(sorted(rewrites)),
                refused=tuple(
                    text for d, text in zip(mine, refused) if d.verdict is Verdict.REFUSED and d.subject not in rewrites
                ),
            )
        )
    return result


def close(report: GraphReport, settings: PassConfig) -> None:
    """Correct the list when the rewrites were undone; refuse what is above the limit of the settings.

    Raises:
        LargeRedistributionError: an implicit redistribution sends more than the limit.
    """
    undone = next((p.rolled_back for p in report.passes if p.name == "redistribute"), None)
    if undone is not None:
        report.redistributions = [
            replace(r, bytes_after=r.bytes_before, rewrites=(), refused=(f"undone: {undone.value}",))
            for r in report.redistributions
        ]
    limit = settings.redistribution.limit_bytes
    if limit is None:
        return
    large = [r for r in report.redistributions if r.explicit is False and r.bytes_after > limit]
    if large:
        lines = "\n".join(
            f"  {r.source or 'unknown line'}: {r.call}: {'; '.join(r.placements)}: {r.bytes_after} bytes per rank"
            for r in large
        )
        raise LargeRedistributionError(
            f"inductor_passes: redistribute={settings.redistribute!r} and the {report.phase} graph redistributes more "
            f"than {limit} bytes per rank without being asked to:\n{lines}\n"
            "Call DTensor.redistribute there to say that it is meant, change the layouts, or raise the limit."
        )
