"""Parameters that are frozen and thawed between steps of one batch or several: adopted FSDP2 trains as FSDP2 does."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes import adopt
from tests.support.ranks import Ranks
from tests.support.wrapped import Net, batch, sharded, whole

#: A number is a step of so many batches; ``F`` freezes a parameter, ``T`` lets it be trained again. ``f`` and ``t`` do
#: so in the middle of a step, behind its first of three batches.
SEQUENCES = ("2F221", "21F12", "F2T2", "2FT2", "2F2T21", "3F3F3T3", "f2t2", "2Ft1f3")
BATCHES = {"f": 3, "t": 3}


def drawn(seed: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice("1223FFTft") for _ in range(8)) + "2"


def trained(model: Any, run: Any, sequence: str) -> list[Any]:
    """Every gradient of every step, and the parameters at the end."""
    named = dict(model.named_parameters())
    names = sorted(named)
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    chance, frozen = random.Random(sequence), []
    found: list[Any] = []

    def switch(word: str) -> None:
        if word == "f":
            name = chance.choice(names)
            frozen.append(name)
            named[name].requires_grad_(False)
        elif frozen:
            named[frozen.pop(0)].requires_grad_(True)

    for number, word in enumerate(sequence):
        if word.isupper():
            switch(word.lower())
        else:
            batches = BATCHES.get(word) or int(word)
            for k in range(batches):
                model.set_requires_gradient_sync(k + 1 == batches)
                run(batch(number, k)[0]).square().mean().backward()
                if word in BATCHES and k == 0:
                    switch(word)
            found.append({n: None if p.grad is None else whole(p.grad).clone() for n, p in named.items()})
            optimizer.step()
            optimizer.zero_grad()
    return [*found, {n: whole(p.detach()).clone() for n, p in named.items()}]


def compared(rank: int, world_size: int, sequence: str, compiled: bool) -> None:
    torch.manual_seed(0)
    clean: nn.Module = Net()
    plain: Any = sharded(copy.deepcopy(clean))
    ours: Any = adopt(sharded(copy.deepcopy(clean)))
    run = ours
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(ours, backend="aot_eager")
    for expected, got in zip(trained(plain, plain, sequence), trained(ours, run, sequence), strict=True):
        assert {n for n, g in expected.items() if g is None} == {n for n, g in got.items() if g is None}
        for name, value in expected.items():
            if value is not None:
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", [*SEQUENCES, *(drawn(seed) for seed in range(6))])
def test_what_is_frozen_gets_no_gradient(two_ranks: Ranks, sequence: str) -> None:
    two_ranks.run(compared, sequence, False)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", ["2F221", "3F3F3T3", "2Ft1f3"])
def test_what_is_frozen_gets_no_gradient_in_compiled_code(two_ranks: Ranks, sequence: str) -> None:
    two_ranks.run(compared, sequence, True)
