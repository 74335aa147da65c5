"""The commands against damaged files and odd arguments: one sentence and an exit status, never a traceback.

    tools/fuzz_commands --inputs 20000 --seed 0
    tools/fuzz_commands --inputs 1 --first 1234 --command report --keep out/case

Every input is a real file (problem, log, graph, cost profile, plan, profiler trace) that was damaged, or arguments that
nobody gives; input i of a seed depends on the seed and i only. Commands run in this process. A failure is an exception,
an exit status other than 0, 1 or 2, a failure without a sentence on stderr, a character that a terminal would act on
anywhere in what was printed or written, or a written file that is not well-formed.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import html.parser
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from inductor_passes.cli.main import app as application
from inductor_passes.records.text import printable
from tools.fuzzing import command_corpus as real
from tools.fuzzing.hostile import EVIL_TEXTS, damage, damaged_bytes, encoded, twist

#: Inputs that take longer are counted.
SLOW_S = 20.0
HANG_S = 300.0
#: How often each command is drawn: doctor asks compilers, which takes time.
WEIGHTS = {"report": 8, "simulate": 8, "check": 8, "calibrate": 4, "doctor": 0.3}
PROGRAM = "inductor-passes"


@dataclass
class Input:
    """One call of a command in a folder of its own."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a call left behind."""

    status: object
    stdout: str
    stderr: str
    error: str = ""


# -- inputs ----------------------------------------------------------------------------------------------------------


def _file(folder: Path, name: str, value: Any, rng: random.Random) -> Path:
    """Write a damaged file; now and then something that is no file at all."""
    path = folder / name
    odd = rng.random()
    if odd < 0.01:
        path.mkdir()
    elif odd < 0.02:
        os.mkfifo(path)
    elif odd < 0.03:
        path.symlink_to(path)
    elif odd < 0.04:
        return folder / rng.choice(("missing", "x" * 300, "a\nb\x1b[31m", "nul\x00"))
    elif odd < 0.20:
        path.write_bytes(damaged_bytes(encoded(value, rng), rng))
    elif odd < 0.30:
        path.write_bytes(encoded(value, rng))
    elif odd < 0.75:
        path.write_bytes(encoded(twist(value, rng, rng.choice((1, 1, 1, 2, 5))), rng))
    else:
        path.write_bytes(encoded(damage(value, rng, rng.choice((1, 1, 1, 2, 5, 20))), rng))
    return path


def _trace(folder: Path, rng: random.Random) -> Path:
    logs = real.corpus().logs
    target = folder / rng.choice(("trace", "trace", "tr\x1b[31mace", "[red]"))
    target.mkdir()
    for rank, records in enumerate(logs[: rng.choice((1, 2))]):
        data = b""
        for one in records:
            payload = real.payload_of(one)
            if one.is_json and rng.random() < 0.3:
                change = rng.choice((damage, twist))
                payload = encoded(change(one.payload, rng, rng.choice((1, 2, 5))), rng)
            elif rng.random() < 0.05:
                payload = damaged_bytes(payload, rng)
            if rng.random() < 0.05:
                damage(one.head, rng, 1)
            elif rng.random() < 0.03:
                index = rng.choice(("9" * 5000, "00", "1", "²", "-1"))
                one.head["artifact"]["name"] = f"inductor_passes_summary_{rng.choice(('forward', 'x' * 50))}_{index}"
            data += one.encoded(payload, checksum=rng.random() < 0.98)
        if rng.random() < 0.1:
            data = damaged_bytes(data, rng)
        names = (f"dedicated_log_torch_trace_rank_{rank}_x.log", f"x\x1b[2J{rank}.log", f"rank_99999_{rank}.log")
        (target / rng.choice(names)).write_bytes(data)
    return target


def _target(folder: Path, name: str, rng: random.Random) -> str:
    """Where to write: mostly possible."""
    odd = rng.random()
    if odd < 0.7:
        return str(folder / name)
    (folder / "is_a_folder").mkdir(exist_ok=True)
    bad = (folder / "no" / "folder" / name, folder / "is_a_folder", "/proc/x", "/dev/full", "", folder / ("y" * 300))
    return str(rng.choice(bad))


_NUMBERS = (
    *("1", "2", "0.5", "0", "-1", "1/3", "1,2,4", "1000000"),
    *("1e400", "1e9999999999", "1/0", "nan", "inf", "-0", "9" * 5000, "", " ", ",".join(["1"] * 50)),
    *("0x10", "1_000", "\u0663", "2" * 16, "0." + "0" * 14 + "1", "1000001"),
    *EVIL_TEXTS[:6],
)


