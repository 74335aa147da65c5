"""The Hugging Face Trainer's own loop, alone, compiled, and with our callback: real ranks on the emulated link."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from inductor_passes.emulation import link as emulated_link
from tests.support import frameworks
from tests.support.ranks import Ranks
from tools.link.lab import RATES, peak_of_events, tuned
from tools.shared.record import RESULTS, chosen, markdown_table, write

#: Name -> title, in the order in which they take turns; the first is what the others are compared with.
CONTENDERS = {
    "alone": "the Trainer alone",
    "blocks": "compiled per block",
    "whole": "compiled as a whole",
    "adopted": "with AdoptCallback",
}
KINDS = {"fsdp2": "FSDP2", "ddp": "DDP"}
#: Steps of one turn. The first one of a turn is not timed: the Trainer begins anew.
TURN = 4


def setup(rank: int, world_size: int) -> None:
    """Make the emulated link known; runs before the process group is made."""
    del rank, world_size
    emulated_link.register()


def measure(rank: int, world_size: int, kind: str, sizes: dict[str, int], rounds: int, rate: str) -> dict[str, Any]:
    """One rank's part: every contender's steps, interleaved turn by turn."""
    frameworks.as_launched(rank, world_size)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.json")
        turns = {"alone": _Turns(kind, "alone", sizes, folder, profile)}
        turns["alone"].take()
        compute_ns = median(turns["alone"].take("virtual_ns" if kind == "fsdp2" else "wall_ns"))
        told: list[Any] = [tuned(turns["alone"].records, compute_ns, RATES[rate])]
        dist.broadcast_object_list(told)
        latency_ns, bytes_per_s = told[0]
        emulated_link.set_rate(latency_ns, bytes_per_s)
        _calibrate(profile)
        for name in CONTENDERS:
            if name not in turns:
                turns[name] = _Turns(kind, name, sizes, folder, profile)
                for _ in range(2):
                    turns[name].take()
        for one in turns.values():
            one.steps.clear()
        for _ in range(rounds):
            for one in turns.values():
                one.take()
        return {
            "kind": kind,
            "rate": rate,
            "latency_ns": latency_ns,
            "bytes_per_s": bytes_per_s,
            "compute_ns": compute_ns,
            "rows": {
                name: {"steps": one.steps, "losses": one.losses, "peak_bytes": one.peak_bytes()}
                for name, one in turns.items()
            },
        }


def _calibrate(profile: Path) -> None:
    from inductor_passes.cost.calibrate import calibrate

    world = dist.group.WORLD
    found = calibrate(
        [world],
        dtypes=[torch.float32],
        repeats=5,
        ranks_per_host=emulated_link.ranks_per_host() or dist.get_world_size(),
        name="emulated link",
        timed=emulated_link.timed,
    )
    told: list[Any] = [found.to_json()]
    dist.broadcast_object_list(told)
    type(found).from_json(told[0]).save(profile)


class _Turns:
    """One contender: a Trainer that trains a few steps at a time."""

    def __init__(self, kind: str, name: str, sizes: dict[str, int], folder: str, profile: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

        from inductor_passes import options
        from inductor_passes.integrations.transformers import AdoptCallback

        frameworks.forget_accelerate(fsdp=kind == "fsdp2")
        torch.manual_seed(0)
        width = sizes["width"]
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=sizes["layers"],
                num_attention_heads=width // 64,
                num_key_value_heads=width // 64,
                max_position_embeddings=sizes["length"],
                use_cache=False,
            )
        )
        more: dict[str, Any] = {}
        if kind == "fsdp2":
            more["accelerator_config"] = {"use_configured_state": True}
            more["fsdp"] = True
            more["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        arguments = TrainingArguments(
            output_dir=str(Path(folder, name)),
            use_cpu=True,
            per_device_train_batch_size=sizes["batch"],
            learning_rate=1e-3,
            max_steps=TURN,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **more,
        )
        drawn = torch.Generator().manual_seed(3)
        tokens = torch.randint(2048, (64 * sizes["batch"], sizes["length"]), generator=drawn)
        self.trainer = Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t.clone()} for t in tokens])
        self.steps: list[dict[str, int]] = []
        self.records: Sequence[Any] = ()
        turns = self

        class Compile(TrainerCallback):
            """As users of FSDP2 compile."""

            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                # Dynamo cannot trace DDP's broadcast of buffers on the emulated link: what DDP wraps is compiled.
                for part in model.model.layers if name == "blocks" else [model]:
                    if part._compiled_call_impl is None:
                        part.compile()

        class Timed(TrainerCallback):
            """Times forward, backward, clipping and the optimizer's step."""

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                self.stack = contextlib.ExitStack()
                self.clock = self.stack.enter_context(emulated_link.step_clock())

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                self.stack.close()
                time = self.clock.time
                turns.records = time.records
                turns.steps.append({"virtual_ns": time.virtual_ns, "wall_ns": time.wall_ns})

        if name in ("blocks", "whole"):
            self.trainer.add_callback(Compile())
        if name == "adopted":
            self.trainer.add_callback(AdoptCallback(self.trainer, options=options(cost_profile=str(profile))))
        self.trainer.add_callback(Timed())

    def take(self, clock: str = "virtual_ns") -> list[int]:
        """Train one turn; the times of its steps without the first."""
        before = len(self.steps)
        dist.barrier()
        self.trainer.train()
        del self.steps[before]
        return [step[clock] for step in self.steps[before:]]

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [line["loss"] for line in self.trainer.state.log_history if "loss" in line]

    def peak_bytes(self) -> int:
        """Most memory that a turn holds above what it found."""
        import json

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.trainer.train()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            return peak_of_events(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def compared(results: dict[str, Any]) -> list[list[str]]:
    """Of each contender: step and peak, also relative to the Trainer alone, and how far its losses are off."""
    clock = "virtual_ns" if results["kind"] == "fsdp2" else "wall_ns"
    rows, first = [], results["rows"]["alone"]
    base = median(step[clock] for step in first["steps"])
    for name, row in results["rows"].items():
        times = [step[clock] for step in row["steps"]]
        walls = median(step["wall_ns"] for step in row["steps"])
        off = max(abs(a - b) for a, b in zip(first["losses"], row["losses"], strict=True))
        rows.append(
            [
                CONTENDERS[name],
                f"{median(times) / 1e6:.1f}",
                f"{min(times) / 1e6:.1f}-{max(times) / 1e6:.1f}",
                f"{median(times) / base:.3f}",
                f"{walls / median(s['wall_ns'] for s in first['steps']):.3f}",
                f"{row['peak_bytes'] / first['peak_bytes']:.3f}",
                "equal" if off == 0 else f"{off:.0e}",
            ]
        )
    return rows


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of rank 0 with each step's times taken from its slowest rank."""
    found = ranks[0]
    for name, row in found["rows"].items():
        theirs = [one["rows"][name] for one in ranks]
        row["steps"] = [{k: max(s[k] for s in steps) for k in steps[0]} for steps in zip(*(t["steps"] for t in theirs))]
        row["peak_bytes"] = max(t["peak_bytes"] for t in theirs)
    return found


def page(everything: Sequence[dict[str, Any]], sizes: dict[str, int]) -> list[str]:
    """The page's lines."""
    text = [
        "A Llama of `transformers` trains in the `Trainer`'s own loop: forward, backward, clipping of gradients and "
        "AdamW. Real ranks exchange data with gloo on one machine; every collective takes as long as on the emulated "
        "link. `step` is on a clock that other load does not move (for DDP, whose waits that clock does not see, by "
        f"the wall). Contenders take turns of {TURN} steps, of which {TURN - 1} are timed.",
    ]
    for results in everything:
        link = f"{results['bytes_per_s'] / 1e6:.1f} MB/s, {results['latency_ns'] / 1e3:.0f} us per collective"
        text += ["", f"## {KINDS[results['kind']]}, {results['rate']}", ""]
        text += [f"2 ranks, {sizes['layers']} layers of width {sizes['width']}, {sizes['batch']} x {sizes['length']} "]
        text[-1] += f"tokens per rank; link {link}. Compute alone {results['compute_ns'] / 1e6:.1f} ms."
        columns = ["contender", "step ms", "spread", "/ alone", "wall / alone", "peak / alone", "losses"]
        text += ["", *markdown_table(columns, compared(results))]
    return text


def trainer(
    kind: Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(KINDS)}. Default: all.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RATES)}. Default: balanced.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of every contender.", min=1)] = 5,
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = 4,
    width: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.", min=64)] = 256,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens per sequence.", min=8)] = 256,
    timeout_s: Annotated[int, typer.Option(help="Of one kind, in seconds.")] = 3600,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = RESULTS,
) -> None:
    """The Hugging Face Trainer alone, compiled, and with our callback, on an emulated link."""
    sizes = {"layers": layers, "width": width, "batch": batch, "length": length}
    everything = []
    for one in chosen(kind, KINDS, "kind"):
        for name in chosen(rate or ["balanced"], RATES, "rate"):
            with Ranks(2, backend=emulated_link.BACKEND, setup=setup) as ranks:
                everything.append(slowest(ranks.run(measure, one, sizes, rounds, name, timeout=timeout_s)))
            Console().print("\n".join(page(everything[-1:], sizes)[1:]), markup=False)
    write("trainer", "The Hugging Face Trainer", page(everything, sizes), everything, folder=out)
