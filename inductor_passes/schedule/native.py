"""The planner's inner loops, compiled: the same results sooner.

``planner.cpp`` is built by the C++ compiler that Inductor uses too (``CXX``, else ``g++``, ``clang++``, ``c++``) when
the first problem of more than ``WORTH_BUILDING`` tasks is planned or Python has searched for long. It is kept in
``$TORCHINDUCTOR_CACHE_DIR`` and in the user's cache folder, and used for all problems once it is there. Building it
takes as long as several kernels of a model, but it belongs to no model, so an empty cache of Inductor's is no reason to
build it again. Where there is no compiler, no place to write or ``INDUCTOR_PASSES_NATIVE=0``, Python does the work.
Both give the same numbers, so ranks need not have the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from inductor_passes.records.words import NATIVE
from inductor_passes.schedule.problem import ProblemError
from inductor_passes.schedule.tables import Tables
from inductor_passes.schedule.window import Place

#: Up to this many tasks Python is done before a compiler would be, unless it has looked at so many states by then.
WORTH_BUILDING, MANY_STATES = 96, 2_000
#: Members of a window that fit into the core's sets.
LONGEST = 120
#: Numbers whose sums surely fit into 64 bits.
LARGEST = 1 << 60
#: What the core gives where it has no answer.
_NO_TASK, _FAILED = -1, -2
_FUNCTIONS = (
    *("replay", "live_bytes", "value", "latest_issue", "as_progress"),
    *("lazy", "list_schedule", "improve_window", "sweep"),
    *("waits_down", "starts_up", "makespans"),
    *("just_in_time", "greedy", "on_demand", "implied"),
)
_BUILD_S = 120
#: How often a process looks whether another one has built it.
_LOOK_S = 0.02
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
_SOURCE = Path(__file__).with_name("planner.cpp")

_log = logging.getLogger(__name__)
_I64 = ctypes.c_int64


class _Tables(ctypes.Structure):
    _fields_ = [(name, _I64) for name in ("n", "machines", "storages", "live0")] + [
        (name, ctypes.c_void_p)
        for name in (
            *("kind", "busy", "lane", "machine", "start", "alloc", "transient", "size"),
            *("pred_at", "preds", "succ_at", "succs", "eats_at", "eats", "reader_at", "readers"),
            "slowdown",
        )
    ]


@dataclass(frozen=True, slots=True)
class Flat:
    """A problem as the core reads it; the arrays are what its pointers point at."""

    view: Any
    n: int
    arrays: list[array[int]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pointers mean nothing elsewhere: a copy has None, and is flattened when it is needed."""
        return _not_yet, ()


def _not_yet() -> None:
    return None


def core() -> ctypes.CDLL | None:
    """The compiled core; None: it cannot be had here."""
    return None if os.environ.get(NATIVE, "").strip().lower() in ("0", "false", "off", "no") else _load()


def flat(t: Tables) -> tuple[ctypes.CDLL, Flat] | None:
    """The core and ``t`` as it reads it; None: Python shall do the work."""
    small = t.n <= WORTH_BUILDING and _states.value < MANY_STATES
    if small and not _load.cache_info().currsize and not _is_there():
        return None
    library = core()
    if library is None:
        return None
    if t.flat is None:
        object.__setattr__(t, "flat", _flatten(t))
    found: Flat | bool = t.flat
    return (library, found) if isinstance(found, Flat) else None


class _States(threading.local):
    """How many states Python has looked at on this thread."""

    value = 0


_states = _States()


def looked_at(states: int) -> None:
    """Python has searched: after some of that the core is worth building for small problems too."""
    _states.value += states


@functools.cache
def _is_there() -> bool:
    """Whether somebody has built it, so that loading it takes no time."""
    try:
        return any(path.exists() for path in _paths(_compiler()))
    except OSError:
        return False


