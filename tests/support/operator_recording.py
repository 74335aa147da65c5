"""What operators do to real memory: torch's own samples run on the CPU, every operator below them watched.

    python -m tests.support.operator_recording SAMPLES

Prints one JSON object per difference between what an operator did to its arguments' bytes and storages and what the
passes (by schema) or the verifier (by a run without data) say, and a last one with counts.
"""

from __future__ import annotations

import collections
import json
import sys
import warnings
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from inductor_passes import _torch
from inductor_passes.verify.facts import operators

#: How many calls of one overload are watched.
ENOUGH = 6


class Watch(TorchDispatchMode):
    """Compares bytes and storages of arguments before and after every operator."""

    def __init__(self, watched: collections.Counter[Any], differences: set[str]) -> None:
        super().__init__()
        self.watched = watched
        self.differences = differences

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        use = _torch.memory_use(target) if _torch.is_op(target) else None
        given = operators.by_name(target, args, kwargs) if use is not None else {}
        owned = [(name, t) for name, value in given.items() for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        if use is None or self.watched[target] >= ENOUGH or any(t.layout is not torch.strided for _, t in owned):
            return target(*args, **kwargs)
        self.watched[target] += 1
        before = [(_bytes(t), _torch.storage_identity(t)) for _, t in owned]
        state = torch.get_rng_state()
        outcome = target(*args, **kwargs)
        drew = not torch.equal(state, torch.get_rng_state())
        wrote = {name for (name, t), (content, _) in zip(owned, before) if _bytes(t) != content}
        results = [outcome] if len(use.results) == 1 else list(outcome or ())
        places = [{_torch.storage_identity(t) for t in tree_leaves(r) if _strided(t)} for r in results]
        # Where several arguments are the same memory (``x.copy_(x)``), any of them may stand for it.
        owners: dict[int, set[str]] = {}
        for (name, _), (_, place) in zip(owned, before):
            owners.setdefault(place, set()).add(name)
        shared = [[owners[place] for place in found if place in owners] for found in places]
        signature = self._signature(target, given)
        for what, where in (
            ("draws", drew and not _torch.is_seeded_random(target)),
            ("schema: writes", wrote - set(use.written)),
            ("schema: aliases", _unsaid(shared, use.results)),
            ("run: writes", signature is not None and wrote - signature[0]),
            ("run: aliases", signature is not None and _unsaid(shared, signature[1])),
        ):
            if where:
                names = sorted(where) if isinstance(where, set) else []
                self.differences.add(json.dumps({"op": str(target), "what": what, "arguments": names}))
        return outcome

    def _signature(self, target: Any, given: dict[str, Any]) -> tuple[set[str], list[set[str]]] | None:
        """(arguments that the verifier says are written to, per return those that it may be memory of)."""

        def argument(value: Any) -> Any:
            return _torch.tensor_argument(value) if isinstance(value, torch.Tensor) else value

        filled = {k: tree_map(argument, v) for k, v in given.items()}
        owners = [name for name, v in filled.items() for t in tree_leaves(v) if isinstance(t, _torch.TensorArgument)]
        seen = _torch.observe(target, (), filled, trusted=True) if owners else None
        if seen is None:
            return None
        flags = tuple((k, v) for k, v in filled.items() if type(v) is bool)
        results = [seen.results] if len(_torch.op_schema(target).returns) == 1 else list(seen.results or ())
        aliased = [{owners[i] for found in operators.flat_results(r) for i in found} for r in results]
        return {owners[i] for i in seen.written} | _torch.declared_writes(target, flags), aliased


def _unsaid(shared: list[list[set[str]]], said: Any) -> set[str]:
    """Arguments that a result is memory of, where none of those that it is memory of is among the ones said."""
    return {name for places, names in zip(shared, said) for place in places if not place & set(names) for name in place}


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def record(samples: int) -> tuple[collections.Counter[Any], set[str]]:
    """(how often each overload was watched, differences) of ``samples`` samples of every operator that torch tests."""
    watched: collections.Counter[Any] = collections.Counter()
    differences: set[str] = set()
    for info in op_db:
        supported = info.supported_dtypes("cpu")
        dtype = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in supported), None)
        for number, sample in enumerate(info.sample_inputs("cpu", dtype) if dtype is not None else ()):
            if number == samples:
                break
            for variant in (info.op, info.inplace_variant):
                if variant is None or (variant is not info.op and sample.broadcasts_input):
                    continue
                given = sample.transform(lambda t: t.clone() if isinstance(t, torch.Tensor) else t)
                with Watch(watched, differences):
                    try:
                        variant(given.input, *given.args, **given.kwargs)
                    except Exception:  # a sample that this build of torch does not take
                        continue
    return watched, differences


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counts, found = record(int(sys.argv[1]))
    for line in sorted(found):
        print(line)
    print(json.dumps({"overloads": len(counts), "calls": sum(counts.values())}))
