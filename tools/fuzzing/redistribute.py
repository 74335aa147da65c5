"""Random chains of redistributions through the rewrites: same bits on all ranks, all ranks decide alike.

    tools/fuzz_redistribute --programs 10000 --seed 0

A program is what DTensor would trace: gathers with their unpacking, own slices, packed reduce_scatters, all_reduces and
exchanges between random layouts on a random mesh, with casts, sums, several readers, repeated gathers, writes and
uneven padding in between. Shards may be nested in any order (strided shards and shard orders come out as that),
elements may be complex, pieces may be moved by permutations, and collectives of one kind may be coalesced. Every rank
has its own graph (its slices are baked in). Each is rewritten on its own; the verifier must be content; then all ranks
run in lockstep before and after, which also finds ranks that communicate differently. Program i of a seed is the same
wherever it runs.
"""

from __future__ import annotations

import collections
import logging
import operator
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import typer

from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import group_name
from inductor_passes.report import Verdict
from tests.support import redistribute_graphs as graphs
from tests.support import redistribute_programs as programs
from tests.support.world import mesh_world

MESHES = ((4,), (2, 2), (2, 3), (3, 2), (2, 2), (2, 3), (2, 4), (2, 2, 2))
BATCH = 50


@dataclass
class Value:
    """A tensor of a program: its node, the mesh dims that cut each tensor dim (innermost last), pending reductions."""

    node: Any
    cuts: list[list[int]]
    partial: dict[int, str] = field(default_factory=dict)

    def copy(self, node: Any) -> Value:
        """The same layout for another node."""
        return Value(node, [list(c) for c in self.cuts], dict(self.partial))

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for values that may be added."""
        shape = tuple(self.node.meta["val"].shape)
        return (shape, self.node.meta["val"].dtype, str(self.cuts), str(sorted(self.partial.items())))


class Builder:
    """One program, first as the graph of rank 0; every choice depends on the random numbers only.

    ``plain`` leaves coalesced, complex, strided and permuted forms out: what programs were before these came.
    """

    def __init__(self, rng: random.Random, mesh: Mesh, plain: bool = False) -> None:
        self.rng, self.mesh, self.plain = rng, mesh, plain
        #: pieces of a slice, and the mesh dimension whose coordinate says which one is a rank's own
        self.own: list[tuple[list[Any], int]] = []
        self.names = [group_name(mesh, (m,)) for m in range(mesh.ndim)]
        self.calls = 0
        unit = mesh.size * 2
        count = rng.choice([1, 1, 2])
        rank_of = rng.choice([1, 2, 2, 2, 3])
        small = [rng.choice([1, 2, 3]), unit, rng.choice([2, unit])][:rank_of]
        sizes = [unit] if rank_of == 1 else small
        self.uneven = rng.random() < 0.1
        if self.uneven:
            sizes[-1] += 1
        dtypes = [torch.float32, torch.float32, torch.int64]
        self.dtype = rng.choice(dtypes if plain else [torch.float32, *dtypes, torch.complex64])
        self.program = programs.Program(*([tuple(sizes)] * count), dtype=self.dtype)
        self.values = [self._input(node) for node in self.program.inputs]
        #: per input, the mesh dims along which ranks hold different things: replicas are equal, as DTensor's are
        self.varying = [sorted({m for cuts in v.cuts for m in cuts} | set(v.partial)) for v in self.values]

    def inputs(self, seed: str, rank: int) -> list[torch.Tensor]:
        """A rank's inputs: small whole numbers, so that sums are exact in any order."""
        result = []
        at = self.mesh.coordinates(rank)
        for k, (node, varying) in enumerate(zip(self.program.inputs, self.varying)):
            part = random.Random(f"{seed}/{k}/{[at[m] for m in varying]}").randrange(2**31)
            generator = torch.Generator().manual_seed(part)
            value = node.meta["val"]
            parts = [torch.randint(-2, 3, tuple(value.shape), generator=generator) for _ in range(2)]
            whole = torch.complex(parts[0].float(), parts[1].float()) if value.dtype.is_complex else parts[0]
            result.append(whole.to(value.dtype))
        return result

    def _input(self, node: Any) -> Value:
        value = Value(node, [[] for _ in node.meta["val"].shape])
        dims = list(range(self.mesh.ndim))
        if not self.plain and self.rng.random() < 0.3:
            # Nested in another order than the mesh's: a strided shard, or a shard order.
            self.rng.shuffle(dims)
        for m in dims:
            kind = self.rng.choice(["replicate", "partial", "shard", "shard"])
            if kind == "partial":
                value.partial[m] = self.rng.choice(["sum", "sum", "max", "min"])
            elif kind == "shard":
                # The local tensor is what it is; its cut by m is remembered from the outside in.
                value.cuts[self.rng.randrange(len(value.cuts))].append(m)
        if len(set(value.partial.values())) > 1 or self.dtype.is_complex:
            value.partial = dict.fromkeys(value.partial, "sum")
        return value

    def call(self, target: Any, *args: Any, origin: str = "", **kwargs: Any) -> Any:
        """One node, traced from the call ``origin``."""
        node = self.program.call(target, *args, **kwargs)
        if origin:
            node.meta["source_fn_stack"] = [(f"{origin}_{self.calls}", origin)]
        return node

    def collective(self, name: str, *args: Any) -> Any:
        """A start and its wait."""
        start = self.call(programs._torch.collective_op(name), *args, origin="redistribute")
        return self.call(programs._torch.collective_op("wait_tensor"), start, origin="redistribute")

    def pieces(self, node: Any, count: int, dim: int) -> list[Any]:
        """All pieces of a dimension."""
        size = node.meta["val"].shape[dim] // count
        split = self.call(torch.ops.aten.split.Tensor, node, size, dim, origin="redistribute")
        return [self.call(operator.getitem, split, i, origin="redistribute") for i in range(count)]

    def gather(self, value: Value) -> Value | None:
        """The innermost cut of a dimension goes."""
        dims = [d for d, cuts in enumerate(value.cuts) if cuts]
        if not dims or value.node.meta["val"].numel() > 4096:
            return None
        d = self.rng.choice(dims)
        result = value.copy(value.node)
        m = result.cuts[d].pop()
        size = self.mesh.shape[m]
        result.node = self.collective("all_gather_into_tensor", value.node, size, self.names[m])
        if d:
            result.node = self.unpacked(result.node, size, d)
        return result

    def unpacked(self, node: Any, count: int, d: int) -> Any:
        """The pieces of dimension 0 side by side along dimension d: as DTensor writes it, or as a permutation."""
        aten = torch.ops.aten
        if self.plain or self.rng.random() < 0.7:
            return self.call(aten.cat.default, self.pieces(node, count, 0), d, origin="redistribute")
        shape = list(node.meta["val"].shape)
        part = [shape[0] // count, *shape[1:]]
        grid = self.call(aten.view.default, node, [count, *part], origin="redistribute")
        order = [*range(1, d + 1), 0, *range(d + 1, len(part) + 1)]
        moved = self.call(aten.permute.default, grid, order, origin="redistribute")
        dense = self.call(aten.clone.default, moved, memory_format=torch.contiguous_format, origin="redistribute")
        return self.call(aten.view.default, dense, [*part[:d], count * part[d], *part[d + 1 :]], origin="redistribute")

    def coalesced(self, value: Value) -> Value | None:
        """One collective for several tensors of a dtype; now and then the next one reads all of its results."""
        pending = sorted(value.partial)
        m = self.rng.choice(pending) if pending else self.rng.randrange(self.mesh.ndim)
        dtype = value.node.meta["val"].dtype
        if pending:
            op = value.partial[m]
            others = [v for v in self.values if v.partial.get(m) == op]
        else:
            others = [v for v in self.values if v.cuts and v.cuts[0] and v.cuts[0][-1] == m]
            if not value.cuts or not value.cuts[0] or value.cuts[0][-1] != m:
                return None
        others = [v for v in others if v.node.meta["val"].dtype == dtype and v.node is not value.node]
        others = list({v.node: v for v in others if v.node.meta["val"].numel() <= 4096}.values())
        if not others or value.node.meta["val"].numel() > 4096:
            return None
        members = [value, *self.rng.sample(others, min(len(others), self.rng.randint(1, 2)))]
        nodes = [v.node for v in members]
        size, name = self.mesh.shape[m], self.names[m]
        if pending:
            start = self.call(
                programs._torch.collective_op("all_reduce_coalesced"), nodes, op, name, origin="redistribute"
            )
        else:
            start = self.call(
                programs._torch.collective_op("all_gather_into_tensor_coalesced"),
                nodes,
                size,
                name,
                origin="redistribute",
            )
        wait = programs._torch.collective_op("wait_tensor")
        taken = [self.call(operator.getitem, start, k) for k in range(len(members))]
        results = []
        for member, one in zip(members, taken):
            result = member.copy(self.call(wait, one, origin="redistribute"))
            if pending:
                del result.partial[m]
            else:
                result.cuts[0].pop()
            results.append(result)
        self.values += results[1:]
        if self.rng.random() < 0.5 and not pending and results[0].node.meta["val"].dtype == torch.float32:
            self.values += [made for v in results[1:] if (made := self.narrowed(v)) is not None]
            return self.narrowed(results[0]) or results[0]
        return results[0]

    def as_pairs(self, value: Value) -> Value | None:
        """Complex elements seen as pairs and back, as torch does it around collectives."""
        if not value.node.meta["val"].dtype.is_complex:
            return None
        pairs = self.call(torch.ops.aten.view_as_real.default, value.node)
        return value.copy(self.call(torch.ops.aten.view_as_complex.default, pairs))

    def slice(self, value: Value) -> Value | None:
        """A replicated mesh dimension cuts a dimension that it divides."""
        used = {m for cuts in value.cuts for m in cuts} | set(value.partial)
        shape = value.node.meta["val"].shape
        ways = [
            (m, d)
            for m in range(self.mesh.ndim)
            for d in range(len(shape))
            if m not in used and shape[d] and shape[d] % self.mesh.shape[m] == 0
        ]
        if not ways:
            return None
        m, d = self.rng.choice(ways)
        result = value.copy(value.node)
        size = self.mesh.shape[m]
        pieces = self.pieces(value.node, size, d)
        self.own.append((pieces, m))
        result.node = pieces[0]
        if d or self.rng.random() < 0.5:
            result.node = self.call(
                torch.ops.aten.clone.default, result.node, memory_format=torch.contiguous_format, origin="redistribute"
            )
        result.cuts[d].append(m)
        return result

    def reduce(self, value: Value) -> Value | None:
        """A pending reduction is done, whole or scattered over a dimension."""
        if not value.partial:
            return None
        m = self.rng.choice(sorted(value.partial))
        result = value.copy(value.node)
        op = result.partial.pop(m)
        size = self.mesh.shape[m]
        shape = value.node.meta["val"].shape
        ways = [d for d in range(len(shape)) if shape[d] % size == 0 and shape[d]]
        if not ways or self.rng.random() < 0.5:
            result.node = self.collective("all_reduce", value.node, op, self.names[m])
        else:
            d = self.rng.choice(ways)
            packed = value.node
            if d:
                packed = self.call(
                    torch.ops.aten.cat.default, self.pieces(packed, size, d), origin="redistribute"
                )
            result.node = self.collective("reduce_scatter_tensor", packed, op, size, self.names[m])
            result.cuts[d].append(m)
        # Sums stay small enough to be exact in every dtype.
        if self.rng.random() < 0.3 and not result.node.meta["val"].dtype.is_complex:
            result.node = self.call(torch.ops.aten.clamp.default, result.node, -3, 3)
        return result

    def exchange(self, value: Value) -> Value | None:
        """An innermost cut moves to another dimension by DTensor's blocking operator."""
        shape = value.node.meta["val"].shape
        ways = [
            (d, e)
            for d, cuts in enumerate(value.cuts)
            for e in range(len(shape))
            if cuts and e != d and shape[e] % self.mesh.shape[cuts[-1]] == 0 and shape[e]
        ]
        if not ways:
            return None
        d, e = self.rng.choice(ways)
        result = value.copy(value.node)
        m = result.cuts[d].pop()
        result.cuts[e].append(m)
        result.node = self.call(
            torch.ops._dtensor.shard_dim_alltoall.default, value.node, d, e, self.names[m], origin="redistribute"
        )
        return result

    def compute(self, value: Value) -> Value | None:
        """Something that keeps the layout (values of a pending maximum or minimum are only copied)."""
        kinds = ["relu", "clamp", "double", "view", "cast"] if not value.partial else ["double", "view"]
        kind = self.rng.choice(kinds)
        node = value.node
        if node.meta["val"].dtype.is_complex and kind not in ("double", "view"):
            return None
        if kind == "relu":
            node = self.call(torch.ops.aten.relu.default, node)
        elif kind == "clamp":
            node = self.call(torch.ops.aten.clamp.default, node, -3, 3)
        elif kind == "double" and node.meta["val"].dtype == torch.int64:
            return None
        elif kind == "double":
            node = self.call(torch.ops.aten.mul.Tensor, node, 2)
        elif kind == "view":
            flat = self.call(torch.ops.aten.view.default, node, [node.meta["val"].numel()])
            node = self.call(torch.ops.aten.view.default, flat, list(value.node.meta["val"].shape))
        else:
            wanted = self.rng.choice([torch.bfloat16, torch.float32])
            if node.meta["val"].dtype == wanted or not node.meta["val"].dtype.is_floating_point:
                return None
            small = self.call(torch.ops.aten.clamp.default, node, -3, 3)
            node = self.call(torch.ops.prims.convert_element_type.default, small, wanted)
            if self.rng.random() < 0.5:
                node = self.call(torch.ops.prims.convert_element_type.default, node, torch.float32)
        return value.copy(node)

    def narrowed(self, value: Value) -> Value | None:
        """A cast right behind what came before."""
        if value.node.meta["val"].dtype != torch.float32 or value.partial:
            return None
        small = self.call(torch.ops.aten.clamp.default, value.node, -3, 3) if self.rng.random() < 0.3 else value.node
        return value.copy(self.call(torch.ops.prims.convert_element_type.default, small, torch.bfloat16))

    def add(self, value: Value) -> Value | None:
        """A sum with another value of this layout."""
        if any(op != "sum" for op in value.partial.values()):
            return None
        others = [v for v in self.values if v.layout == value.layout and v.node is not value.node]
        if not others:
            return None
        return value.copy(self.call(torch.ops.aten.add.Tensor, self.rng.choice(others).node, value.node))

    def all_of_a_kind(self, value: Value) -> Value | None:
        """Reductions or gathers one after the other, nothing in between."""
        made: Value | None = None
        if value.partial:
            for m in self.rng.sample(sorted(value.partial), len(value.partial)):
                current = made or value
                made = current.copy(current.node)
                made.node = self.collective("all_reduce", current.node, made.partial.pop(m), self.names[m])
            return made
        while (further := self.gather(made or value)) is not None:
            made = further
        return made

    def summed(self, value: Value) -> Value | None:
        """The sum of reductions of several tensors."""
        ready = [m for m, op in value.partial.items() if op == "sum"]
        if not ready:
            return None
        m = self.rng.choice(ready)
        shape = value.node.meta["val"].shape
        scatter = bool(shape) and shape[0] % self.mesh.shape[m] == 0 and shape[0] > 0 and self.rng.random() < 0.5
        terms = []
        for _ in range(self.rng.randint(2, 3)):
            term = self.call(torch.ops.aten.mul.Tensor, value.node, self.rng.choice([1, 2]))
            if scatter:
                size = self.mesh.shape[m]
                terms.append(self.collective("reduce_scatter_tensor", term, "sum", size, self.names[m]))
            else:
                terms.append(self.collective("all_reduce", term, "sum", self.names[m]))
        total = terms[0]
        for term in terms[1:]:
            total = self.call(torch.ops.aten.add.Tensor, total, term)
        result = value.copy(total)
        del result.partial[m]
        if scatter:
            result.cuts[0].append(m)
        return result

    def write(self, value: Value) -> Value | None:
        """A copy that is written to after it was read."""
        if value.partial or self.rng.random() < 0.7:
            return None
        copy = self.call(torch.ops.aten.clone.default, value.node)
        read = self.gather(value.copy(copy))
        self.call(torch.ops.aten.add_.Tensor, copy, 1)
        return read if read is not None else value.copy(copy)

    def padded(self, value: Value) -> Value | None:
        """Uneven sizes: a pending sum scattered over a dimension that does not divide, padded as DTensor pads."""
        shape = value.node.meta["val"].shape
        if not self.uneven or not value.partial:
            return None
        m = self.rng.choice(sorted(value.partial))
        size, d = self.mesh.shape[m], len(shape) - 1
        step = -(-shape[d] // size)
        if step * (size - 1) >= shape[d] or shape[d] % size == 0:
            return None
        split = self.call(torch.ops.aten.split.Tensor, value.node, step, d, origin="redistribute")
        parts = [self.call(operator.getitem, split, i, origin="redistribute") for i in range(size)]
        missing = step * size - shape[d]
        dense = torch.contiguous_format
        parts = [self.call(torch.ops.aten.clone.default, p, memory_format=dense) for p in parts[:-1]] + [
            self.call(torch.ops.aten.constant_pad_nd.default, parts[-1], [0, missing], 0.0)
        ]
        whole = self.call(torch.ops.aten.cat.default, parts, d, origin="redistribute")
        packed = whole
        if d:
            packed = self.call(torch.ops.aten.cat.default, self.pieces(whole, size, d), origin="redistribute")
        result = value.copy(value.node)
        op = result.partial.pop(m)
        shard = self.collective("reduce_scatter_tensor", packed, op, size, self.names[m])
        back = self.collective("all_gather_into_tensor", shard, size, self.names[m])
        if d:
            back = self.unpacked(back, size, d)
        result.node = self.call(torch.ops.aten.slice.Tensor, back, d, 0, shape[d], origin="redistribute")
        result.node = self.call(
            torch.ops.aten.clone.default, result.node, memory_format=torch.contiguous_format, origin="redistribute"
        )
        return result

    def run(self) -> Plain:
        """The program as a graph."""
        steps = [self.gather, self.gather, self.slice, self.slice, self.reduce, self.reduce, self.exchange]
        steps += [self.compute, self.add, self.add, self.narrowed, self.write, self.padded]
        steps += [self.all_of_a_kind, self.all_of_a_kind, self.summed]
        steps += [] if self.plain else [self.coalesced, self.coalesced, self.as_pairs]
        for _ in range(self.rng.randint(3, 12)):
            self.calls += 1
            # Mostly the newest value: chains; now and then an older one: other readers, repeated gathers.
            value = self.values[-1] if self.rng.random() < 0.7 else self.rng.choice(self.values)
            made = self.rng.choice(steps)(value)
            if made is not None:
                self.values.append(made)
        results = {self.values[-1].node: None}
        for value in self.values:
            if not value.node.users or self.rng.random() < 0.15:
                results[value.node] = None
        return Plain(self.program.output(*results))

    def for_rank(self, rank: int, names: list[str]) -> Plain:
        """The same program on another rank: its own slices, its own process groups."""
        copy = torch.fx.Graph()
        new: dict[Any, Any] = {}
        copy.output(copy.graph_copy(self.program.graph, new))
        at = self.mesh.coordinates(rank)
        for pieces, m in self.own:
            if at[m]:
                new[pieces[0]].replace_all_uses_with(new[pieces[at[m]]])
        renamed = dict(zip(self.names, names))
        for node in copy.nodes:
            if any(isinstance(a, str) for a in node.args):
                node.args = tuple(renamed.get(a, a) if isinstance(a, str) else a for a in node.args)
        return Plain(copy)


class Plain:
    """A graph that is never executed as Python: nothing is generated for it."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph

    def recompile(self) -> None:
        """Nothing to do."""

    def duplicate(self) -> Plain:
        """The graph once more."""
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        return Plain(copy)


def batch(
    seed: int, numbers: list[int], shape: tuple[int, ...], counts: collections.Counter[str], plain: bool = False
) -> list[str]:
    """Run programs on one mesh; what went wrong, one line each."""
    mesh = Mesh(shape)
    before: dict[int, dict[int, Any]] = {n: {} for n in numbers}
    after: dict[int, dict[int, Any]] = {n: {} for n in numbers}
    said: dict[int, dict[int, Any]] = {n: {} for n in numbers}
    inputs: dict[int, dict[int, Any]] = {n: {} for n in numbers}
    wrong: dict[int, str] = {}
    groups = {}
    builders: dict[int, Builder] = {}
    for rank in range(mesh.size):
        with mesh_world(shape, rank):
            groups[rank] = graphs.group_ranks()
            names = [group_name(mesh, (m,)) for m in range(mesh.ndim)]
            for number in numbers:
                try:
                    if rank == 0:
                        builders[number] = Builder(random.Random(f"{seed}/{number}"), mesh, plain)
                        builders[number].run()
                    gm = builders[number].for_rank(rank, names)
                    inputs[number][rank] = builders[number].inputs(f"{seed}/{number}", rank)
                    before[number][rank] = gm
                    after[number][rank] = gm.duplicate()
                    tier = random.Random(f"{seed}/{number}/tier").choice(["exact", "reassociate"])
                    context = programs.settings_for(memory_budget="unlimited")
                    report = graphs.rewritten(after[number][rank], context, tier)
                    said[number][rank] = report
                except Exception as error:  # every kind of failure is a finding
                    wrong.setdefault(number, f"rank {rank}: {type(error).__name__}: {error}")
    for number in numbers:
        counts["programs"] += 1
        if number in wrong:
            continue
        applied = [d for d in said[number][0].decisions if d.verdict is Verdict.APPLIED]
        counts["programs that a rewrite changed"] += bool(applied)
        targets = {str(node.target) for node in before[number][0].graph.nodes}
        counts["programs with coalesced collectives"] += any("coalesced" in target for target in targets)
        counts["programs with complex elements"] += builders[number].dtype.is_complex
        for decision in applied:
            counts[f"  {decision.subject} applied"] += 1
        try:
            graphs.assert_equal_on_all_ranks(before[number], after[number], groups, inputs[number])
        except Exception as error:
            wrong[number] = f"{type(error).__name__}: {error}"
    return [f"program {number} of seed {seed} on mesh {shape}: {text}" for number, text in sorted(wrong.items())]


def _in_order(name: str) -> tuple[int, str]:
    """Totals first, then rewrites by number."""
    digits = "".join(c for c in name.split()[0] if c.isdigit())
    return (int(digits or 99), name) if name.startswith(" ") else (0, name)


def run(
    programs: int = typer.Option(10_000, help="How many programs."),
    seed: int = typer.Option(0, help="Program i depends on the seed and i only."),
    first: int = typer.Option(0, help="Number of the first program."),
    failures: int = typer.Option(5, help="Stop after so many failures."),
    plain: bool = typer.Option(False, help="Without coalesced, complex, strided and permuted forms."),
) -> None:
    """Run programs; exits with 1 when one failed."""
    if programs < 1 or first < 0 or failures < 1:
        raise typer.BadParameter("--programs and --failures are at least 1, --first is at least 0")
    import torch.distributed.tensor._collective_utils  # registers the exchange

    logging.getLogger("inductor_passes").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    found: list[str] = []
    # A batch has one mesh; it is the number of a program that says in which batch it is.
    for start in range(first - first % BATCH, first + programs, BATCH):
        numbers = list(range(max(start, first), min(start + BATCH, first + programs)))
        shape = random.Random(f"{seed}/{start // BATCH}/mesh").choice(MESHES)
        wrong = batch(seed, numbers, shape, counts, plain)
        for line in wrong:
            typer.echo(line)
        found += wrong
        if len(found) >= failures:
            break
        if (start // BATCH) % 10 == 9:
            done = f"{counts['programs']} programs, {counts['programs that a rewrite changed']} changed"
            typer.echo(f"{done}, {len(found)} wrong, {time.monotonic() - began:.0f} s", err=True)
    for name in sorted(counts, key=_in_order):
        typer.echo(f"{counts[name]:8d} {name.strip()}")
    typer.echo(f"{len(found):8d} wrong")
    typer.echo(f"{time.monotonic() - began:8.0f} seconds")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(run)
