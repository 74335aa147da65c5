"""A plan as text: one line per layout, one arrow per step.

::

    [R, S(0)] -> [S(0), S(0)]  float32 [64, 32] on mesh [2, 4]
      1.0 KiB per rank, 1 collective, 10.0 us, peak 4.0 KiB, exact
      [R S0]   2.0 KiB each
        | all_to_all over dims 0,1 (8 ranks): 1.0 KiB per rank, 10.0 us, copies 4.0 KiB
      [S0 S0]  1.0 KiB each
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.redistribute.spec import Layout, Spec
from inductor_passes.redistribute.steps import Step


def draw(source: Spec, target: Spec, steps: Sequence[Step], totals: str) -> str:
    """A plan as lines of text, without a trailing newline; ``totals`` is its second line."""
    lines = [
        f"{source} -> {target}  {source.dtype} {list(source.shape)} on mesh {list(source.mesh.shape)}",
        f"  {totals}",
    ]
    layouts = [source.layout, *(s.after for s in steps)]
    width = max(len(layout.text()) for layout in layouts) + 2
    lines.append(_state(layouts[0], source.itemsize, width))
    for step in steps:
        lines.append(f"    | {step_text(step)}")
        lines.append(_state(step.after, source.itemsize, width))
    return "\n".join(lines)


def step_text(step: Step) -> str:
    """One step in words, e.g. ``all_gather over dims 0,1 (8 ranks): 7.0 KiB per rank, 10.1 us``."""
    words: str = step.kind
    if step.reduce_op:
        words += f"({step.reduce_op})"
    if step.mesh_dims:
        ranks = 1
        for m in step.mesh_dims:
            ranks *= step.before.mesh_shape[m]
        plural = "s" if len(step.mesh_dims) > 1 else ""
        words += f" over dim{plural} {','.join(map(str, step.mesh_dims))} ({ranks} ranks)"
    if step.communicates:
        words += f": {size(step.bytes)} per rank, {duration(step.cost_ns)}"
    if step.copy_bytes:
        words += f", copies {size(step.copy_bytes)}"
    return words


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def duration(ns: int) -> str:
    """Nanoseconds for people."""
    return f"{ns / 1e6:.2f} ms" if ns >= 10**6 else f"{ns / 1e3:.1f} us"


def _state(layout: Layout, itemsize: int, width: int) -> str:
    return f"  {layout.text():<{width}}{size(layout.max_numel * itemsize)} each"
