"""Verdicts and warm caches: code from a cache runs only under the verdict that it was compiled under, on all ranks."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import inductor_passes
from inductor_passes import _torch, agreement
from inductor_passes.agreement import asking, cached
from inductor_passes.agreement.claim import Claim, packed_lines
from inductor_passes.agreement.consensus import refusal
from inductor_passes.config import PassConfig
from tests.support.gated import Gate, alike, inductor_options, inputs, right, use_cache
from tests.support.models import WorldGather
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

SETTINGS = PassConfig(verify="strict", redistribute="reassociate")


@dataclasses.dataclass
class Start:
    """One start of a program on one rank.

    Attributes:
        correct: its results are those without a compiler.
        told: verdicts on graphs that were compiled here.
        hits / misses: of Inductor's cache of graphs.
        said: our warnings.
        entries: files in that cache afterwards.
    """

    correct: bool
    told: list[bool]
    hits: int
    misses: int
    said: list[str]
    entries: int


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def start(
    rank: int, world_size: int, folder: str, late: set[int] | None = None, patience_s: float | None = None
) -> Start:
    """Compile a program through a cache and run it; ranks in ``late`` come when the others gave up."""
    return _observed(rank, folder, late or set(), patience_s, _inference)


def train(
    rank: int, world_size: int, folder: str, late: set[int] | None = None, patience_s: float | None = None
) -> Start:
    """The same for a forward and a backward."""
    return _observed(rank, folder, late or set(), patience_s, _training)


def _inference(gate: Gate, rank: int) -> bool:
    return right(torch.compile(lambda x: alike(rank, x), options=inductor_options(gate)), alike, rank)


def _training(gate: Gate, rank: int) -> bool:
    def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ WorldGather.apply(w)).relu() @ WorldGather.apply(v)

    def grads(function: Any) -> list[torch.Tensor]:
        weights = [torch.full((2, 4), k + 1.0, requires_grad=True) for k in range(2)]
        function(inputs(rank), *weights).sum().backward()
        return [w.grad for w in weights if w.grad is not None]

    compiled = torch.compile(model, options=inductor_options(gate))
    return all(torch.equal(a, b) for a, b in zip(grads(compiled), grads(model), strict=True))


def _observed(rank: int, folder: str, late: set[int], patience_s: float | None, run: Any) -> Start:
    from torch._dynamo.utils import counters

    heard = _Heard()
    log = logging.getLogger("inductor_passes")
    log.addHandler(heard)
    own = Path(folder) / str(rank)
    use_cache(str(own))
    gate = Gate(SETTINGS)
    if patience_s is not None:
        gate.timeout_s = patience_s
        cached.ask = lambda claim: asking.ask(dataclasses.replace(claim, timeout_s=patience_s))  # type: ignore[assignment]
    counters.clear()
    dist.barrier()
    _come(rank in late, gate)
    try:
        correct = run(gate, rank)
    finally:
        log.removeHandler(heard)
        cached.ask = asking.ask  # type: ignore[assignment]
    found = counters["inductor"]
    entries = sum(path.is_file() for path in (own / "fxgraph").rglob("*"))
    told = [one.agreed for one in gate.told]
    return Start(correct, told, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], heard.said, entries)


def _come(late: bool, gate: Gate) -> None:
    """A late rank waits until another one has its verdict, however long that takes on a busy machine."""
    known = _torch.default_store()
    assert known is not None
    _, store = known
    if late:
        store.wait(["told"], datetime.timedelta(seconds=300))
        return

    def watch() -> None:
        while not gate.told:
            time.sleep(0.1)
        store.set("told", "")

    threading.Thread(target=watch, daemon=True).start()


def fresh(function: Any, folder: Path, *args: Any) -> list[Start]:
    """One start in new processes."""
    with Ranks(2) as pool:
        found: list[Start] = pool.run(function, str(folder), *args, timeout=400)
    assert all(one.correct for one in found), found
    return found


def test_cold_then_warm(tmp_path: Path) -> None:
    cold = fresh(start, tmp_path)
    assert [one.told for one in cold] == [[True], [True]] and all(one.misses and not one.hits for one in cold)
    warm = fresh(start, tmp_path)
    assert all(one.hits and not one.misses and not one.told and not one.said for one in warm), warm
    assert [one.entries for one in warm] == [one.entries for one in cold]


@pytest.mark.parametrize("cold", [0, 1])
def test_a_rank_with_a_warm_cache_and_one_without(tmp_path: Path, cold: int) -> None:
    """The one that loads its code takes part as if it compiled, so both go on under one verdict."""
    fresh(start, tmp_path)
    shutil.rmtree(tmp_path / str(cold))
    found = fresh(start, tmp_path)
    assert found[1 - cold].hits and not found[1 - cold].told
    assert found[cold].misses and found[cold].told == [True]


def test_code_compiled_together_is_not_used_alone_and_the_other_way_round(tmp_path: Path) -> None:
    """Rank 1 comes too late, then in time again: each time what is in the cache does not fit, and is replaced."""
    fresh(start, tmp_path)
    apart = fresh(start, tmp_path, {1}, 1.0)
    assert all(one.misses and one.told == [False] for one in apart), apart
    assert any("compiling a graph anew" in text and "in time" in text for text in apart[0].said)
    assert [one.entries for one in apart] == [1, 1], "the entry that does not fit has gone"
    together = fresh(start, tmp_path)
    assert all(one.misses and one.told == [True] for one in together), together
    said = [text for one in together for text in one.said]
    assert any("compiled while ranks were not known to agree, and now they do" in text for text in said)
    assert [one.entries for one in together] == [1, 1]
    warm = fresh(start, tmp_path)
    assert all(one.hits and not one.misses and not one.told for one in warm), warm


def test_forward_and_backward_of_a_warm_and_a_cold_rank(tmp_path: Path) -> None:
    """A cold rank compiles its backward when the forward has run, and the warm one loads its own only then."""
    fresh(train, tmp_path)
    shutil.rmtree(tmp_path / "1")
    warm, cold = fresh(train, tmp_path, None, 30.0)
    assert warm.hits and not warm.misses and not warm.told, warm
    assert cold.told == [True, True] and cold.misses and not cold.hits, cold
    again = fresh(train, tmp_path)
    assert all(one.hits and not one.misses and not one.told for one in again), again


def bundled(rank: int, world_size: int, folder: str, patience_s: float) -> tuple[bool, list[str]]:
    """The cache that holds a function's graphs in one entry."""
    from torch._functorch import config

    with config.patch(bundled_autograd_cache=True):
        found = _observed(rank, folder, {1} if patience_s < 60 else set(), patience_s, _inference)
    return found.correct, found.said


