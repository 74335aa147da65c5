"""Rewrites validated by value: a changed graph is proven to compute what it computed before.

``check`` is the entry point; ``proof`` compares two values; ``movement``, ``joining``, ``bytes``, ``strided``,
``communication``, ``signatures`` and ``definitions`` say what operators do; ``terms`` and ``matching`` compare sums.
Nothing here imports a pass or shares a helper with one.
"""

from inductor_passes.verify.values.check import changed_values, compared
from inductor_passes.verify.values.program import Program
from inductor_passes.verify.values.proof import Numerics, Replicated

__all__ = ["Numerics", "Program", "Replicated", "changed_values", "compared"]
