"""The doctor names what is wrong and what to do, and fails only when something is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inductor_passes.cli import doctor
from inductor_passes.cli.main import app


def found(environ: dict[str, str]) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.run_checks(environ)}


def test_this_environment_is_healthy_and_every_problem_has_advice(tmp_path: Path) -> None:
    checks = doctor.run_checks({})
    assert {c.name for c in checks} >= {"Python", "torch", "torch features", "process groups", "compile cache", "GPU"}
    assert not [c for c in checks if c.status == "fail"]
    broken = {
        "TORCH_TRACE": str(tmp_path / "file"),
        "INDUCTOR_PASSES_COST_PROFILE": str(tmp_path / "none.json"),
        "INDUCTOR_PASSES_VERIFY": "maybe",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    (tmp_path / "file").touch()
    problems = [c for c in (*checks, *doctor.run_checks(broken)) if c.status != "ok"]
    assert {c.status for c in problems} == {"warn", "fail"} and len(problems) >= 3
    assert [c.name for c in problems if not c.advice] == []


def test_exit_status_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_TRACE", "INDUCTOR_PASSES_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "failures" in done.output
    monkeypatch.setenv("INDUCTOR_PASSES_VERIFY", "maybe")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    failed = [c for c in json.loads(done.stdout)["checks"] if c["status"] == "fail"]
    assert [c["name"] for c in failed] == ["settings from the environment"]
    assert "maybe" in failed[0]["found"]


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "fail"), ("2.11.0", "ok"), ("2.15.0a0+git1", "ok"), ("2.16.0", "warn"), ("?", "fail")],
)
def test_torch_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    assert found({})["torch"].status == status


def test_in_tree_passes_that_clash_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    with inductor.patch(bucket_all_gathers_fx="all"):
        check = found({})["Inductor's own communication passes"]
    assert check.status == "warn" and "bucket_all_gathers_fx='all'" in check.found


def test_trace_directory(tmp_path: Path) -> None:
    assert found({"TORCH_TRACE": str(tmp_path / "new")})["TORCH_TRACE"].status == "ok"
    (tmp_path / "x.log").touch()
    assert found({"TORCH_TRACE": str(tmp_path)})["TORCH_TRACE"].status == "warn"
    assert found({"TORCH_TRACE": str(tmp_path / "x.log")})["TORCH_TRACE"].status == "fail"


def test_disabled_caches_and_missing_profile(tmp_path: Path) -> None:
    checks = found(
        {
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "INDUCTOR_PASSES_COST_PROFILE": str(tmp_path / "none.json"),
        }
    )
    assert checks["TORCHINDUCTOR_FORCE_DISABLE_CACHES"].status == "warn"
    assert "TORCHINDUCTOR_FX_GRAPH_CACHE" not in checks
    assert checks["cost profile"].status == "fail" and "calibrate" in checks["cost profile"].advice


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr("inductor_passes._torch.cpp_compiler", none)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert found({})["C++ compiler"].status == "fail"


def test_gpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda k: "H100")
    checks = found({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1"})
    assert checks["GPU"].found == "2 x H100"
    assert checks["CUDA_DEVICE_MAX_CONNECTIONS"].status == checks["CUDA_LAUNCH_BLOCKING"].status == "warn"
    assert found({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})["CUDA_DEVICE_MAX_CONNECTIONS"].status == "ok"


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, bool]:
        raise OSError("boom")

    monkeypatch.setattr("inductor_passes._torch.features", broken)
    checks = found({})
    assert checks["features"].status == "fail" and "boom" in checks["features"].found
    assert "compile cache" in checks
