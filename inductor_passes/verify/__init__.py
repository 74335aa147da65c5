"""Independent checks of graphs and schedules: waits, buffers in flight, effects, order across groups, memory, ranks.

Nothing here imports a pass or the planner: every answer is derived again from the graph.
"""

from inductor_passes.verify.certificate import Certificate, Claim
from inductor_passes.verify.checker import check, snapshot
from inductor_passes.verify.memory import peak_bytes
from inductor_passes.verify.snapshot import ReferenceSnapshot
from inductor_passes.verify.snodes import check_snodes, snodes_peak_bytes

__all__ = [
    "Certificate",
    "Claim",
    "ReferenceSnapshot",
    "check",
    "check_snodes",
    "peak_bytes",
    "snapshot",
    "snodes_peak_bytes",
]
