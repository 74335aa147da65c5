"""The compiled core of the planner gives what Python gives, to the last tie, and its absence is no error."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.config import PassConfig
from inductor_passes.schedule import native
from inductor_passes.schedule.bounds import tails
from inductor_passes.schedule.construct import rules
from inductor_passes.schedule.guarded import Timing, Trial, just_in_time
from inductor_passes.schedule.implied import implied
from inductor_passes.schedule.least_memory import greedy, large_needs_first, orders, small_first
from inductor_passes.schedule.list_schedule import PriorityRule, Reach, list_schedule
from inductor_passes.schedule.local_search import SHAPES, local_search
from inductor_passes.schedule.memory import live_bytes, peak_bytes, profile
from inductor_passes.schedule.memory_bound import within
from inductor_passes.schedule.placing import starts_up, waits_down
from inductor_passes.schedule.plan import plan
from inductor_passes.schedule.problem import Kind, Problem, ProblemError, Storage, Task
from inductor_passes.schedule.reference import lazy
from inductor_passes.schedule.robust import makespans
from inductor_passes.schedule.simulate import replay_time, value
from inductor_passes.schedule.slack import as_progress, latest_issue
from inductor_passes.schedule.tables import Tables, tables
from inductor_passes.schedule.window import improve_window
from inductor_passes.settings.errors import ConfigError
from tests.support.processes import LIMIT_S
from tests.support.schedule_graphs import random_problem, training_graphs
from tests.test_schedule_simulate import random_order

pytestmark = pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")

#: All there are.
TIMINGS = [Timing(m, r, f) for m in (0, 1) for r in (False, True) for f in (False, True)]
_SEEDS = st.integers(0, 1 << 30)


def both(problem: Problem) -> tuple[Tables, Tables]:
    """The tables of two equal problems: the first for the core, the second for Python."""
    assert native.core() is not None
    found = tables(problem), tables(Problem.from_json(problem.to_json()))
    object.__setattr__(found[0], "flat", native._flatten(found[0]))
    object.__setattr__(found[1], "flat", False)
    assert isinstance(found[0].flat, native.Flat) and native.flat(found[0]) and not native.flat(found[1])
    return found


@settings(max_examples=100, deadline=None)
@given(_SEEDS, st.integers(0, 60))
def test_memory_of_the_input_order_needs_no_tables(seed: int, tasks: int) -> None:
    problem = random_problem(seed, tasks)
    _, theirs = both(problem)
    lived = live_bytes(theirs, range(theirs.n))
    assert profile(problem) == lived
    assert peak_bytes(problem) == max(lived, default=theirs.live0)


def all_rules(t: Tables, order: Sequence[int]) -> list[PriorityRule]:
    by_tail = [-q for q in tails(t)[0]]
    trial = Trial("", order, 0, 0)
    return [
        *rules(t, True),
        *(just_in_time(t, trial, timing) for timing in TIMINGS),
        PriorityRule("", by_tail, by_tail, eager=True),
        PriorityRule("", by_tail, range(t.n), fill=True, strict=True),
    ]


@settings(max_examples=60, deadline=None)
@given(_SEEDS, st.integers(1, 120))
def test_replays_and_list_schedules_are_equal(seed: int, tasks: int) -> None:
    problem = random_problem(seed, tasks)
    ours, theirs = both(problem)
    order = random_order(problem, seed)
    assert replay_time(ours, order) == replay_time(theirs, order)
    assert live_bytes(ours, order) == live_bytes(theirs, order)
    assert value(ours, order) == value(theirs, order)
    trace = replay_time(theirs, order)
    for wait_by in (None, trace.begin):
        latest = latest_issue(theirs, order, trace, wait_by)
        assert latest_issue(ours, order, trace, wait_by) == latest
        assert as_progress(ours, order, trace, latest) == as_progress(theirs, order, trace, latest)
    assert makespans(ours, order) == makespans(theirs, order)
    peak = max(live_bytes(theirs, order), default=0)
    for limit in (peak, peak + peak // 4, 1 << 70):
        assert waits_down(ours, order, limit) == waits_down(theirs, order, limit)
        for ahead in (0, trace.makespan // 10, 1 << 70):
            assert starts_up(ours, order, limit, ahead) == starts_up(theirs, order, limit, ahead)
    assert lazy(ours, order, True) == lazy(theirs, order, True)
    assert lazy(ours, order) == lazy(theirs, order)
    reference = lazy(theirs, order)
    least = max(live_bytes(theirs, reference), default=theirs.live0)
    kept = order[: seed % (len(problem) + 1)]
    for rule in all_rules(theirs, order):
        assert list_schedule(ours, rule) == list_schedule(theirs, rule)
        for reach in (Reach(reference, least), Reach(reference, least + least // 4)):
            assert list_schedule(ours, rule, reach) == list_schedule(theirs, rule, reach)
        ends = Reach(order, max(live_bytes(theirs, order), default=0))
        assert list_schedule(ours, rule, ends, kept) == list_schedule(theirs, rule, ends, kept)


@settings(max_examples=60, deadline=None)
@given(_SEEDS, st.integers(1, 120))
def test_rules_and_frugal_orders_are_equal(seed: int, tasks: int) -> None:
    problem = random_problem(seed, tasks)
    ours, theirs = both(problem)
    order = random_order(problem, seed)
    for timing in TIMINGS:
        found, expected = (just_in_time(t, Trial("list/input", order, 0, 0), timing) for t in (ours, theirs))
        assert (found.name, found.fill) == (expected.name, expected.fill)
        assert list(found.compute) == list(expected.compute)
        assert list(found.collective) == list(expected.collective)
        assert list(found.release or ()) == list(expected.release or ())
    for frugal in (greedy, small_first, large_needs_first):
        assert frugal(ours) == frugal(theirs)


@settings(max_examples=100, deadline=None)
@given(_SEEDS, st.integers(1, 120), st.sampled_from([-40, -20, -5, 0, 3, 10]))
def test_implied_precedences_are_equal(seed: int, tasks: int, above: int) -> None:
    problem = random_problem(seed, tasks)
    ours, theirs = both(problem)
    least = min(max(live_bytes(theirs, order), default=theirs.live0) for order in orders(theirs))
    for cap in (least + least * above // 100, 1 << 70):
        found, expected = implied(ours, cap), implied(theirs, cap)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert (found.preds, found.succs, found.added) == (expected.preds, expected.succs, expected.added)
            assert list(found.order) == list(expected.order)


def test_implied_precedences_of_training_steps_are_equal() -> None:
    added = refused = 0
    for problem in training_graphs(6):
        ours, theirs = both(problem)
        came = max(live_bytes(theirs, range(theirs.n)))
        for percent in (40, 60, 80, 90, 95, 98, 100, 105):
            cap = came * percent // 100
            found, expected = implied(ours, cap), implied(theirs, cap)
            assert (found is None) == (expected is None), (problem.name, percent)
            refused += found is None
            if found is not None and expected is not None:
                added += found.added
                assert (found.preds, found.succs, found.added) == (expected.preds, expected.succs, expected.added)
                assert list(found.order) == list(expected.order)
            assert within(ours, cap) == within(theirs, cap)
    assert added and refused


@settings(max_examples=40, deadline=None)
@given(_SEEDS, st.integers(2, 150), st.sampled_from([*SHAPES, (5, 3), (120, 4)]), st.sampled_from([None, 0, 10]))
def test_searches_are_equal(seed: int, tasks: int, shape: tuple[int, int], above: int | None) -> None:
    from inductor_passes.schedule import local_search as module

    problem = random_problem(seed, tasks)
    ours, theirs = both(problem)
    order = random_order(problem, seed)
    peak = max(live_bytes(theirs, order))
    cap = None if above is None else peak + peak * above // 100
    for allowance in (50, 3000):
        expected = module._improved(theirs, list(order), shape, cap, allowance)
        assert module._improved(ours, list(order), shape, cap, allowance) == expected
    assert local_search(ours, order, cap, 0, 5000) == local_search(theirs, order, cap, 0, 5000)


@settings(max_examples=40, deadline=None)
@given(_SEEDS, st.integers(2, 24), st.integers(1, 60), st.sampled_from([None, 0, 10]))
def test_answers_about_a_window_are_equal(seed: int, length: int, width: int, above: int | None) -> None:
    from inductor_passes.schedule import local_search as module

    problem = random_problem(seed, 60)
    _, theirs = both(problem)
    flat = native._flatten(theirs)
    library = native.core()
    order = random_order(problem, seed)
    peak = max(live_bytes(theirs, order))
    cap = None if above is None else peak + peak * above // 100
    compared = 0

    def search(window, place):  # type: ignore[no-untyped-def]
        nonlocal compared
        compared += 1
        expected = improve_window(theirs, window, place, cap, width)
        found = native.improve_window(library, flat, window, place, cap, width)  # type: ignore[arg-type]
        assert found == (expected.tasks, expected.value, expected.expanded, expected.optimal)
        return expected

    module._sweep(theirs, list(order), length, search, 1 << 40)
    assert compared or replay_time(theirs, order).makespan == sum(theirs.busy_ns)


@settings(max_examples=15, deadline=None)
@given(_SEEDS, st.integers(2, 80), st.sampled_from([None, 0, 5, 25]))
def test_plans_are_equal(seed: int, tasks: int, above: int | None) -> None:
    problem = random_problem(seed, tasks)
    _, theirs = both(problem)
    peak = max(live_bytes(theirs, range(theirs.n)))
    cap = None if above is None else peak + peak * above // 100
    copy = Problem.from_json(problem.to_json())
    object.__setattr__(tables(copy), "flat", False)
    assert plan(problem, cap) == plan(copy, cap)


def test_what_is_no_order_is_refused() -> None:
    problem = random_problem(1, 40)
    ours, _ = both(problem)
    for number in (-1, ours.n):
        order = list(range(ours.n))
        order[3] = number
        for call in (replay_time, live_bytes):
            with pytest.raises(IndexError):
                call(ours, order)
        with pytest.raises(IndexError):
            list_schedule(ours, rules(ours, True)[0], Reach(order, 1 << 30))
    wait = next(i for i in range(ours.n) if ours.start[i] >= 0)
    order = [wait, *(i for i in range(ours.n) if i != wait)]
    with pytest.raises(ProblemError, match=f"task {wait} waits before its start {ours.start[wait]}"):
        replay_time(ours, order)


def test_a_planned_problem_can_be_copied_and_sent() -> None:
    """Found: pointers of the core are kept with the problem, and nothing that holds them could be pickled."""
    problem = random_problem(2, 130)
    expected = plan(problem, None)
    assert isinstance(tables(problem).flat, native.Flat)
    for copy in (pickle.loads(pickle.dumps(problem)), deepcopy(problem)):
        assert tables(copy).flat is None and plan(copy, None) == expected


def test_a_core_that_fails_is_an_error() -> None:
    """Exceptions of C++ arrive as Python's: a schedule of more tasks than any memory holds."""
    ours, _ = both(random_problem(1, 40))
    library = native.core()
    assert library is not None
    view = native._Tables.from_buffer_copy(ours.flat.view._obj)
    view.storages = 1 << 60
    broken = native.Flat(ctypes.byref(view), ours.n, ours.flat.arrays)
    with pytest.raises(MemoryError, match="planner's core"):
        native.live_bytes(library, broken, range(ours.n))