def _flatten(t: Tables) -> Flat | bool:
    """False: the numbers are too large."""
    whole_ns = (sum(t.busy_ns) + sum(t.lane_ns)) * (100 + max(t.slowdown, default=-99))
    if whole_ns > LARGEST or t.live0 + sum(t.alloc) > LARGEST:
        return False
    if max((abs(s) for s in t.size), default=0) > LARGEST:
        return False
    plain = [t.kind, t.busy_ns, t.lane_ns, t.machine, t.start, t.alloc, t.transient, t.size]
    arrays = [array_of(one) for one in plain]
    for lists in (t.preds, t.succs, t.consumes, t.readers):
        arrays += _flat_lists(lists)
    arrays.append(array_of(t.slowdown) if t.slowdown else _empty(t.n))
    view = _Tables(t.n, t.machines, len(t.size), t.live0, *(one.buffer_info()[0] for one in arrays))
    return Flat(ctypes.byref(view), t.n, arrays)


def _flat_lists(lists: Sequence[Sequence[int]]) -> tuple[array[int], array[int]]:
    """Where each list begins, and all of them one after the other."""
    ends = array_of([0, *itertools.accumulate(map(len, lists))])
    return ends, array_of(list(itertools.chain.from_iterable(lists)))


def array_of(numbers: Iterable[int]) -> array[int]:
    """A copy for the core; through ``struct``, which takes a third of the time of an array's own way."""
    if isinstance(numbers, range) and numbers.start == 0 and numbers.step == 1:
        return array("q", _counted(len(numbers)))
    if isinstance(numbers, array):
        return array("q", numbers)
    if not isinstance(numbers, (list, tuple)):
        numbers = tuple(numbers)
    try:
        return array("q", struct.pack(f"{len(numbers)}q", *numbers))
    except struct.error:
        return array("q", numbers)  # which says what is wrong


@functools.lru_cache(maxsize=8)
def _counted(n: int) -> array[int]:
    return array("q", range(n))


def _at(numbers: array[int] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0] if numbers is not None else None)


def _empty(n: int) -> array[int]:
    return array("q", bytes(8 * n))


# -- the functions of the core; for what they give see their namesakes ------------------------------------------------


def replay(library: ctypes.CDLL, t: Flat, order: Sequence[int], contended: bool) -> tuple[Any, ...]:
    """The fields of ``simulate.Trace``.

    Args:
        contended: transfers slow kernels down.

    Raises:
        ProblemError: a wait comes before its start.
        IndexError: a number that is no task's.
    """
    given, makespan = array_of(order), _I64()
    out = [_empty(t.n) for _ in range(5)]
    _legal(t, library.ip_replay(t.view, _at(given), _I64(contended), *map(_at, out), ctypes.byref(makespan)))
    return (makespan.value, *(one.tolist() for one in out))


def live_bytes(library: ctypes.CDLL, t: Flat, order: Sequence[int]) -> list[int]:
    """See :func:`~inductor_passes.schedule.memory.live_bytes`."""
    given, out = array_of(order), _empty(t.n)
    _checked(library.ip_live_bytes(t.view, _at(given), _at(out)))
    return out.tolist()


def value(library: ctypes.CDLL, t: Flat, order: Sequence[int], contended: bool) -> tuple[int, int]:
    """See :func:`~inductor_passes.schedule.simulate.value`; ``contended``: transfers slow kernels down.

    Raises:
        ProblemError: a wait comes before its start.
        IndexError: a number that is no task's.
    """
    given, makespan, peak = array_of(order), _I64(), _I64()
    _legal(t, library.ip_value(t.view, _at(given), _I64(contended), ctypes.byref(makespan), ctypes.byref(peak)))
    return makespan.value, peak.value


def latest_issue(
    library: ctypes.CDLL,
    t: Flat,
    order: Sequence[int],
    times: tuple[int, Sequence[int], Sequence[int]],
    wait_by: Sequence[int] | None,
) -> list[int]:
    """See :func:`~inductor_passes.schedule.slack.latest_issue`; ``times``: ``makespan``, ``begin``, ``lane_begin``."""
    given, begin, lane_begin, out = array_of(order), array_of(times[1]), array_of(times[2]), _empty(t.n)
    until = None if wait_by is None else array_of(wait_by)
    _checked(
        library.ip_latest_issue(
            *(t.view, _at(given), _I64(times[0]), _at(begin), _at(lane_begin), _at(until), _at(out)),
        )
    )
    return out.tolist()


