"""Inductor's scheduler nodes: buffers, dependencies, kernels."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.fx

#: The operator by whose name columns are copied out of a message, or into one, in generated code.
COPY_COLUMNS = torch.ops.aten.slice_copy.Tensor_out
#: The operator by whose name a part of a message is divided by a number.
DIVIDE = torch.ops.aten.div.out
#: What calls of our own in generated code are known as: each reads and writes a part of a message.
_CALLED = (COPY_COLUMNS, DIVIDE)


def snode_name(node: Any) -> str:
    """Unique name of a scheduler node."""
    return str(node.get_name())


def snode_kind(node: Any) -> str:
    """``start``, ``wait``, ``group`` (nodes that must stay together), ``extern``, ``nop`` or ``fused``."""
    from torch._inductor.scheduler import (
        ExternKernelSchedulerNode,
        GroupedSchedulerNode,
        NopKernelSchedulerNode,
    )
    from torch._inductor.utils import is_collective, is_wait

    if isinstance(node, GroupedSchedulerNode):
        return "group"
    if isinstance(node, NopKernelSchedulerNode):
        return "nop"
    if not isinstance(node, ExternKernelSchedulerNode):
        return "fused"
    if is_wait(node.node):
        return "wait"
    if is_collective(node.node):
        return "start"
    return "extern"


def snode_is_batched(node: Any) -> bool:
    """Whether Inductor's C++ backend makes one function of the node and its like in a row, and frees nothing inside."""
    from torch._inductor import config

    if snode_kind(node) not in ("fused", "nop") or snode_is_template(node):
        return False
    device = node.get_device()
    return device is None or (device.type == "cpu" and getattr(config, "cpu_backend", "cpp") == "cpp")


def snode_output_names(node: Any) -> list[str]:
    """Names of the buffers that a scheduler node (or the nodes fused into it) defines."""
    return [str(buffer.get_name()) for buffer in node.get_outputs()]


def snode_dependencies(node: Any) -> list[tuple[str, bool]]:
    """(buffer name, whether it only orders) for everything that must run before a scheduler node.

    A dependency that only orders (a fake weak dependency) does not keep the buffer alive.
    """
    from torch._inductor.dependencies import WeakDep

    return [
        (str(dep.name), isinstance(dep, WeakDep) and bool(getattr(dep, "is_fake", False)))
        for dep in node.unmet_dependencies
    ]


def snode_reads(node: Any) -> list[str]:
    """Names of buffers and graph inputs that a scheduler node reads or needs alive."""
    from torch._inductor.dependencies import WeakDep

    return [
        str(dep.name)
        for dep in node.read_writes.reads
        if not (isinstance(dep, WeakDep) and getattr(dep, "is_fake", False))
    ]


def snode_data_reads(node: Any) -> list[str]:
    """Names of buffers and graph inputs whose contents a scheduler node reads, not what only orders or keeps alive."""
    from torch._inductor.dependencies import WeakDep

    return [str(dep.name) for dep in node.read_writes.reads if not isinstance(dep, WeakDep)]


def snode_mutations(node: Any) -> list[str]:
    """Names of existing buffers and graph inputs that a scheduler node writes to."""
    return [str(name) for buffer in node.get_outputs() for name in buffer.get_mutations()]


def snode_versions(node: Any) -> list[tuple[str, str]]:
    """(buffer, the existing buffer or graph input whose memory it is after this node has written to it) for each."""
    return [(str(buffer.get_name()), str(name)) for buffer in node.get_outputs() for name in buffer.get_mutations()]


def snode_parts(node: Any) -> list[Any]:
    """The nodes of a group that must stay together, in order; any other node alone."""
    return [p for part in node.snodes for p in snode_parts(part)] if snode_kind(node) == "group" else [node]


def snode_origins(node: Any) -> list[torch.fx.Node]:
    """FX nodes that a scheduler node computes, in no particular order; may be empty."""
    found: dict[torch.fx.Node, None] = {}
    for part in node.get_nodes():
        ir_node = part.node
        if ir_node is None:
            continue
        for origin in ir_node.get_origins() if hasattr(ir_node, "get_origins") else ():
            found[origin] = None
    return list(found)


