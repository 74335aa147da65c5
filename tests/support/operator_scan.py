"""Both derivations of what operators do to memory, held against each other; a process of its own.

    python -m tests.support.operator_scan NAMESPACE...

Prints one JSON object per overload: the overload, whether it could be called, and the differences between what the
passes take from schemas and what the verifier saw. An overload that takes the process with it is the last one printed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch._inductor.fx_passes.post_grad  # registers Inductor's operators
import torch._inductor.inductor_prims
import torch._prims
import torch.distributed._functional_collectives
import torch.fx

import inductor_passes.plugin  # registers ours
from inductor_passes import _torch
from inductor_passes.ir import memory, ops
from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import operators
from inductor_passes.verify.facts.view import alone
from tests.support.operator_calls import calls, overloads

#: How many calls of an overload are looked at.
ENOUGH = 3


def differences(target: Any) -> dict[str, Any]:
    """What the two derivations say differently about an overload."""
    use = _torch.memory_use(target)
    found: dict[str, Any] = {"op": str(target), "calls": 0}
    seen: list[dict[str, Any]] = []
    for given in calls(target):
        if len(seen) == ENOUGH:
            break
        if (one := _seen(target, given)) is not None:
            seen.append(one)
    found["calls"] = len(seen)
    found["tensors"] = any("Tensor" in str(a.type) for a in _torch.op_schema(target).arguments)
    if seen and use is None:
        found["no schema"] = True
    if seen and use is not None:
        written = set().union(*(one["written"] for one in seen))
        bumped = set().union(*(one["bumped"] for one in seen))
        aliased = [set().union(*(one["aliased"][i] for one in seen)) for i in range(len(use.results))]
        found["writes more than its schema says"] = sorted(written - set(use.written))
        found["writes less than its schema says"] = sorted(set(use.written) - written)
        found["writes without a new version"] = sorted(set(use.written) & written - bumped)
        results = [(a, set(r)) for a, r in zip(aliased, use.results)]
        found["aliases more than its schema says"] = sorted({name for a, r in results for name in a - r})
        found["aliases less than its schema says"] = sorted({name for a, r in results for name in r - a})
        found["rebinds"] = any(one["rebound"] for one in seen) and _torch.op_name(target) not in memory.REBINDING
        copies = any(one["copies"] for one in seen)
        found["copies"] = copies and memory.is_view_op(target) and _torch.op_name(target) not in memory.MAY_COPY
        # A buffer for a result is made to fit it when it does not.
        buffers = any(a.kwarg_only and a.name in use.written for a in _torch.op_schema(target).arguments)
        reshapes = any(one["reshaped"] for one in seen) and not buffers
        found["changes shape"] = reshapes and not _torch.changes_metadata(target)
        found["roles"] = sorted({one["roles"] for one in seen if one["roles"]})
    return {key: value for key, value in found.items() if value != [] and value is not False}


def _seen(target: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    owners = [name for name, value in given.items() for _ in _tensors(value)]
    trusted = _torch.op_name(target).partition("::")[0] in operators.TRUSTED
    observed = _torch.observe(target, (), given, trusted=trusted) if owners else None
    if observed is None:
        return None
    flags = tuple((name, value) for name, value in given.items() if type(value) is bool)
    bumped = {owners[i] for i in observed.written}
    returns = len(_torch.op_schema(target).returns)
    results = [observed.results] if returns == 1 else list(observed.results or ())
    return {
        "bumped": bumped,
        "written": bumped | _torch.declared_writes(target, flags),
        "aliased": [{owners[i] for found in operators.flat_results(r) for i in found} for r in results],
        "rebound": bool(observed.rebound),
        "reshaped": observed.reshaped,
        "copies": observed.copies,
        "roles": _roles(target, given),
    }


def _roles(target: Any, given: dict[str, Any]) -> str:
    """``passes' role and channel / verifier's`` where they differ."""
    graph = torch.fx.Graph()
    filled = _filled(graph, given)
    node = graph.call_function(target, (), filled)
    values = torch.fx.node.map_arg(filled, lambda n: n.meta["val"])
    try:
        with _torch.isolated():
            node.meta["val"] = target(**_on_meta(values))
    except (RuntimeError, ValueError):  # it needs room behind its operand
        return ""
    role = ops.role(node)
    theirs, mine = (role, ops.effect_channel(node, role)), alone(node)
    if theirs == (mine.role, mine.channel):
        return ""
    return f"{theirs[0].value} {theirs[1]} / {mine.role.value} {mine.channel}"


def _filled(graph: torch.fx.Graph, value: Any) -> Any:
    if isinstance(value, _torch.TensorArgument):
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty_strided(value.sizes, value.strides, dtype=value.dtype, device="meta")
        return node
    if isinstance(value, dict):
        return {k: _filled(graph, v) for k, v in value.items()}
    return [_filled(graph, v) for v in value] if isinstance(value, list) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: False if k == "pin_memory" else _on_meta(v) for k, v in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, _torch.TensorArgument) else []


if __name__ == "__main__":
    assert Role and inductor_passes.plugin
    for overload in overloads(tuple(sys.argv[1:])):
        print(json.dumps({"next": str(overload)}), flush=True)
        print(json.dumps(differences(overload)), flush=True)