def _number(rng: random.Random) -> str:
    return rng.choice(_NUMBERS)


def _report(folder: Path, rng: random.Random) -> Input:
    trace = str(_trace(folder, rng))
    if rng.random() < 0.15:
        other = folder / "other"
        other.mkdir()
        return Input(["report", "diff", trace, str(_trace(other, rng))])
    arguments = ["report", trace]
    if rng.random() < 0.25:
        arguments += ["-o", _target(folder, "page.html", rng)]
    if rng.random() < 0.2:
        arguments += ["--perfetto", _target(folder, "perfetto.json", rng)]
    if rng.random() < 0.15:
        arguments += ["--plans", _target(folder, "plans", rng)]
    if rng.random() < 0.1:
        arguments += ["--json"]
    if rng.random() < 0.1:
        arguments += ["--rank", _number(rng)]
    if rng.random() < 0.1:
        arguments += ["--top", _number(rng)]
    if rng.random() < 0.25:
        arguments += ["--profile", str(_file(folder, "profile.json", real.corpus().chrome, rng))]
        if rng.random() < 0.6:
            arguments += ["--write-cost-profile", _target(folder, "costs.json", rng)]
    return Input(arguments)


def _simulate(folder: Path, rng: random.Random) -> Input:
    arguments = ["simulate", str(_file(folder, "problem.json", real.corpus().problem, rng))]
    for option in ("--bandwidth-scale", "--latency-scale", "--compute-scale"):
        if rng.random() < 0.15:
            arguments += [option, _number(rng)]
    if rng.random() < 0.15:
        arguments += ["--latency", _number(rng) + rng.choice(("us", "ns", "s", "", "h"))]
    if rng.random() < 0.15:
        budgets = ("0", "+5%", "unlimited", "2GiB", "+" + "9" * 400 + "%", _number(rng) + "GiB")
        arguments += ["--budget", rng.choice(budgets)]
    if rng.random() < 0.1:
        arguments += ["--effort", rng.choice(("0", "2", "-1", "101", "9" * 5000, "x"))]
    if rng.random() < 0.15:
        arguments += ["--json"]
    if rng.random() < 0.2:
        arguments += ["--svg", _target(folder, "chart.svg", rng)]
    if rng.random() < 0.2:
        arguments += ["--perfetto", _target(folder, "perfetto.json", rng)]
    return Input(arguments)


def _check(folder: Path, rng: random.Random) -> Input:
    graphs = real.graphs()
    count = rng.choice((1, 1, 2))
    paths = [_file(folder, f"graph{k}{rng.choice(('', chr(27)))}.json", rng.choice(graphs), rng) for k in range(count)]
    arguments = ["check", *map(str, paths)]
    if rng.random() < 0.3:
        arguments += ["--reference", str(_file(folder, "reference.json", rng.choice(graphs), rng))]
    if rng.random() < 0.2:
        arguments += ["--ranks"]
    if rng.random() < 0.2:
        arguments += ["--memory-budget", rng.choice(("0", "1000", "-1", "9" * 400, "x"))]
    if rng.random() < 0.1:
        arguments += ["--donated", rng.choice(("x", "arg0_1", *EVIL_TEXTS[:4]))]
    if rng.random() < 0.1:
        arguments += ["--max-in-flight", rng.choice(("0", "2", "-1", "9" * 30))]
    if rng.random() < 0.1:
        arguments += ["--any-group-order"]
    return Input(arguments)


def _calibrate(folder: Path, rng: random.Random) -> Input:
    arguments = ["calibrate", "--out", _target(folder, "profile.json", rng)]
    if rng.random() < 0.4:
        arguments += ["--device", rng.choice(("cpu", "cuda", "cuda:99", "xpu", "tpu", "meta", *EVIL_TEXTS[:8]))]
    if rng.random() < 0.4:
        arguments += ["--backend", rng.choice(("gloo", "nccl", "emulated", "nope", "cpu:gloo", ":", *EVIL_TEXTS[:8]))]
    if rng.random() < 0.4:
        meshes = ("1", "2x2", "0x1", "x", "1x1x1x1x1x1x1x1x1", "9" * 400, "\u00b2", *EVIL_TEXTS[:8])
        arguments += ["--mesh", rng.choice(meshes)]
    if rng.random() < 0.3:
        arguments += ["--repeats", _number(rng)]
    if rng.random() < 0.3:
        arguments += ["--name", rng.choice((*EVIL_TEXTS, "mine"))]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    if rng.random() < 0.5:
        name = rng.choice(list(environment))
        if rng.random() < 0.4 and name not in ("MASTER_ADDR", "WORLD_SIZE"):
            del environment[name]
        elif name != "MASTER_ADDR":
            environment[name] = rng.choice(("x", "-1", "", "0x1", "9" * 400, "\x1b[31m", "1.5"))
    return Input(arguments, environment)