def snode_origin(node: Any) -> torch.fx.Node | None:
    """The FX node that an extern kernel stands for, None when Inductor does not say."""
    ir_node = node.node
    origin = getattr(ir_node, "origin_node", None) if ir_node is not None else None
    if origin is None and ir_node is not None and hasattr(ir_node, "get_origin_node"):
        origin = ir_node.get_origin_node()
    if origin is None and isinstance(called := snode_op(node), torch._ops.HigherOrderOperator):
        # Inductor does not say for those with several results, but the node is among what went into the kernel.
        found = [n for n in snode_origins(node) if n.target is called]
        origin = found[0] if len(found) == 1 else None
    return origin if isinstance(origin, torch.fx.Node) else None


def snode_op(node: Any) -> Any:
    """The operator overload or higher-order operator that an extern kernel calls, None when it is no operator call."""
    return getattr(node.node, "op_overload", None)


def snode_call(node: Any) -> torch.fx.Node | None:
    """The one FX node among those of a kernel that calls the kernel's own operator; None where there is no such one.

    For messages between two ranks and for waits Inductor names no origin, or names another node's.
    """
    found = [origin for origin in snode_origins(node) if origin.target is snode_op(node)]
    return found[0] if len(found) == 1 else None


def snodes_kept_behind(nodes: list[Any], behind: list[tuple[Any, Any]]) -> list[Any]:
    """Nodes of Inductor's scheduler before fusion, in an order that keeps pairs (before, after).

    Inductor keeps them from now on too, also where it fuses: as it keeps the order of collectives.
    """
    from torch._inductor.dependencies import WeakDep

    for before, after in behind:
        own = next(iter(after.get_buffer_names()))
        for buffer in before.get_buffer_names():
            after.add_fake_dep(WeakDep(buffer, mutating_buf=own, is_fake=True))
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    return list(scheduler.nodes)


def snode_needs(node: Any, other: Any) -> bool:
    """Whether a node of Inductor's scheduler comes behind another one by what it reads, directly or not."""
    return not node.ancestors.isdisjoint(other.get_operation_names())


def snode_waited_buffers(node: Any) -> list[str]:
    """Buffers that a wait waits for."""
    return [str(buffer.get_name()) for buffer in node.node.inputs if hasattr(buffer, "get_name")]


def snode_is_template(node: Any) -> bool:
    """Whether a scheduler node is a template (a matmul with fused epilogues, for instance)."""
    return bool(node.is_template())


def snode_bytes(node: Any) -> int:
    """Bytes that a scheduler node reads and writes, by hints."""
    if getattr(getattr(node, "node", None), "op_overload", None) in _CALLED:
        # Inductor counts all of the message that a part is read from, or written into.
        from torch._inductor.virtualized import V

        elements = [_hint(V.graph.sizevars, size) for size in node.node.get_size()]
        return 2 * math.prod(elements) * int(node.node.get_dtype().itemsize)
    return int(node.get_read_write_buffers_sizes())


def snode_buffers(node: Any) -> list[tuple[str, int, list[str], str]]:
    """What a scheduler node defines: (name, bytes, names of buffers whose memory it shares, allocated with) each.

    The last is the name of the multi-output buffer whose kernel allocates this one, "" when the node itself does.
    """
    from torch._inductor.ir import MultiOutput, MultiOutputLayout, NoneLayout
    from torch._inductor.virtualized import V

    out = []
    for buffer in node.get_outputs():
        shared = [str(n) for n in (*buffer.get_mutations(), *buffer.get_aliases())]
        layout = buffer.node.layout
        if shared or isinstance(layout, (NoneLayout, MultiOutputLayout)) or _stays_in_kernel(node, buffer):
            size = 0
        else:
            size = _hint(V.graph.sizevars, layout.storage_size()) * layout.dtype.itemsize
        allocated_with = ""
        if isinstance(buffer.node, MultiOutput) and not shared:
            allocated_with = str(buffer.node.inputs[0].get_name())
        out.append((str(buffer.get_name()), size, shared, allocated_with))
    return out


