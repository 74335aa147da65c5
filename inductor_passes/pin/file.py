"""The plan file: what was decided for each graph, as data that people read, compare and edit.

One file holds any number of graphs, one name per line:

    {"schema_version": 1, "graphs": [{"phase": "forward", "graph_index": 0, ..., "buckets": [["a", "b"]],
     "kept": ["c"], "order": [...], "kernels": [...]}]}

``collectives`` describes the graph that came in and tells whether the plan still fits; ``parameters`` says which
parameters they carry. ``buckets`` names the collectives that travel together, ``kept`` the gathers of a forward graph
whose results backward reuses, each by its node or by a parameter (``pins.resolved``), ``order`` everything that the
graph passes ordered (FX nodes that take time), and ``kernels`` the order of the fused kernels. Every field may be left
out or null: what is not written is planned, and fits any graph.

A file is data: names are compared and never called, opened or evaluated.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from inductor_passes.cost.profile import CostProfile
from inductor_passes.records.convert import check_version, convert, plain, shown
from inductor_passes.records.errors import MeantError
from inductor_passes.records.json_text import RecordError, parse
from inductor_passes.records.json_text import content as read_bytes
from inductor_passes.records.limits import Count, Integer, one_of
from inductor_passes.report import PHASES

SCHEMA_VERSION = 1
#: Larger files, and more of them in one directory, are refused before they are parsed.
MAX_FILE_BYTES = 64 * 2**20
MAX_FILES = 256


#: Names of nodes or kernels, each once.
Names: TypeAlias = tuple[Annotated[str, Meta(min_length=1)], ...]


class PlanFileError(MeantError, RecordError):
    """A plan file that cannot be read, does not fit the graph, or asks for what is not allowed."""


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph.

    Attributes:
        phase, graph_index: which graph of a process it was; None: any.
        compile_id, rank, world_size: where it came from, for people; ``rank`` also tells whose kernels are listed.
        collectives: start node of the graph that came in -> ``kind, bytes, ranks``; None: fits any graph.
        buckets: starts that travel together, in buckets of two or more; None: plan them.
        left_out: passes whose changes were undone, and parts of passes (``redistribute/R5``); None: the passes decide.
        kept: starts of a forward graph's gathers whose results are held for backward; None: choose them.
        order: names of the FX tasks in order; None: plan them.
        kernels: names of the fused kernels in order; None: plan them.
        predicted: step time in ns and peak in bytes when the plan was made; not read back.
        parameters: start node of the graph that came in -> parameters that it carries, where known; not read back.
        memory_budget: what the graph takes instead of the setting, because it has to send what another variant sends.
        costs: the cost profile by which passes decide, as ``CostProfile.to_json``: what they rewrite depends on it, so
            an order that was made by other ones may not fit. None: the setting's.
    """

    phase: Annotated[str, one_of(*PHASES)] | None = None
    graph_index: Count | None = None
    collectives: Mapping[str, str] | None = None
    left_out: Names | None = None
    buckets: tuple[Names, ...] | None = None
    kept: Names | None = None
    order: Names | None = None
    kernels: Names | None = None
    compile_id: str = ""
    rank: Count = 0
    world_size: Count = 1
    predicted: Mapping[str, Integer] = field(default_factory=dict)
    parameters: Mapping[str, Names] = field(default_factory=dict)
    memory_budget: Annotated[str, Meta(min_length=1)] | None = None
    costs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.costs is not None:
            try:
                CostProfile.from_json(dict(self.costs))
            except RecordError as error:
                raise PlanFileError(f"costs: {error}") from None
        taken: set[str] = set()
        for number, bucket in enumerate(self.buckets or ()):
            if len(bucket) < 2:
                raise PlanFileError(f"buckets[{number}] is {shown(list(bucket))}; expected at least two collectives")
            if twice := taken.intersection(bucket):
                name = sorted(twice)[0]
                raise PlanFileError(f"buckets[{number}] is {name!r}; expected a collective in one bucket only")
            taken.update(bucket)
        lists = {"left_out": self.left_out, "kept": self.kept, "order": self.order, "kernels": self.kernels}
        lists |= {f"buckets[{number}]": bucket for number, bucket in enumerate(self.buckets or ())}
        for key, names in lists.items():
            if names is not None and len(set(names)) != len(names):
                name = next(n for n, count in Counter(names).items() if count > 1)
                raise PlanFileError(f"{key} lists {name!r} twice")

    @property
    def profile(self) -> CostProfile | None:
        """``costs`` as a profile."""
        return None if self.costs is None else CostProfile.from_json(dict(self.costs))

    @property
    def title(self) -> str:
        """``forward_0``."""
        return f"{self.phase or 'any'}_{'any' if self.graph_index is None else self.graph_index}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is to be planned is left out."""
        data: dict[str, Any] = plain(self)
        return _written(data)

    @staticmethod
    def from_json(data: object, where: str) -> GraphPlan:
        """Inverse of :meth:`to_json`.

        Raises:
            PlanFileError: an unknown key or a value of another form; it names the place.
        """
        try:
            return convert(_written(data), GraphPlan, "a plan", keys="known", place=where)
        except RecordError as error:
            raise PlanFileError(str(error)) from None


