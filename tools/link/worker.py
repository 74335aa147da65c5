"""One rank of the link benchmark: compiles the contenders, measures them interleaved, and lets rank 0 write
the results.

Before anything that can kill the process, rank 0 notes in a journal what is about to happen, so that whoever
started the job knows which contender to blame.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from inductor_passes.cost.calibrate import calibrate
from inductor_passes.cost.profile import CostProfile
from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.link_model import Record, StepTime
from inductor_passes.trace.collector import collect
from tools.link import retiming
from tools.link.census import judged
from tools.link.lab import (
    RATES,
    Contender,
    Trial,
    communication_alone,
    compute_alone,
    head_and_tail_ns,
    local,
    tuned,
)
from tools.link.models import ALL_LAYOUTS
from tools.link.prediction import foretold, measured_stalls, planned_stalls, predicted_peak, step_peak
from tools.link.sweep import EVERY
from tools.shared.leave import leave

#: The contender whose compute alone sets the link's rate, and to which losses are compared.
REFERENCE = "inductor"
#: Plans differ from run to run, as measured costs do, and with them how Inductor fuses and rounds. Training lets such a
#: difference grow, by a factor of about 20 in this many steps: later losses are shown and not judged.
COMPARED_STEPS = 50
#: Steps whose peak is taken; the lowest counts.
PEAKS = 3
#: How long the first steps of a contender may take that is tuned.
TUNED_S = 400.0


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        layout: a key of ``link_models.LAYOUTS``.
        sizes: fields of ``LlamaConfig`` that differ from the layout's.
        contenders: keys of ``lab.CONTENDERS``; the reference is always there.
        rates: keys of ``lab.RATES``.
        rounds: interleaved steps per contender and rate.
        folder: receives all files.
        kept: folder in which links and cost profiles stay, so that the next run compiles nothing again; "": each run
            sets and measures them.
    """

    layout: str
    sizes: dict[str, Any]
    contenders: list[str]
    rates: list[str]
    rounds: int
    folder: str
    kept: str = ""

    def file(self, name: str) -> Path:
        """Path of a file of this job."""
        return Path(self.folder) / name

    @staticmethod
    def load(folder: str) -> Job:
        """Read the job in ``folder``."""
        return Job(**json.loads((Path(folder) / "job.json").read_text(encoding="utf-8")))


#: Told on rank 0 what comes next: (phase, contender).
Say = Callable[[str, str], None]


def silent(phase: str, contender: str) -> None:
    """Says nothing."""


class RankFailed(RuntimeError):
    """Some rank raised; the message is the first rank's that did."""


