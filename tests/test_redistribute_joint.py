"""The joint-graph rewrites through torch.compile: they run, are reported with forward, and can be left out."""

from __future__ import annotations

import gc

import pytest
import torch

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.engine import hooks, joint
from inductor_passes.report import Verdict
from inductor_passes.trace.collector import collect
from tests.support.compiled import without_kernels
from tests.support.redistribute_models import sequence_parallel_mlp
from tests.support.world import mesh_world


def compiled(ranks, **fields):
    """The reports of a forward and a backward in a world of so many ranks."""
    torch._dynamo.reset()
    with mesh_world((ranks,)) as mesh, without_kernels():
        torch.manual_seed(0)
        model, inputs = sequence_parallel_mlp(mesh)
        with collect(what_if=False) as reports:
            options = inductor_passes.options(redistribute="reassociate", verify="strict", **fields)
            torch.compile(model, options=options, fullgraph=True)(*inputs).sum().backward()
    return reports


def fails(graph):
    raise RuntimeError("the user's own pass")


def test_the_joint_pass_runs_in_torch_compile():
    reports = compiled(4)
    forward, backward = sorted(reports, key=lambda r: r.phase, reverse=True)
    (first, *_) = forward.passes
    assert first.name == "redistribute (joint)" and first.changed and first.rolled_back is None
    assert [d.subject for d in first.decisions if d.verdict is Verdict.APPLIED] == ["R9"]
    assert "redistribute (joint)" not in [p.name for p in backward.passes]


def test_nothing_is_left_of_a_compilation_that_failed():
    """Its successor has the same compile id: what was found on the joint graph of two ranks is not true of four."""
    with pytest.raises(Exception, match="the user's own pass"):
        compiled(2, inductor={"post_grad_custom_pre_pass": fails})
    forward, _ = sorted(compiled(4), key=lambda r: r.phase, reverse=True)
    assert [p.name for p in forward.passes].count("redistribute (joint)") == 1
    gc.collect()
    assert not joint.REPORTS


@pytest.mark.parametrize(
    "fields, registered",
    [
        ({"redistribute": "reassociate"}, True),
        ({"redistribute": "exact"}, False),
        ({"redistribute": "reassociate", "async_tp": "auto"}, True),
    ],
)
def test_it_is_registered_where_it_has_something_to_do(fields, registered):
    assert ("joint_custom_post_pass" in inductor_passes.options(**fields)) is registered
    assert hooks.joint_wanted(PassConfig(**fields)) is registered


def test_the_users_own_joint_pass_is_kept():
    def own(graph):
        pass

    options = inductor_passes.options(redistribute="reassociate", inductor={"joint_custom_post_pass": own})
    found = options["joint_custom_post_pass"]
    passes = found if isinstance(found, list) else [*found.others, found]
    assert passes[0] is own and isinstance(passes[1], hooks.JointPass)


def test_its_key_depends_on_the_settings():
    one, other = (hooks.JointPass(PassConfig(redistribute="reassociate", memory_budget=b)) for b in ("0", "+5%"))
    assert one.uuid() == hooks.JointPass(one.settings).uuid() != other.uuid()
    assert one.uuid() is not None
