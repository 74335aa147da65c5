"""``INDUCTOR_PASSES`` in processes of their own: cheap until something is compiled, and never in torch's way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.settings.budget import DEFAULT_BUDGET
from tests.support.processes import LIMIT_S, ROOT, environment

#: No compiled graph comes from a cache; kernels, which are the same with us and without, may.
UNCACHED = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

#: What a graph with a collective needs; ``compiled()`` compiles one and returns our reports of it.
PRELUDE = """
import json, sys
def heavy(): return sorted({m.split(".")[1] for m in sys.modules if m.startswith("inductor_passes.")} - {"switch"})
def compiled(call=None):
    import torch, torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    def step(x, w):
        return x.sin() @ funcol.all_gather_tensor(w, 0, dist.group.WORLD)
    run = torch.compile(step) if call is None else call(step)
    from inductor_passes.trace.collector import collect
    with collect() as reports:
        run(torch.ones(4, 8), torch.ones(4, 8))
    return [r.config["memory_budget"] for r in reports]
"""


def run(code: str, *, prelude: str = PRELUDE, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with ``INDUCTOR_PASSES=1`` unless ``env`` says otherwise."""
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(**{"INDUCTOR_PASSES": "1", **env}),
    )


def result(code: str, **env: str) -> Any:
    """What ``code`` prints last, as JSON."""
    done = run(code, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# -- cheap until something is compiled ----------------------------------------------------------------------


def test_importing_torch_imports_nothing_more() -> None:
    """Neither our passes nor any part of torch that it would not import itself."""
    code = "import torch; print(json.dumps(sorted(sys.modules)))"
    off, on = (set(result(code, INDUCTOR_PASSES=value)) for value in ("0", "1"))
    extra = {name for name in on - off if not name.startswith("importlib")}
    assert extra == {"inductor_passes", "inductor_passes.switch"}


def test_a_process_that_never_compiles_imports_no_pass() -> None:
    """Eager work, Dynamo's and Inductor's configuration: our objects are in it, and nothing behind them is imported."""
    code = """
import torch, torch._dynamo, torch._inductor.config as config
(torch.ones(2, requires_grad=True) * 2).sum().backward()
assert config.reorder_for_compute_comm_overlap and config.post_grad_custom_post_pass
print(json.dumps([heavy(), [m for m in sys.modules if "inductor_passes.engine." in m]]))
"""
    packages, imported = result(code)
    assert packages == ["_torch", "engine", "operators"]
    assert sorted(name.rpartition(".")[2] for name in imported) == ["options", "ours", "process"]


def test_making_options_imports_no_pass() -> None:
    code = "import torch, inductor_passes; inductor_passes.options(memory_budget='+5%'); print(json.dumps(heavy()))"
    passes = {"agreement", "async_tp", "bucket", "ir", "reorder", "rewrites", "schedule", "simple_fsdp", "verify"}
    assert not passes & set(result(code, INDUCTOR_PASSES="0"))


def test_the_first_compilation_uses_our_passes() -> None:
    code = "before = __import__('torch') and heavy(); print(json.dumps([before, compiled()]))"
    assert result(code, INDUCTOR_PASSES_MEMORY_BUDGET="+7%") == [[], ["+7%"]]
    assert result(code, INDUCTOR_PASSES="0") == [[], []]


def test_compile_workers_import_nothing_of_ours() -> None:
    """Inductor's workers import Inductor's configuration, with our variable in their environment."""
    code = """
if __name__ == "__main__":
    import torch
    from torch._inductor.async_compile import AsyncCompile
    look = '[m for m in __import__("sys").modules if "inductor" in m]'
    names = AsyncCompile.process_pool().submit(eval, look).result()
    assert "torch._inductor.config" in names
    print(json.dumps([m for m in names if m.startswith("inductor_passes.engine")]))
"""
    assert result(code, TORCHINDUCTOR_COMPILE_THREADS="2", TORCHINDUCTOR_WORKER_START="subprocess") == []


# -- in every order of imports ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        "import inductor_passes; inductor_passes.options()",
        "import inductor_passes; inductor_passes.simple_fsdp",
        "import inductor_passes.plugin",
        "import inductor_passes.engine.hooks",
        "import inductor_passes.verify, inductor_passes._torch",
        "import torch; import inductor_passes; inductor_passes.options()",
        "import torch._inductor.custom_graph_pass; import inductor_passes.plugin",
        "import torch._inductor.compile_fx; import inductor_passes",
    ],
)
def test_either_may_be_imported_first(first: str) -> None:
    code = f"""
{first}
import torch, inductor_passes, torch._inductor.config as config
assert inductor_passes.config.enabled and config.reorder_for_compute_comm_overlap
assert type(config.__spec__.loader) is type(torch._dynamo.config.__spec__.loader), config.__spec__.loader
assert config.__loader__ is config.__spec__.loader
assert not any("inductor_passes" in type(finder).__module__ for finder in sys.meta_path), sys.meta_path
from inductor_passes.engine.ours import is_ours
passes = config.post_grad_custom_post_pass
print(json.dumps([is_ours(one) for one in (passes if isinstance(passes, list) else [passes])]))
"""
    assert result(code) == [True]


