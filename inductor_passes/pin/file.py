"""The plan file: what was decided for each graph, as data that people read, compare and edit.

One file holds any number of graphs, one name per line:

    {"schema_version": 1, "graphs": [{"phase": "forward", "graph_index": 0, ..., "buckets": [["a", "b"]],
     "kept": ["c"], "order": [...], "kernels": [...]}]}

``collectives`` describes the graph that came in and tells whether the plan still fits. ``buckets`` names the
collectives that travel together, ``kept`` the gathers of a forward graph whose results backward reuses, ``order``
everything that the graph passes ordered (FX nodes that take time), and ``kernels`` the order of the fused kernels.
``kept``, ``order`` and ``kernels`` may be left out: what is not written is planned.

A file is data: names are compared and never called, opened or evaluated.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
#: Larger files, and more of them in one directory, are refused before they are parsed.
MAX_FILE_BYTES = 64 * 2**20
MAX_FILES = 256
PHASES = ("forward", "backward", "inference")


class PlanFileError(ValueError):
    """A plan file that cannot be read, does not fit the graph, or asks for what is not allowed."""


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph.

    Attributes:
        phase, graph_index: which graph of a process it was.
        compile_id, rank, world_size: where it came from, for people; ``rank`` also tells whose kernels are listed.
        collectives: start node of the graph that came in -> ``kind, bytes, ranks``.
        buckets: start nodes that travel together, in buckets of two or more.
        kept: start nodes of a forward graph's gathers whose results are held for backward; None: choose them.
        order: names of the FX tasks in order; None: plan them.
        kernels: names of the fused kernels in order; None: plan them.
        predicted: step time in ns and peak in bytes when the plan was made; not read back.
    """

    phase: str
    graph_index: int
    collectives: Mapping[str, str]
    buckets: tuple[tuple[str, ...], ...] = ()
    kept: tuple[str, ...] | None = None
    order: tuple[str, ...] | None = None
    kernels: tuple[str, ...] | None = None
    compile_id: str = ""
    rank: int = 0
    world_size: int = 1
    predicted: Mapping[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """``forward_0``."""
        return f"{self.phase}_{self.graph_index}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is to be planned is left out."""
        data: dict[str, Any] = {
            "phase": self.phase,
            "graph_index": self.graph_index,
            "compile_id": self.compile_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "predicted": dict(self.predicted),
            "collectives": dict(self.collectives),
            "buckets": [list(b) for b in self.buckets],
        }
        for key, value in (("kept", self.kept), ("order", self.order), ("kernels", self.kernels)):
            if value is not None:
                data[key] = list(value)
        return data

    @staticmethod
    def from_json(data: object, where: str) -> GraphPlan:
        """Inverse of :meth:`to_json`.

        Raises:
            PlanFileError: an unknown or missing key or a value of another form; it names the place.
        """
        row = _table(data, where, _KEYS, ("phase", "graph_index", "collectives"))
        phase = row["phase"]
        if phase not in PHASES:
            raise _wrong(f"{where}.phase", phase, f"one of {', '.join(PHASES)}")
        collectives = row["collectives"]
        if not isinstance(collectives, dict) or not all(isinstance(v, str) for v in collectives.values()):
            raise _wrong(f"{where}.collectives", collectives, "an object of texts")
        buckets = row.get("buckets", [])
        if not isinstance(buckets, list):
            raise _wrong(f"{where}.buckets", buckets, "a list of lists of names")
        taken: set[str] = set()
        for number, bucket in enumerate(buckets):
            members = _names(bucket, f"{where}.buckets[{number}]")
            if len(members) < 2:
                raise _wrong(f"{where}.buckets[{number}]", bucket, "at least two collectives")
            if twice := taken.intersection(members):
                raise _wrong(f"{where}.buckets[{number}]", sorted(twice)[0], "a collective in one bucket only")
            taken.update(members)
        predicted = row.get("predicted", {})
        return GraphPlan(
            phase=phase,
            graph_index=_count(row["graph_index"], f"{where}.graph_index"),
            collectives=collectives,
            buckets=tuple(tuple(b) for b in buckets),
            kept=_names(row["kept"], f"{where}.kept") if "kept" in row else None,
            order=_names(row["order"], f"{where}.order") if "order" in row else None,
            kernels=_names(row["kernels"], f"{where}.kernels") if "kernels" in row else None,
            compile_id=str(row.get("compile_id", "")),
            rank=_count(row.get("rank", 0), f"{where}.rank"),
            world_size=_count(row.get("world_size", 1), f"{where}.world_size"),
            predicted=predicted if isinstance(predicted, dict) else {},
        )


_KEYS = frozenset(
    (
        "phase",
        "graph_index",
        "compile_id",
        "rank",
        "world_size",
        "predicted",
        "collectives",
        "buckets",
        "kept",
        "order",
        "kernels",
    )
)


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
    files = _files(path)
    try:
        stamps = tuple((str(f), s.st_mtime_ns, s.st_size) for f in files for s in (f.stat(),))
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be read: {error}") from error
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
        raise PlanFileError(f"plan={path!r} is not allowed; expected the path of an existing file or directory")
    return [root]


@functools.lru_cache(maxsize=8)
def _load(path: str, stamps: tuple[tuple[str, int, int], ...]) -> PlanFile:
    hasher = hashlib.sha256()
    graphs: list[GraphPlan] = []
    for name, _, size in stamps:
        if size > MAX_FILE_BYTES:
            raise PlanFileError(f"{name}: {size} bytes are too many for a plan; expected at most {MAX_FILE_BYTES}")
        try:
            content = Path(name).read_bytes()
            data = json.loads(content)
        except RecursionError:
            raise PlanFileError(f"{name}: not a plan: nested too deeply") from None
        except (OSError, ValueError) as error:
            raise PlanFileError(f"{name}: cannot be read as a plan: {error}") from error
        hasher.update(hashlib.sha256(content).digest())
        graphs += _graphs(data, name)
    seen: set[str] = set()
    for graph in graphs:
        if graph.title in seen:
            raise PlanFileError(f"{path}: {graph.title} is planned twice; expected one plan per graph")
        seen.add(graph.title)
    return PlanFile(path, hasher.hexdigest()[:16], tuple(graphs))


def _graphs(data: object, name: str) -> list[GraphPlan]:
    top = _table(data, f"{name}: top", frozenset(("schema_version", "graphs")), ("schema_version", "graphs"))
    if top["schema_version"] != SCHEMA_VERSION:
        raise PlanFileError(f"{name}: schema_version is {top['schema_version']!r}; expected {SCHEMA_VERSION}")
    if not isinstance(top["graphs"], list):
        raise _wrong(f"{name}: graphs", top["graphs"], "a list")
    return [GraphPlan.from_json(one, f"{name}: graphs[{k}]") for k, one in enumerate(top["graphs"])]


def text_of(graphs: Sequence[GraphPlan]) -> str:
    """The file's content: one name per line, so that two plans can be compared line by line."""
    data = {"schema_version": SCHEMA_VERSION, "graphs": [graph.to_json() for graph in graphs]}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _table(data: object, where: str, known: frozenset[str], needed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _wrong(where, data, "an object")
    for key in data:
        if key not in known:
            raise PlanFileError(f"{where} has the unknown key {key!r}; expected {', '.join(sorted(known))}")
    for key in needed:
        if key not in data:
            raise PlanFileError(f"{where} lacks the key {key!r}")
    return data


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise _wrong(where, value, "a list of names")
    if len(set(value)) != len(value):
        twice = next(v for v in value if value.count(v) > 1)
        raise PlanFileError(f"{where} lists {twice!r} twice")
    return tuple(value)


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(where, value, "a whole number of at least 0")
    return value


def _wrong(where: str, value: object, expected: str) -> PlanFileError:
    shown = repr(value)
    return PlanFileError(f"{where} is {shown if len(shown) < 80 else shown[:77] + '...'}; expected {expected}")
