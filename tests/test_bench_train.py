"""The training benchmark: what it reads, which batches runs get, and what its table compares."""

from __future__ import annotations

import torch

from tools.benchmarks.train import BASE, LAST, PIECE, RUNS, Bytes, Sizes, batches, figures, text


def test_text_is_split_once() -> None:
    learned, held_out = text()
    assert 8 < len(learned) / len(held_out) < 10
    assert len(learned) + len(held_out) > 100 * PIECE
    assert int(torch.cat([learned, held_out]).max()) < 256


def test_runs_get_the_same_batches_and_ranks_others() -> None:
    sizes = Sizes()
    learned, _ = text()
    first, again, other = (list(batches(learned, sizes, 3, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, other))
    tokens, targets = first[0]
    assert tokens.shape == (sizes.batch, sizes.length) and torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_model_does_not_see_what_it_predicts() -> None:
    torch.manual_seed(0)
    sizes = Sizes(width=16, heads=2, hidden=24, batch=1, length=8)
    model = Bytes(sizes)
    tokens = torch.randint(256, (1, 8))
    embedded = torch.nn.Parameter(model.embed.detach().clone())
    model.embed = embedded
    targets = torch.full((1, 8), -100)
    targets[0, 3] = 7
    model(tokens, targets).backward()
    seen = {int(t) for t in tokens[0, :4]}
    touched = {int(row) for row in embedded.grad.abs().sum(1).nonzero().flatten()}  # type: ignore[union-attr]
    assert touched == seen


def test_figures_are_relative_to_the_uncompressed_run() -> None:
    def run(loss: float) -> dict[str, object]:
        return {"losses": [9.0] * 50 + [loss] * LAST, "held_out": 2 * loss}

    found = figures({BASE: run(2.0), "int8": run(2.02)})
    assert found[BASE]["final_off"] == 0
    assert abs(found["int8"]["final_off"] - 0.01) < 1e-9 and abs(found["int8"]["held_out"] - 4.04) < 1e-9


def test_every_type_is_trained_with_and_without_feedback() -> None:
    for name in ("int8", "e4m3", "e5m2"):
        with_it, without = RUNS[f"{name}, feedback"], RUNS[name]
        assert with_it == {**(without or {}), "compress_feedback": "on"}