class Bench:
    """The benchmark inside one rank."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job = job
        self._say = say
        self.rank = dist.get_rank()
        self.layout = ALL_LAYOUTS[job.layout]
        self.config = self.layout.sized(job.sizes)
        self.trials: dict[str, Trial] = {}
        self.failed: dict[str, str] = {}
        self.predicted: dict[str, dict[str, int]] = {}
        self.planned: dict[str, list[tuple[str, int]]] = {}
        self.tuned: dict[str, list[str]] = {}
        self.plans: dict[str, str] = {}
        self.profile = self.job.file("profile.json")
        self.step_peak_bytes: int | None = None
        self.steps: dict[str, list[StepTime]] = {}
        self.compute_alone: list[StepTime] = []
        self.communication_alone: list[StepTime] = []

    def note(self, phase: str, contender: str) -> None:
        """Write down what comes next."""
        if self.rank == 0:
            self._say(phase, contender)
            with self.job.file("journal.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"phase": phase, "contender": contender}) + "\n")

    def compile(self, name: str) -> None:
        """Make a trial and take two steps: the first compiles, the second shows that nothing compiles again.
        """
        self.note("compiling", name)
        error = ""
        try:
            problems = self.profile.parent / f"problems_{self.profile.stem}_{name}" if self.job.kept else None
            contender, profile = EVERY[name], str(self.profile)
            if contender.tunes:
                contender, profile = contender.timed(self.plans[name]), contender.tune_file(profile)
            trial = Trial(contender, self.layout, self.config, profile, str(problems or ""), self.step_peak_bytes)
            with collect(what_if=False) as reports:
                for _ in range(2):
                    trial.plain_step()
            self.trials[name] = trial
            self.predicted[name], self.planned[name] = foretold(reports), planned_stalls(reports)
            if problems is not None:
                self.predicted[name]["predicted_peak_bytes"] = predicted_peak(reports, problems, self.rank)
            self.step_peak_bytes = self.step_peak_bytes or step_peak(reports)
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
        self._agree(name, error)

    def tune(self, name: str) -> None:
        """Take a contender's first steps, before any other graph of ours is there that sends the same messages."""
        self.note("first steps of", name)
        error = ""
        try:
            self.tuned[name], self.plans[name] = self._first_steps(EVERY[name])
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
        self._agree(name, error)
        gc.collect()

    def _first_steps(self, contender: Contender) -> tuple[list[str], str]:
        """Train until the costs of the first steps are written and it is known which of two plans is the faster one.

        Returns:
            What they took, for people; and the path of the file with the faster plans, "" where there is none.

        Raises:
            RuntimeError: that is not known for a long time.
        """
        profile = Path(contender.tune_file(str(self.profile)))
        plans, pinned = profile.with_suffix(".plan.json"), profile.with_suffix(".pinned.json")
        if self.rank == 0:
            for path in (profile, plans, pinned):
                path.unlink(missing_ok=True)
        dist.barrier()
        until = time.monotonic() + TUNED_S
        with collect(what_if=False) as reports, retiming.virtual_clock():
            trial = Trial(contender, self.layout, self.config, str(self.profile))
            try:
                while not all(gathered(retiming.is_over(reports, profile))):
                    if any(gathered(time.monotonic() > until)):
                        raise RuntimeError(f"no costs of the first steps after {TUNED_S} s")
                    trial.plain_step()
                    # Ranks that wait on the emulated link keep a processor busy, and what compiles meanwhile needs one.
                    time.sleep(0.03 * (len(trial.losses) > contender.settings["tune"]))
            finally:
                # The next contender sends the same messages: nothing of this one may still be called.
                trial.forget()
        if self.rank == 0 and plans.is_file():
            pinned.write_text(retiming.of_any_program(plans.read_text(encoding="utf-8")), encoding="utf-8")
        dist.barrier()
        return retiming.told(reports), str(pinned) if pinned.is_file() else ""

    def _agree(self, name: str, error: str) -> None:
        """All ranks drop a contender that failed on any of them."""
        for problem in gathered(error):
            if problem:
                self.failed[name] = problem
                self.trials.pop(name, None)
                return

    def prepare(self) -> tuple[float, Sequence[Record]]:
        """Compile the reference; its compute alone in ns and the collectives of its step."""
        self.compile(REFERENCE)
        if REFERENCE in self.failed:
            raise RankFailed(self.failed[REFERENCE])
        self.note("compute alone", REFERENCE)
        alone = compute_alone(self.trials[REFERENCE], max(3, self.job.rounds))
        return median(slowest([s.virtual_ns for s in alone])), alone[-1].records

    def set_rate(self, name: str, compute_ns: float, records: Sequence[Record]) -> dict[str, Any]:
        """Set the link's rate and calibrate the cost profile at it."""
        rate = RATES[name]
        known = self._known(name)
        latency_ns, bytes_per_s = known or gathered(tuned(records, compute_ns, rate))[0]
        emulated_link.set_rate(latency_ns, bytes_per_s)
        if known is None:
            self._calibrate()
            if self.rank == 0 and self.job.kept:
                text = json.dumps([latency_ns, bytes_per_s])
                self.profile.with_suffix(".link").write_text(text, encoding="utf-8")
        dist.barrier()
        facts = {"rate": name, "ratio": rate.ratio, "latency_ns": latency_ns, "bytes_per_s": bytes_per_s}
        return {**facts, "profile_hash": CostProfile.load(self.profile).hash()}

    def _known(self, name: str) -> tuple[int, float] | None:
        """The link of an earlier run, whose cost profile is there too; None: there was none."""
        self.step_peak_bytes = None
        if not self.job.kept:
            return None
        folder = Path(self.job.kept)
        folder.mkdir(parents=True, exist_ok=True)
        self.profile = folder / f"{name}.json"
        link = self.profile.with_suffix(".link")
        # One rank looks: another one could look after files have been written.
        there = gathered(json.loads(link.read_text(encoding="utf-8")) if link.is_file() else None)[0]
        return None if there is None else (int(there[0]), float(there[1]))

    def _calibrate(self) -> None:
        """Measure the link as it is now, and write the profile."""
        self.note("calibrating", REFERENCE)
        profile = calibrate(
            self.trials[REFERENCE].groups,
            dtypes=[torch.float32],
            repeats=5,
            ranks_per_host=emulated_link.ranks_per_host() or dist.get_world_size(),
            name="emulated link",
            timed=emulated_link.timed,
        )
        if self.rank == 0:
            profile.save(self.profile)

    def replace_planned(self) -> None:
        """Compile the contenders: those that a cost profile steers again for every rate, the others once."""
        for name in [name for name, trial in self.trials.items() if trial.contender.planned]:
            self.trials.pop(name).forget()
        # What is compiled next sends the same messages, so nothing of this may still be called.
        gc.collect()
        for name in self.job.contenders:
            if EVERY[name].tunes and name not in self.failed:
                self.tune(name)
        for name in self.job.contenders:
            if name not in self.trials and name not in self.failed:
                self.compile(name)
        # Interleaved in the order of the command line, whatever was compiled first.
        self.trials = {name: self.trials[name] for name in self.job.contenders if name in self.trials}

    def measure(self, latency_ns: int, bytes_per_s: float) -> None:
        """Interleaved rounds of every contender, and of the reference on an infinitely fast link (compute
        alone).

        A recompilation is an error from here on.
        """
        self.steps = {name: [] for name in self.trials}
        self.compute_alone, self.communication_alone = [], []
        torch.compiler.set_stance("fail_on_recompile")
        for _ in range(self.job.rounds):
            self.note("measuring", REFERENCE)
            self.compute_alone.extend(compute_alone(self.trials[REFERENCE], 1))
            emulated_link.set_rate(latency_ns, bytes_per_s)
            for name, trial in self.trials.items():
                self.note("measuring", name)
                self.steps[name].append(trial.timed_step())
            records = self.steps[REFERENCE][-1].records
            self.communication_alone.append(communication_alone(records))
        torch.compiler.set_stance("default")

    def measured_errors(self, name: str) -> dict[str, float | None]:
        """The largest bound on a narrowed message, and the largest error on any rank in two steps that are not timed.

        By a model of its own: measuring keeps what was narrowed in memory.
        """
        contender = self.trials[name].contender
        if not contender.narrows:
            return {}
        self.note("measuring errors", name)
        settings = {**contender.settings, "compress_measure": "1"}
        other = replace(contender, name=f"{name}-measured", settings=settings)
        with collect(what_if=False) as reports:
            trial = Trial(other, self.layout, self.config, str(self.profile))
            for _ in range(2):
                trial.plain_step()
        found = [one for report in reports for one in report.narrowed]
        largest = gathered(max((one.largest for one in found if one.runs), default=None))
        known = [error for error in largest if error is not None]
        return {
            "error_bound": max((one.bound for one in found), default=None),
            "measured_error": max(known, default=None),
        }

    def parameter_wire_bytes(self) -> int:
        """What a rank sends to gather, or to reduce, every parameter once."""
        shards = [local(p) for p in self.trials[REFERENCE].model.parameters()]
        return (dist.get_world_size() - 1) * sum(s.numel() * s.element_size() for s in shards)

    def rows(self) -> list[dict[str, Any]]:
        """One record per contender, times of each step taken from its slowest rank."""
        reference = self.trials[REFERENCE].losses
        result = []
        for name, trial in self.trials.items():
            self.note("memory", name)
            steps = self.steps[name]
            # The profiler does not see what gloo's threads free: each step's figure is too high by another amount.
            peak = min(max(gathered(trial.peak_bytes())) for _ in range(PEAKS))
            first = steps[0]
            result.append(
                {
                    "name": name,
                    "title": trial.contender.title,
                    "family": trial.contender.family,
                    **self.predicted[name],
                    **({"tuned": self.tuned[name]} if name in self.tuned else {}),
                    "virtual_ns": slowest([s.virtual_ns for s in steps]),
                    "wall_ns": slowest([s.wall_ns for s in steps]),
                    "cpu_ns": slowest([s.cpu_ns for s in steps]),
                    "exposed_ns": slowest([s.exposed_ns for s in steps]),
                    "exposed_wall_ns": slowest([s.exposed_wall_ns for s in steps]),
                    "violations": sum(gathered(sum(s.violations for s in steps))),
                    "counts": first.counts(),
                    **self._stalls(name),
                    "steady": all(gathered(all(s.counts() == first.counts() for s in steps))),
                    "wire_bytes": wire_by_kind(first),
                    "traffic": self._traffic(trial),
                    "narrowed": trial.contender.narrows,
                    **self.measured_errors(name),
                    "peak_bytes": peak,
                    "losses": [x if math.isfinite(x) else None for x in trial.losses[: len(reference)]],
                    "worst_loss_difference": max(gathered(_difference(trial.losses, reference))),
                }
            )
        return result

    def _stalls(self, name: str) -> dict[str, list[list[float]]]:
        """[planned, measured] ns that the compute lane stands still for each collective; {} where no plan says it.

        Measured is the median over the steps, of the slower rank.
        """
        steps = [measured_stalls(step.records) for step in self.steps[name]]
        planned = self.planned[name]
        kinds = [kind for kind, _ in planned]
        known = bool(planned) and all([kind for kind, _ in step] == kinds for step in steps)
        mine = [median(step[k][1] for step in steps) for k in range(len(planned))] if known else []
        ranks = gathered(mine)
        if not all(ranks) or len({*map(len, ranks)}) > 1:
            return {}
        return {"stalls": [[ns, max(rank[k] for rank in ranks)] for k, (_, ns) in enumerate(planned)]}

    def _traffic(self, trial: Trial) -> dict[str, Any] | None:
        """What a step sent, by the values of parameters; nothing is known where those are not what is sent."""
        if not self.layout.sharded:
            return None
        if trial.contender.narrows:
            return {"wrong": [], "known_bytes": None}
        return judged(gathered(trial.census()))


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of the first ``COMPARED_STEPS`` losses."""
    return max(_relative(a, b) for a, b in zip(losses[:COMPARED_STEPS], reference[:COMPARED_STEPS]))


def _relative(loss: float, expected: float) -> float:
    if loss == expected:
        return 0.0
    found = abs(loss - expected) / max(abs(expected), sys.float_info.min)
    # JSON has no NaN, and a comparison with it is never an error.
    return found if math.isfinite(found) else sys.float_info.max


def wire_by_kind(step: StepTime) -> dict[str, int]:
    """Bytes that a rank sent, by kind of collective."""
    result: dict[str, int] = {}
    for record in step.records:
        if record.wire_bytes:
            result[record.kind] = result.get(record.kind, 0) + record.wire_bytes
    return dict(sorted(result.items()))


def gathered(value: Any) -> list[Any]:
    """Every rank's ``value``, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(values: Sequence[int]) -> list[int]:
    """Element by element the largest over ranks."""
    return [max(column) for column in zip(*gathered(list(values)))]