def as_progress(
    library: ctypes.CDLL, t: Flat, order: Sequence[int], begin: Sequence[int], latest: Sequence[int]
) -> list[int]:
    """See :func:`~inductor_passes.schedule.slack.as_progress`."""
    given, begins, times, out = array_of(order), array_of(begin), array_of(latest), _empty(t.n)
    _checked(library.ip_as_progress(t.view, _at(given), _at(begins), _at(times), _at(out)))
    return out.tolist()


def lazy(library: ctypes.CDLL, t: Flat, order: Sequence[int], hold_waits: bool) -> list[int]:
    """See :func:`~inductor_passes.schedule.reference.lazy`; ``order`` is one of all tasks."""
    given, out = array_of(order), _empty(t.n)
    _checked(library.ip_lazy(t.view, _at(given), _I64(hold_waits), _at(out)))
    return out.tolist()


def list_schedule(
    library: ctypes.CDLL,
    t: Flat,
    priorities: tuple[Sequence[int], Sequence[int], Sequence[int] | None],
    flags: tuple[bool, bool, bool],
    memory: tuple[Sequence[int], int] | None,
    first: Sequence[int],
) -> list[int] | None:
    """See :func:`~inductor_passes.schedule.list_schedule.list_schedule`. None: Python shall do it.

    Args:
        priorities: ``compute``, ``collective`` and ``release`` of the rule.
        flags: ``eager``, ``strict`` and ``fill`` of the rule.
        memory: reference order and cap in bytes.
    """
    try:
        compute, collective, release = (None if one is None else array_of(one) for one in priorities)
        reference, cap = (None, 0) if memory is None else (array_of(memory[0]), min(memory[1], LARGEST))
    except OverflowError:
        return None
    begin, out = array_of(first), _empty(t.n)
    failed = library.ip_list_schedule(
        *(t.view, _at(compute), _at(collective), _at(release), *map(_I64, flags)),
        *(_at(reference), _I64(cap), _at(begin), _I64(len(begin)), _at(out)),
    )
    return None if _checked(failed) else out.tolist()


def improve_window(
    library: ctypes.CDLL, t: Flat, window: Sequence[int], place: Place, cap_bytes: int | None, width: int
) -> tuple[list[int], tuple[int, int], int, bool]:
    """The fields of ``window.Answer``; the window has at most ``LONGEST`` members."""
    given, out, facts = array_of(window), _empty(len(window)), _empty(5)
    head, tail = place.head, place.tail
    lists = [array_of(one) for one in (head.free, head.lane_end, tail.machine, tail.wait, place.unread)]
    free, lane_end, machine, wait, unread = map(_at, lists)
    _checked(
        library.ip_improve_window(
            *(t.view, _at(given), _I64(len(given)), _I64(head.now), _I64(head.live), free, lane_end),
            *(_I64(tail.compute), machine, wait, unread, _I64(place.incumbent[0]), _I64(place.incumbent[1])),
            *(*_cap(cap_bytes), _I64(width), _at(out), _at(facts)),
        )
    )
    return out.tolist()[: facts[4]], (facts[0], facts[1]), facts[2], bool(facts[3])


def sweep(
    library: ctypes.CDLL,
    t: Flat,
    order: Sequence[int],
    shape: tuple[int, int],
    cap_bytes: int | None,
    allowance: int,
) -> tuple[list[int], int]:
    """``order`` with its windows improved, and the number of states expanded; ``shape``: length and width."""
    changed = array_of(order)
    used = _checked(
        library.ip_sweep(
            *(t.view, _at(changed), _I64(shape[0]), _I64(shape[1]), *_cap(cap_bytes), _I64(min(allowance, LARGEST))),
        )
    )
    return changed.tolist(), used


