"""Capture GPU-shaped graphs without processes, memory or a GPU, and store their scheduling problems.

    tools/capture_graphs --out out/graphs --scenarios llama8b_fsdp64 moe_ep

Models are built on the meta device and turned into fake tensors, collectives belong to a fake process group. For each
scenario of ``tools.capture.models`` the forward and the backward graph (and with ``--joint`` the joint one) become a
``Problem`` with the default costs of ``--device``, one JSON file each, for ``inductor-passes simulate`` and for
planning again without tracing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.view import GraphView
from inductor_passes.problems.fx import FxProblem, build
from tests.support.world import fake_world
from tools.capture.models import SCENARIOS, Scenario

Graphs = dict[str, torch.fx.GraphModule]


Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


def trace(
    model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, joint: bool = False, partition: Partition | None = None
) -> Graphs:
    """The forward and backward (and joint) graphs of a step of a meta-device model, as Inductor's passes see them.

    Must run inside :func:`fake_world`.

    Args:
        joint: whether the joint graph is wanted too.
        partition: separates the joint graph, torch's own where there is none.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: Graphs = {}

    def record(name: str) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs[name] = copied(gm)
            return make_boxed_func(gm.forward)

        return compiler

    def separate(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if joint:
            graphs["joint"] = copied(gm)
        return (partition or min_cut_rematerialization_partition)(gm, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=record("forward"),
        bw_compiler=record("backward"),
        partition_fn=separate,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        fakes = tuple(torch.empty_like(value, device="cpu") for value in inputs)
        torch.compile(model, backend=backend, fullgraph=True)(*fakes).backward()
    return graphs


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with nodes and meta dictionaries of its own; their values are shared."""
    graph = torch.fx.Graph()
    fresh: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, fresh))
    for node in gm.graph.find_nodes(op="output"):
        next(iter(graph.find_nodes(op="output"))).meta.update(node.meta)
    return torch.fx.GraphModule(gm, graph)


def capture(scenario: Scenario, layers: int | None = None, *, joint: bool = False) -> Graphs:
    """Build and trace; inside a :func:`fake_world` of the scenario's size."""
    model, inputs = scenario.build(layers or scenario.layers)
    return trace(model, inputs, joint=joint)


def as_problem(gm: torch.fx.GraphModule, profile: CostProfile, name: str) -> FxProblem:
    """The graph's scheduling problem."""
    return build(GraphView(gm.graph), profile, name=name)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("out/graphs"),
    scenarios: Annotated[list[str], typer.Option(help="Which ones.")] = list(SCENARIOS),  # noqa: B006
    device: Annotated[str, typer.Option(help="Whose default costs.")] = "cuda",
    layers: Annotated[int, typer.Option(help="Depth; 0: the scenario's own.")] = 0,
    joint: Annotated[bool, typer.Option(help="Store the joint graph too.")] = False,
) -> None:
    """Capture, one line and two or three files per scenario."""
    unknown = sorted(set(scenarios) - set(SCENARIOS))
    if unknown:
        raise typer.BadParameter(f"unknown scenarios {unknown}; expected some of {', '.join(SCENARIOS)}")
    out.mkdir(parents=True, exist_ok=True)
    profile = CostProfile.default(device)
    for name in scenarios:
        scenario = SCENARIOS[name]
        began = time.process_time()
        with fake_world(scenario.world):
            for phase, gm in capture(scenario, layers or None, joint=joint).items():
                problem = as_problem(gm, profile, f"{name}/{phase}").problem
                problem.meta.update(
                    scenario=name,
                    world=str(scenario.world),
                    layers=f"{layers or scenario.layers} of {scenario.full_layers}",
                    nodes=str(len(gm.graph.nodes)),
                    profile=profile.name,
                    torch=torch.__version__,
                )
                (out / f"{name}.{phase}.json").write_text(json.dumps(problem.to_json(), separators=(",", ":")))
                collectives = sum(task.kind == 1 for task in problem.tasks)
                print(f"{name}.{phase}: {len(gm.graph.nodes)} nodes, {len(problem)} tasks, {collectives} collectives")
        print(f"{name}: {time.process_time() - began:.1f} s of processor time", flush=True)


if __name__ == "__main__":
    typer.run(main)
