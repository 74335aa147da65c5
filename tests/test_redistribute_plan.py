"""Plans as data: bytes against DTensor's planners and one exchange, tiers, profiles, caching, the drawn form."""

import itertools
import threading

import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from inductor_passes.cost.profile import CostProfile
from inductor_passes.redistribute import plan as plan_module
from inductor_passes.redistribute.mesh import Mesh
from inductor_passes.redistribute.plan import plan_redistribution
from inductor_passes.redistribute.spec import Spec, SpecError
from tests.support.redistribute_ranks import device_mesh
from tests.support.world import fake_world
from tools.benchmarks import redistribute as table


@pytest.fixture(scope="module")
def world():
    with fake_world(8):
        yield


def spec(mesh, placements, shape=(64, 32), **more):
    return Spec(Mesh(mesh), tuple(placements.split()), shape, **more)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "size", "collectives"),
    [
        ((2, 4), "P P", "R S0", 8192, 2),
        ((2, 4), "P P", "R R", 14336, 1),
        ((2, 2, 2), "P P P", "R R R", 14336, 1),
        ((2, 4), "S0 S0", "R R", 7168, 1),
        ((2, 2, 2), "S0 S0 S0", "R R R", 7168, 1),
        ((2, 4), "P P", "S0 S0", 7168, 1),
        ((2, 4), "P S0", "S0 S0", 2048, 2),
        ((2, 4), "S0 S1", "S1 S0", 1024, 1),
        ((2, 4), "S0 S0", "S1 S1", 896, 1),
        ((2, 4), "R S0", "S0 S0", 1024, 1),
        ((2, 4), "S0 S0", "R S0", 2048, 1),
        ((2, 4), "R R", "S0 S1", 0, 0),
    ],
)
def test_known_best_plans(mesh, source, target, size, collectives):
    plan = plan_redistribution(spec(mesh, source), spec(mesh, target), exactness="reassociate")
    assert (plan.bytes, plan.collectives) == (size, collectives)


@pytest.mark.parametrize(("mesh", "shape", "every"), [(m, s, 1 if len(m) < 3 else 97) for m, s in table.CASES], ids=str)
def test_never_more_bytes_than_dtensors_planners_or_one_exchange(world, mesh, shape, every):
    dmesh = device_mesh(mesh)
    rows = [table.compare(a, b, dmesh) for a, b in itertools.islice(table.pairs(mesh, shape), 0, None, every)]
    assert sum(r["best"] is not None for r in rows) > len(rows) // 2 >= 4
    assert all(r["reassociate"] <= r["best"] for r in rows if r["best"] is not None)
    assert all(r["exact"] <= r["best"] for r in rows if r["best"] is not None and not r["partial"])
    if len(mesh) < 3:
        assert any(r["default"] is not None for r in rows)
        assert all(r["exact"] <= r["default"] for r in rows if r["default"] is not None)


def test_the_table_counts_what_dtensor_is_known_to_send(world):
    dmesh = device_mesh((2, 4))
    for source, target, greedy in [("P P", "R S0", 14336), ("S0 S1", "S1 S0", 5120), ("R S0", "S0 S0", 6144)]:
        assert table.torch_bytes(spec((2, 4), source), spec((2, 4), target), dmesh, graph=False) == greedy
    assert table.one_shot_bytes(spec((2, 4), "S0 S0"), spec((2, 4), "S1 S1")) == 896


def test_the_exact_tier_keeps_every_reduction_of_dtensor():
    kept = 0
    for source, target in itertools.product(itertools.product(("S0", "S1", "R", "P"), repeat=2), repeat=2):
        a, b = spec((2, 4), " ".join(source)), spec((2, 4), " ".join(target))
        if any(y == "P" != x for x, y in zip(source, target)):
            continue
        reductions = [s for s in plan_redistribution(a, b).steps if s.reduce_op]
        assert all(len(s.mesh_dims) == 1 for s in reductions)
        assert plan_redistribution(a, b).exactness == "exact"
        kept += len(reductions)
    assert kept > 5


def test_integer_sums_and_extrema_are_free_to_merge_in_the_exact_tier():
    for more, op in [({"dtype": "int32"}, "P"), ({}, "P(max)"), ({}, "P(min)")]:
        plan = plan_redistribution(spec((2, 4), f"{op} {op}", **more), spec((2, 4), "R R", **more))
        assert (plan.collectives, plan.exactness) == (1, "exact")
    averages = (spec((2, 4), p, dtype="int32") for p in ("P(avg) P(avg)", "R R"))
    assert plan_redistribution(*averages).collectives == 2


def test_equal_specs_need_nothing_and_keep_the_input():
    plan = plan_redistribution(spec((2, 4), "S0 P"), spec((2, 4), "S0 P"))
    assert (plan.steps, plan.bytes, plan.cost_ns) == ((), 0, 0)
    assert plan.peak_bytes == 32 * 32 * 4


def test_peak_counts_source_staging_and_result():
    plan = plan_redistribution(spec((8,), "S0"), spec((8,), "R"))
    assert plan.peak_bytes == 1024 + 8192
    plan = plan_redistribution(spec((8,), "S1"), spec((8,), "R"))
    assert plan.peak_bytes == 1024 + 8192 + 8192, "a gather along dim 1 is unpacked into the result"


