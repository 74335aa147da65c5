"""Graphs of DTensor programs as Inductor's last graph pass sees them, and running them for all ranks in lockstep.

A captured graph belongs to one rank: it has that rank's slices baked in. :func:`run_in_lockstep` runs one graph per
rank and carries out each collective when all ranks of its group have reached it: it also finds ranks that disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.compilation import Known, phase_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.redistribute.noted import note_layouts
from inductor_passes.rewrites.pass_ import RewriteCollectives


@dataclass
class Captured:
    """Graphs of one step in order of compilation, and the ranks of all process groups by name."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[bool] = field(default_factory=list)
    joint: list[torch.fx.GraphModule] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def capture(
    function: Callable[..., Any],
    inputs: list[Any],
    joint: Callable[[torch.fx.Graph], None] = lambda graph: None,
    dynamo: Callable[[torch.fx.Graph], None] = note_layouts,
    **options: Any,
) -> Captured:
    """Graphs of one call (and of the backward of its sum), under the current process group; nothing is generated.

    ``joint`` may change the joint graph, which is recorded as it was before; ``dynamo`` may annotate Dynamo's.
    """
    import torch._inductor.config as inductor_config

    captured = Captured()

    def copied(graph: torch.fx.Graph) -> torch.fx.GraphModule:
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        return torch.fx.GraphModule(graph.owning_module, copy)

    def inner(gm: torch.fx.GraphModule, _: Any, **how: Any) -> Any:
        def grab(graph: torch.fx.Graph) -> None:
            captured.graphs.append(copied(graph))
            captured.backward.append(bool(how.get("is_backward")))

        with inductor_config.patch(post_grad_custom_post_pass=grab):
            _recursive_post_grad_passes(gm, is_inference=bool(how.get("is_inference")))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True
        return run

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner)

    def grab_joint(graph: torch.fx.Graph) -> None:
        captured.joint.append(copied(graph))
        joint(graph)

    torch._dynamo.reset()
    with inductor_config.patch(joint_custom_post_pass=grab_joint, pre_grad_custom_pass=dynamo):
        result = torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
        results = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
        if any(r.requires_grad for r in results):
            torch.autograd.backward([r.sum() for r in results if r.requires_grad])
    captured.groups = group_ranks()
    return captured


def group_ranks() -> dict[str, tuple[int, ...]]:
    """Ranks of every process group of this process, by name."""
    return {
        str(group.group_name): tuple(dist.get_process_group_ranks(group))
        for group in dist.distributed_c10d._world.pg_names
    }


def rewritten(
    gm: torch.fx.GraphModule,
    settings: tuple[PassConfig, CostProfile],
    exactness: str = "exact",
    only: tuple[str, ...] = (),
    agreed: bool = True,
) -> Any:
    """Rewrite a graph in place; the report. The verifier must be content."""
    known = Known(phase_of(gm.graph, is_inference=False), agreed=agreed)
    report = run_passes(gm.graph, [RewriteCollectives(exactness, only)], *settings, known=known).report.passes[0]
    gm.graph.lint()
    gm.recompile()
    return report


def ops_of(gm: torch.fx.GraphModule) -> list[str]:
    """Names of the operators called, in order, without waits."""
    return [
        _torch.op_name(n.target).partition("::")[2]
        for n in gm.graph.nodes
        if _torch.op_name(n.target) and "wait_tensor" not in _torch.op_name(n.target)
    ]