def _hint(sizevars: Any, expression: Any) -> int:
    if hasattr(sizevars, "optimization_hint"):
        return int(sizevars.optimization_hint(expression, fallback=0))
    return int(sizevars.size_hint(expression, fallback=0))


def _stays_in_kernel(node: Any, buffer: Any) -> bool:
    """Whether a buffer is read by the kernel that computes it only: it never gets memory of its own."""
    if snode_kind(node) != "fused":
        return False
    own = {part.get_name() for part in node.get_nodes()}
    return bool(node.scheduler.can_buffer_be_removed_through_fusion(buffer.get_name(), own))


def snode_overwrites(node: Any, done: Collection[str] = ()) -> list[tuple[str, str]]:
    """(input, output) buffers of a fused kernel of which the output will be stored in the input's memory.

    Holds when everything else that reads the input has run: what the node depends on, and the operations ``done``.
    Inductor looks at uses in its own graph: it does not know how long a collective reads.

    Source: ``SchedulerNode.decide_inplace_update`` in torch/_inductor/scheduler.py.
    """
    from torch._inductor import config
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.ir import MultiOutputLayout, MutationLayoutSHOULDREMOVE, NoneLayout
    from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    if snode_kind(node) != "fused" or not config.inplace_buffers:
        return []
    if not V.graph.has_feature(node.get_device(), BackendFeature.INPLACE_BUFFERS):
        return []
    scheduler = node.scheduler
    parts = node.get_nodes()
    # Loops that share their outer loop on a processor keep what passes between them in a local array, not in memory.
    local = type(node).__name__ == "OuterLoopFusedSchedulerNode"
    found: list[tuple[str, str]] = []
    taken: set[str] = set()
    for part in parts:
        if not isinstance(part, SchedulerNode):
            continue
        for output in part.get_outputs():
            if not output.node.should_allocate() or output.get_aliases() or output.get_mutations():
                continue
            for read in part.read_writes.reads:
                name = str(read.name)
                source = scheduler.name_to_donated_buffer.get(name) or scheduler.name_to_buf.get(name)
                if source is None or source.node is None or name in taken or name in V.graph.never_reuse_buffers:
                    continue
                if isinstance(getattr(source, "defining_op", None), NopKernelSchedulerNode):
                    continue
                if local and name in scheduler.name_to_buf and _stays_in_kernel(node, source):
                    continue
                layout = source.node.get_output_spec()
                if isinstance(layout, (NoneLayout, MultiOutputLayout, MutationLayoutSHOULDREMOVE)):
                    continue
                rest = [
                    u for u in source.users if u.node.get_name() not in part.ancestors and u.node.get_name() not in done
                ]
                if len(rest) != 1 or rest[0].node is not part or not rest[0].can_inplace:
                    continue
                accesses = {
                    access for other in parts for access in other.read_writes.reads_and_writes() if access.name == name
                }
                if len(accesses) == 1 and _same_memory(source.node, output.node):
                    found.append((name, str(output.get_name())))
                    taken.add(name)
                    break
    return found


def _same_memory(a: Any, b: Any) -> bool:
    """Whether two IR buffers have equal device, dtype and size in memory, also symbolically."""
    if a.get_device() != b.get_device() or a.get_dtype() != b.get_dtype():
        return False
    return str(a.get_layout().storage_size()) == str(b.get_layout().storage_size())


def snode_operations(node: Any) -> list[str]:
    """Names of the operations that a scheduler node carries out."""
    return [str(part.get_name()) for part in node.get_nodes()]


def snode_follows(node: Any, other: Any) -> bool:
    """Whether a scheduler node depends on another one, directly or not."""
    return any(part.get_name() in node.ancestors for part in other.get_nodes())
