"""Measuring a device's compute: time of matmuls by dtype and size, streaming bandwidth, fixed cost of a
kernel.

On a CPU with one intra-op thread the clock is the thread's CPU time, which other processes do not disturb;
elsewhere it is the wall clock, on accelerators around batches of calls that end with a synchronisation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from inductor_passes.cost.profile import MatmulPoint, ShapeRate

#: Matmuls of as many FLOPs as square ones of these sizes.
CPU_SIZES = (32, 64, 128, 256, 512)
ACCELERATOR_SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: Rows of matmuls with few of them, and how wide these are.
CPU_SIDES, CPU_WIDTH = (32, 64, 128, 256, 512), 1024
ACCELERATOR_SIDES, ACCELERATOR_WIDTH = (64, 128, 256, 512, 1024, 2048), 4096
_STREAM_BYTES_CPU = 16 * 2**20
_STREAM_BYTES_ACCELERATOR = 512 * 2**20
#: What a layer's tensors share the caches with.
_WORKING_SET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Roofline:
    """What :func:`measure` found: ``matmul`` without the fixed cost ``kernel_ns``; ``bytes_per_s`` reads and writes."""

    matmul: tuple[MatmulPoint, ...]
    bytes_per_s: float
    kernel_ns: float
    shapes: tuple[ShapeRate, ...] = ()


def measure(device: torch.device, dtypes: Sequence[torch.dtype], repeats: int) -> Roofline:
    """Measure ``device`` alone, without communication.

    Args:
        device: where to compute.
        dtypes: of the matmuls; one that the device cannot multiply is left out.
        repeats: samples per size; their median counts.
    """
    tiny = torch.zeros(8, device=device)
    kernel_ns = _time(device, lambda: tiny.add_(1.0), repeats, calls=200)
    points: list[MatmulPoint] = []
    for dtype in dtypes:
        last = MatmulPoint(_name(dtype), 0.0, 0.0)
        for size in CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES:
            try:
                ns = _matmul_ns(device, dtype, size, repeats)
            except RuntimeError:
                break
            # Profiles want rising times: a larger matmul does not take less than a smaller one.
            last = MatmulPoint(last.dtype, 2.0 * size**3, max(ns - kernel_ns, last.ns, 1.0))
            points.append(last)
    count = (_STREAM_BYTES_CPU if device.type == "cpu" else _STREAM_BYTES_ACCELERATOR) // 8
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    # Fused kernels stream and compute at once: on a CPU a transcendental per element is what limits them.
    stream_ns = _time(device, lambda: torch.sigmoid(source, out=target), repeats, calls=3)
    moved = 2 * count * source.element_size()
    bytes_per_s = moved / max(1.0, stream_ns - kernel_ns) * 1e9
    shapes: list[ShapeRate] = []
    for dtype in dtypes:
        shapes += [*_narrow(device, dtype, repeats), *_attention(device, dtype, repeats)]
    return Roofline(tuple(points), bytes_per_s, kernel_ns, tuple(shapes))


def _narrow(device: torch.device, dtype: torch.dtype, repeats: int) -> list[ShapeRate]:
    """Matmuls with few rows, as the parts of a larger one have."""
    width = CPU_WIDTH if device.type == "cpu" else ACCELERATOR_WIDTH
    found = []
    for side in CPU_SIDES if device.type == "cpu" else ACCELERATOR_SIDES:
        try:
            left, right = (torch.ones(rows, width, device=device, dtype=dtype) for rows in (side, width))
            out = torch.empty(side, width, device=device, dtype=dtype)
            ns = _time(device, lambda: torch.mm(left, right.t(), out=out), repeats, 4)  # noqa: B023  called at once
        except RuntimeError:
            break
        found.append(ShapeRate("matmul", _name(dtype), side, ns / (2.0 * side * width * width)))
    return found


def _attention(device: torch.device, dtype: torch.dtype, repeats: int) -> list[ShapeRate]:
    """Fused attention, causal, forward and with its gradient; FLOPs as ``torch.utils.flop_counter`` counts them."""
    batch, heads, sequence, width = (2, 4, 256, 64) if device.type == "cpu" else (4, 16, 2048, 128)
    shape = (batch, heads, sequence, width)
    product = 2.0 * batch * heads * sequence * sequence * width
    try:
        query, key, value = (torch.ones(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        gradient = torch.ones(shape, device=device, dtype=dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        with torch.no_grad():
            forward = _time(device, lambda: attend(query, key, value, is_causal=True), repeats, 2)
        result = attend(query, key, value, is_causal=True)
        inputs = (query, key, value)
        backward = _time(
            device, lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True), repeats, 2
        )
    except RuntimeError:
        return []
    rates = (("attention", forward / (2 * product)), ("attention_backward", backward / (5 * product)))
    return [ShapeRate(kind, _name(dtype), 0, ns) for kind, ns in rates]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _matmul_ns(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> float:
    """Time of ``2 * size**3`` FLOPs: on a CPU the mean over the three matmuls of a linear layer's training step.

    There operands come from memory as often as not, which costs the more of a square matmul's speed with warm caches
    the smaller the matmul is.
    """
    if device.type != "cpu":
        left = torch.ones(size, size, device=device, dtype=dtype)
        right = torch.ones(size, size, device=device, dtype=dtype)
        out = torch.empty_like(left)
        return _time(device, lambda: torch.mm(left, right, out=out), repeats, 10)
    width = size // 2
    tokens = 8 * width
    each = (2 * tokens * width + width * width) * dtype.itemsize
    layers = [
        (
            torch.ones(tokens, width, dtype=dtype),
            torch.ones(width, width, dtype=dtype),
            torch.ones(tokens, width, dtype=dtype),
        )
        for _ in range(max(2, _WORKING_SET_BYTES // each))
    ]
    turn = itertools.cycle(layers)

    def step() -> None:
        activations, weight, gradients = next(turn)
        torch.mm(activations, weight.t())
        torch.mm(gradients, weight)
        torch.mm(gradients.t(), activations)

    return _time(device, step, repeats, max(2, 10**7 // size**3)) / 3


def _time(device: torch.device, call: Callable[[], object], repeats: int, calls: int) -> float:
    """Median ns per call."""
    cpu_clock = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time_ns if cpu_clock else time.perf_counter_ns
    samples = []
    for sample in range(repeats + 1):
        synchronize(device)
        begin = now()
        for _ in range(calls):
            call()
        synchronize(device)
        if sample:
            samples.append((now() - begin) / calls)
    return median(samples)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
