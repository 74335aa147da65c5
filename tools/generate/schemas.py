#!/usr/bin/env python3
"""Writes the JSON schemas of the trace artifacts from the records that they are made of.

``tools/gen schemas`` writes inductor_passes/trace/schemas/; ``--check`` only says whether they are current.
docs/schemas/ links to the same files. A schema describes what is written: every field is there, and no other one;
readers ignore keys that they do not know.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import msgspec.inspect

from inductor_passes.pin.file import GraphPlan
from inductor_passes.report import GraphReport
from inductor_passes.schedule.problem import ProblemRecord
from inductor_passes.trace import records
from tools.shared.launch import ROOT

FOLDER = ROOT / "inductor_passes" / "trace" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

#: Artifact kind -> (what it is made of, in this order; what a reader should know).
PARTS: dict[str, tuple[tuple[type, ...], str]] = {
    "config": ((records.ConfigArtifact,), "The settings a graph was compiled with."),
    "summary": (
        (GraphReport, records.Identity),
        "A graph's report without decisions, collectives, settings, schedules: those have their own artifacts.",
    ),
    "decisions": (
        (records.DecisionsArtifact,),
        "Every candidate that a pass looked at, with verdict and reason; passes in the order of their runs.",
    ),
    "collectives": (
        (records.CollectivesArtifact,),
        "The verdict on every collective of the final schedule. Times in ns, sizes in bytes, ranks global.",
    ),
    "chrome_trace": (
        (records.ChromeTraceArtifact,),
        "A planned timeline for Perfetto. ts and dur are microseconds with three digits.",
    ),
    "problem": (
        (ProblemRecord, records.Identity),
        "The scheduling problem, for `inductor-passes simulate`; rows are positional, see schedule/problem.py.",
    ),
    "plan": (
        (GraphPlan, records.Identity),
        "What was decided for a graph, by names; `report --plans` makes a plan file of it.",
    ),
    "failure": (
        (records.FailureArtifact,),
        "A pass that was rolled back: why, and the graph that was refused, line by line.",
    ),
    "timing": (
        (records.TimingArtifact,),
        "What the setting `tune` measured of a graph, beside what was predicted; the last record counts. Times in ns.",
    ),
    "measured": (
        (records.MeasuredArtifact,),
        "Errors of narrowed messages, measured while the graph runs; the last one of a graph counts.",
    ),
    "nothing_planned": (
        (records.NothingPlannedArtifact,),
        "Why nothing was planned although graphs were compiled; once per process.",
    ),
}
#: Artifact kind -> record -> fields that are written elsewhere.
WITHOUT: dict[str, dict[str, Sequence[str]]] = {
    "summary": {
        "GraphReport": ("collectives", "config", "plan", "timing"),
        "PassReport": ("decisions",),
        "ScheduleReport": ("schedule_before", "schedule_after"),
    },
}
#: Fields that a writer leaves out where there is nothing to say; a file of ``dump_problem`` has no identity.
OPTIONAL: dict[str, Sequence[str]] = {
    "plan": (
        *("kept", "order", "kernels", "buckets", "predicted", "world_size"),
        *("compile_id", "rank", "schema_version"),
    ),
    "problem": ("phase", "graph_index", "compile_id", "rank"),
}


def strict(definition: Schema, without: Sequence[str] = (), unset: Sequence[str] = ()) -> Schema:
    """An object as it is written: fields with a default are there too, those that stay ``unset`` are not."""
    if "properties" not in definition:
        return definition
    fields = {name: field for name, field in definition["properties"].items() if name not in without}
    kept = {key: value for key, value in definition.items() if key not in ("properties", "required")}
    if "description" in kept:  # as of msgspec 0.23; versions before keep the indentation
        kept["description"] = inspect.cleandoc(kept["description"])
    return {
        **kept,
        "properties": {name: nullable(field) for name, field in fields.items()},
        "required": sorted({*fields} - {*unset}),
        "additionalProperties": False,
    }


def left_unset(parts: Sequence[type]) -> dict[str, list[str]]:
    """Record -> its fields that are not written unless they are set.

    msgspec's schemas do not tell: whether a default that a function makes is in them depends on the version.
    """
    found: dict[str, list[str]] = {}
    waiting: list[Any] = [*msgspec.inspect.multi_type_info(parts)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if one.cls.__name__ not in found:
                found[one.cls.__name__] = [
                    f.encode_name
                    for f in one.fields
                    if not f.required and f.default is f.default_factory is msgspec.NODEFAULT  # it is UNSET
                ]
                waiting += [f.type for f in one.fields]
        elif isinstance(one, msgspec.inspect.Type):
            held = (getattr(one, name) for name in one.__struct_fields__)
            for value in held:
                waiting += value if isinstance(value, tuple) else [value]
    return found


def nullable(field: Any) -> Any:
    """A field's schema without its default; a float may be null, because JSON has no NaN and no infinity."""
    if isinstance(field, Mapping):
        cleaned = {key: nullable(value) for key, value in field.items() if key != "default"}
        if cleaned.get("type") == "number":
            cleaned["type"] = ["number", "null"]
        return cleaned
    return [nullable(one) for one in field] if isinstance(field, list) else field


def schema_of(kind: str) -> Schema:
    """The schema of one kind of artifact."""
    parts, about = PARTS[kind]
    _, definitions = msgspec.json.schema_components(parts)
    without = WITHOUT.get(kind, {})
    unset = left_unset(parts)
    known = {name: strict(one, without.get(name, ()), unset.get(name, ())) for name, one in definitions.items()}
    whole: Schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    for part in parts:
        own = known.pop(part.__name__)
        whole["properties"] |= own["properties"]
        whole["required"] = sorted({*whole["required"], *own["required"]} - {*OPTIONAL.get(kind, ())})
    used = reachable(whole, known)
    return {
        "$schema": DRAFT,
        "title": f"inductor_passes_{kind}",
        "description": about,
        **whole,
        **({"$defs": {name: known[name] for name in sorted(used)}} if used else {}),
    }


def reachable(schema: Any, definitions: dict[str, Schema]) -> set[str]:
    """Names of the definitions that a schema refers to, directly or through others."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            name = str(one.get("$ref", "")).rpartition("/")[2]
            if name in definitions and name not in found:
                found.add(name)
                waiting.append(definitions[name])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def rendered() -> dict[str, str]:
    """File name -> text."""
    return {f"{kind}.json": json.dumps(schema_of(kind), indent=1) + "\n" for kind in PARTS}


def main() -> int:
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"not current: {', '.join(stale)}; run tools/gen schemas")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