def run(job: Job, say: Say = silent) -> list[dict[str, Any]]:
    """The whole benchmark on this rank; one result per rate, the same on every rank.

    Rank 0 writes what there is after every rate: a job that is cut short leaves it.
    """
    bench = Bench(job, say)
    compute_ns, records = bench.prepare()
    results = []
    for name in job.rates:
        rate = bench.set_rate(name, compute_ns, records)
        bench.replace_planned()
        bench.measure(rate["latency_ns"], rate["bytes_per_s"])
        results.append({**rate, **_result(bench)})
        if bench.rank == 0:
            job.file("results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
    return results


def _result(bench: Bench) -> dict[str, Any]:
    """What was measured at one rate."""
    head, tail = head_and_tail_ns(bench.steps[REFERENCE][0].records) if bench.layout.sharded else (0, 0)
    sizes = {name: getattr(bench.config, name) for name in ("layers", "dim", "hidden", "batch", "seq")}
    return {
        "layout": bench.layout.name,
        "title": bench.layout.title,
        "sharded": bench.layout.sharded,
        "sizes": sizes,
        "rounds": bench.job.rounds,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "compute_alone_ns": median(slowest([s.virtual_ns for s in bench.compute_alone])),
        "compute_alone_wall_ns": median(slowest([s.wall_ns for s in bench.compute_alone])),
        "communication_alone_ns": median(slowest([s.virtual_ns for s in bench.communication_alone])),
        "communication_alone_wall_ns": median(slowest([s.wall_ns for s in bench.communication_alone])),
        "parameter_wire_bytes": bench.parameter_wire_bytes(),
        "head_ns": head,
        "tail_ns": tail,
        "rows": bench.rows(),
        "failed": dict(bench.failed),
    }


def join() -> None:
    """Join the emulated process group from torchrun's environment."""
    torch.set_num_threads(1)
    emulated_link.register()
    dist.init_process_group(emulated_link.BACKEND, timeout=timedelta(minutes=10))


def main() -> None:
    """Entry point under torchrun; the argument is the job's folder."""
    job = Job.load(sys.argv[1])
    join()
    run(job)
    leave()


if __name__ == "__main__":
    main()
