"""Settings: one validated record, whatever way they come in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inductor_passes
from inductor_passes import ConfigError, PassConfig, config
from inductor_passes.async_tp.pass_ import AsyncTpPass
from inductor_passes.config import FIELDS, allowed_values
from inductor_passes.engine.passes import passes_of
from inductor_passes.rewrites.pass_ import RewriteCollectives
from inductor_passes.rewrites.scatter_by_exchange import ScatterByExchange
from inductor_passes.settings.budget import DEFAULT_BUDGET, MemoryBudget


@pytest.mark.parametrize(
    ("text", "peak", "limit"),
    [
        ("0", 1000, 1000),
        ("+5%", 1000, 1050),
        ("+12.5%", 1000, 1125),
        ("2GiB", 1000, 1000 + 2 * 2**30),
        ("+512MiB", 0, 512 * 2**20),
        ("1.5 GB", 10, 10 + 1_500_000_000),
        ("unlimited", 1000, None),
        ("-30%", 1000, 700),
        ("- 12.5 %", 1000, 875),
        ("=12GiB", 1000, 12 * 2**30),
        ("= 700 B", 1000, 700),
        ("+5% or 1MiB", 1000, 1000 + 2**20),
        ("+5% or 1MiB", 2**30, 2**30 + 2**30 // 20),
        ("+ 0% or 700 B", 1000, 1700),
    ],
)
def test_budgets(text: str, peak: int, limit: int | None) -> None:
    assert MemoryBudget.parse(text).limit_bytes(peak) == limit


@pytest.mark.parametrize(
    "bad",
    ["+5% or", "-5% or 1MiB", "+5% or 1", "+5% or 5%", "0 or 1MiB", "+5% or 1MiB or 2MiB", "+5%or1MiB", "+5% or =1MiB",
     "+5% or 1 gig",
     "5", "5%", "-100%", "-2GiB", "=5%", "=unlimited", "+=1MB", "=0", "=0B", "2 gigs", "", "+", "GiB", "nan%", "1e3MB",
     None, 5, True, -1],
)
def test_bad_budgets_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="memory_budget="):
        MemoryBudget.parse(bad)


@pytest.mark.parametrize(("text", "shrinks"), [("0", False), ("+5%", False), ("2GiB", False), ("unlimited", False),
                                               ("-0%", False), ("-1%", True), ("=2GiB", True)])
def test_which_budgets_shrink_a_step(text: str, shrinks: bool) -> None:
    assert MemoryBudget.parse(text).shrinks == shrinks


def test_a_plan_file_does_not_go_with_a_budget_that_shrinks() -> None:
    with pytest.raises(ConfigError, match=r"plan='plan.json'.*nothing beside memory_budget"):
        PassConfig(memory_budget="-30%", plan="plan.json")


@given(st.integers(0, 10**12))
def test_a_floor_leaves_a_small_graph_room_and_a_plain_share_is_kept(peak: int) -> None:
    assert PassConfig().memory_budget == DEFAULT_BUDGET
    assert PassConfig(memory_budget="+5% or 1MiB").budget.limit_bytes(peak) == peak + max(2**20, peak // 20)
    assert PassConfig(memory_budget="+5%").budget.limit_bytes(peak) == peak + peak // 20


@given(st.integers(0, 10**15), st.integers(0, 10**4))
def test_a_budget_never_falls_below_the_input(peak: int, percent: int) -> None:
    limit = MemoryBudget.parse(f"+{percent}%").limit_bytes(peak)
    assert limit is not None
    assert peak <= limit <= peak + peak * percent // 100 + 1


def test_unknown_keys_name_their_neighbour() -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory_budget'"):
        PassConfig.from_mapping({"memory_bugdet": "0"})
    with pytest.raises(ConfigError, match="memory_budget"):
        inductor_passes.options(memory_bugdet="0")


@pytest.mark.parametrize(
    ("key", "value"),
    [("verify", "off"), ("verify", True), ("codegen", "triton"), ("replay", 1), ("cost_profile", 3), ("estimator", 3)],
)
def test_bad_values_name_key_value_and_what_is_allowed(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        PassConfig.from_mapping({key: value})
    assert key in str(caught.value) and repr(value) in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_setting_refuses_what_it_does_not_know(key: str) -> None:
    """Found: a switch that was missing in a list took any text, and did nothing with it."""
    if key in ("cost_profile", "dump_plan", "dump_problem", "plan", "tune_file"):
        assert "path" in allowed_values(key)
        # No file can be called so, which would come to light when it is written.
        with pytest.raises(ConfigError, match=f"{key}=.*path"):
            PassConfig.from_mapping({key: "a\0b"})
        return
    with pytest.raises(ConfigError, match=key):
        PassConfig.from_mapping({key: "no such value"})
    assert "path" not in allowed_values(key)


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        PassConfig(memory_budget="9" * 10**6)
    assert len(str(caught.value)) < 1000 and "memory_budget='9999" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        PassConfig.from_mapping({"x" * 10**5: 1})
    assert len(str(caught.value)) < 2000


def test_environment() -> None:
    environ = {"INDUCTOR_PASSES": "1", "INDUCTOR_PASSES_MEMORY_BUDGET": "+7%", "OTHER": "x"}
    assert PassConfig.from_env(environ).memory_budget == "+7%"
    with pytest.raises(ConfigError, match="INDUCTOR_PASSES_MEMORY"):
        PassConfig.from_env({"INDUCTOR_PASSES_MEMORY": "0"})
    with pytest.raises(ConfigError, match="INDUCTOR_PASSES_MEMORY_BUDGET='lots' is not"):
        PassConfig.from_env({"INDUCTOR_PASSES_MEMORY_BUDGET": "lots"})
    with pytest.raises(ConfigError, match="function"):
        PassConfig.from_env({"INDUCTOR_PASSES_ESTIMATOR": "f"})


def test_the_namespace_holds_process_wide_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.memory_budget == PassConfig().memory_budget
    monkeypatch.setenv("INDUCTOR_PASSES_MEMORY_BUDGET", "+1%")
    assert config.memory_budget == "+1%"
    with config.patch(memory_budget="0", verify="strict"):
        assert config.current() == PassConfig(memory_budget="0", verify="strict")
        assert config.verify == "strict"
    assert config.memory_budget == "+1%"
    for bad in ({"memory_budget": "5"}, {"enabled": 1}, {"nothing": 1}):
        with pytest.raises(ConfigError), config.patch(**bad):
            pass
    with pytest.raises(AttributeError):
        config.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("fields", "tier", "async_tp"),
    [
        ({}, "exact", "off"),
        ({"numerics": "reassociate"}, "reassociate", "auto"),
        ({"numerics": "reassociate", "redistribute": "exact"}, "exact", "auto"),
        ({"numerics": "reassociate", "redistribute": "error-above:1MiB"}, "reassociate", "auto"),
        ({"numerics": "reassociate", "async_tp": "off"}, "reassociate", "off"),
        ({"redistribute": "reassociate"}, "reassociate", "off"),
        ({"async_tp": "force"}, "exact", "force"),
        ({"redistribute": "off", "async_tp": "numerics"}, "off", "off"),
    ],
)
def test_one_word_for_numerics(fields: dict[str, str], tier: str, async_tp: str) -> None:
    settings = PassConfig.from_mapping(fields)
    assert (settings.tier, settings.async_tp_mode) == (tier, async_tp)
    made = passes_of(settings)
    assert [one.exactness for one in made if isinstance(one, RewriteCollectives | ScatterByExchange)] == [tier, tier]
    assert [one.mode for one in made if isinstance(one, AsyncTpPass)] == [async_tp] * (async_tp != "off")


def test_numerics_by_environment() -> None:
    settings = PassConfig.from_env({"INDUCTOR_PASSES_NUMERICS": "reassociate"})
    assert settings.tier == "reassociate"
    with pytest.raises(ConfigError, match=r"numerics='fast' is not allowed; expected \"exact\" or \"reassociate\""):
        PassConfig(numerics="fast")  # type: ignore[arg-type]


def test_a_folder_is_no_tune_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune_file=.*expected the path of a file, and this is a folder"):
        PassConfig(tune=3, tune_file=str(tmp_path))
    assert PassConfig(tune_file=str(tmp_path)).tune == 0


@pytest.mark.parametrize(
    ("name", "read", "given"),
    [
        ("cost_profile", "{}/own.json", "{}/own.json"),
        ("cost_profile", "{}/own.json", "{}/../{}/own.json"),
        ("plan", "{}/own.plan.json", "{}/own.json"),
        ("plan", "{}/own.plan.json", "{}/own.txt"),
        ("plan", "{}", "{}/own.json"),
    ],
)
def test_a_run_does_not_write_what_it_reads(tmp_path: Path, name: str, read: str, given: str) -> None:
    """Graphs that are compiled later would be planned by something else, on each rank from another moment on."""
    path = read.format(tmp_path)
    tune_file = given.replace("/../{}/", f"/../{tmp_path.name}/").format(tmp_path)
    with pytest.raises(ConfigError, match=f"tune_file=.* is not allowed.*write {name}=.*which it reads"):
        PassConfig(**{name: path, "tune": 3, "tune_file": tune_file})
    elsewhere = str(tmp_path / "elsewhere" / "other.json")
    assert getattr(PassConfig(**{name: path, "tune": 3, "tune_file": elsewhere}), name) == path
    assert getattr(PassConfig(**{name: path, "tune_file": tune_file}), name) == path
