"""Prints how the code is built, for docs/design.md: ``tools/gen structure [CHECKOUT]`` (default: this one).

Lengths of files and functions, and trips: how far one argument travels. A trip follows a parameter through the
calls that hand it on: by name, or as the attribute of an object that was made with it. A method of an object whose
class is not known counts where its own parameter has the same name. Each function is entered once per parameter, in
the order of calls. A folder (or a file of the package's root) is a room; a climb is a step from one function to the
next that leads to a higher floor.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.test_layout import FLOORS, PACKAGE

#: Rooms of older commits -> the room where their code is now.
_MOVED = {
    **dict.fromkeys(("budget",), "rewriting"),
    **dict.fromkeys(("emulated_group", "emulated_link", "link_model"), "emulation"),
    **dict.fromkeys(("garbage", "identity", "in_tree", "joint", "pipeline"), "engine"),
    "rank_check": "verify",
}
_FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: What travels -> where it begins and under which name, in today's code or in that of older commits.
TRIPS = {
    "a graph, from the hook to its report": ("engine.graph:compile_graph:graph", "plugin:run:graph"),
    "a graph through the rewrites": (
        "rewrites.pass_:RewriteCollectives.run:graph",
        "redistribute.driver:RewriteCollectives.run:graph",
    ),
    "a graph through async TP": ("async_tp.pass_:AsyncTpPass.run:graph",),
    "a graph through the order on FX": ("reorder.pass_:ReorderPass.run:graph",),
    "a graph through the verifier": ("verify.checker:check:graph",),
    "a problem through the planner": ("schedule.plan:plan:problem",),
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Code:
    """The functions of a package; names are ``module:function`` or ``module:Class.method``.

    Attributes:
        names: per module, what a name there means: another module, or something in one.
        fields: per class those that are annotated, in order.
        methods: name of a method -> all that are called so.
    """

    modules: dict[str, ast.Module]
    packages: set[str]
    functions: dict[str, _Function] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    fields: dict[str, list[str]] = field(default_factory=dict)
    methods: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def read(root: Path) -> Code:
        modules, packages = {}, set()
        for path in sorted(root.glob(f"{PACKAGE}/**/*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            modules[name] = ast.parse(path.read_text())
            if package:
                packages.add(name)
        code = Code(modules, packages)
        for module, tree in modules.items():
            code._enter(module, tree)
        return code

    def _enter(self, module: str, tree: ast.Module) -> None:
        names = self.names.setdefault(module, {})
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (source := self._source(module, node)).startswith(PACKAGE):
                for one in node.names:
                    inner = f"{source}.{one.name}"
                    names[one.asname or one.name] = inner if inner in self.modules else f"{source}:{one.name}"
        for node in tree.body:
            if isinstance(node, _Function):
                self.functions[f"{module}:{node.name}"] = node
            elif isinstance(node, ast.ClassDef):
                self._enter_class(f"{module}:{node.name}", node)
            if isinstance(node, (_Function, ast.ClassDef)):
                names[node.name] = f"{module}:{node.name}"

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The module that is imported from; a relative one is counted from this module's folder."""
        if not node.level:
            return node.module or ""
        folder = module.split(".")
        above = node.level - (module in self.packages)
        return ".".join([*folder[: len(folder) - above], *filter(None, [node.module])])

    def _enter_class(self, name: str, node: ast.ClassDef) -> None:
        annotated = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        self.fields[name] = [target.id for target in annotated if isinstance(target, ast.Name)]
        for one in node.body:
            if isinstance(one, _Function):
                self.functions[f"{name}.{one.name}"] = one
                self.methods.setdefault(one.name, []).append(f"{name}.{one.name}")

    def meant(self, module: str, call: ast.expr) -> str | None:
        """The function or class that is called, where that is written there; None: a method of some object."""
        if isinstance(call, ast.Name):
            found = self.names[module].get(call.id)
        elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
            outer = self.names[module].get(call.value.id)
            found = outer and f"{outer}{'.' if ':' in outer else ':'}{call.attr}"
        else:
            return None
        # Through packages that hand names on.
        while found and ":" in found and found not in self.functions and found not in self.fields:
            where, _, name = found.partition(":")
            further = self.names.get(where, {}).get(name)
            if further in (None, found):
                break
            found = further
        return found


