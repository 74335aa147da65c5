"""The soak of tuning: a run with a rank that is killed in the exchange, and findings that can be wrong."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.fuzzing import tune_soak

JOB: dict[str, Any] = {"how": "nothing", "victim": 0, "after_s": 1.0, "warm": [], "delays": {}}
TIMING = {"profile_hash": "abc", "note": ""}
ONE: dict[str, Any] = {"losses": [1.0, 2.0], "timings": [TIMING], "error": "", "finished": True, "delayed": []}
HELD = {rank: dict(ONE) for rank in range(2)}


def swapped(call: int = 9, back: int = 0, outcome: str = "swapped in, faster", why: str = "") -> dict[str, Any]:
    """A graph that was tuned, and what became of its second plan."""
    return {**TIMING, "swap": {"outcome": outcome, "why": why, "call": call, "back": back}}


def judged(tmp_path: Path, job: dict[str, Any], held: dict[int, Any]) -> Counter[str]:
    for rank in range(2):
        (tmp_path / f"losses-2-{rank}").write_text(json.dumps([1.0, 2.0]))
    return tune_soak._judged(0, 2, job, held, tmp_path)


def test_a_run_without_findings_is_counted(tmp_path: Path) -> None:
    assert judged(tmp_path, JOB, HELD)["graphs tuned"] == 2
    killed = {**JOB, "how": "kill"}
    assert judged(tmp_path, killed, {1: {**HELD[1], "losses": [1.0], "error": "connection closed"}})["kill"] == 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"losses": [1.0, 2.5]}, "losses of rank 1"),
        ({"finished": False}, "still exchanging"),
        ({"error": "RuntimeError"}, "ended with RuntimeError"),
        ({"timings": [{"profile_hash": "other", "note": ""}]}, "different results"),
        ({"timings": [{"profile_hash": "", "note": ""}]}, "neither a profile nor a reason"),
        ({"timings": [{"profile_hash": "", "note": f"times {tune_soak.OWN_MISTAKE}: 3 were given"}]}, "does not fit"),
    ],
)
def test_what_must_not_happen_is_found(tmp_path: Path, change: dict[str, Any], finding: str) -> None:
    held = copy.deepcopy(HELD)
    held[1] |= change
    with pytest.raises(tune_soak.TuneSoakError, match=finding):
        judged(tmp_path, JOB, held)


def test_second_plans_are_counted(tmp_path: Path) -> None:
    timings = [swapped(), swapped(0, 0, "nothing swapped", "it is late")]
    held = {rank: {**HELD[rank], "timings": timings} for rank in HELD}
    found = judged(tmp_path, JOB, held)
    assert found["swapped in, faster"] == found["nothing swapped"] == 2


@pytest.mark.parametrize(
    ("timing", "finding"),
    [
        (swapped(call=10), "changed plans at different calls"),
        (swapped(back=12, outcome="swapped in, not faster, swapped back"), "different results"),
        (swapped(0, 0, "nothing swapped"), "no reason why nothing was swapped"),
        (swapped(outcome="swapped in"), "does not know what became of the second plan"),
    ],
)
def test_a_second_plan_on_one_rank_is_found(tmp_path: Path, timing: dict[str, Any], finding: str) -> None:
    held = {0: {**HELD[0], "timings": [swapped()]}, 1: {**HELD[1], "timings": [timing]}}
    with pytest.raises(tune_soak.TuneSoakError, match=finding):
        judged(tmp_path, JOB, held)


def test_a_rank_that_does_not_end_is_found(tmp_path: Path) -> None:
    with pytest.raises(tune_soak.TuneSoakError, match="did not end"):
        judged(tmp_path, JOB, {0: HELD[0]})
    with pytest.raises(tune_soak.TuneSoakError, match="did not end"):
        judged(tmp_path, {**JOB, "how": "kill", "victim": 0}, {0: HELD[0]})


def test_ranks_with_shards_of_other_sizes_have_kernels_of_their_own(tmp_path: Path) -> None:
    one = {"name": "op0", "label": "AG0", "measured_ns": 5, "predicted_ns": 4}
    timings = [
        {**swapped(), "predicted_ns": 4, "kernels": [{"predicted_ns": 3}], "collectives": [one]},
        {**swapped(), "predicted_ns": 5, "kernels": [], "collectives": [{**one, "name": "op1", "predicted_ns": 5}]},
    ]
    held = {rank: {**ONE, "timings": [timings[rank]]} for rank in range(2)}
    assert judged(tmp_path, JOB, held)["graphs tuned"] == 2
    held[1]["timings"] = [{**timings[1], "collectives": [{**one, "measured_ns": 6}]}]
    with pytest.raises(tune_soak.TuneSoakError, match="different results"):
        judged(tmp_path, JOB, held)


def test_a_run_goes_on_until_it_is_known_what_became_of_second_plans() -> None:
    pending = {**TIMING, "note": "one size only", "swap": None}
    noted = {"profile_hash": "", "note": "late", "swap": None}
    assert not tune_soak._over([swapped(), pending]) and not tune_soak._over([swapped(), swapped(outcome="swapped in")])
    assert tune_soak._over([swapped(), noted]) and not tune_soak._over([swapped()])


def test_delays_are_counted_once_each() -> None:
    happened: list[str] = []
    delays = tune_soak.Delays({"call": 0.0, "exchange": 0.0}, happened)
    for stage in ("call", "compilation", "call"):
        delays.at(stage)
    assert happened == ["call"]
    delays.sleep("come late", 0.0)
    assert happened == ["call", "come late"]


@pytest.mark.ranks
def test_ranks_that_nothing_happens_to_get_second_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = {"0": {"call": 0.3}, "1": {"exchange": 0.2, "step": 0.1}}
    job = {**JOB, "delays": delays, "late_step": 1, "tune": tune_soak.STEPS, "steps": tune_soak.MOST}
    # Beside other load compiling takes longer.
    job |= {"patience": "60s", "longest_s": 200.0}
    monkeypatch.setattr(tune_soak, "job_of", lambda number, seed: (2, job))
    found = tune_soak.one_run(0, 0, tmp_path)
    assert found["graphs tuned"] == 4 and found["graphs with a reason"] == 0
    assert sum(found[outcome] for outcome in tune_soak.OVER) == 4 and found["delays"] >= 3


@pytest.mark.ranks
def test_a_rank_that_is_killed_in_the_exchange(tmp_path: Path) -> None:
    number = next(n for n in range(100) if tune_soak.job_of(n, 0)[1]["how"] == "kill in the exchange"
                  and tune_soak.job_of(n, 0)[0] == 2)
    found = tune_soak.one_run(number, 0, tmp_path)
    assert found["kill in the exchange"] == 1 and found["graphs with a reason"] >= 1
