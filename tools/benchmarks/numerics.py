"""What each word of ``numerics`` costs in bits: losses and gradients of real ranks against default Inductor's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import inductor_passes
from inductor_passes.trace.collector import collect
from tests.support.ranks import Ranks
from tools.link.lab import local, own_code
from tools.link.models import LAYOUTS, Spread
from tools.shared.record import RESULTS, chosen, markdown_table, write

#: Name -> arguments of ``torch.compile``'s options; the first is what the others are compared with.
WORDS: dict[str, dict[str, Any] | None] = {
    "default Inductor": None,
    "exact, bucket off": {"numerics": "exact", "bucket": "off"},
    "exact": {"numerics": "exact"},
    "reassociate": {"numerics": "reassociate"},
}
EAGER = "eager"


def measure(rank: int, world_size: int, layout: str, dtype: str) -> dict[str, dict[str, Any]]:
    """One rank's losses, the largest relative differences of its gradients, and its number of collectives."""
    del rank, world_size
    config = LAYOUTS[layout].sized({"layers": 2, "batch": 2, "seq": 64})
    found: dict[str, dict[str, Any]] = {}
    for name in (EAGER, *WORDS):
        torch._dynamo.reset()
        laid = LAYOUTS[layout].build(config, Spread())
        laid.model.to(getattr(torch, dtype))
        step = own_code(laid.model, f"{name} {layout} {dtype}")
        options = WORDS.get(name)
        with collect(what_if=False) as reports:
            if name != EAGER:
                given = None if options is None else inductor_passes.options(memory_budget="unlimited", **options)
                step = torch.compile(step, options=given, fullgraph=True)
            loss = step(*laid.batch(0))
            loss.backward()
        grads = {n: local(p.grad).detach().clone() for n, p in laid.model.named_parameters() if p.grad is not None}
        found[name] = {
            "loss": loss.detach(),
            "grads": grads,
            "sent": sum(len(r.collectives) for r in reports),
        }
    base = found["default Inductor"]
    return {
        name: {
            "loss": _relative(one["loss"], base["loss"]),
            "worst": max(_relative(one["grads"][n], g) for n, g in base["grads"].items()),
            "equal": sum(torch.equal(one["grads"][n], g) for n, g in base["grads"].items()) / len(base["grads"]),
            "sent": one["sent"],
        }
        for name, one in found.items()
    }


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    scale = other.double().abs().max().item()
    return (one.double() - other.double()).abs().max().item() / scale if scale else 0.0


def rows(everything: dict[tuple[str, str], list[dict[str, dict[str, Any]]]]) -> list[list[str]]:
    """A row per layout, type and word: the worst rank's figures."""
    found = []
    for (layout, dtype), ranks in everything.items():
        for name in (EAGER, *list(WORDS)[1:]):
            of = [one[name] for one in ranks]
            sent = str(of[0]["sent"]) if name != EAGER else "-"
            off = [max(one[key] for one in of) for key in ("loss", "worst")]
            equal = min(one["equal"] for one in of)
            found.append([layout, dtype, name, sent, *(f"{v:.0e}" if v else "0" for v in off), f"{equal:.0%}"])
    return found


def numerics(
    layout: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(LAYOUTS)}. Default: all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeatable; default: float32 and bfloat16.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = RESULTS,
) -> None:
    """What each word of the setting numerics costs in bits, against default Inductor."""
    everything: dict[tuple[str, str], list[dict[str, dict[str, Any]]]] = {}
    for name in chosen(layout, LAYOUTS, "layout"):
        with Ranks(LAYOUTS[name].ranks) as ranks:
            for one in dtype or ["float32", "bfloat16"]:
                everything[name, one] = ranks.run(measure, name, one, timeout=1800)
                table = markdown_table(_COLUMNS, rows({(name, one): everything[name, one]}))
                Console(width=160).print("\n".join(table), markup=False)
    body = [
        "One step of a Llama of two layers on real gloo ranks. Differences are the largest of any element, relative to "
        "the largest value of the tensor, on the worst rank; *equal* is the share of gradients that are default "
        "Inductor's bit for bit. Eager, which everybody takes for granted, is there for scale.",
        "",
        *markdown_table(_COLUMNS, rows(everything)),
    ]
    data = [{"layout": k[0], "dtype": k[1], "ranks": v} for k, v in everything.items()]
    write("numerics", "What numerics cost in bits", body, data, folder=out)


_COLUMNS = ["layout", "type", "against default Inductor", "collectives", "loss", "worst gradient", "equal"]