def duplicate(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph once more, to be rewritten."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    return torch.fx.GraphModule(gm, copy)


def integers(gm: torch.fx.GraphModule, rank: int) -> list[torch.Tensor]:
    """Small whole numbers for every tensor input: sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return [
        torch.randint(-2, 3, tuple(v.shape), generator=generator).to(v.dtype)
        for v in values
        if isinstance(v, torch.Tensor)
    ]


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among a graph's outputs."""
    return [v for v in values if isinstance(v, torch.Tensor)]


def assert_equal_on_all_ranks(
    before: dict[int, torch.fx.GraphModule],
    after: dict[int, torch.fx.GraphModule],
    groups: dict[int, dict[str, tuple[int, ...]]],
    inputs: dict[int, list[Any]] | None = None,
) -> None:
    """Both give the same shapes and bits on every rank; without ``inputs`` every rank has random ones of its own."""
    inputs = inputs or {rank: integers(gm, rank) for rank, gm in before.items()}
    wanted, got = (run_in_lockstep(graphs, inputs, groups) for graphs in (before, after))
    for rank in before:
        for a, b in zip(tensors(wanted[rank]), tensors(got[rank]), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), f"rank {rank}"


# -- all ranks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    node: str
    kind: str
    arguments: dict[str, Any]
    ranks: tuple[int, ...]


class LockstepError(AssertionError):
    """Ranks wait for each other, or disagree about a collective."""


def _steps(
    gm: torch.fx.GraphModule, inputs: list[Any], groups: dict[str, tuple[int, ...]]
) -> Generator[_Request, torch.Tensor, Any]:
    values: dict[torch.fx.Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            # A mesh among the inputs is used by nobody.
            values[node] = next(given) if isinstance(node.meta.get("val"), torch.Tensor) else None
        elif node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        elif node.op == "output":
            return args[0]
        elif _torch.op_name(node.target).startswith("_c10d_functional::wait_tensor"):
            values[node] = args[0]
        elif _torch.op_name(node.target).startswith(("_c10d_functional::", "_dtensor::")):
            names = [a.name for a in node.target._schema.arguments]
            arguments = {**dict(zip(names, args)), **kwargs}
            group = groups[arguments["group_name"]]
            kind = _torch.op_name(node.target).partition("::")[2]
            values[node] = yield _Request(node.name, kind, arguments, group)
        else:
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")


_WHOLE = (torch.int64, torch.int32)


def _reduce(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    if stacked.is_complex() and op not in ("sum", "avg"):
        raise LockstepError(f"complex numbers have no {op}")
    if op == "avg":
        return stacked.sum(0) / len(tensors) if stacked.dtype not in _WHOLE else stacked.sum(0) // len(tensors)
    if op == "product":
        return stacked.prod(0).to(stacked.dtype)
    return stacked.sum(0).to(stacked.dtype) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)


def _carry_out(requests: dict[int, _Request]) -> dict[int, torch.Tensor]:
    """Results by rank; ``requests`` in group order."""
    ranks = list(requests)
    first = requests[ranks[0]]
    g = len(ranks)
    if first.kind.endswith("_coalesced"):
        return _carry_out_members(requests)
    tensors = [requests[r].arguments.get("input", requests[r].arguments.get("self")) for r in ranks]
    if any(not t.is_contiguous() for t in tensors):
        raise LockstepError(f"{first.node} sends a tensor that is not dense")
    if first.kind == "all_gather_into_tensor":
        _equal([t.shape for t in tensors], first)
        return {r: torch.cat(tensors) for r in ranks}
    if first.kind in ("all_reduce", "reduce_scatter_tensor"):
        _equal([(t.shape, requests[r].arguments["reduce_op"]) for r, t in zip(ranks, tensors)], first)
        whole = _reduce(tensors, first.arguments["reduce_op"])
        if first.kind == "all_reduce":
            return {r: whole.clone() for r in ranks}
        return {r: part.clone() for r, part in zip(ranks, whole.chunk(g))}
    if first.kind == "all_to_all_single":
        sent = [t.split(requests[r].arguments["input_split_sizes"]) for r, t in zip(ranks, tensors)]
        for i, r in enumerate(ranks):
            _equal([[s[i].shape[0] for s in sent], list(requests[r].arguments["output_split_sizes"])], first)
        return {r: torch.cat([s[i] for s in sent]) for i, r in enumerate(ranks)}
    if first.kind == "shard_dim_alltoall":
        gather, shard = first.arguments["gather_dim"], first.arguments["shard_dim"]
        whole = torch.cat(tensors, gather)
        return {r: part.contiguous() for r, part in zip(ranks, whole.chunk(g, shard))}
    raise LockstepError(f"{first.kind} is not simulated")


def _carry_out_members(requests: dict[int, _Request]) -> dict[int, Any]:
    """A coalesced collective: each member as the single collective that it stands for."""
    lists = {r: next(v for v in q.arguments.values() if isinstance(v, list)) for r, q in requests.items()}
    _equal([len(tensors) for tensors in lists.values()], next(iter(requests.values())))
    results: dict[int, list[torch.Tensor]] = {r: [] for r in requests}
    for index in range(len(next(iter(lists.values())))):
        single = {
            r: _Request(q.node, q.kind.removesuffix("_coalesced"), {**q.arguments, "input": lists[r][index]}, q.ranks)
            for r, q in requests.items()
        }
        for r, tensor in _carry_out(single).items():
            results[r].append(tensor)
    return results


def _equal(values: list[Any], request: _Request) -> None:
    if any(v != values[0] for v in values):
        raise LockstepError(f"ranks {request.ranks} disagree about {request.node} ({request.kind}): {values}")


def run_in_lockstep(
    graphs: dict[int, torch.fx.GraphModule], inputs: dict[int, list[Any]], groups: dict[int, dict[str, tuple[int, ...]]]
) -> dict[int, Any]:
    """Outputs by rank of one graph per rank.

    Raises:
        LockstepError: a deadlock, or ranks that disagree about kind, shape, reduce op or splits.
    """
    running = {r: _steps(gm, inputs[r], groups[r]) for r, gm in graphs.items()}
    waiting: dict[int, _Request] = {}
    results: dict[int, Any] = {}
    send: dict[int, Any] = dict.fromkeys(running)
    while running:
        for rank in list(send):
            try:
                waiting[rank] = running[rank].send(send.pop(rank))
            except StopIteration as stop:
                results[rank] = stop.value
                del running[rank]
        for request in list(waiting.values()):
            if all(r in waiting and waiting[r].ranks == request.ranks for r in request.ranks):
                requests = {r: waiting.pop(r) for r in request.ranks}
                _equal([q.kind for q in requests.values()], request)
                send.update(_carry_out(requests))
        if running and not send:
            raise LockstepError("deadlock: " + "; ".join(f"{r} in {q.node} {q.ranks}" for r, q in waiting.items()))
    return results