_VARIABLES = (
    *("TORCH_TRACE", "TORCHINDUCTOR_CACHE_DIR", "CXX", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCHINDUCTOR_FX_GRAPH_CACHE"),
    *("INDUCTOR_PASSES", "INDUCTOR_PASSES_MEMORY_BUDGET", "INDUCTOR_PASSES_NONSENSE"),
)


def _doctor(folder: Path, rng: random.Random) -> Input:
    values = ("x" * 300, "/proc/x", str(folder), str(folder / "none"), "", "0", "2", *EVIL_TEXTS[:12])
    environment = {rng.choice(_VARIABLES): rng.choice(values) for _ in range(rng.randrange(3))}
    if rng.random() < 0.5:
        environment["INDUCTOR_PASSES_COST_PROFILE"] = str(_file(folder, "costs.json", real.corpus().profile, rng))
    if rng.random() < 0.5:
        environment["INDUCTOR_PASSES_PLAN"] = str(_file(folder, "plan.json", real.corpus().plan, rng))
    # The operating system's variables are bytes without zeros.
    environment = {name: value.replace("\0", "") for name, value in environment.items() if "\ud800" not in value}
    return Input(["doctor", *(["--json"] if rng.random() < 0.3 else [])], environment)


MAKERS: dict[str, Callable[[Path, random.Random], Input]] = {
    "report": _report,
    "simulate": _simulate,
    "check": _check,
    "calibrate": _calibrate,
    "doctor": _doctor,
}


def make(command: str, folder: Path, rng: random.Random) -> Input:
    """An input for ``command``, with its files in ``folder``."""
    made = MAKERS[command](folder, rng)
    if rng.random() < 0.02:
        odd = ("--nope", "--", "-", "", *EVIL_TEXTS[:6])
        made.arguments.insert(rng.randrange(len(made.arguments) + 1), rng.choice(odd))
    return made


# -- running and judging ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _streams() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    """Output as a process has it: bytes behind a text layer."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def _quick(groups: object, **settings: Any) -> Any:
    """In the place of measuring, which takes seconds and reads nothing."""
    from inductor_passes.cost.profile import CostProfile

    return CostProfile.from_json({**real.corpus().profile, "name": settings["name"] or "measured"})


def call(made: Input) -> Outcome:
    """Run the command in this process."""
    command: Any = typer.main.get_command(application)
    with _streams() as (out, err), mock.patch.dict(os.environ, made.environment):
        for name in [n for n in os.environ if n.startswith("INDUCTOR_PASSES") and n not in made.environment]:
            del os.environ[name]
        status: object = None
        error = ""
        try:
            with mock.patch("inductor_passes.cost.calibrate.calibrate", _quick):
                command.main(list(made.arguments), prog_name=PROGRAM)
        except SystemExit as end:
            status = end.code
        except BaseException:
            error = traceback.format_exc()
        stdout, stderr = (s.buffer.getvalue().decode("utf-8", "replace") for s in (out, err))  # type: ignore[attr-defined]
    return Outcome(status, stdout, stderr, error)


def judge(made: Input, outcome: Outcome, folder: Path) -> str:
    """What is wrong with an outcome, or ""."""
    if outcome.error:
        return f"raised\n{outcome.error}"
    if outcome.status not in (0, 1, 2):
        return f"exit status {outcome.status!r}"
    sentence = outcome.stderr.strip()
    if "Traceback" in sentence or "internal error" in sentence:
        return f"stderr: {sentence}"
    findings = made.arguments[0] == "check" and outcome.status == 1 and "findings" in outcome.stdout
    if outcome.status != 0 and not findings and (not sentence or len(sentence.splitlines()) > _most_lines(made)):
        return f"exit status {outcome.status} without one sentence: {sentence!r}"
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        bad = [c for c in text if c != "\n" and printable(c) != c]
        if bad:
            return f"{name} has {bad[:5]!r}: {text[max(0, text.index(bad[0]) - 60) :][:120]!r}"
    return _judge_files(made, outcome, folder)


def _most_lines(made: Input) -> int:
    """With --json or a file, what was written before the failure is said on stderr too."""
    return 1 + sum(option in made.arguments for option in ("--json", "--svg", "--perfetto", "-o"))


def _judge_files(made: Input, outcome: Outcome, folder: Path) -> str:
    for path in sorted(folder.glob("*")):
        if not path.is_file() or path.name not in ("page.html", "perfetto.json", "chart.svg", "costs.json"):
            continue
        if path.name == "costs.json" and made.arguments[0] == "doctor":
            continue
        text = path.read_text(encoding="utf-8")
        try:
            problem = WELL_FORMED[path.name](text)
        except (ValueError, ElementTree.ParseError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and outcome.status == 0:
            return f"{path.name}: {problem}"
    return ""


class _Page(html.parser.HTMLParser):
    """Counts elements; data stand in inert scripts only."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: collections.Counter[str] = collections.Counter()
        self.handlers: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.handlers += [name for name, value in attrs if name.startswith("on") or (name == "src" and value)]


def _page(text: str) -> str:
    page = _Page(text)
    foreign = {"img", "iframe", "object", "embed", "link", "base", "form"} & page.tags.keys()
    if foreign or page.handlers:
        return f"foreign elements {foreign} or attributes {page.handlers}"
    return _unprintable(text.replace("\n", "").replace("\t", ""))


def _unprintable(text: str) -> str:
    bad = [c for c in text if c != "\n" and printable(c) != c]
    return f"holds {bad[:5]!r}" if bad else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield key
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)


def _json(text: str) -> str:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    return next(filter(None, map(_unprintable, _strings(value))), "")


def _svg(text: str) -> str:
    root = ElementTree.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    foreign = tags - {"svg", "style", "text", "line", "polyline", "circle", "title", "rect"}
    return f"foreign elements {foreign}" if foreign else _unprintable(text)


def _costs(text: str) -> str:
    from inductor_passes.cost.profile import CostProfile

    CostProfile.from_json(json.loads(text))
    return ""


WELL_FORMED: dict[str, Callable[[str], str]] = {
    "page.html": _page,
    "perfetto.json": _json,
    "chart.svg": _svg,
    "costs.json": _costs,
}


def one(
    seed: int, number: int, command: str | None = None, keep: Path | None = None
) -> tuple[Input, Outcome, str, float]:
    """Input ``number`` of a seed: what was called, what came out, what is wrong with it ("": nothing), seconds."""
    rng = random.Random(f"{seed}/{number}")
    drawn = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    folder = Path(tempfile.mkdtemp(prefix="fuzz_commands_"))
    try:
        made = make(command or drawn, folder, rng)
        began = time.monotonic()
        outcome = call(made)
        took = time.monotonic() - began
        wrong = judge(made, outcome, folder)
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        return made, outcome, wrong, took
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    inputs: int = typer.Option(1000, min=1, help="How many inputs."),
    seed: int = typer.Option(0, help="Input i depends on the seed and i only."),
    first: int = typer.Option(0, min=0, help="Number of the first input."),
    command: str = typer.Option("", help=f"Only this command, of {', '.join(WEIGHTS)}."),
    failures: int = typer.Option(10, min=1, help="Stop after so many failures."),
    keep: Annotated[Path | None, typer.Option(help="Leave the files of the inputs in this folder.")] = None,
) -> None:
    """Run inputs; exits with 1 when one failed."""
    if command and command not in WEIGHTS:
        raise typer.BadParameter(f"--command is {command!r}; expected one of {', '.join(WEIGHTS)}")
    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(first, first + inputs):
            # A command that hangs ends the run and shows where.
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            made, outcome, wrong, took = one(seed, number, command or None, keep)
            counts["inputs"] += 1
            called = made.arguments[0] if made.arguments[0] in WEIGHTS else "another command"
            counts[f"{called}, exit status {outcome.status}"] += 1
            counts[f"slower than {SLOW_S:g} s"] += took > SLOW_S
            if took > SLOW_S:
                print(f"# input {number} took {took:.0f} s: {printable(' '.join(made.arguments))[:300]}", flush=True)
            if wrong:
                counts["failures"] += 1
                print(f"\n# seed {seed}, input {number}: {printable(' '.join(made.arguments))[:600]}", flush=True)
                print(f"# {made.environment}\n{wrong}", flush=True)
                if counts["failures"] >= failures:
                    break
            if counts["inputs"] % 1000 == 0:
                print(f"# {counts['inputs']} inputs, {counts['failures']} failures", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    for name in sorted(counts):
        print(f"{counts[name]:8d} {name}")
    print(f"{time.monotonic() - began:8.0f} seconds")
    raise typer.Exit(int(counts["failures"] > 0))


if __name__ == "__main__":
    typer.run(run)