def test_bundled_entries_are_refused_too(tmp_path: Path) -> None:
    for patience_s, anew in ((120.0, False), (1.0, True)):
        with Ranks(2) as pool:
            found = pool.run(bundled, str(tmp_path), patience_s, timeout=400)
        assert all(correct for correct, _ in found)
        assert any("compiling a graph anew" in text for text in found[0][1]) is anew


def two_variants(rank: int, world_size: int, folder: str, late: bool) -> tuple[bool, list[str]]:
    """A function's first graph, to which rank 0 may come too late, and a further one, to which both come."""
    heard = _Heard()
    log = logging.getLogger("inductor_passes")
    log.addHandler(heard)
    use_cache(f"{folder}/{rank}")
    known = _torch.default_store()
    assert known is not None
    _, store = known
    if late and rank == 0:
        store.wait(["told"], datetime.timedelta(seconds=300))
    if late and rank == 1:

        def impatient(claim: Claim) -> agreement.Agreement:
            found = asking.ask(dataclasses.replace(claim, timeout_s=1.0))
            store.set("told", "")
            return found

        cached.ask = impatient  # type: ignore[assignment]

    def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ WorldGather.apply(w)).relu() @ WorldGather.apply(v)

    options = inductor_passes.options(memory_budget="unlimited", rank_agreement="60s")
    compiled = torch.compile(model, options=options, dynamic=False)
    weights = [torch.full((2, 4), k + 1.0) for k in range(2)]
    correct = []
    for rows in (3, 5):
        x = torch.full((rows, 4), rank + 1.0)
        correct.append(torch.equal(compiled(x, *weights), model(x, *weights)))
        cached.ask = asking.ask  # type: ignore[assignment]
        dist.barrier()
    log.removeHandler(heard)
    return all(correct), heard.said


