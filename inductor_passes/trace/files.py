"""Files that a setting asks for: plans (``dump_plan``) and planning problems (``dump_problem``).

On a warm cache no pass runs. So a file travels inside the generated module, as the report does, and is written again
when the module is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from inductor_passes.pin import file as plan_file
from inductor_passes.records.once import warn_once
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import Problem
from inductor_passes.trace.payload import dumps


@dataclass(frozen=True)
class AskedFile:
    """A file as it was asked for.

    Attributes:
        setting: "dump_plan" or "dump_problem".
        directory: its value.
        name: of the file in it.
        text: all of it.
    """

    setting: str
    directory: str
    name: str
    text: str

    def write(self) -> None:
        """Write it; a directory that cannot be written is a warning, once per process."""
        try:
            folder = Path(self.directory)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.name).write_text(self.text, encoding="utf-8")
        except OSError as error:
            what = self.setting.removeprefix("dump_")
            warn_once(f"inductor_passes: cannot write the {what} to {self.setting}={self.directory}: {error}")

    def to_json(self) -> list[str]:
        """Plain data; inverse of :func:`from_json`."""
        return list(astuple(self))


def from_json(data: Iterable[str]) -> AskedFile:
    """Inverse of :meth:`AskedFile.to_json`."""
    return AskedFile(*data)


def plan_of(report: GraphReport) -> AskedFile | None:
    """The graph's plan, by rank 0: what it decided on FX is what all ranks decided. None where it is not asked for.

    Raises:
        PlanFileError: what the report holds is no plan.
    """
    directory = report.config.get("dump_plan")
    if not directory or report.rank or not report.plan:
        return None
    graph = plan_file.GraphPlan.from_json(report.plan, report.phase)
    return AskedFile("dump_plan", str(directory), f"{graph.title}.json", plan_file.text_of([graph]))


def problem_of(problem: Problem, rank: int, directory: str) -> AskedFile:
    """A planned problem for ``inductor-passes simulate``."""
    name = f"rank{rank}_{problem.name}_{problem.digest()}.json"
    return AskedFile("dump_problem", directory, name, dumps(problem.to_json(), indent=None))
