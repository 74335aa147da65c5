"""How good the predictions are: a step on the emulated link against what the plan said, with a calibrated profile.

    tools/predict_link --latency-us 200 --mb-per-s 100

Two ranks train a Llama under fully sharded data parallelism. Times are virtual (CPU time of the compute thread plus
the waits that the link demands), so a busy machine does not change them. Compared are the step (forward and backward)
and the stall of each collective's wait: medians over the steps, of the slower rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tools.shared.launch import ROOT, environment
from tools.shared.leave import leave


def main(
    latency_us: Annotated[float, typer.Option(min=0, help="Of each collective.")] = 200.0,
    mb_per_s: Annotated[float, typer.Option(min=0.001)] = 100.0,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    dim: Annotated[int, typer.Option(min=8)] = 128,
    steps: Annotated[int, typer.Option(min=1)] = 9,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"latency_us": latency_us, "mb_per_s": mb_per_s, "layers": layers, "dim": dim, "steps": steps}
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        variables = {**environment(), "OMP_NUM_THREADS": "1", "TORCH_TRACE": str(Path(folder, "trace"))}
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", "tools.link.predict", "--worker", folder]
        subprocess.run(command, cwd=ROOT, env=variables, check=True)
        results = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    print_results(results)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def print_results(results: dict[str, Any]) -> None:
    """The figures as text."""
    job, predicted, measured = results["job"], results["predicted_ns"], results["measured_ns"]
    print(f"link {job['mb_per_s']:g} MB/s, {job['latency_us']:g} us; {job['layers']} layers of width {job['dim']}")
    print(f"step: predicted {predicted / 1e6:.2f} ms, measured {measured / 1e6:.2f} ms, off by "
          f"{100 * abs(predicted - measured) / measured:.1f}%")
    errors = []
    for label, ours, theirs in results["waits"]:
        if theirs > 0 or ours > 0:
            errors.append(abs(ours - theirs) / max(ours, theirs))
            print(f"  {label:6} exposed: predicted {ours / 1e6:7.3f} ms, measured {theirs / 1e6:7.3f} ms")
    if errors:
        print(f"exposed time per collective, of the larger: median {100 * median(errors):.1f}% off, worst "
              f"{100 * max(errors):.1f}% ({len(errors)} exposed of {len(results['waits'])})")


def worker(folder: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import inductor_passes
    from inductor_passes.cost.calibrate import calibrate
    from inductor_passes.emulation import link as emulated_link
    from inductor_passes.models import LlamaConfig, cross_entropy, llama, llama_batch
    from inductor_passes.trace.profiled import planned_waits
    from inductor_passes.trace.reader import read_trace

    job = json.loads(Path(folder, "job.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    emulated_link.register()
    dist.init_process_group(emulated_link.BACKEND)
    emulated_link.set_rate(round(job["latency_us"] * 1e3), job["mb_per_s"] * 1e6)
    profile = calibrate(dtypes=[torch.float32], repeats=5, ranks_per_host=2, timed=emulated_link.timed)
    path = Path(folder, "profile.json")
    if dist.get_rank() == 0:
        profile.save(path)
    dist.barrier()
    config = LlamaConfig(
        layers=job["layers"], dim=job["dim"], heads=4, kv_heads=4, hidden=3 * job["dim"], vocab=256, batch=4, seq=128
    )
    model = llama(config)
    inductor_passes.simple_fsdp(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    tokens, targets = llama_batch(config, seed=dist.get_rank())

    def forward() -> torch.Tensor:
        return cross_entropy(model(tokens), targets)

    step = torch.compile(forward, options=inductor_passes.options(cost_profile=str(path)), fullgraph=True)
    taken = []
    for number in range(job["steps"] + 2):
        with emulated_link.step_clock() as clock:
            step().backward()
        for parameter in model.parameters():
            parameter.grad = None
        if number >= 2:
            taken.append(clock.time)
    mine = (
        [t.virtual_ns for t in taken],
        [[r.virtual.exposed_ns for r in t.records if r.kind != "barrier"] for t in taken],
        [r.kind for r in taken[-1].records if r.kind != "barrier"],
    )
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        graphs = [g for g in read_trace(Path(folder, "trace")).graphs if g.rank == 0 and g.report is not None]
        graphs.sort(key=lambda g: g.phase == "backward")
        waits = [w for g in graphs for w in planned_waits(g)]
        if [kind for kind, _, _ in waits] != mine[2]:
            raise RuntimeError(f"the step issued {mine[2]}; planned were {[kind for kind, _, _ in waits]}")
        stalls = [max(median(step[k] for step in rank[1]) for rank in ranks) for k in range(len(waits))]
        results = {
            "job": job,
            "torch": torch.__version__,
            "predicted_ns": sum(g.report.schedule.makespan_after_ns for g in graphs if g.report and g.report.schedule),
            "measured_ns": max(median(rank[0]) for rank in ranks),
            "waits": [[label, ns, stall] for (_, label, ns), stall in zip(waits, stalls)],
        }
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    leave()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        typer.run(main)
