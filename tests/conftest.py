"""Shared set-up: a compile cache of this run's own, and settings that do not leak from test to test."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

# Set-up code asserts too: its failures shall show values as those of tests do.
pytest.register_assert_rewrite("tests.support")

_OWN_CACHE = "PASSES_TEST_CACHE"

# A run of the suite says the same each time. To search: pytest --hypothesis-profile=search --hypothesis-seed=$RANDOM.
settings.register_profile("suite", derandomize=True)
settings.register_profile("search", settings.get_profile("default"), deadline=None)
settings.load_profile("suite")


#: Tests that the suite leaves out unless it is asked for them, one to a line behind their seconds. Written by
#: `tools/gen slow_tests`.
_SLOW = Path(__file__).with_name("slow.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow``."""
    parser.addoption("--slow", action="store_true", help="run what is marked slow, and what tests/slow.txt lists, too")


def pytest_configure(config: pytest.Config) -> None:
    """A compile cache of this run's own, shared by its workers and ranks: what an earlier run left decides nothing."""
    # Else Inductor compiles and loads a library per vector extension: ten seconds for every cache that begins empty,
    # more than one for every process.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Tests start hundreds of processes: each would compile three hundred files of ours for a second.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if _OWN_CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="inductor_passes_cache_")
        os.environ[_OWN_CACHE] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


#: Files that take longest, longest first. Workers take whole files: one of these at the end would keep a single worker
#: busy while the others have nothing left to do. Only that depends on this list.
_LONG = (
    *("end_to_end", "environment_variable", "variants", "step_keep", "tuning_swap_ranks", "step_recompute"),
    *("operator_memory", "nothing_planned", "simple_fsdp_checkpointing", "tuning_ranks", "parameter_names"),
    *("sequence_parallel_ranks", "memory_measured", "tuning_again", "memory_cap", "hugging_face", "compress"),
    *("replay_problem", "replay_order", "bucket_sums", "simple_fsdp_graphs", "agreement_ranks", "regions"),
    *("trace_models", "uneven_ranks", "simple_fsdp", "trace_plan_file", "tuning_soak", "xpu_stand_in", "trace_graphs"),
    *("frameworks_trainer", "soak", "failures", "verify_mutations", "barrier", "bench", "trace_artifacts", "fuzz"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; slow tests only where they are asked for: with ``--slow``, ``-m``, or their file."""
    listed = {line.split(maxsplit=1)[1] for line in _SLOW.read_text(encoding="utf-8").splitlines() if line}
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
    whole = all(Path(argument.split("::")[0]).is_dir() for argument in config.args)
    if whole and not config.getoption("slow") and not config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
    places = {f"test_{name}": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_LONG)))


def pytest_collection_finish() -> None:
    """Whatever tests import is imported now."""
    from tests.support.processes import collect_rarely

    collect_rarely()


def pytest_unconfigure() -> None:
    """Else libraries complain at the end that objects of theirs were never freed."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    """Process-wide settings as they were before, whatever a test did to them."""
    from inductor_passes import config

    with config.patch():
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo ranks for all files whose functions leave nothing behind that others would notice.

    Groups that they make, and what was compiled, stay: a file that counts such things, prepares groups or needs
    another backend or environment has ranks of its own.
    """
    from tests.support.ranks import Ranks

    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """As ``two_ranks``."""
    from tests.support.ranks import Ranks

    with Ranks(4) as ranks:
        yield ranks