def test_a_profile_decides_by_time_and_depends_on_the_topology():
    """Across hosts gathers in two levels beat the flat ring; within one host the single collective does."""

    class Hosts:
        def __init__(self, ranks_per_host):
            self.ranks_per_host = ranks_per_host

        def communication_ns(self, kind, input_bytes, output_bytes, ranks):
            slow = len({r // self.ranks_per_host for r in ranks}) > 1
            group = len(ranks)
            whole = max(input_bytes * (group if kind == "all_gather" else 1), output_bytes)
            return 1000 + whole * (group - 1) // group * (100 if slow else 1)

    source, target = spec((2, 4), "S0 S0", (4096, 64)), spec((2, 4), "R R", (4096, 64))
    two = plan_redistribution(source, target, cost_profile=Hosts(4))
    one = plan_redistribution(source, target, cost_profile=Hosts(8))
    assert [s.mesh_dims for s in one.steps] == [(0, 1)]
    # Shards are swapped within the hosts first, so that the slow axis carries the smallest possible ones.
    assert [(s.kind, s.mesh_dims) for s in two.steps] == [
        ("all_to_all", (1,)),
        ("all_gather", (0,)),
        ("all_gather", (1,)),
    ]
    assert two.steps[1].bytes == source.layout.max_numel * 4


def test_a_calibratable_profile_is_accepted_and_cached_by_content():
    source, target = spec((2, 4), "P P", (512, 512)), spec((2, 4), "R S0", (512, 512))
    plans = [
        plan_redistribution(source, target, cost_profile=CostProfile.default("cuda", 4), exactness="reassociate")
        for _ in range(2)
    ]
    assert plans[0] is plans[1]
    assert plans[0] is not plan_redistribution(source, target, exactness="reassociate")


def test_plans_are_cached_by_value_and_safe_to_make_from_threads():
    plan_module._cache.clear()
    specs = [spec((2, 4), p) for p in ("S0 S1", "S1 S0", "R S0", "S0 S0")]
    pairs = list(itertools.permutations(specs, 2))
    results = [[] for _ in range(4)]

    def work(out):
        out.extend(plan_redistribution(a, b) for a, b in pairs)

    threads = [threading.Thread(target=work, args=(out,)) for out in results]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(out == results[0] for out in results)
    assert plan_redistribution(spec((2, 4), "S0 S1"), spec((2, 4), "S1 S0")) is plan_module._cache[
        (*pairs[0], "exact", None)
    ]


def test_torch_specs_are_accepted(world):
    mesh = device_mesh((2, 4))
    meta = TensorMeta(torch.Size((64, 32)), (32, 1), torch.float32)
    a, b = (DTensorSpec(mesh, p, tensor_meta=meta) for p in ((Shard(0), Shard(0)), (Replicate(), Shard(0))))
    assert plan_redistribution(a, b) == plan_redistribution(spec((2, 4), "S0 S0"), spec((2, 4), "R S0"))
    with pytest.raises(SpecError, match="tensor meta"):
        plan_redistribution(DTensorSpec(mesh, (Shard(0), Shard(0))), b)


def test_bad_input_is_named():
    a = spec((2, 4), "S0 R")
    with pytest.raises(SpecError, match="exactness='fast'"):
        plan_redistribution(a, a, exactness="fast")
    with pytest.raises(SpecError, match="differ in shape"):
        plan_redistribution(a, spec((2, 4), "S0 R", (32, 32)))
    with pytest.raises(SpecError, match="differ in mesh"):
        plan_redistribution(a, spec((4, 2), "S0 R"))


class Drawing(TestCase):
    def test_hybrid_shard_gradient(self):
        plan = plan_redistribution(spec((2, 4), "P P"), spec((2, 4), "R S0"), exactness="reassociate")
        self.assertExpectedInline(
            str(plan),
            """\
[P(sum), P(sum)] -> [R, S(0)]  float32 [64, 32] on mesh [2, 4]
  8.0 KiB per rank, 2 collectives, 20.1 us, peak 12.0 KiB, reassociate
  [P P]   8.0 KiB each
    | reduce_scatter(sum) over dim 1 (4 ranks): 6.0 KiB per rank, 10.1 us
  [P S0]  2.0 KiB each
    | all_reduce(sum) over dim 0 (2 ranks): 2.0 KiB per rank, 10.0 us
  [R S0]  2.0 KiB each""",
        )

    def test_strided_to_plain_is_a_permutation(self):
        source = Spec(Mesh((2, 4)), ("_S(0, 4)", "S(0)"), (64, 32))
        self.assertExpectedInline(
            str(plan_redistribution(source, spec((2, 4), "S0 S0"))),
            """\
[_S(0, 4), S(0)] -> [S(0), S(0)]  float32 [64, 32] on mesh [2, 4]
  1.0 KiB per rank, 1 collective, 10.0 us, peak 3.0 KiB, exact
  [S0 S0] S0 by 1,0  1.0 KiB each
    | all_to_all over dims 0,1 (8 ranks): 1.0 KiB per rank, 10.0 us, copies 4.0 KiB
  [S0 S0]            1.0 KiB each""",
        )
