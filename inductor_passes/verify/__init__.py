"""Independent checks of graphs and schedules: waits, buffers in flight, effects, order across groups, memory, ranks.

Nothing here imports a pass or the planner: every answer is derived from the graph itself.
"""

from inductor_passes.verify.agreement import RanksDifferError, compare_digests
from inductor_passes.verify.certificate import Certificate, Claim, Narrowed
from inductor_passes.verify.checker import Asked, Checked, check, checked, snapshot
from inductor_passes.verify.deadlock import Certification, certify
from inductor_passes.verify.events import digest
from inductor_passes.verify.facts.known import Known
from inductor_passes.verify.graph_json import GraphFileError, load, save
from inductor_passes.verify.memory import peak_bytes
from inductor_passes.verify.ranks import check_ranks
from inductor_passes.verify.snapshot import ReferenceSnapshot
from inductor_passes.verify.snodes import check_snodes, snodes_peak_bytes
from inductor_passes.verify.statement import statement

__all__ = [
    "Asked",
    "Certificate",
    "Certification",
    "Checked",
    "Claim",
    "GraphFileError",
    "Known",
    "Narrowed",
    "RanksDifferError",
    "ReferenceSnapshot",
    "certify",
    "check",
    "check_ranks",
    "check_snodes",
    "checked",
    "compare_digests",
    "digest",
    "load",
    "peak_bytes",
    "save",
    "snapshot",
    "snodes_peak_bytes",
    "statement",
]
