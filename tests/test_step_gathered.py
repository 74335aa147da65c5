"""Values that backward computes again with a parameter that it gathers for them alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from inductor_passes.report import GraphReport, PassReport, Verdict
from inductor_passes.schedule.memory import profile
from inductor_passes.schedule.problem import INPUT, Kind, Lane, Problem, ProblemError, Storage, Task
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.step import derived, recompute
from inductor_passes.step.derived import Candidate, Step
from inductor_passes.step.stored import StoredStep
from inductor_passes.trace.collector import collect
from tests.support.compiled import compiled_reports, dotted, save_profile
from tests.support.ranks import Ranks
from tests.support.world import fake_world


def step_of_two() -> Step:
    """Two saved values, both made with one gathered parameter; backward has other messages, on a lane of their own."""
    forward = Problem(
        tasks=(
            Task("gather", Kind.START, 7, lane=1, issue_ns=1),
            Task("wait", Kind.WAIT, lane=1, start=0, issue_ns=1),
            Task("f0", Kind.COMPUTE, 5),
            Task("f1", Kind.COMPUTE, 5),
        ),
        preds=((), (0,), (1,), (1, 2)),
        lanes=(Lane("else", "link"), Lane("dp", "link")),
        storages=(
            Storage(10, INPUT, (0, 1), True, "shard"),
            Storage(20, 0, (1, 2, 3), False, "gather"),
            Storage(20, 0, (1,), False, "copied", True),
            Storage(100, 2, (3,), True, "f0"),
            Storage(100, 3, (), True, "f1"),
        ),
        name="forward",
    )
    backward = Problem(
        tasks=(
            Task("b1", Kind.COMPUTE, 5),
            Task("reduce", Kind.START, 3, lane=0, issue_ns=1),
            Task("reduced", Kind.WAIT, lane=0, start=1, issue_ns=1),
            Task("b0", Kind.COMPUTE, 5),
        ),
        preds=((), (0,), (1,), (0,)),
        lanes=(Lane("else", "link"),),
        storages=(Storage(100, INPUT, (3,), False, "f0"), Storage(100, INPUT, (0,), False, "f1")),
        name="backward",
    )
    # Where f1 is made again it reads what was saved of f0.
    candidates = (Candidate("f0", 100, (0, 1, 2), 3, (0,)), Candidate("f1", 100, (0, 1, 3), 4, (1,)))
    return Step(forward, backward, candidates, reads={3: (0,)}, callers=(0,))


def test_a_chain_sends_its_message_once_more() -> None:
    step = step_of_two()
    derived.check(step)
    both = derived.derived(step, (0,))
    assert both is not None
    backward = both[1]
    assert [t.name for t in backward.tasks] == [
        *("b1", "reduce", "reduced"),
        *("gather.again", "wait.again", "f0.again", "b0"),
    ]
    assert [lane.name for lane in backward.lanes] == ["else", "dp"]
    start, wait = backward.tasks[3:5]
    assert (start.lane, start.duration_ns, wait.lane, wait.start) == (1, 7, 1, 3)
    # The caller's shard all the time; while it is gathered what the backend takes, too.
    assert profile(backward) == [110, 10, 10, 50, 50, 130, 110]
    assert step.added_ns((0,)) == step.added_ns((1,)) == (5, 7)


def test_chains_share_their_message() -> None:
    step = step_of_two()
    both = derived.derived(step, (0, 1))
    assert both is not None
    names = [t.name for t in both[1].tasks]
    assert names == ["gather.again", "wait.again", "f0.again", "f1.again", "b1", "reduce", "reduced", "b0"]
    gathered = next(s for s in both[1].storages if s.name == "gather.again")
    assert (gathered.producer, gathered.readers) == (0, (1, 2, 3))
    assert next(s for s in both[1].storages if s.name == "copied.again").workspace
    assert step.added_ns((0, 1)) == (10, 7)
    # Nobody reads what forward computed there. Its message stays.
    assert [t.duration_ns for t in both[0].tasks] == [7, 0, 0, 0]


def test_a_file_keeps_it_and_other_links_price_it() -> None:
    step = step_of_two()
    stored = StoredStep.from_json(json.loads(json.dumps(StoredStep(step).to_json())))
    assert stored.step == step
    slower = stored.changed(
        lambda p: dataclasses.replace(
            p, tasks=tuple(dataclasses.replace(t, duration_ns=t.duration_ns * 3) for t in p.tasks)
        )
    )
    both = derived.derived(slower.step, (0,))
    assert both is not None and both[1].tasks[3].duration_ns == 21


def test_what_is_waited_for_is_sent() -> None:
    step = step_of_two()
    wrong = dataclasses.replace(step, candidates=(dataclasses.replace(step.candidates[0], chain=(1, 2)),))
    with pytest.raises(ProblemError, match="the chain of f0 waits for what it does not send"):
        derived.check(wrong)


class Cells(nn.Module):
    """A recurrent cell: its gates read the input alone, so that backward needs no gradient of that product."""

    again = "of_input.weight"

    def __init__(self, inputs: int = 64, hidden: int = 128, checkpoints: bool = False) -> None:
        super().__init__()
        self.of_input, self.of_state = (nn.Linear(n, 3 * hidden, bias=False) for n in (inputs, hidden))
        self.out = nn.Linear(hidden, inputs, bias=False)
        self.hidden, self.checkpoints = hidden, checkpoints

    def cell(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        r, z, n = (self.of_input(x) + self.of_state(state)).chunk(3, -1)
        return torch.lerp(torch.tanh(n * r.sigmoid()), state, z.sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], self.hidden)
        results = []
        for one in x.unbind(1):
            args = state, one
            state = checkpoint(self.cell, *args, use_reentrant=False) if self.checkpoints else self.cell(*args)
            results.append(self.out(state))
        return torch.stack(results, 1)


class Narrow(nn.Module):
    """Layers under ``torch.autocast``, which converts each weight after it was gathered."""

    again = "wide.1.weight"

    def __init__(self, dim: int = 256, layers: int = 4, checkpoints: bool = False) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.checkpoints = checkpoints

    def layer(self, wide: nn.Module, narrow: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + narrow(nn.functional.silu(wide(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for both in zip(self.wide, self.narrow):
                args = (*both, x)
                x = checkpoint(self.layer, *args, use_reentrant=False) if self.checkpoints else self.layer(*args)
        return x.float()


def compiled(
    model: nn.Module, inputs: torch.Tensor, rank: int = 0, ranks: int = 2, *, reshard: Any = True, **settings: Any
) -> list[GraphReport]:
    torch._dynamo.reset()
    with fake_world(ranks, rank):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        sharded = simple_fsdp(model, mesh, reshard_after_forward=reshard)
        return compiled_reports(sharded, inputs, bucket="off", **settings)


def choice_of(reports: list[GraphReport]) -> PassReport:
    return next(p for r in reports for p in r.passes if p.name == recompute.NAME)


def gathered(reports: list[GraphReport]) -> set[str]:
    """Parameters that backward gathers."""
    return {p.name for c in reports[1].collectives if c.kind == "all_gather" for p in c.parameters}


def peak_of(reports: list[GraphReport]) -> int:
    return max(r.schedules[-1].peak_after_bytes for r in reports)


@pytest.mark.parametrize("reshard", [True, "auto"])
@pytest.mark.parametrize(
    ("model", "shape", "than_by_hand"),
    [(Cells, (64, 12, 64), 1.1), (Narrow, (128, 256), 1.0)],
    ids=["cells", "autocast"],
)
def test_the_least_is_that_of_checkpoints_by_hand(
    model: Any, shape: tuple[int, ...], than_by_hand: float, reshard: Any
) -> None:
    """Found from outside: gates of a recurrent cell, and every weight under autocast, were saved at any budget."""
    by_hand = peak_of(compiled(model(checkpoints=True), torch.randn(shape), memory_budget="0"))
    reports = compiled(model(), torch.randn(shape), memory_budget="=1B", reshard=reshard)
    choice = choice_of(reports)
    assert choice.metrics["gathered_again_ns"] > 0
    assert any("ns of gathers" in d.detail for d in choice.decisions if d.verdict is Verdict.APPLIED)
    assert any("ns of gathers" in line for line in reports[0].notes)
    assert not any("communicates" in d.detail for d in choice.decisions)
    assert peak_of(reports) <= by_hand * than_by_hand
    assert peak_of(reports) <= choice.metrics["peak_bytes"] * 1.02, "as it was chosen"
    assert model.again in gathered(reports)
    assert model.again not in gathered(compiled(model(), torch.randn(shape)))


class Blocks(nn.Module):
    """Residual blocks whose inside is wider than their ends."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(31), nn.Linear(31, 67), nn.SiLU(), nn.Linear(67, 31)) for _ in range(3)
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x


