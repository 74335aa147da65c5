"""FX graphs built by hand, rewritten, and run on all ranks of a (2, 4) mesh in one process."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import group_name, prepare_groups
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewriting.contract import Facts, Look
from tests.support.graphs import GraphBuilder
from tests.support.redistribute_ranks import simulate
from tests.support.world import simulated

MESH = Mesh((2, 4))


@contextlib.contextmanager
def world():
    with simulated(8):
        prepare_groups(MESH)
        yield {m: group_name(MESH, m) for m in ((0,), (1,), (0, 1))}


def rewrite(name, exactness="exact"):
    return RewriteCollectives(exactness, only=(name,))


class Program(GraphBuilder):
    """A graph of ``inputs`` and of collectives by their operators' names; ``output`` ends it."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.inputs = [self.placeholder(f"x{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        self.results = []

    def collective(self, name, *args):
        return self.call(_torch.collective_op("wait_tensor"), self.call(_torch.collective_op(name), *args))

    def output(self, *nodes):
        self.graph.output(nodes)
        return self.graph


def settings_for(**settings):
    """Settings and costs: the strict verifier, no memory cap, the defaults of a GPU."""
    fields = {"verify": "strict", "memory_budget": "unlimited", **settings}
    return PassConfig.from_mapping(fields), CostProfile.default("cuda", 8)


def facts_for(graph, **settings):
    """What a pass gets to know about the graph, without a memory cap."""
    return Facts(Look(GraphView(graph), *settings_for(**settings), "inference", True))


def run_pass(pass_, graph, **settings):
    """Run one pass through the pipeline; what became of the graph."""
    return run_passes(graph, [pass_], *settings_for(**settings))


def text(graph):
    """One line: ops in order with their inputs, collectives with the size of their group."""
    words = []
    for node in graph.nodes:
        if not _torch.is_op(node.target):
            continue
        name = str(node.target).split(".")[1]
        if name == "wait_tensor":
            continue
        groups = [a for a in node.args if isinstance(a, str) and a.isdigit()]
        ranks = [len(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(g))) for g in groups]
        words.append(name + (f"[{ranks[0]}]" if ranks else ""))
    return " ".join(words)


def run_on_all_ranks(graph, shapes, dtype=torch.float32):
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(1)
        values = [
            {r: torch.randint(-4, 5, shape, generator=generator).to(dtype) for r in range(8)} for shape in shapes
        ]
    outputs = torch.fx.GraphModule(torch.nn.Module(), graph)(*(simulate(v) for v in values))
    return [dict(o._local_tensors) for o in outputs]


def apply(pass_, graph, shapes, dtype=torch.float32):
    """Text before and after, the report; results are equal on all ranks and the verifier is content."""
    with _disable_current_modes():
        before = text(graph)
    wanted = run_on_all_ranks(graph, shapes, dtype)
    with _disable_current_modes():
        report = run_pass(pass_, graph).report.passes[0]
        graph.lint()
    got = run_on_all_ranks(graph, shapes, dtype)
    for a, b in zip(wanted, got, strict=True):
        assert all(torch.equal(a[r], b[r]) and a[r].dtype == b[r].dtype for r in a)
    return before, text(graph), report


def nested(name, order, groups, *, op=None, dtype=torch.float32, size=16):
    program = Program((size, 3), dtype=dtype)
    node = program.inputs[0]
    for m in order:
        extra = () if op is None else (op,)
        if name != "all_reduce":
            extra += (MESH.shape[m],)
        node = program.collective(name, node, *extra, groups[(m,)])
    return program.output(node)
