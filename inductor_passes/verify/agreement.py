"""Do the ranks of a group hold the same plan: digests compared through the group's key-value store.

Never a collective: a rank that is not there cannot hang the others. Each rank writes its digest and the lines behind
it under a key of its own and reads the others' until a deadline. What comes from the store is data: size-limited,
parsed as JSON, checked, and only ever compared and shown.

A rank that does not answer in time (its graph came from a cache, it compiles another stage of a pipeline) is
reported and never an error: only a digest that differs is one.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from inductor_passes import _torch
from inductor_passes.report import Finding

Mode = Literal["warn", "error"]

_MAX_LINES = 20_000
_MAX_BYTES = 4 * 2**20
_POLL_S = 0.02
_lock = threading.Lock()
_generation: dict[tuple[str, str], int] = {}


class RanksDifferError(RuntimeError):
    """The ranks of a group hold different plans; the message shows the first difference."""


def compare_digests(
    digest: str,
    details: Sequence[str],
    group: str,
    *,
    key: str,
    mode: Mode = "warn",
    timeout_s: float = 30.0,
    retries: int = 3,
) -> list[Finding]:
    """Compare a plan's digest with the other ranks of a group.

    Args:
        digest: equal on ranks that agree.
        details: the plan as text, one line per step, with the user's source line where known; the first line that
            differs is what gets shown.
        group: name of the process group whose ranks compare.
        key: identifies the graph among all that are compared on this group, equal on all ranks. Used again (a
            recompilation) it counts on.
        mode: ``"warn"`` warns, ``"error"`` raises when digests differ.
        timeout_s: how long to wait for the others altogether.
        retries: how many errors of the store to put up with.

    Returns:
        ``ranks-differ`` findings, one per rank that differs; ``ranks-unanswered`` when some did not answer in time.

    Raises:
        RanksDifferError: ``mode="error"`` and digests differ.
        ValueError: a bad mode, timeout or number of retries.
    """
    if mode not in ("warn", "error"):
        raise ValueError(f'inductor_passes: rank check mode={mode!r} is not allowed; expected "warn" or "error"')
    if timeout_s <= 0 or retries < 0:
        raise ValueError(
            f"inductor_passes: timeout_s={timeout_s}, retries={retries} are not allowed; expected above 0, at least 0"
        )
    place = _torch.group_store(group)
    if place is None:
        return [Finding("ranks-unanswered", "", f"process group {group} does not exist here; nothing was compared")]
    store, rank, ranks = place
    with _lock:
        generation = _generation.get((group, key), 0)
        _generation[group, key] = generation + 1
    prefix = f"inductor_passes/{key}/{generation}"
    lines = [str(line) for line in details[:_MAX_LINES]]
    answers, trouble = _exchange(store, prefix, rank, ranks, [digest, lines], timeout_s, retries)
    found = _judge(digest, lines, rank, answers)
    silent = sorted(set(ranks) - set(answers) - {rank})
    if silent or trouble:
        found.append(
            Finding(
                "ranks-unanswered",
                "",
                f"ranks {silent} of group {group} did not answer within {timeout_s:g} s; they may have this graph from "
                f"a cache or compile another one{f' ({trouble})' if trouble else ''}",
            )
        )
    for finding in found:
        if mode == "error" and finding.rule == "ranks-differ":
            raise RanksDifferError(f"inductor_passes: {finding.message}")
        warnings.warn(f"inductor_passes: {finding.message}", stacklevel=2)
    return found


def _exchange(
    store: Any, prefix: str, rank: int, ranks: Sequence[int], answer: list[object], timeout_s: float, retries: int
) -> tuple[dict[int, object], str]:
    """Publish the own answer, collect the others'; (answers by rank, last trouble with the store)."""
    deadline = time.monotonic() + timeout_s
    text = json.dumps(answer)
    if len(text) > _MAX_BYTES:
        text = json.dumps([answer[0], []])
    waiting = [r for r in ranks if r != rank]
    answers: dict[int, object] = {}
    published = False
    trouble = ""
    while not published or waiting:
        try:
            if not published:
                store.set(f"{prefix}/{rank}", text)
                published = True
            here = [r for r in waiting if store.check([f"{prefix}/{r}"])]
            for other in here:
                answers[other] = _parse(store.get(f"{prefix}/{other}"))
                waiting.remove(other)
        except Exception as error:  # stores raise RuntimeError, DistError, socket errors ...
            trouble = f"{type(error).__name__}: {error}"
            retries -= 1
            if retries < 0:
                break
        if published and not waiting:
            return answers, ""
        if time.monotonic() >= deadline:
            break
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
    return answers, trouble


def _parse(raw: bytes) -> object:
    """Another rank's answer; None when it is not one."""
    try:
        answer = json.loads(raw) if len(raw) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    if (
        isinstance(answer, list)
        and len(answer) == 2
        and isinstance(answer[0], str)
        and isinstance(answer[1], list)
        and all(isinstance(line, str) for line in answer[1])
    ):
        return answer
    return None


def _judge(digest: str, lines: list[str], rank: int, answers: dict[int, object]) -> list[Finding]:
    found = []
    for other, answer in sorted(answers.items()):
        if not isinstance(answer, list):
            found.append(Finding("ranks-differ", "", f"rank {other} left something unreadable in the store"))
        elif answer[0] != digest:
            found.append(Finding("ranks-differ", "", _first_difference(rank, lines, other, answer[1])))
    return found


def _first_difference(rank: int, mine: list[str], other: int, theirs: list[str]) -> str:
    end = "nothing more"
    for step in range(max(len(mine), len(theirs))):
        left = mine[step] if step < len(mine) else end
        right = theirs[step] if step < len(theirs) else end
        if left != right:
            return (
                f"plans differ at step {step}: rank {rank} has {left[:500]}; rank {other} has {right[:500]}"
                if theirs
                else f"plans differ: rank {rank} and rank {other} (which sent no details)"
            )
    return f"plans differ between rank {rank} and rank {other}, but not in what they list"
