"""The fuzzer of redistribution chains: some programs, and those that once found something."""

from __future__ import annotations

import collections
import random

import pytest
import torch

from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.rewrites.r2_nested_reductions import MergeNestedReductions
from tests.support.redistribute_graphs import LockstepError
from tools.fuzzing import redistribute as fuzz


def judged(numbers, counts=None, plain=True):
    """What the fuzzer says about programs of seed 0 (of one batch)."""

    shape = random.Random(f"0/{numbers[0] // fuzz.BATCH}/mesh").choice(fuzz.MESHES)
    return fuzz.batch(0, numbers, shape, counts if counts is not None else collections.Counter(), plain)


@pytest.mark.parametrize("plain", [True, False])
def test_programs_keep_their_bits(plain):
    counts = collections.Counter()
    assert judged(list(range(30)), counts, plain) == []
    assert counts["programs"] == 30 and counts["programs that a rewrite changed"] >= 6
    if not plain:
        assert counts["programs with coalesced collectives"] and counts["programs with complex elements"]


@pytest.mark.parametrize("number", [298, 603])
def test_programs_that_found_something(number):
    """A slice that was shared and then released; a gather that was planned and then shared."""
    assert judged([number]) == []


def test_a_wrong_rewrite_is_found(monkeypatch):
    """A merge that reduces over one level only gives other numbers: the fuzzer must say so.

    The proof of values refuses such a rewrite, so that nobody sees its numbers; here it is off.
    """
    import inductor_passes.rewrites.r2_nested_reductions as module

    monkeypatch.setattr("inductor_passes.verify.values.compared", lambda *_: [])

    assert MergeNestedReductions in (type(r) for r in fuzz.graphs.RewriteCollectives().rewrites)
    original = module.reduced
    monkeypatch.setattr(module, "reduced", lambda emit, x, op, group: emit.call(
        torch.ops.aten.mul.Tensor, original(emit, x, op, group), 2
    ))
    program = next(n for n in range(200) if _nests_reductions(n))
    assert any("AssertionError" in line for line in judged([program]))


def _nests_reductions(number):
    """Whether the tier and the program make R2 applicable."""
    counts = collections.Counter()
    judged([number], counts)
    return counts["  R2 applied"] > 0


def test_programs_do_not_depend_on_the_rank():
    """All ranks run one program: the same operators in the same order."""
    assert issubclass(LockstepError, AssertionError)
    mesh = Mesh((2, 2))
    from tests.support.world import mesh_world

    with mesh_world((2, 2)) as _:
        builder = fuzz.Builder(random.Random("0/3"), mesh)
        first = builder.run()
        other = builder.for_rank(3, builder.names)
    assert [n.target for n in first.graph.nodes] == [n.target for n in other.graph.nodes]