def test_the_end_of_a_block_takes_the_place_of_what_is_wide_inside() -> None:
    """Found from outside: neither computing one more value again nor saving one helped, and 10% more was needed."""
    by_hand = peak_of(compiled(Blocks(checkpoints=True), torch.randn(177, 31), memory_budget="0"))
    assert peak_of(compiled(Blocks(), torch.randn(177, 31), memory_budget="=1B")) <= by_hand * 1.03


class Drawn(nn.Module):
    """Layers of odd sizes, in an order that is drawn; many read the input alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.dim, self.hidden, self.cast = drawn.choice([33, 50, 63]), drawn.choice([65, 70, 99]), drawn.random() < 0.5
        self.gates = nn.ModuleList(nn.Linear(self.dim, self.hidden, drawn.random() < 0.5) for _ in range(2))
        self.state = nn.Linear(self.hidden, self.hidden, drawn.random() < 0.5)
        self.scale = nn.Parameter(torch.ones(self.hidden))
        self.out = nn.Linear(self.hidden, self.dim)
        self.kinds = [drawn.randrange(4) for _ in range(drawn.choice([2, 3, 5]))]

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], self.hidden)
        for kind in self.kinds:
            for gate in self.gates:
                opened = gate(x).sigmoid()
                h = torch.tanh(h + opened) * opened
            if kind < 2:
                h = self.state(h) if kind else h * self.scale
            else:
                x = x.sin() if kind == 2 else torch.tanh(self.out(h))
        return self.out(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            return self.layers(x).float()


@pytest.mark.parametrize(
    ("seed", "ranks", "budget", "reshard"),
    [(4, 2, "-60%", True), (6, 2, "=1B", "auto"), (14, 3, "-40%", "auto"), (18, 2, "-20%", True)],
)
def test_ranks_that_pad_choose_alike(seed: int, ranks: int, budget: str, reshard: Any) -> None:
    """Found by a search: pads belong to the message, and ranks that have them refused what others computed again."""
    found = []
    for rank in range(ranks):
        model = Drawn(seed)
        inputs = torch.randn(64, model.dim)
        reports = compiled(model, inputs, rank, ranks, memory_budget=budget, reshard=reshard, codegen="aot_eager")
        sent = [[(c.kind, c.size_bytes, tuple(c.parameters)) for c in r.collectives] for r in reports]
        found.append((sent, [r.digest for r in reports], choice_of(reports).metrics))
    assert all(one == found[0] for one in found)


def _train(rank: int, world_size: int, model: nn.Module, shape: tuple[int, ...], profile_file: str) -> list[Any]:
    """Losses and parameters of two steps with everything saved, and with the least memory."""
    torch.manual_seed(rank)
    inputs = torch.randn(shape)
    found: list[Any] = []
    for budget in ("+5%", "=1B"):
        torch._dynamo.reset()
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
        mine = simple_fsdp(copy.deepcopy(model), mesh, reshard_after_forward=True)
        options = dotted(memory_budget=budget, cost_profile=profile_file, codegen="inductor")
        options |= {"emulate_precision_casts": True}
        step = torch.compile(mine, fullgraph=True, backend="inductor_passes", options=options)
        losses = []
        with collect(what_if=False) as reports:
            for _ in range(2):
                loss = step(inputs).square().mean()
                loss.backward()
                losses.append(loss.detach())
                for parameter in mine.parameters():
                    with torch.no_grad():
                        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                    parameter.grad = None
        parameters = [p.to_local().detach().clone() for p in mine.parameters()]  # type: ignore[attr-defined]
        found.append((losses, parameters, gathered(reports)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "shape"), [(Cells, (64, 6, 63)), (Narrow, (16, 65))], ids=["cells", "autocast"])
def test_numbers_are_the_same_bit_for_bit(
    two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, model: Any, shape: tuple[int, ...]
) -> None:
    """On shards of unequal size."""
    slow = save_profile(tmp_path_factory.mktemp("profile") / "slow.json", 100_000, 10.0, 5_000, 0.1)
    torch.manual_seed(0)
    for saved, again in two_ranks.run(_train, model(shape[-1], 3 if model is Narrow else 70), shape, slow):
        assert model.again in again[2] - saved[2]
        for one, other in zip((*saved[0], *saved[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(one, other)