def test_numbers_that_do_not_fit_are_pythons() -> None:
    tasks = tuple(Task(f"t{i}", Kind.COMPUTE, 1 << 60) for i in range(4))
    problem = Problem(tasks, ((),) * 4, storages=(Storage(1 << 61, 0, (1,)),))
    assert native._flatten(tables(problem)) is False
    assert plan(problem, None).makespan_ns == 1 << 62


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has built the core, and Python has not searched anything."""
    kept_in(tmp_path, monkeypatch)
    monkeypatch.setattr(native, "_states", native._States())
    native._load.cache_clear()
    native._is_there.cache_clear()
    yield
    native._load.cache_clear()
    native._is_there.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_small_problems_start_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_built", lambda: pytest.fail("built"))
    assert plan(random_problem(3, native.WORTH_BUILDING // 2), None).feasible


@pytest.mark.usefixtures("unbuilt")
def test_small_problems_use_a_core_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tables(random_problem(3, native.WORTH_BUILDING // 2))
    assert native.flat(small) is None
    native._built()
    assert native.flat(small) is None
    native._is_there.cache_clear()
    assert native.flat(small) is not None


@pytest.mark.usefixtures("unbuilt")
def test_a_small_problem_that_takes_long_has_the_core_built() -> None:
    """Found: a graph of 90 tasks was searched in Python for minutes, because larger ones only got the core."""
    small = tables(random_problem(3, native.WORTH_BUILDING // 2))
    native.looked_at(native.MANY_STATES - 1)
    assert native.flat(small) is None
    native.looked_at(1)
    assert native.flat(small) is not None


def kept_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests gets into the cache of whoever runs them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "own"))


@pytest.mark.parametrize("lacks", ["compiler", "place", "wish", "sense"])
def test_without_the_core_python_plans(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5, 200)
    expected = plan(Problem.from_json(problem.to_json()), None)
    native._load.cache_clear()
    if lacks == "compiler":
        monkeypatch.setenv("CXX", str(tmp_path / "none"))
    elif lacks == "place":
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif lacks == "wish":
        monkeypatch.setenv("INDUCTOR_PASSES_NATIVE", "0")
    else:
        kept_in(tmp_path, monkeypatch)
        monkeypatch.setattr(native, "_SOURCE", tmp_path / "planner.cpp")
        (tmp_path / "planner.cpp").write_text("this is no C++")
    try:
        assert native.core() is None
        assert plan(problem, None) == expected and tables(problem).flat is None
        assert not list(tmp_path.glob("**/*.so"))
    finally:
        native._load.cache_clear()


def test_the_variable_is_checked() -> None:
    assert PassConfig.from_env({"INDUCTOR_PASSES_NATIVE": "0"}) == PassConfig()
    with pytest.raises(ConfigError, match="INDUCTOR_PASSES_NATIVE='maybe' is not allowed"):
        PassConfig.from_env({"INDUCTOR_PASSES_NATIVE": "maybe"})


def test_an_empty_cache_of_inductors_builds_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is of no model: it is in both folders, whichever of them is new."""
    builds: list[Path] = []

    def build(compiler: str, path: Path) -> None:
        builds.append(path)
        path.write_text("core")

    monkeypatch.setattr(native, "_build", build)
    kept_in(tmp_path, monkeypatch)
    first = native._built()
    assert first.is_relative_to(tmp_path / "inductor")
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / f"new {variable}"))
        native._built()
        copy = tmp_path / f"new {variable}" / "inductor_passes" / first.name
        assert copy.read_text() == "core"
    assert builds == [first]


