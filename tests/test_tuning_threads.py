"""Two threads in the background: one exchanges times, the other plans again and compiles, which may take minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from inductor_passes.tuning import clock, measuring, replanning
from tests.support.tuned import MS, plan
from tests.test_tuning_clock import PLAIN

LIMIT_S = 60.0


@pytest.fixture
def graphs() -> Iterator[measuring._Graphs]:
    made = measuring._Graphs()
    yield made
    # At the end of the process nothing is to be said of them.
    made._timed.clear()


def test_times_are_handed_in_while_a_graph_is_compiled(graphs: measuring._Graphs) -> None:
    """Found by an outsider: "rank 1 did not hand in any times", while rank 1 compiled another graph's second plan."""
    handed_in, compiled = threading.Event(), threading.Event()

    def compiles() -> None:
        assert handed_in.wait(LIMIT_S)
        compiled.set()

    graphs._later(replanning.COMPILE, "forward_0 [0/0]", compiles)
    graphs._later(replanning.TIMES, "backward_1 [0/0]", handed_in.set)
    assert compiled.wait(LIMIT_S) and graphs.wait(LIMIT_S)


def test_what_is_planned_again_waits_for_graphs_that_are_being_timed(
    graphs: measuring._Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's backward is timed a little later than its forward, and both are to be in the profile."""
    monkeypatch.setattr(clock, "_RECENT_S", LIMIT_S)
    module: dict[str, Any] = {}
    exec(PLAIN, module)
    planned = plan([MS], [MS])
    done: list[str] = []
    with mock.patch.object(graphs, "_finished", lambda graph, tape, why: done.append("timed")):
        graphs.add(planned, "0/0", module, "not kept")
        (one,) = graphs._clocks
        assert not one.running, "it was not called yet"
        graphs._settle(LIMIT_S)
        module["call"]([torch.ones(1)])
        assert one.running
        began = time.monotonic()
        graphs._settle(0.2)
        assert 0.2 <= time.monotonic() - began < LIMIT_S, "for so long at most"

        def planned_again() -> None:
            graphs._settle(LIMIT_S)
            done.append("planned again")

        graphs._later(replanning.COMPILE, "forward_0 [0/0]", planned_again)
        for _ in range(planned.about.steps):
            time.sleep(0.05)
            module["call"]([torch.ones(1)])
        assert graphs.wait(LIMIT_S) and done == ["timed", "planned again"]
    assert one.over and not one.running


def test_a_graph_that_is_not_called_any_more_is_not_waited_for(
    graphs: measuring._Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an evaluation, of which the next call may be an hour away."""
    monkeypatch.setattr(clock, "_RECENT_S", 0.2)
    module: dict[str, Any] = {}
    exec(PLAIN, module)
    graphs.add(plan([MS], [MS]), "0/0", module, "not kept")
    module["call"]([torch.ones(1)])
    began = time.monotonic()
    graphs._settle(LIMIT_S)
    assert time.monotonic() - began < LIMIT_S / 2
