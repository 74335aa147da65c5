#!/usr/bin/env python3
"""Writes the JSON schemas of the trace artifacts from the data classes that they are made of.

``python tools/gen_schemas.py`` writes inductor_passes/trace/schemas/; ``--check`` only says whether they are current.
docs/schemas/ links to the same files.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inductor_passes import report  # noqa: E402
from inductor_passes.schedule import problem  # noqa: E402
from inductor_passes.trace import chrome  # noqa: E402

FOLDER = ROOT / "inductor_passes" / "trace" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
INTEGER = {"type": "integer"}
COUNT = {"type": "integer", "minimum": 0}
STRING = {"type": "string"}
BOOLEAN = {"type": "boolean"}
#: What every payload of a graph carries.
IDENTITY = {
    "schema_version": {"const": report.SCHEMA_VERSION},
    "phase": {"enum": ["forward", "backward", "inference"]},
    "graph_index": COUNT,
    "compile_id": STRING,
    "rank": COUNT,
}


def of_type(hint: Any) -> dict[str, Any]:
    """The schema of a field's type; a float may be null, because JSON has no NaN and no infinity."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [of_type(a) for a in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if dataclasses.is_dataclass(hint):
        return of_dataclass(hint)
    if origin in (list, tuple):
        return {"type": "array", "items": of_type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": of_type(arguments[1])}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [one.value for one in hint]}
    return {bool: BOOLEAN, int: INTEGER, str: STRING, float: {"type": ["number", "null"]}}[hint]


def of_dataclass(cls: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = {f.name: of_type(hints[f.name]) for f in dataclasses.fields(cls) if f.name not in without}
    return record(fields)


def record(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with exactly these keys."""
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False, **more}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def row(*items: dict[str, Any]) -> dict[str, Any]:
    """A positional record."""
    return {"type": "array", "prefixItems": list(items), "minItems": len(items), "maxItems": len(items)}


def summary() -> dict[str, Any]:
    schema = of_dataclass(report.GraphReport, without=("collectives", "config", "plan"))
    fields = schema["properties"]
    fields |= IDENTITY
    fields["passes"] = array(of_dataclass(report.PassReport, without=("decisions",)))
    fields["schedules"] = array(
        of_dataclass(report.ScheduleReport, without=("schedule_before", "schedule_after"))
    )
    return schema


def problem_schema() -> dict[str, Any]:
    fields = {
        "name": STRING,
        "base_bytes": COUNT,
        "meta": {"type": "object", "additionalProperties": STRING},
        "lanes": array(row(STRING, STRING, BOOLEAN)),
        "tasks": array(
            row(
                STRING,
                {"enum": [int(kind) for kind in problem.Kind]},
                COUNT,
                INTEGER,
                INTEGER,
                COUNT,
                COUNT,
                STRING,
                STRING,
                BOOLEAN,
                STRING,
            )
        ),
        "preds": array(array(COUNT)),
        "storages": array(row(COUNT, INTEGER, array(COUNT), BOOLEAN, STRING)),
    }
    schema = record(fields)
    # A file written by ``dump_problem`` is no artifact and has no identity.
    version = {"schema_version": {"const": problem.SCHEMA_VERSION}}
    schema["properties"] = {**fields, **IDENTITY, **version}
    schema["required"] = sorted([*fields, *version])
    return schema


def chrome_schema() -> dict[str, Any]:
    time = {"type": "number", "minimum": 0}
    base = {"pid": COUNT, "tid": COUNT, "name": STRING}
    size = {"bytes": COUNT, "budget": COUNT}
    events = [
        record({"ph": {"const": "M"}, **base, "args": {"type": "object"}}),
        record(
            {
                "ph": {"const": "X"},
                **base,
                "cat": {"enum": ["compute", "wait", "issue", "transfer"]},
                "ts": time,
                "dur": time,
                "args": {"type": "object", "properties": {"task": COUNT}, "required": ["task"]},
            }
        ),
        record({"ph": {"enum": ["s", "t"]}, **base, "cat": STRING, "id": STRING, "ts": time}),
        record({"ph": {"const": "f"}, **base, "cat": STRING, "id": STRING, "ts": time, "bp": {"const": "e"}}),
        record({"ph": {"const": "C"}, **base, "ts": time, "args": {**record(size), "required": ["bytes"]}}),
    ]
    identity = {**IDENTITY, "schema_version": {"const": chrome.SCHEMA_VERSION}}
    return record({**identity, "displayTimeUnit": {"const": "ns"}, "traceEvents": array({"oneOf": events})})


def schemas() -> dict[str, dict[str, Any]]:
    """Artifact kind -> schema."""
    groups = record(
        {
            "name": STRING,
            "ranks": array(COUNT),
            "start": {"type": ["integer", "null"]},
            "stride": {"type": ["integer", "null"]},
        }
    )
    decisions = record({"name": STRING, "decisions": array(of_dataclass(report.Decision))})
    return {
        "config": record(
            {
                **IDENTITY,
                "config": {"type": "object"},
                "cost_profile": STRING,
                "torch_version": STRING,
                "world_size": COUNT,
            }
        ),
        "summary": summary(),
        "decisions": record({**IDENTITY, "passes": array(decisions)}),
        "collectives": record(
            {**IDENTITY, "groups": array(groups), "collectives": array(of_dataclass(report.CollectiveReport))}
        ),
        "chrome_trace": chrome_schema(),
        "problem": problem_schema(),
        "plan": record(
            {
                **IDENTITY,
                "world_size": COUNT,
                "predicted": {"type": "object", "additionalProperties": INTEGER},
                "collectives": {"type": "object", "additionalProperties": STRING},
                "buckets": array(array(STRING)),
                "order": array(STRING),
                "kept": array(STRING),
                "kernels": array(STRING),
            },
            required=["phase", "graph_index", "collectives"],
        ),
        "failure": record({**IDENTITY, "pass": of_dataclass(report.PassReport), "graph": array(STRING)}),
    }


def rendered() -> dict[str, str]:
    """File name -> text."""
    return {
        f"{kind}.json": json.dumps(
            {"$schema": DRAFT, "title": f"inductor_passes_{kind}", "description": ABOUT[kind], **schema}, indent=1
        )
        + "\n"
        for kind, schema in schemas().items()
    }


ABOUT = {
    "config": "The settings a graph was compiled with.",
    "summary": "A graph's report without decisions, collectives, settings, schedules: those have their own artifacts.",
    "decisions": "Every candidate that a pass looked at, with verdict and reason; passes in the order of their runs.",
    "collectives": "The verdict on every collective of the final schedule. Times in ns, sizes in bytes, ranks global.",
    "chrome_trace": "A planned timeline for Perfetto. ts and dur are microseconds with three digits.",
    "problem": "The scheduling problem, for `inductor-passes simulate`; rows are positional, see schedule/problem.py.",
    "plan": "What was decided for a graph, by names; `report --plans` makes a plan file of it.",
    "failure": "A pass that was rolled back: why, and the graph that was refused, line by line.",
}


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
        print(f"not current: {', '.join(stale)}; run python tools/gen_schemas.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