def test_torch_without_autoloading() -> None:
    """Then importing our package is what looks at the variable."""
    code = """
import torch, torch._inductor.config as config
before = config.reorder_for_compute_comm_overlap
import inductor_passes
print(json.dumps([before, inductor_passes.config.enabled, config.reorder_for_compute_comm_overlap]))
"""
    assert result(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [False, True, True]


# -- switched in the program --------------------------------------------------------------------------------


def test_a_program_decides_against_the_variable() -> None:
    code = """
import inductor_passes
inductor_passes.config.enabled = False
import torch, torch._inductor.config as config
off = config.reorder_for_compute_comm_overlap
inductor_passes.config.enabled = True
on = config.reorder_for_compute_comm_overlap
with inductor_passes.config.patch(enabled=False):
    patched = config.reorder_for_compute_comm_overlap
print(json.dumps([off, on, patched, config.reorder_for_compute_comm_overlap, compiled()]))
"""
    assert result(code) == [False, True, False, True, [DEFAULT_BUDGET]]


def test_enabling_without_the_variable_is_as_late() -> None:
    code = """
import inductor_passes
inductor_passes.config.enabled = True
import torch
early = heavy()
print(json.dumps([early, compiled()]))
"""
    assert result(code, INDUCTOR_PASSES="0") == [["config", "records", "settings"], [DEFAULT_BUDGET]]


def test_the_users_own_hooks_stay() -> None:
    """Set before enabling, set around the first compilation, and options of a single compilation."""
    code = """
import torch, torch._inductor.config as config
import inductor_passes
seen = []
inductor_passes.config.enabled = False
config.post_grad_custom_post_pass = lambda graph: seen.append("before")
inductor_passes.config.enabled = True
reports = [compiled()]
torch._dynamo.reset()
with config.patch(post_grad_custom_post_pass=lambda graph: seen.append("around")):
    compiled()
torch._dynamo.reset()
reports.append(compiled())
torch._dynamo.reset()
reports.append(compiled(lambda step: torch.compile(step, options=inductor_passes.options(memory_budget="+9%"))))
inductor_passes.config.enabled = False
kept = config.post_grad_custom_post_pass.__name__
print(json.dumps([reports, seen, kept]))
"""
    reports, seen, kept = result(code, **UNCACHED)
    assert reports == [[DEFAULT_BUDGET], [DEFAULT_BUDGET], ["+9%"]]
    assert seen == ["before", "around", "before", "before"] and kept == "<lambda>"


def test_a_warm_cache_knows_the_stand_ins(tmp_path: Path) -> None:
    """The keys of what was compiled are the same in the next process, and other settings have others."""
    code = """
found = compiled()
from torch._dynamo.utils import counters
print(json.dumps([found, dict(counters["inductor"]).get("fxgraph_cache_hit", 0)]))
"""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert result(code, **cache) == [[DEFAULT_BUDGET], 0]
    assert result(code, **cache) == [[DEFAULT_BUDGET], 1]
    assert result(code, INDUCTOR_PASSES_MEMORY_BUDGET="0", **cache) == [["0"], 0]


@pytest.mark.parametrize("module", ["engine.hooks", "bucket.pass_"])
def test_passes_that_cannot_be_imported_are_left_out(module: str) -> None:
    """Torch compiles as it would without us, and says so once."""
    code = f"""
import torch
sys.modules["inductor_passes.{module}"] = None
def step(x): return (x.sin() + 1).sum()
x = torch.ones(4, requires_grad=True)
for _ in range(2):
    torch._dynamo.reset()
    torch.compile(step)(x).backward()
print(json.dumps(torch.allclose(x.grad, 2 * torch.ones(4).cos())))
"""
    done = run(code, **UNCACHED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "true"
    assert done.stderr.count("inductor_passes stays off, its passes cannot be imported") == 1


# -- bad values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["2", "yes please"])
def test_a_bad_value_does_not_break_torch(value: str) -> None:
    """It is said once, torch works, and using our package raises."""
    code = """
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
import inductor_passes
assert not inductor_passes.config.enabled
try:
    inductor_passes.options()
except inductor_passes.ConfigError as error:
    print(json.dumps(str(error)))
"""
    done = run(code, INDUCTOR_PASSES=value)
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)
    assert f"INDUCTOR_PASSES={value!r} is not allowed" in message and '"1"' in message and '"0"' in message
    assert done.stderr.count(f"INDUCTOR_PASSES={value!r} is not allowed; expected") == 1


@pytest.mark.parametrize("value", ["0", " FALSE ", ""])
def test_values_that_mean_off(value: str) -> None:
    code = "import torch, inductor_passes; print(json.dumps(inductor_passes.config.enabled))"
    done = run(code, INDUCTOR_PASSES=value)
    assert (done.stdout.strip(), done.stderr) == ("false", "")


@pytest.mark.parametrize("value", ["on", " True"])
def test_values_that_mean_on(value: str) -> None:
    code = "import torch; from inductor_passes import switch; print(json.dumps(switch.is_on()))"
    assert result(code, INDUCTOR_PASSES=value)


def test_a_bad_setting_is_an_error_of_the_compilation() -> None:
    """Torch imports, eager code runs, and the first compilation names variable, value and what is allowed."""
    done = run("import torch; print(torch.ones(2).sum().item())", INDUCTOR_PASSES_MEMORY_BUDGET="nonsense")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2.0", "")
    done = run("compiled()", INDUCTOR_PASSES_MEMORY_BUDGET="nonsense")
    assert done.returncode == 1
    assert "ConfigError: inductor_passes: INDUCTOR_PASSES_MEMORY_BUDGET='nonsense' is not allowed" in done.stderr
    done = run("compiled()", INDUCTOR_PASSES_MEMORY_BUGDET="0")
    assert done.returncode == 1 and "INDUCTOR_PASSES_MEMORY_BUGDET" in done.stderr


# -- other processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_child_processes(tmp_path: Path, method: str) -> None:
    """Each follows the variable by itself; a forked one has what its parent had."""
    script = tmp_path / "script.py"
    script.write_text(
        PRELUDE
        + f"""
import torch
import torch.multiprocessing as multiprocessing
def child(queue):
    queue.put(compiled())
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(json.dumps(queue.get(timeout={LIMIT_S})))
    process.join()
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(INDUCTOR_PASSES="1", **UNCACHED),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [DEFAULT_BUDGET]


def test_pytest_runs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch, inductor_passes\n"
        "def test_it():\n"
        "    assert inductor_passes.config.enabled\n"
        "    assert torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(1)).item() == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env=environment(INDUCTOR_PASSES="1"),
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


COMMANDS = ["report", "check", "simulate", "calibrate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    """Each does what it does without the variable: complains about a file that is not there."""
    done, plain = (
        subprocess.run(
            [sys.executable, "-m", "inductor_passes.cli.main", command, "nowhere"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment(INDUCTOR_PASSES=value),
        )
        for value in ("1", "0")
    )
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize(("value", "autoload"), [("1", "1"), ("2", "1"), ("1", "0")])
def test_doctor(value: str, autoload: str) -> None:
    """Works with the variable, and says what is wrong with it."""
    done = subprocess.run(
        [sys.executable, "-m", "inductor_passes.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(INDUCTOR_PASSES=value, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload),
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    status = "fail" if value == "2" else "ok" if autoload == "1" else "warn"
    assert checks["INDUCTOR_PASSES"]["status"] == status
    failed = [name for name, check in checks.items() if check["status"] == "fail"]
    assert failed == (["INDUCTOR_PASSES"] if value == "2" else [])
    assert done.returncode == bool(failed)
    assert checks["torch features"]["status"] == checks["Inductor's own communication passes"]["status"] == "ok"


def test_tools_run_without_the_settings_of_the_shell(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "tools/constraints.txt", "tools/setup_env.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    activate = tmp_path / ".venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    # The environment is as wanted already: nothing is installed.
    wanted = b"".join((tmp_path / name).read_bytes() for name in ("pyproject.toml", "tools/constraints.txt"))
    (tmp_path / ".venv/inductor_passes.stamp").write_text(hashlib.sha256(wanted).hexdigest() + "\n")
    shell = {"INDUCTOR_PASSES": "1", "INDUCTOR_PASSES_MEMORY_BUDGET": "0", "INDUCTOR_PASSES_NATIVE": "0"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "source tools/setup_env.sh; env"],
        cwd=tmp_path,
        env={**os.environ, **shell},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    left = {line for line in done.stdout.splitlines() if line.startswith("INDUCTOR_PASSES")}
    assert left == {"INDUCTOR_PASSES_NATIVE=0"}
