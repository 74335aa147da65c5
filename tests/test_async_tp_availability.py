"""What a group can do: one answer on all ranks, in the cache key, gone with the groups; and the settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import inductor_passes
from inductor_passes import ConfigError, PassConfig
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.engine import identity
from inductor_passes.engine.passes import passes_of
from inductor_passes.groups import availability
from inductor_passes.groups.availability import UNKNOWN, Availability, Facts, agree
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.prepare import GroupError
from tests.support.ranks import Ranks
from tests.support.world import fake_world

CPU = Facts(host="a", device="cpu", symmetric_memory="no CUDA")
CUDA = Facts(host="a", device="cuda", device_id="x", visible=("x", "y"), reachable=("x", "y"))
OTHER = replace(CUDA, device_id="y")


@pytest.mark.parametrize(
    ("facts", "symmetric", "kernels", "device"),
    [
        ([CPU, CPU], "no CUDA", "", "cpu"),
        ([CPU, replace(CPU, interpreted="off")], "no CUDA", "rank 1 of the group: off", "cpu"),
        ([CPU, replace(CPU, host="b")], "no CUDA", "the ranks are on 2 hosts", "cpu"),
        ([CUDA, OTHER], "", "", "cuda"),
        ([CUDA, replace(OTHER, compiled="no Triton")], "", "rank 1 of the group: no Triton", "cuda"),
        ([CUDA, replace(OTHER, host="b")], "2 hosts", "2 hosts", "cuda"),
        ([replace(CUDA, reachable=("x",)), OTHER], "rank 0 of the group cannot access", "cannot access", "cuda"),
        ([CUDA, CUDA], "share a device", "share a device", "cuda"),
        ([replace(CUDA, overlapping=True)] * 2, "", "", "cuda"),
        ([CUDA, replace(OTHER, visible=("y",), reachable=("y",))], "", "", "cuda"),
        ([CUDA, CPU], "rank 1 of the group: no CUDA", "", "cpu"),
    ],
)
def test_agreement(facts: list[Facts], symmetric: str, kernels: str, device: str) -> None:
    found = agree(facts)
    for said, expected in ((found.symmetric_memory, symmetric), (found.kernels, kernels)):
        assert expected in said and bool(expected) == bool(said), found
    assert found.device == device and found.point_to_point == ""


def with_one_that_differs(rank: int, world: int) -> list[Availability]:
    """Availability of the world and of a mesh dimension where one rank cannot run kernels, and of an unknown group."""
    real = availability.own_facts
    availability.own_facts = lambda name: replace(real(name), interpreted="mocked") if rank == 1 else real(name)  # type: ignore[assignment]
    try:
        inductor_passes.prepare_groups(Mesh((world // 2, 2)))
        inductor_passes.prepare_groups(groups=[dist.group.WORLD])
    finally:
        availability.own_facts = real  # type: ignore[assignment]
    own = f"{sorted(availability.established())}"
    assert len(availability.established()) == 3, own
    mine = next(r for n, r in inductor_passes._torch.group_layout().items() if len(r) == 2 and r[1] - r[0] == 1)
    names = [n for n, r in inductor_passes._torch.group_layout().items() if r == mine]
    same = dist.new_group(list(range(world)))
    return [
        availability.availability(dist.group.WORLD.group_name),
        availability.availability(names[0]),
        availability.availability(same.group_name),
        availability.availability("none"),
    ]


@pytest.mark.ranks
def test_one_rank_decides_for_its_groups() -> None:
    with Ranks(4, env={"TRITON_INTERPRET": "1"}) as ranks:
        found = ranks.run(with_one_that_differs)
    bad = "rank 1 of the group: mocked"
    assert {answers[0].kernels for answers in found} == {bad}
    assert [answers[1].kernels for answers in found] == [bad, bad, "", ""]
    assert all(answers[2] == answers[0] and answers[3] == Availability() for answers in found)
    assert all(answers[0].point_to_point == "" and "CUDA" in answers[0].symmetric_memory for answers in found)


def test_fake_groups_move_nothing_and_answers_go_with_the_groups() -> None:
    with fake_world(4) as group:
        assert availability.availability(group).kernels == UNKNOWN
        inductor_passes.prepare_groups(Mesh((2, 2)))
        assert "fake" in availability.availability(group).kernels
        with pytest.raises(GroupError, match="no process group"):
            inductor_passes.prepare_groups(groups=["nothing"])
    with fake_world(4) as group:
        assert availability.availability(group).kernels == UNKNOWN
    assert availability.established() == {}


def test_the_cache_key_knows() -> None:
    config = PassConfig()
    profile = identity.load_profile(config)
    with fake_world(2) as group:
        keys = [identity.cache_key(config, profile)]
        for found in (Availability("", "", "", "cpu"), Availability("", "no", "", "cpu")):
            availability.record(group, found)
            keys.append(identity.cache_key(config, profile))
    assert len(set(keys)) == 3


def test_settings_reach_the_pass() -> None:
    config = PassConfig(
        async_tp="auto",
        async_tp_lowering="kernels",
        async_tp_groups="mesh_tp=force, 3=off",
        async_tp_sizes="0B=off,1MiB=auto",
        async_tp_parts="4,2",
    )
    (found,) = [p for p in passes_of(config) if isinstance(p, AsyncTpPass)]
    assert found == AsyncTpPass(
        mode="auto",
        lowering="kernels",
        groups=(("mesh_tp", "force"), ("3", "off")),
        sizes=((0, "off"), (1 << 20, "auto")),
        parts=(2, 4),
    )
    environ = {"INDUCTOR_PASSES_ASYNC_TP_SIZES": "64KiB=force", "INDUCTOR_PASSES_ASYNC_TP_LOWERING": "op"}
    assert PassConfig.from_env(environ).uses_async_tp and not PassConfig().uses_async_tp
    assert not PassConfig(async_tp_groups="tp=off").uses_async_tp
    ours = inductor_passes.options(async_tp_groups="tp=force")["custom_partitioner_fn"]
    assert ours.settings.async_tp_groups == "tp=force"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("async_tp_lowering", "triton"),
        ("async_tp_groups", "tp"),
        ("async_tp_groups", "tp=on"),
        ("async_tp_groups", "=auto"),
        ("async_tp_groups", "tp=off,tp=auto"),
        ("async_tp_groups", {"tp": "off"}),
        ("async_tp_sizes", "1048576=auto"),
        ("async_tp_sizes", "1MiB"),
        ("async_tp_sizes", "1KiB=off,1024B=auto"),
        ("async_tp_parts", ""),
        ("async_tp_parts", "1,2"),
        ("async_tp_parts", "2;4"),
        ("async_tp_parts", "2,4,2"),
        ("async_tp_parts", 4),
    ],
)
def test_bad_settings(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        inductor_passes.options(**{key: value})
    assert key in str(caught.value) and repr(value) in str(caught.value) and "expected" in str(caught.value)


def test_a_group_is_known_by_its_description() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from inductor_passes.ir.view import GraphView
    from tests.support.async_tp_programs import BY_NAME, trace

    with fake_world(2):
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        descriptions = inductor_passes._torch.group_descriptions()
        (collective,) = GraphView(trace(BY_NAME["ag0_mm"]).graph).collectives
        described = descriptions[collective.group.name]
        assert described
        settings = AsyncTpPass(groups=((described, "off"),))
        assert settings.mode_of(collective) == "off"
        assert AsyncTpPass(groups=(("other", "off"),)).mode_of(collective) == "auto"
    assert torch.distributed.is_initialized() is False
