"""Hand-made functional graphs with collectives, and a way to run them on all ranks of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from inductor_passes.ir.view import GraphView
from tests.support.graphs import GraphBuilder, aten, c10d


class Program(GraphBuilder):
    """A graph with collectives over whole groups; ``done`` makes it a module.

    Each call is a line of ``model.py`` in its node's stack trace.
    """

    def __init__(self) -> None:
        super().__init__("model.py")

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.fx.Node:
        return self.placeholder(f"x{len(self.graph.nodes)}", *shape, dtype=dtype)

    def copy_of(self, x: torch.fx.Node) -> torch.fx.Node:
        """A pointwise operation that shares its input's fake tensor: cheap to make in thousands."""
        node = self.graph.call_function(aten.neg.default, (x,))
        node.meta = dict(x.meta)
        return node

    def start(self, kind: str, x: torch.fx.Node, group: str, op: str = "sum") -> torch.fx.Node:
        """Issue a collective over the whole of ``group``; all_to_all in equal parts."""
        ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))
        if kind == "all_gather":
            return self.call(c10d.all_gather_into_tensor.default, x, ranks, group)
        if kind == "reduce_scatter":
            return self.call(c10d.reduce_scatter_tensor.default, x, op, ranks, group)
        if kind == "all_reduce":
            return self.call(c10d.all_reduce.default, x, op, group)
        splits = [x.meta["val"].shape[0] // ranks] * ranks
        return self.call(c10d.all_to_all_single.default, x, splits, splits, group)

    def wait(self, start: torch.fx.Node) -> torch.fx.Node:
        return self.call(c10d.wait_tensor.default, start)

    def collective(self, kind: str, x: torch.fx.Node, group: str, op: str = "sum") -> torch.fx.Node:
        """Issue and wait."""
        return self.wait(self.start(kind, x, group, op))

    def done(self, *outputs: torch.fx.Node) -> torch.fx.GraphModule:
        self.graph.output(tuple(outputs)).meta["val"] = tuple(o.meta["val"] for o in outputs)
        self.graph.lint()
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)


def inputs_by_rank(gm: torch.fx.GraphModule, ranks: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """Random inputs per placeholder and rank, with the strides of its fake tensor; None for what is no tensor."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta.get("val")
        per_rank: list[Any] = []
        if not isinstance(fake, torch.Tensor):
            result.append([None] * ranks)
            continue
        for _ in range(ranks):
            value = torch.randn(fake.shape, generator=generator) * 8
            value = value.abs() if fake.dtype is torch.int64 else value
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            real.copy_(value > 0 if fake.dtype is torch.bool else value)
            per_rank.append(real)
        result.append(per_rank)
    return result


def run_all_ranks(gm: torch.fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The graph's outputs, per output and rank."""
    ranks = len(inputs[0])
    with LocalTensorMode(ranks):
        outputs = gm(
            *(
                LocalTensor({r: x.clone() for r, x in enumerate(per_rank)}) if per_rank[0] is not None else None
                for per_rank in inputs
            )
        )
    return [[out._local_tensors[r] for r in range(ranks)] for out in outputs if isinstance(out, LocalTensor)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals NaN and 0.0 differs from -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]]) -> None:
    assert before, "nothing to compare"
    for index, (expected, found) in enumerate(zip(before, after, strict=True)):
        for rank, (e, f) in enumerate(zip(expected, found, strict=True)):
            assert e.shape == f.shape and e.dtype == f.dtype, (index, rank, e.shape, f.shape)
            assert torch.equal(bits(e), bits(f)), f"output {index} differs on rank {rank}: {e} and {f}"


def output_layouts(gm: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    """(shape, strides, dtype) of every output by its fake tensor."""
    (outputs,) = gm.graph.output_node().args
    values = [node.meta["val"] for node in outputs]  # type: ignore[union-attr]
    return [(tuple(v.shape), v.stride(), v.dtype) for v in values]


def check_fakes(gm: torch.fx.GraphModule) -> None:
    """Every node's fake tensor is what its operator returns for its arguments' fake tensors."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with next(v for n in gm.graph.nodes if isinstance(v := n.meta["val"], torch.Tensor)).fake_mode:
            expected = node.target(*args, **kwargs)
        for e, f in zip(_leaves(expected), _leaves(node.meta["val"]), strict=True):
            assert (e.shape, e.stride(), e.dtype, e.device) == (f.shape, f.stride(), f.dtype, f.device), node


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None else [value]


def text(gm: torch.fx.GraphModule) -> str:
    """One line per call: a number per node, the operator's name, its arguments; waits and views included."""
    numbers: dict[torch.fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            lines.append(f"{numbers[node]} = input {_shape(node)}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0], numbers)}")
        else:
            name = getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))
            arguments = [_argument(a, numbers) for a in node.args]
            lines.append(f"{numbers[node]} = {name}({', '.join(a for a in arguments if a)}) {_shape(node)}".rstrip())
    return "\n".join(lines)


def _argument(value: Any, numbers: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(v, numbers) for v in value) + "]"
    return "" if isinstance(value, str) and value.isdigit() else str(value)


def _shape(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def kinds(gm: torch.fx.GraphModule) -> str:
    """The collectives of a graph in order, e.g. ``AG0 RS1``."""
    return " ".join(c.label for c in GraphView(gm.graph).collectives)


def narrow_then_wide(world: str, count: int) -> torch.fx.GraphModule:
    """Small parameters, and a step whose memory none of them is near."""
    p = Program()
    x, y = p.input(8, 16, dtype=torch.bfloat16), p.input(2048, 2048)
    for _ in range(count):
        weight = p.collective("all_gather", p.input(2, 16, dtype=torch.bfloat16), world)
        x = p.call(aten.relu.default, p.call(aten.mm.default, x, p.call(aten.permute.default, weight, [1, 0])))
    wide = p.call(aten.relu.default, p.call(aten.neg.default, p.call(aten.mm.default, y, y)))
    return p.done(x, p.call(aten.sum.default, wide))