def test_code_that_is_not_used_has_not_answered_before(tmp_path: Path) -> None:
    """A further variant out of a cache whose first graph sends something else here: it answers for what it becomes."""
    for late in (False, True):
        shutil.rmtree(tmp_path / "0", ignore_errors=True)
        with Ranks(2) as pool:
            (right0, said0), (right1, said1) = pool.run(two_variants, str(tmp_path), late, timeout=400)
        assert right0 and right1
    assert any("an earlier graph with its collectives sends something else" in text for text in said1), said1
    assert not any("did not all do the same" in text for text in (*said0, *said1)), (said0, said1)


# the statement by itself


def claim(**changes: Any) -> Claim:
    values: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "participants": (0,),
        "corners": (0,),
        "digest": "ab" * 16,
        "values": (),
        "kinds": "",
        "roles": (),
        "places": (),
        "graph": "model__0_forward_1",
        "phase": "forward",
        "lines": "",
        "timeout_s": 1.0,
        "agreed": True,
    }
    return Claim(**{**values, **changes})


def alone(rank: int, world_size: int) -> dict[str, str]:
    """What happens to claims in a world of one rank."""
    found = {}
    wide = {"participants": (0, 1), "world_size": 1}
    cases = {
        "as it was": claim().text(),
        "another rank": claim(rank=1).text(),
        "another world": claim(world_size=4).text(),
        "agreed without anybody": claim(participants=(), digest="").text(),
        "alone without anybody": claim(participants=(), digest="", agreed=False).text(),
        "agreed with nobody there": claim(**wide).text(),
        "alone with nobody there": claim(**wide, digest="cd" * 16, agreed=False).text(),
        "garbage": "garbage",
        "empty": "",
    }
    for name, text in cases.items():
        try:
            agreement.loaded(text)
            found[name] = "used"
        except OSError as error:
            found[name] = str(error)
    return found


def test_what_is_used_and_what_is_not() -> None:
    with Ranks(1) as pool:
        (found,) = pool.run(alone)
    used = {name for name, what in found.items() if what == "used"}
    assert used == {"as it was", "alone without anybody", "alone with nobody there"}
    assert "it was compiled by rank 1 of 1, and this is rank 0 of 1" in found["another rank"]
    assert "in time" in found["agreed with nobody there"]
    assert "no claim" in found["garbage"] and "no claim" in found["empty"]


def beside_a_refusal(rank: int, world_size: int) -> str:
    """Rank 1 loads the code of a graph that it could not describe; rank 0 compiles its own and is told of it."""
    both: dict[str, Any] = {"rank": rank, "participants": (0, 1), "corners": (0, 1), "world_size": world_size}
    about = claim(**both, agreed=False, timeout_s=200.0)
    if rank == 0:
        return asking.ask(about, ["the graph"])[0].why
    why = "an argument of type object"
    refused = dataclasses.replace(about, digest=refusal(why, rank), lines=packed_lines([why]))
    agreement.loaded(refused.text())
    return "used"


def test_code_of_a_graph_that_cannot_be_described_tells_those_who_compile_theirs() -> None:
    with Ranks(2) as pool:
        said = pool.run(beside_a_refusal)
    assert said == ["rank 1 cannot describe its graph to others: an argument of type object", "used"]


def test_without_a_process_group_nothing_is_used() -> None:
    with pytest.raises(agreement.StaleVerdictError, match="there is no process group to ask"):
        agreement.loaded(claim().text())


def test_a_claim_comes_back_as_it_was() -> None:
    one = claim(values=(3, -1), kinds="po", roles=((0, 0, 1),), places=(4, 9), lines="x" * 100)
    assert Claim.parse(one.text()) == one
    assert claim().text() == claim().text()


@pytest.mark.parametrize("changes", [{"kinds": "p"}, {"digest": "a/b", "participants": (0, 1)}])
def test_claims_that_do_not_fit_together(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        Claim.parse(claim(**changes).text())


