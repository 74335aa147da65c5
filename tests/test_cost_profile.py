"""Cost models and profiles: shapes of the curves, agreement between ranks, and refusal of bad files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.cost.communication import (
    KINDS,
    GroupLayout,
    communication_estimate,
    message_bytes,
    wire_bytes,
)
from inductor_passes.cost.profile import (
    MAX_FILE_BYTES,
    CollectiveCost,
    CostProfile,
    GroupCost,
    MatmulPoint,
    ProfileError,
    ShapeRate,
)
from inductor_passes.cost.specs import CPU, H100_SXM, SPECS, lookup
from inductor_passes.engine.identity import load_profile
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support.world import fake_world

MB = 10**6


def calibrated() -> CostProfile:
    cost = CollectiveCost("all_gather", 50_000.0, 2.0, 7_000.0, 0.5)
    return CostProfile(
        name="lab",
        device="CPU",
        measured=True,
        ranks_per_host=2,
        matmul=(MatmulPoint("float32", 1e6, 1e5), MatmulPoint("float32", 1e8, 2e6)),
        memory_bytes_per_s=4e9,
        kernel_ns=1_000.0,
        groups=(GroupCost(GroupLayout(2, 1, 2), "gloo", "loopback", (cost,)),),
        shapes=(
            ShapeRate("matmul", "float32", 64, 0.08),
            ShapeRate("matmul", "float32", 256, 0.02),
            ShapeRate("attention", "float32", 0, 0.04),
        ),
    )


def test_every_constant_names_its_origin() -> None:
    for spec in SPECS:
        for name, constant in spec.constants().items():
            assert constant.tag in ("datasheet", "fitted"), (spec.name, name)
            assert constant.source, (spec.name, name)
            assert constant.value > 0, (spec.name, name)
        assert "float32" in spec.flops and "bfloat16" in spec.flops
        assert lookup(spec.name) is spec


class _A100:
    """What torch tells of the accelerator."""

    type = "cuda"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM"), ("NVIDIA RTX A6000", "NVIDIA H100 SXM"), (None, "NVIDIA H100 SXM")],
)
def test_defaults_are_those_of_the_device_at_hand(
    monkeypatch: pytest.MonkeyPatch, name: str | None, expected: str
) -> None:
    """Found on the first GPU: every CUDA device was planned as an H100."""

    def reported(device: object) -> str:
        if name is None:
            raise RuntimeError("no driver")
        return name

    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", _A100)
    monkeypatch.setattr("torch.cuda.get_device_name", reported)
    assert load_profile(PassConfig()).name == f"defaults for {expected}"
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert load_profile(PassConfig()).device == "CPU"


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("Intel(R) Data Center GPU Max 1550", "Intel Data Center GPU Max 1550"),
        ("cuda", "NVIDIA H100 SXM"),
        ("cpu", "CPU"),
        ("abacus", "CPU"),
    ],
)
def test_lookup(reported: str, expected: str) -> None:
    assert lookup(reported).name == expected


def test_layout() -> None:
    assert GroupLayout.of((0, 1, 2, 3), 8) == GroupLayout(4, 1, 4)
    assert GroupLayout.of((0, 8, 16), 8) == GroupLayout(3, 3, 1)
    assert GroupLayout.of((6, 7, 8), 8) == GroupLayout(3, 2, 2)
    assert GroupLayout.of((2, 3), 2).link == "intra" and GroupLayout.of((1, 2), 2).link == "inter"
    with pytest.raises(ValueError, match="ranks_per_host is 0"):
        GroupLayout.of((0, 1), 0)
    with pytest.raises(ValueError, match="without ranks"):
        GroupLayout.of((), 1)


def test_bytes_on_the_wire() -> None:
    assert wire_bytes("all_gather", 10, 40, 4) == 30
    assert wire_bytes("reduce_scatter", 40, 10, 4) == 30
    assert wire_bytes("all_reduce", 40, 40, 4) == 60
    assert wire_bytes("all_to_all", 40, 40, 4) == 30
    assert wire_bytes("broadcast", 40, 40, 4) == 40
    assert wire_bytes("send", 40, 0, 2) == 40 and wire_bytes("recv", 0, 40, 2) == 40
    assert message_bytes("all_gather", 10, 0, 4) == 40
    assert all(wire_bytes(kind, 40, 40, 1) == 0 for kind in KINDS)
    with pytest.raises(ValueError, match="'gather'; expected one of all_gather"):
        wire_bytes("gather", 1, 1, 2)


def test_large_messages_run_at_link_speed() -> None:
    gathered = 8 * 10**9
    ns, algorithm = communication_estimate("all_gather", gathered // 8, gathered, GroupLayout(8, 1, 8), H100_SXM)
    assert math.isclose(ns, gathered * 7 / 8 / 450e9 * 1e9, rel_tol=0.01), algorithm
    ns, _ = communication_estimate("all_gather", gathered // 16, gathered, GroupLayout(16, 16, 1), H100_SXM)
    assert math.isclose(ns, gathered * 15 / 16 / 50e9 * 1e9, rel_tol=0.01)
    # Eight ports of a host together are not slower than its internal link.
    ns, _ = communication_estimate("all_gather", gathered // 16, gathered, GroupLayout(16, 2, 8), H100_SXM)
    assert math.isclose(ns, gathered * 15 / 16 / 400e9 * 1e9, rel_tol=0.01)


def test_algorithm_changes_with_size() -> None:
    layout = GroupLayout(64, 8, 8)
    assert communication_estimate("all_reduce", 1024, 1024, layout, H100_SXM)[1] == "tree"
    assert communication_estimate("all_reduce", 10**10, 10**10, layout, H100_SXM)[1] == "ring"
    assert communication_estimate("all_reduce", 1024, 1024, GroupLayout(8, 1, 8), H100_SXM)[1] == "one-shot"


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(1, 4096),
    ranks_per_host=st.integers(1, 16),
    small=st.integers(0, 10**9),
    more=st.integers(0, 10**9),
    spec=st.sampled_from(SPECS),
)
def test_time_grows_with_size(kind: str, ranks: int, ranks_per_host: int, small: int, more: int, spec: object) -> None:
    profile = CostProfile.default(spec.name, ranks_per_host)  # type: ignore[attr-defined]
    group = tuple(range(ranks))
    low = profile.communication_ns(kind, small, small, group)
    high = profile.communication_ns(kind, small + more, small + more, group)
    assert isinstance(low, int) and 0 <= low <= high
    assert 0 <= profile.issue_ns(kind, small, small, group) <= profile.issue_ns(kind, small + more, small + more, group)
    assert (low == 0) == (ranks == 1)


def test_equal_groups_cost_the_same_on_every_rank() -> None:
    profile = calibrated()
    for kind in KINDS:
        assert profile.communication_ns(kind, MB, MB, (0, 1)) == profile.communication_ns(kind, MB, MB, (6, 7))
    assert profile.link((0, 1)) == profile.link((6, 7)) == "loopback"


def test_a_group_is_not_gone_through_for_every_message() -> None:
    """With thousands of ranks that is most of what planning takes: each bucket that is thought of asks."""

    class Ranks(tuple[int, ...]):
        times = 0

        def __hash__(self) -> int:
            Ranks.times += 1
            return super().__hash__()

        def __iter__(self) -> Iterator[int]:
            Ranks.times += 1
            return super().__iter__()

    profile, ranks = calibrated(), Ranks((0, 1))
    plain = [profile.communication_ns("all_reduce", size, size, (0, 1)) for size in range(1, 200)]
    issued = [profile.issue_ns("all_reduce", size, size, (0, 1)) for size in range(1, 200)]
    assert [profile.communication_ns("all_reduce", size, size, ranks) for size in range(1, 200)] == plain
    assert [profile.issue_ns("all_reduce", size, size, ranks) for size in range(1, 200)] == issued
    assert Ranks.times < 10


def test_calibrated_collective() -> None:
    profile = calibrated()
    assert profile.communication_estimate("all_gather", MB, 2 * MB, (0, 1)) == (50_000 + 2 * MB, "measured")
    assert profile.issue_ns("all_gather", MB, 2 * MB, (0, 1)) == 7_000 + MB
    # Not measured: another kind, and another host's link.
    assert (
        profile.communication_ns("all_reduce", MB, MB, (0, 1))
        == communication_estimate("all_reduce", MB, MB, GroupLayout(2, 1, 2), CPU)[0]
    )
    assert profile.communication_estimate("all_gather", MB, 2 * MB, (0, 2))[1] not in ("measured", "scaled")
    assert profile.link((0, 2)) == "inter"
    # A larger group on the same kind of link: latency by hops, bandwidth as measured.
    wide = CostProfile.from_json({**profile.to_json(), "ranks_per_host": 8})
    assert wide.communication_estimate("all_gather", MB, 4 * MB, (0, 1, 2, 3)) == (150_000 + 6 * MB, "scaled")


def test_compute_is_a_roofline() -> None:
    profile = calibrated()
    assert profile.compute_ns(0, 4 * MB, "float32") == 1_001_000
    assert profile.compute_ns(0, 4 * MB, "float32", kernels=3) == 1_003_000
    assert profile.compute_ns(0, 0, "float32", kernels=0) == 0
    assert profile.compute_ns(1e6, 0, "torch.float32") == 101_000
    assert profile.compute_ns(1e8, 0, "float32") == 2_001_000
    assert profile.compute_ns(2e8, 0, "float32") == 4_001_000
    halfway = profile.compute_ns((1e6 + 1e8) / 2, 0, "float32")
    assert halfway == round((1e5 + 2e6) / 2) + 1_000
    # bfloat16 was not measured: the spec's rate.
    assert profile.compute_ns(140e9, 0, "bfloat16") == 10**9 + 1_000
    assert CostProfile.default("cuda").compute_ns(989.4e12, 0, "bfloat16") == pytest.approx(1e9 / 0.7, rel=0.001)
    with pytest.raises(ValueError, match="bytes_moved=-1"):
        profile.compute_ns(0, -1, "float32")


@pytest.mark.parametrize(
    ("kind", "side", "ns_per_flop"),
    [
        ("matmul", 64, 0.08),
        ("matmul", 128, 0.04),  # between two measured sides, on a straight line of logarithms
        ("matmul", 256, 0.02),
        ("matmul", 257, 0.02),  # longer than all that was measured: as a square one
        ("matmul", 16, 0.32),  # shorter: takes as long as the shortest
        ("attention", 0, 0.04),
        ("attention_backward", 0, 0.02),  # not measured
    ],
)
def test_no_kernel_is_faster_than_its_shape(kind: str, side: int, ns_per_flop: float) -> None:
    taken = calibrated().compute_ns(1e8, 0, "torch.float32", 0, (kind, side))
    assert taken == pytest.approx(1e8 * ns_per_flop, rel=1e-6)
    assert calibrated().compute_ns(140e9, 0, "bfloat16", 0, (kind, side)) == 10**9


def test_profiles_of_before_shapes_still_load() -> None:
    data = calibrated().to_json()
    del data["shapes"]
    loaded = CostProfile.from_json(json.loads(json.dumps({**data, "schema_version": 1})))
    assert loaded.shapes == () and loaded.matmul == calibrated().matmul


def test_round_trip_and_hash(tmp_path: Path) -> None:
    for profile in (calibrated(), CostProfile.default("cuda")):
        file = tmp_path / "profile.json"
        profile.save(file)
        assert CostProfile.load(file) == profile
        assert CostProfile.load(file).hash() == profile.hash()
    assert calibrated().hash() != CostProfile.default("cpu").hash()
    renamed = CostProfile.from_json({**calibrated().to_json(), "name": "other"})
    assert renamed.hash() == calibrated().hash()
    faster = CostProfile.from_json({**calibrated().to_json(), "kernel_ns": 999.0})
    assert faster.hash() != calibrated().hash()
    assert not CostProfile.default("cuda").measured and "default" in CostProfile.default("cuda").name


def _with(path: str, value: object) -> dict[str, object]:
    data = json.loads(json.dumps(calibrated().to_json()))
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 99, "schema_version 99; expected 3"),
        ("schema_version", KeyError, "schema_version is missing"),
        ("colour", "red", "colour is unknown; expected one of"),
        ("ranks_per_host", 0, "ranks_per_host is 0; expected a whole number of at least 1"),
        ("ranks_per_host", True, "ranks_per_host is True"),
        ("measured", 1, "measured is 1; expected true or false"),
        ("name", 7, "name is 7; expected text"),
        ("groups", {}, "groups is {}; expected a list"),
        ("groups.0.costs.0.kind", "gather", "groups[0].costs[0].kind is 'gather'; expected one of all_gather"),
        ("groups.0.costs.0.alpha_ns", -1, "groups[0].costs[0].alpha_ns is -1; expected a finite number of at least 0"),
        (
            "groups.0.costs.0.alpha_ns",
            1e308,
            "groups[0].costs[0].alpha_ns is 1e+308; expected a finite number of at least 0, at most 1e+300",
        ),
        ("memory_bytes_per_s", 1e-300, "memory_bytes_per_s is 1e-300; expected 0 (that of the device) or at least 1"),
        ("schema_version", True, "has schema_version True; expected 3"),
        ("groups.0.costs.0.alpha_ns", float("nan"), "groups[0].costs[0].alpha_ns is nan"),
        ("groups.0.costs.0.alpha_ns", 10**400, "groups[0].costs[0].alpha_ns is 1000"),
        ("groups.0.costs.0.beta_ns_per_byte", "fast", "groups[0].costs[0].beta_ns_per_byte is 'fast'"),
        ("groups.0.layout.hosts", 3, "groups[0].layout: GroupLayout(ranks=2, hosts=3"),
        ("groups.0.layout", [], "groups[0].layout is []; expected an object"),
        ("matmul.1.flops", 1e5, "matmul points of float32 must rise"),
        ("matmul.0.ns", 0, "matmul[0].ns is 0; expected a finite number above 0"),
        ("shapes.0.kind", "conv", "a shape's kind is 'conv'; expected one of matmul, attention"),
        ("shapes.1.side", 64, "shapes of matmul in float32 must have rising sides"),
        ("shapes.1.ns_per_flop", 0, "shapes[1].ns_per_flop is 0; expected a finite number above 0"),
        ("memory_bytes_per_s", float("inf"), "memory_bytes_per_s is inf"),
    ],
)
def test_bad_values_are_named(path: str, value: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(_with(path, value)))
    with pytest.raises(ProfileError) as caught:
        CostProfile.load(file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_duplicates_are_refused() -> None:
    data = calibrated().to_json()
    group = data["groups"][0]
    with pytest.raises(ProfileError, match="layout is listed twice"):
        CostProfile.from_json(json.loads(json.dumps({**data, "groups": [group, group]})))
    twice = {**group, "costs": list(group["costs"]) * 2}
    with pytest.raises(ProfileError, match="kind is listed twice"):
        CostProfile.from_json(json.loads(json.dumps({**data, "groups": [twice]})))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", "\x00\x01", "[" * 200_000])
def test_files_that_are_no_profiles(content: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(content)
    with pytest.raises(ProfileError, match=r"profile\.json"):
        CostProfile.load(file)


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        CostProfile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        CostProfile.load(tmp_path)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ProfileError, match="too many"):
        CostProfile.load(large)


def test_slowdowns_travel_and_files_from_before_have_none(tmp_path: Path) -> None:
    plain = calibrated()
    (group,) = plain.groups
    slow = dataclasses.replace(
        plain, groups=(dataclasses.replace(group, costs=(dataclasses.replace(group.costs[0], slowdown=0.5),)),)
    )
    assert slow.slowdown_percent("all_gather", (0, 1)) == 50 and slow.slowdown_percent("broadcast", (0, 1)) == 0
    assert slow.hash() != plain.hash()
    with pytest.raises(ProfileError, match="slowdown of all_gather is 30; expected 0 to 4"):
        dataclasses.replace(
            plain, groups=(dataclasses.replace(group, costs=(dataclasses.replace(group.costs[0], slowdown=30.0),)),)
        )
    slow.save(tmp_path / "slow.json")
    assert CostProfile.load(tmp_path / "slow.json") == slow
    old = plain.to_json()
    old["schema_version"] = 2
    for cost in old["groups"][0]["costs"]:
        del cost["slowdown"]
    assert CostProfile.from_json(old) == plain
    old["groups"][0]["costs"] = [5]
    with pytest.raises(ProfileError, match=r"groups\[0\]\.costs\[0\]"):
        CostProfile.from_json(old)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_cuda_graph_replays_is_issued_by_nobody(device: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    CostProfile.default(device, 8, device_type=device).save(file)
    config = PassConfig(cost_profile=str(file))
    message = "all_gather", MB, 8 * MB, tuple(range(8))
    usual = load_profile(config)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        recorded = load_profile(config)
        assert load_profile(config) is recorded
    assert load_profile(config) is usual and usual.issue_ns(*message) > 0
    assert (recorded.issue_ns(*message) == 0) is (recorded.hash() != usual.hash()) is (device == "cuda")
    assert recorded.communication_ns(*message) == usual.communication_ns(*message)


def test_messages_are_not_joined_to_spare_a_host_that_issues_none(tmp_path: Path) -> None:
    """Each takes the host half a millisecond and the link nothing but its bytes."""
    kinds = (CollectiveCost(kind, 0.0, 0.01, 500_000.0, 0.0) for kind in KINDS)
    group = GroupCost(GroupLayout(2, 1, 2), "nccl", "link", tuple(kinds))
    file = tmp_path / "profile.json"
    dataclasses.replace(CostProfile.default("cuda", 2, device_type="cuda"), groups=(group,)).save(file)
    starts = []
    for recorded in (False, True):
        torch._dynamo.reset()
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            model = simple_fsdp(torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6))), mesh)
            options = inductor_passes.options(
                cost_profile=str(file), memory_budget="unlimited", inductor={"triton.cudagraphs": recorded}
            )
            with collect(what_if=False) as reports:
                torch.compile(model, fullgraph=True, options=options)(torch.randn(64, 64)).sum().backward()
        starts.append([len(report.collectives) for report in reports])
        assert all(("recorded" in report.cost_profile) is recorded for report in reports)
    assert starts[0][0] < starts[1][0] == 6
    assert starts[0][1] < starts[1][1]