def waits_down(library: ctypes.CDLL, t: Flat, order: Sequence[int], limit_bytes: int) -> list[int]:
    """See :func:`~inductor_passes.schedule.placing.waits_down`."""
    given, out = array_of(order), _empty(t.n)
    _checked(library.ip_waits_down(t.view, _at(given), _I64(min(limit_bytes, LARGEST)), _at(out)))
    return out.tolist()


def starts_up(
    library: ctypes.CDLL, t: Flat, order: Sequence[int], limit_bytes: int, ahead_ns: int
) -> list[int]:
    """See :func:`~inductor_passes.schedule.placing.starts_up`.

    Raises:
        ProblemError: a wait comes before its start.
    """
    given, out = array_of(order), _empty(t.n)
    limits = _I64(min(limit_bytes, LARGEST)), _I64(min(ahead_ns, LARGEST))
    _legal(t, library.ip_starts_up(t.view, _at(given), *limits, _at(out)))
    return out.tolist()


def makespans(
    library: ctypes.CDLL,
    t: Flat,
    order: Sequence[int],
    durations: tuple[array[int], array[int]],
    contended: bool,
) -> list[int]:
    """See :func:`~inductor_passes.schedule.robust.makespans`.

    Args:
        durations: on the compute lane and on machines, of all disturbances one after the other.
        contended: transfers slow kernels down.
    """
    busy_ns, lane_ns = durations
    count = len(busy_ns) // t.n
    given, out = array_of(order), _empty(count)
    ways = _I64(count), _at(busy_ns), _at(lane_ns), _I64(contended)
    _checked(library.ip_makespans(t.view, _at(given), *ways, _at(out)))
    return out.tolist()


def just_in_time(
    library: ctypes.CDLL, t: Flat, order: Sequence[int], early: array[int], margin: int, relief: bool
) -> tuple[array[int], array[int], array[int]]:
    """``compute``, ``collective`` and ``release`` of the rule that ``guarded.just_in_time`` gives.

    Args:
        early: ``slack.relieves``.

    Raises:
        ProblemError: a wait comes before its start.
        IndexError: a number that is no task's.
    """
    given = array_of(order)
    position, latest, release = (_empty(t.n) for _ in range(3))
    ways = _I64(margin), _I64(relief)
    _legal(t, library.ip_just_in_time(t.view, _at(given), _at(early), *ways, *map(_at, (position, latest, release))))
    return position, latest, release


def greedy(library: ctypes.CDLL, t: Flat, looked_at: int) -> list[int]:
    """See :func:`~inductor_passes.schedule.least_memory.greedy`; ``looked_at`` ready tasks in each step."""
    out = _empty(t.n)
    _checked(library.ip_greedy(t.view, _I64(looked_at), _at(out)))
    return out.tolist()


def on_demand(
    library: ctypes.CDLL, t: Flat, roots: Sequence[int], needs: Sequence[Sequence[int]]
) -> list[int]:
    """See :func:`~inductor_passes.schedule.reference.on_demand`; ``roots`` need all tasks."""
    given, at, flat_needs = array_of(roots), *_flat_lists(needs)
    out = _empty(t.n)
    _checked(library.ip_on_demand(t.view, _at(given), _I64(len(given)), _at(at), _at(flat_needs), _at(out)))
    return out.tolist()


def implied(
    library: ctypes.CDLL, t: Flat, storages: tuple[Sequence[int], Sequence[int]], chains: int, cap_bytes: int
) -> tuple[list[tuple[int, int]], list[int]] | None:
    """The edges that ``implied.implied`` adds, in its order, and a topological order; None: no order holds to the cap.

    Args:
        storages: producers, and whether somebody releases them.
        chains: how many are looked at.
    """
    producer, releasable = map(array_of, storages)
    # Of each task that is not on a chain up to three ways of holding memory, early and late.
    edges, order, count = _empty(2 * 6 * max(1, chains) * t.n), _empty(t.n), _I64()
    answer = library.ip_implied(
        *(t.view, _at(producer), _at(releasable), _I64(chains), _I64(cap_bytes)),
        *(_at(edges), ctypes.byref(count), _at(order)),
    )
    if _checked(answer):
        return None
    flat_edges = edges[: 2 * count.value].tolist()
    return list(zip(flat_edges[::2], flat_edges[1::2])), order.tolist()


