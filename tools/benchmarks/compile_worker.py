"""One compilation of the compile benchmark; prints a JSON row.

    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python -m tools.benchmarks.compile_worker LAYERS default|ours [large]
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.models import LlamaConfig, language_batch, language_model
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.world import fake_world

#: Small tensors: what is measured is the compiler.
SMALL = LlamaConfig(vocab=128, dim=64, heads=4, kv_heads=4, hidden=96, batch=1, seq=16)
#: Shards large enough for other buckets, and for calls in the place of loops.
LARGE = LlamaConfig(vocab=2048, dim=512, heads=8, kv_heads=8, hidden=1408, batch=1, seq=16)
RANKS = 8


def processor_s() -> float:
    """Of this process and of the C++ compilers that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def functions() -> int:
    """C++ functions in this process's cache, which began empty: each took more than half a second to compile."""
    return sum(1 for _ in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.cpp"))


def measure(layers: int, compiler: str, sizes: LlamaConfig = SMALL) -> dict[str, object]:
    """Compile and run one step."""
    config = replace(sizes, layers=layers)
    torch.set_num_threads(1)
    with fake_world(RANKS):
        model = simple_fsdp(language_model(config), init_device_mesh("cpu", (RANKS,)))
        batch = language_batch(config)
        options = inductor_passes.options() if compiler == "ours" else {}
        wall, cpu = time.perf_counter(), processor_s()
        with collect() as reports:
            torch.compile(model, options=options, fullgraph=True)(*batch).backward()
        wall, cpu = time.perf_counter() - wall, processor_s() - cpu
    passes: dict[str, float] = {}
    for report in reports:
        for one in report.passes:
            passes[one.name] = passes.get(one.name, 0.0) + one.duration_ns / 1e9
    # In kilobytes, but on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "layers": layers,
        "compiler": compiler,
        "nodes": sum(report.nodes for report in reports),
        "cpu_s": cpu,
        "functions": functions(),
        "wall_s": wall,
        "passes_s": passes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2], LARGE if sys.argv[3:] == ["large"] else SMALL)))
