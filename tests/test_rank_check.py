"""``rank_check`` on real ranks: agreement is silent, a difference is shown from both sides, a cache hit answers too."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import inductor_passes
from inductor_passes import ConfigError
from inductor_passes.engine.graph import compile_graph
from inductor_passes.verify import rank_check
from inductor_passes.verify.agreement import RanksDifferError
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

WIDTH = 16


def gathers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = x @ funcol.all_gather_tensor(weight, 0, dist.group.WORLD)
    return x


def inputs() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.ones(4, WIDTH), [torch.full((WIDTH // 2, WIDTH), i + 1.0) for i in range(3)]


def compiled(**settings: Any) -> Callable[..., torch.Tensor]:
    values = {"codegen": "aot_eager", **settings}
    options = {f"inductor_passes.{k}": v for k, v in values.items()}
    return torch.compile(gathers, backend="inductor_passes", options=options)


def observed(call: Callable[[], Any]) -> tuple[str, list[str], float]:
    """(error, our warnings, seconds) of a call."""
    began = time.monotonic()
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as raised:
            cause: BaseException | None = raised
            error = str(raised)
            while cause is not None and not isinstance(cause, RanksDifferError):
                cause = cause.__cause__ or getattr(cause, "inner_exception", None)
            assert cause is not None, f"{type(raised)}: {error}"
    said = [str(w.message) for w in caught if "inductor_passes" in str(w.message)]
    return error, said, time.monotonic() - began


def agree(rank: int, world_size: int, mode: str) -> tuple[str, list[str], float]:
    function = compiled(rank_check=mode)

    def call() -> None:
        assert torch.equal(function(*inputs()), gathers(*inputs()))

    return observed(call)


def differ(rank: int, world_size: int, mode: str) -> tuple[str, list[str], float]:
    """Rank 0 may use memory for merging, rank 1 may not; what they planned does not fit, so nothing is run."""
    from inductor_passes.config import PassConfig

    settings = PassConfig(
        rank_check=mode,
        codegen="aot_eager",
        memory_budget="unlimited" if rank == 0 else "0",
        rank_agreement="trust",
    )

    def only_plan(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        compile_graph(graph_module.graph, True, settings)
        return lambda *args: [torch.zeros(4, WIDTH)]

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    backend = aot_autograd(fw_compiler=lambda gm, args: make_boxed_func(only_plan(gm, args)))
    return observed(lambda: torch.compile(gathers, backend=backend)(*inputs()))


def silent(rank: int, world_size: int) -> tuple[str, list[str], float]:
    """Only rank 0 compiles something."""
    rank_check.TIMEOUT_S = 0.5
    try:
        function = compiled(rank_check="error", memory_budget="0", rank_agreement="2s")
        return observed(lambda: function(*inputs())) if rank == 0 else _eager_partner()
    finally:
        rank_check.TIMEOUT_S = 30.0


def _eager_partner() -> tuple[str, list[str], float]:
    return observed(lambda: gathers(*inputs()))


def subgroups(rank: int, world_size: int) -> tuple[str, list[str], float]:
    """Each rank has a group of its own besides the world: nobody waits for those who are not in it."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]

    def function(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return funcol.all_reduce(gathers(x, weights), "sum", own)

    options = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_check": "error"}
    call = torch.compile(function, backend="inductor_passes", options=options)
    return observed(lambda: call(*inputs()))


def stages(rank: int, world_size: int) -> tuple[str, list[str], float]:
    """Two stages of a pipeline: the first compiles a graph of its own before the one that both have."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    rank_check.TIMEOUT_S = 0.5
    settings = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_check": "error"}

    def compile_and_run(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.compile(function, backend="inductor_passes", options=settings)(torch.ones(4, 4))

    def call() -> None:
        if rank == 0:
            compile_and_run(lambda x: funcol.all_reduce(x + 1, "sum", own))
        compile_and_run(lambda x: funcol.all_reduce(x @ x, "sum", dist.group.WORLD))

    try:
        return observed(call)
    finally:
        rank_check.TIMEOUT_S = 30.0


def through_cache(rank: int, world_size: int, folder: str, warm: int) -> tuple[str, list[str], float, int]:
    """Inductor with a cache folder per rank; ranks below ``warm`` have compiled before."""
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(rank))
    options = inductor_passes.options(rank_check="error")
    counters.clear()
    found = observed(lambda: torch.compile(gathers, options=options)(*inputs()))
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return (*found, hits)


@pytest.fixture
def ranks(two_ranks: Ranks) -> Ranks:
    return two_ranks


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_ranks_that_agree_are_not_told_so(ranks: Ranks, mode: str) -> None:
    for error, said, seconds in ranks.run(agree, mode):
        assert not error and not said and seconds < rank_check.TIMEOUT_S


def test_off_by_default(ranks: Ranks) -> None:
    assert inductor_passes.config.rank_check == "off"
    assert all(not error and not said for error, said, _ in ranks.run(agree, "off"))


def test_a_difference_is_an_error_on_both_sides(ranks: Ranks) -> None:
    for rank, (error, _, seconds) in enumerate(ranks.run(differ, "error")):
        assert f"at line 0 rank {rank} has <start all_gather" in error
        assert f"rank {1 - rank} has <start all_gather" in error
        assert error.count("test_rank_check.py:") >= 2, error
        assert seconds < rank_check.TIMEOUT_S


def test_a_difference_is_a_warning(ranks: Ranks) -> None:
    for rank, (error, said, _) in enumerate(ranks.run(differ, "warn")):
        assert not error
        assert len(said) == 1 and f"rank {rank} has" in said[0] and f"rank {1 - rank} has" in said[0]


def test_groups_that_not_everybody_is_in(ranks: Ranks) -> None:
    for error, said, seconds in ranks.run(subgroups):
        assert not error and not said and seconds < rank_check.TIMEOUT_S


def test_a_rank_that_does_not_answer_is_a_warning(ranks: Ranks) -> None:
    (error, said, _), partner = ranks.run(silent)
    assert not error and len(said) == 1 and "were not compared" in said[0]
    assert not partner[0] and not partner[1]


def test_stages_of_a_pipeline_are_no_error() -> None:
    """They compile other graphs, and equal ones at other times: at most a warning, and nobody waits long."""
    with Ranks(2) as pool:
        for error, said, _ in pool.run(stages):
            assert not error
            assert all("were not compared" in text for text in said)


def test_a_rank_with_a_warm_cache_answers(tmp_path: Path) -> None:
    """Rank 0 finds everything in its cache, rank 1 compiles: nobody waits for a timeout."""
    with Ranks(2) as pool:
        cold = pool.run(through_cache, str(tmp_path / "a"), 0)
        assert all(not error and not said and not hits for error, said, _, hits in cold)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "0").rename(tmp_path / "b" / "0")
    with Ranks(2) as pool:
        (error, said, _, hits), (error1, said1, _, hits1) = pool.run(through_cache, str(tmp_path / "b"), 1)
    assert hits and not hits1
    assert not error and not error1 and not said1
    assert all("were not compared" in text for text in said), "the rank from the cache only glances at the other"


def test_a_bad_value() -> None:
    with pytest.raises(ConfigError, match=r'rank_check=True is not allowed; expected "off" or "warn" or "error"'):
        inductor_passes.options(rank_check=True)