@dataclass
class Trip:
    """Where a parameter has been."""

    code: Code
    entered: list[str] = field(default_factory=list)
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def go(self, name: str, what: str) -> None:
        """Follow ``what``, a parameter of a function or ``self.ATTRIBUTE`` in a method."""
        if (name, what) in self._seen:
            return
        self._seen.add((name, what))
        module, _, inner = name.partition(":")
        nodes = list(ast.walk(self.code.functions[name]))
        calls = [n for n in nodes if isinstance(n, ast.Call) and any(True for _ in _handed(n, what))]
        if calls or not what.startswith("self."):
            self.entered.append(name)
        owner = inner.rpartition(".")[0]
        for node in nodes:
            if owner and isinstance(node, ast.Assign) and _written(node.value) == what:
                for target in map(_written, node.targets):
                    if target and target.startswith("self."):
                        self._held(f"{module}:{owner}", target)
        for call in sorted(calls, key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0)):
            self._call(module, owner, call, what)

    def _call(self, module: str, owner: str, call: ast.Call, what: str) -> None:
        found = self.code.meant(module, call.func)
        if found in self.code.fields and f"{found}.__init__" not in self.code.functions:
            for place in _handed(call, what):
                names = self.code.fields[found]
                if isinstance(place, str) or place < len(names):
                    self._held(found, f"self.{place if isinstance(place, str) else names[place]}")
            return
        same: str | None = None
        if found is None and isinstance(call.func, ast.Attribute):
            own = f"{module}:{owner}.{call.func.attr}"
            to_self = isinstance(call.func.value, ast.Name) and call.func.value.id == "self"
            targets = [own] if to_self and own in self.code.functions else self.code.methods.get(call.func.attr, [])
            same = None if to_self else what.rpartition(".")[2]
        else:
            targets = [one for one in (found, f"{found}.__init__") if one in self.code.functions]  # type: ignore[misc]
        for target in targets:
            for place in _handed(call, what):
                name = _parameter(self.code.functions[target], "." in target.partition(":")[2], place)
                if name and (same is None or isinstance(place, str) or name == same):
                    self.go(target, name)

    def _held(self, owner: str, what: str) -> None:
        for name in self.code.functions:
            if name.startswith(f"{owner}."):
                self.go(name, what)


def _written(node: ast.expr) -> str | None:
    """``x`` or ``self.x``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return None


def _handed(call: ast.Call, what: str) -> Iterator[int | str]:
    """Places and keywords at which a call is given something."""
    yield from (i for i, one in enumerate(call.args) if _written(one) == what)
    yield from (k.arg for k in call.keywords if k.arg and _written(k.value) == what)


def _parameter(function: _Function, method: bool, place: int | str) -> str | None:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(place, str):
        return place if place in names or place in [one.arg for one in function.args.kwonlyargs] else None
    names = names[1:] if method and names[:1] in (["self"], ["cls"]) else names
    return names[place] if place < len(names) else None


def _room(name: str) -> str:
    return name.partition(":")[0].split(".")[1]


def main(root: Path) -> None:
    """Print both tables' numbers."""
    files = [len(path.read_text().splitlines()) for path in root.glob(f"{PACKAGE}/**/*.py")]
    code = Code.read(root)
    functions = [node for tree in code.modules.values() for node in ast.walk(tree) if isinstance(node, _Function)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    print(f"files: {len(files)}, in the root {len(list(root.glob(f'{PACKAGE}/*.py')))}")
    print(f"file, lines: median {statistics.median(files):g}, largest {max(files)}")
    tenth = statistics.quantiles(lengths, n=10)[-1]
    print(f"functions: {len(lengths)}, over 60 lines {sum(n > 60 for n in lengths)}")
    print(f"function, lines: median {statistics.median(lengths):g}, 90th percentile {tenth:g}, largest {lengths[-1]}")
    for what, begins in TRIPS.items():
        start = next(b for b in begins if f"{PACKAGE}.{b.rpartition(':')[0]}" in code.functions)
        name, _, parameter = f"{PACKAGE}.{start}".rpartition(":")
        trip = Trip(code)
        trip.go(name, parameter)
        rooms = list(map(_room, trip.entered))
        floors = [_FLOOR[_MOVED.get(room, room)] for room in rooms]
        print(f"{what}: {len({*rooms})} rooms, {sum(b > a for a, b in pairwise(floors))} climbs")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]))