def test_where_one_folder_cannot_be_written_to_the_other_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_build", lambda compiler, path: path.touch())
    (tmp_path / "file").touch()
    kept_in(tmp_path, monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    assert native._built().is_relative_to(tmp_path / "own")


def test_it_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in(tmp_path, monkeypatch)
    first = native._built()
    written = first.stat().st_mtime_ns
    assert native._built() == first and first.stat().st_mtime_ns == written
    assert {p.name for p in first.parent.iterdir()} == {first.name, first.with_suffix(".lock").name}


def test_processes_that_start_together_build_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them (a lock is that of an open file): the second waits, and finds what the first has built."""
    kept_in(tmp_path, monkeypatch)
    built: list[Path] = []
    began, go_on = threading.Event(), threading.Event()

    def build(compiler: str, path: Path) -> None:
        built.append(path)
        if len(built) == 1:
            began.set()
            assert go_on.wait(LIMIT_S)
        else:
            go_on.set()
        path.touch()

    monkeypatch.setattr(native, "_build", build)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(native._built)
        assert began.wait(LIMIT_S)
        second = pool.submit(native._built)
        # Without a lock the second one builds by now, and lets the first one go on.
        assert not go_on.wait(0.2)
        go_on.set()
        assert first.result(LIMIT_S) == second.result(LIMIT_S)
    assert len(built) == 1


@pytest.mark.parametrize("why", ["no locks", "no such call", "held for ever"])
def test_a_lock_that_cannot_be_had_does_not_keep_it_from_being_built(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_in(tmp_path, monkeypatch)
    monkeypatch.setattr(native, "_build", lambda compiler, path: path.touch())
    with contextlib.ExitStack() as held:
        if why == "held for ever":
            where = native._built()
            for kept in tmp_path.glob("**/*.so"):
                kept.unlink()
            held.enter_context(FileLock(where.with_suffix(".lock")))
            monkeypatch.setattr(native, "_BUILD_S", 0.05)
        else:
            error = OSError("no locks available") if why == "no locks" else NotImplementedError()
            monkeypatch.setattr(native.FileLock, "acquire", mock.Mock(side_effect=error))
        assert native._built().exists()