@dataclass(frozen=True)
class PlanFile:
    """All graphs of a plan file or directory, and the hash of everything read (equal on ranks that read the same)."""

    path: str
    digest: str
    graphs: tuple[GraphPlan, ...]


def load(path: str) -> PlanFile:
    """Read a plan file, or every ``*.json`` of a directory.

    Raises:
        PlanFileError: it does not exist, is too large, is no JSON or no plan; the message names the file.
    """
    try:
        stamps = tuple((str(f), s.st_mtime_ns, s.st_size) for f in _files(path) for s in (f.stat(),))
    except PlanFileError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # Too long a name, a loop of links, a zero byte, no permission.
        raise PlanFileError(f"{shown(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _load(path, stamps)


def _files(path: str) -> list[Path]:
    root = Path(path)
    if root.is_dir():
        inside = root.resolve()
        # A link out of the directory would pin what is written elsewhere.
        files = [f for f in sorted(root.glob("*.json")) if f.is_file() and f.resolve().parent == inside]
        if not files:
            raise PlanFileError(f"{path} holds no plan; expected files that end in .json")
        if len(files) > MAX_FILES:
            raise PlanFileError(f"{path} holds {len(files)} files; expected at most {MAX_FILES}")
        return files
    if not root.is_file():
        wanted = "expected the path of an existing file or directory"
        raise PlanFileError(f"inductor_passes: plan={path!r} is not allowed; {wanted}")
    return [root]


def _written(data: Any) -> Any:
    """A JSON object without what is null."""
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


@dataclass(frozen=True)
class _Content:
    """A file without its version."""

    graphs: list[GraphPlan] = field(default_factory=list)


@functools.lru_cache(maxsize=8)
def _load(path: str, stamps: tuple[tuple[str, int, int], ...]) -> PlanFile:
    hasher = hashlib.sha256()
    graphs: list[GraphPlan] = []
    for name, _, _ in stamps:
        try:
            content = read_bytes(Path(name), "a plan", max_bytes=MAX_FILE_BYTES)
            data = parse(content, "a plan")
        except RecordError as error:
            raise PlanFileError(f"{name}: {error}") from None
        hasher.update(hashlib.sha256(content).digest())
        graphs += _graphs(data, name)
    seen: set[str] = set()
    for graph in graphs:
        if graph.title in seen:
            raise PlanFileError(f"{path}: {graph.title} is planned twice; expected one plan per graph")
        seen.add(graph.title)
    return PlanFile(path, hasher.hexdigest()[:16], tuple(graphs))


def _graphs(data: object, name: str) -> list[GraphPlan]:
    try:
        # A version that is not written is this one.
        given = {"schema_version": SCHEMA_VERSION, **_written(data)} if isinstance(data, dict) else data
        top = check_version(given, SCHEMA_VERSION, "plan")
        rest = {key: value for key, value in top.items() if key != "schema_version"}
        if isinstance(rest.get("graphs"), list):
            rest["graphs"] = [_written(graph) for graph in rest["graphs"]]
        return convert(rest, _Content, "a plan", keys="known").graphs
    except RecordError as error:
        raise PlanFileError(f"{name}: {error}") from None


def text_of(graphs: Sequence[GraphPlan]) -> str:
    """The file's content: one name per line, so that two plans can be compared line by line."""
    data = {"schema_version": SCHEMA_VERSION, "graphs": [graph.to_json() for graph in graphs]}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