def _legal(t: Flat, answer: int) -> None:
    """Raise :class:`ProblemError` where the core found a wait before its start."""
    if _checked(answer):
        raise ProblemError(f"task {answer - 1} waits before its start {t.arrays[4][answer - 1]}")


def _checked(answer: int) -> int:
    """What the core gave.

    Raises:
        IndexError: a number that is no task's.
        MemoryError: the core could not go on; there is nothing else that it can fail on.
    """
    if answer == _NO_TASK:
        raise IndexError("a number in the order is no task's")
    if answer == _FAILED:
        raise MemoryError("the planner's core has no memory left")
    return answer


def _cap(cap_bytes: int | None) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return _I64(cap_bytes is not None), _I64(0 if cap_bytes is None else min(cap_bytes, LARGEST))


# -- building ---------------------------------------------------------------------------------------------------------


@functools.cache
def _load() -> ctypes.CDLL | None:
    """Build the core unless it is there, and load it."""
    try:
        library = ctypes.CDLL(str(_built()))
    except Exception as error:
        # Whatever is wrong with compiler, disk or loader: Python plans too.
        _log.debug("the planner runs in Python: %s", error)
        return None
    for name in _FUNCTIONS:
        getattr(library, f"ip_{name}").restype = _I64
    return library


def _compiler() -> str | None:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, wanted)), None)


def _paths(compiler: str | None) -> list[Path]:
    """Where the library would be, by folder; nowhere without a compiler."""
    if compiler is None:
        return []
    facts = (_SOURCE.read_text(), compiler, *_FLAGS, platform.platform(), platform.machine())
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return [folder / f"planner-{name}.so" for folder in _folders()]


def _built() -> Path:
    """The library's file, in the first folder that has it, or can be written to.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, no place, or it does not compile.
    """
    compiler = _compiler()
    paths = _paths(compiler)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    there = next((path for path in paths if path.exists()), None) or _first_built(compiler, paths)
    for path in paths:
        if not path.exists():
            # It is there for the next one whichever of the folders outlives this machine.
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                _put(path, lambda temporary: shutil.copyfile(there, temporary))
    return there


def _first_built(compiler: str, paths: Sequence[Path]) -> Path:
    """Build it at the first of ``paths`` that can be written to."""
    for path in paths[:-1]:
        with contextlib.suppress(OSError):
            return _built_at(compiler, path)
    return _built_at(compiler, paths[-1])


def _built_at(compiler: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")):
        # Ranks start together: whoever waited for the first finds it built.
        if not path.exists():
            _build(compiler, path)
    return path


def _build(compiler: str, path: Path) -> None:
    """Compile into ``path``, whose folder is there."""
    _put(
        path,
        lambda temporary: subprocess.run(
            [compiler, *_FLAGS, "-o", temporary, str(_SOURCE)], check=True, capture_output=True, timeout=_BUILD_S
        ),
    )


def _put(path: Path, write: Callable[[str], object]) -> None:
    """Make a file of what ``write`` writes: nobody finds half of it, even where files cannot be locked."""
    descriptor, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; together with others where files cannot be locked, or one takes ``_BUILD_S``."""
    with contextlib.ExitStack() as held:
        # A network's file system may have no locks; a process that was stopped would keep its lock for ever.
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(FileLock(lock, timeout=_BUILD_S, poll_interval=_LOOK_S))
        yield


def _folders() -> list[Path]:
    """Where it is kept, where it is looked for first at the front."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [folder / "inductor_passes" for folder in (*([Path(inductor)] if inductor else ()), own)]
