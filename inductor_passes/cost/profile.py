"""Cost profiles: how long compute and collectives take here, as frozen data with one JSON form.

A profile is a device spec (datasheet defaults) with measurements laid over it: time of matmuls by dtype and
size, what short sides and fused attention cost, streaming bandwidth, fixed cost per kernel, and per group layout and
collective kind a line ``alpha + beta * bytes`` for the link and another for the host that issues. All ranks must load
the same file: every query is a pure function of the profile and its arguments, and depends on a group only through its
layout (size, hosts, ranks per host), so ranks that belong to different but equal groups get equal answers.

Units: ns, bytes, FLOP. ``beta`` counts wire bytes, i.e. what one rank sends in the ring algorithm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from inductor_passes.cost.communication import (
    KINDS,
    GroupLayout,
    communication_estimate,
    default_issue_ns,
    message_bytes,
    wire_bytes,
)
from inductor_passes.cost.specs import DeviceSpec, lookup
from inductor_passes.operators import kind_of
from inductor_passes.records.convert import check_version, convert, plain
from inductor_passes.records.errors import MeantError
from inductor_passes.records.json_text import RecordError, read
from inductor_passes.records.limits import AtLeastOne, Count, NotNegative, Number, Positive, one_of
from inductor_passes.records.whole_file import write_whole

__all__ = ["CollectiveCost", "CostProfile", "GroupCost", "MatmulPoint", "ProfileError", "RecordedProfile", "ShapeRate"]

SCHEMA_VERSION = 3
#: The largest slowdown that is believed, five times as long: the most that was measured is 3.7 times
#: (``docs/results/gpu.md``).
MOST_SLOWDOWN = 4.0
#: What :class:`ShapeRate` knows.
SHAPES = ("matmul", "attention", "attention_backward")
#: Files above this are refused before they are parsed.
MAX_FILE_BYTES = 16 * 2**20
#: Layouts that a profile remembers.
_MOST_LAYOUTS = 1024


class ProfileError(MeantError, RecordError):
    """A cost profile that cannot be used; the message names the file and the place in it."""


@dataclass(frozen=True)
class MatmulPoint:
    """A measured matmul: ``flops`` (2mnk) of ``dtype`` take ``ns``, the fixed cost per kernel not included."""

    dtype: str
    flops: Positive
    ns: Positive


@dataclass(frozen=True)
class ShapeRate:
    """A measured rate of library kernels that square matmuls do not predict.

    Attributes:
        kind: ``matmul`` (with a short side), ``attention`` or ``attention_backward`` (fused).
        side: rows or columns of the result, the shorter one; 0 for attention.
        ns_per_flop: of FLOPs as ``torch.utils.flop_counter`` counts them.
    """

    kind: str
    dtype: str
    side: Count
    ns_per_flop: Positive


@dataclass(frozen=True)
class CollectiveCost:
    """One kind of collective on one layout.

    Attributes:
        kind: one of ``communication.KINDS``.
        alpha_ns / beta_ns_per_byte: time on the link, per wire byte.
        issue_ns / issue_ns_per_byte: time that the issuing host loses, per byte of the full message (staging
            copies and, where the library moves data with the CPU, what it takes away from compute).
        slowdown: by what share kernels take longer while it transfers (0.3: 30% longer).
    """

    kind: Annotated[str, one_of(*KINDS)]
    alpha_ns: NotNegative
    beta_ns_per_byte: NotNegative
    issue_ns: NotNegative
    issue_ns_per_byte: NotNegative
    slowdown: NotNegative = 0.0


@dataclass(frozen=True)
class GroupCost:
    """Measured collectives of every group with ``layout``.

    Attributes:
        layout: see :class:`GroupLayout`.
        backend: e.g. ``gloo``, ``nccl``; for people.
        link: name of the physical link; groups with equal links do not transfer at the same time.
        costs: at most one per kind.
    """

    layout: GroupLayout
    backend: str
    link: str
    costs: tuple[CollectiveCost, ...]

    def cost(self, kind: str) -> CollectiveCost | None:
        """The measurement of ``kind``, or None."""
        return next((c for c in self.costs if c.kind == kind), None)


@dataclass(frozen=True)
class CostProfile:
    """Durations for the planner; see the module's docstring.

    Attributes:
        name: for people and reports.
        device: name of the device spec that fills what was not measured.
        measured: False for datasheet defaults.
        ranks_per_host: global ranks ``h * n`` to ``h * n + n - 1`` share host ``h``.
        matmul: measured points; per dtype of rising FLOPs and rising ns. Empty: the spec.
        memory_bytes_per_s: streaming bandwidth (read plus write). 0: the spec.
        kernel_ns: fixed cost per kernel. Negative: the spec.
        groups: measured group layouts, at most one each.
        shapes: measured rates of kernels that are no square matmuls; per kind and dtype of rising side.
    """

    name: str
    device: str
    measured: bool
    ranks_per_host: AtLeastOne
    matmul: tuple[MatmulPoint, ...] = ()
    memory_bytes_per_s: NotNegative = 0.0
    kernel_ns: Number = -1.0
    groups: tuple[GroupCost, ...] = ()
    shapes: tuple[ShapeRate, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ProfileError(f"{self.name}: ranks_per_host is {self.ranks_per_host}; expected at least 1")
        if 0 < self.memory_bytes_per_s < 1:
            said = f"memory_bytes_per_s is {self.memory_bytes_per_s:g}"
            raise ProfileError(f"{self.name}: {said}; expected 0 (that of the device) or at least 1")
        last: dict[str, MatmulPoint] = {}
        for point in self.matmul:
            before = last.get(point.dtype)
            if before and not (point.flops > before.flops and point.ns >= before.ns):
                raise ProfileError(
                    f"{self.name}: matmul points of {point.dtype} must rise; {before} is followed by {point}"
                )
            last[point.dtype] = point
        side: dict[tuple[str, str], int] = {}
        for rate in self.shapes:
            if rate.kind not in SHAPES:
                raise ProfileError(f"{self.name}: a shape's kind is {rate.kind!r}; expected one of {', '.join(SHAPES)}")
            if rate.side <= side.get((rate.kind, rate.dtype), -1):
                raise ProfileError(f"{self.name}: shapes of {rate.kind} in {rate.dtype} must have rising sides")
            side[rate.kind, rate.dtype] = rate.side
        layouts = [g.layout for g in self.groups]
        if len(set(layouts)) != len(layouts):
            raise ProfileError(f"{self.name}: a group layout is listed twice among {layouts}")
        for group in self.groups:
            kinds = [c.kind for c in group.costs]
            if len(set(kinds)) != len(kinds):
                raise ProfileError(f"{self.name}: a kind is listed twice among {kinds} of {group.layout}")
            for cost in group.costs:
                if cost.slowdown > MOST_SLOWDOWN:
                    found = f"slowdown of {cost.kind} is {cost.slowdown:g}"
                    raise ProfileError(f"{self.name}: {found}; expected 0 to {MOST_SLOWDOWN:g}")

    @staticmethod
    def default(device: str = "cpu", ranks_per_host: int | None = None, *, device_type: str = "cpu") -> CostProfile:
        """Datasheet defaults for a device's name or a device type (``cuda``, ``cpu``, ``xpu``); not measured.

        Args:
            device_type: whose defaults count for a name that is not known.
        """
        spec = lookup(device, device_type)
        return CostProfile(
            name=f"defaults for {spec.name}",
            device=spec.name,
            measured=False,
            ranks_per_host=ranks_per_host if ranks_per_host is not None else spec.ranks_per_host,
        )

    @property
    def spec(self) -> DeviceSpec:
        """The device spec that fills what was not measured."""
        return lookup(self.device)

    def compute_ns(
        self, flops: float, bytes_moved: int, dtype: str, kernels: int = 1, shape: tuple[str, int] | None = None
    ) -> int:
        """Time on the compute lane, by the roofline: the slower of arithmetic and memory, plus fixed cost per
        kernel.

        Args:
            flops: matmul-like floating-point operations (2mnk for a matmul); 0 for pointwise work.
            bytes_moved: bytes read plus bytes written in device memory.
            dtype: of the operands, ``torch.`` prefix allowed.
            kernels: how many kernels the work is split over; 0 for work that launches none (views).
            shape: (kind, shorter side of the result) of a library kernel, see :class:`ShapeRate`: it is no faster than
                was measured for such shapes.
        """
        if flops < 0 or bytes_moved < 0 or kernels < 0:
            raise ValueError(
                f"compute_ns needs sizes of at least 0; got flops={flops}, bytes_moved={bytes_moved}, kernels={kernels}"
            )
        spec = self.spec
        bandwidth = self.memory_bytes_per_s or spec.memory_bytes_per_s.value * spec.memory_efficiency.value
        memory_ns = bytes_moved / bandwidth * 1e9
        fixed_ns = kernels * (self.kernel_ns if self.kernel_ns >= 0 else spec.kernel_ns.value)
        arithmetic_ns = self._arithmetic_ns(float(flops), dtype)
        if shape is not None and self.shapes:
            arithmetic_ns = max(arithmetic_ns, flops * self._ns_per_flop(dtype.removeprefix("torch."), *shape))
        return round(max(arithmetic_ns, memory_ns) + fixed_ns)

    def _ns_per_flop(self, dtype: str, kind: str, side: int) -> float:
        """Of the measured shape next to ``side``, on a straight line of logarithms between two; 0: not measured.

        Below the shortest side time no longer falls with the FLOPs; beyond the longest one a square matmul says enough.
        """
        rates = [r for r in self.shapes if r.kind == kind and r.dtype == dtype]
        if not rates:
            return 0.0
        if kind != "matmul":
            return rates[0].ns_per_flop
        if side <= rates[0].side:
            return rates[0].ns_per_flop * rates[0].side / max(1, side)
        for low, high in itertools.pairwise(rates):
            if side <= high.side:
                share = math.log(side / low.side) / math.log(high.side / low.side)
                return float(low.ns_per_flop ** (1 - share) * high.ns_per_flop**share)
        return 0.0

    def _arithmetic_ns(self, flops: float, dtype: str) -> float:
        name = dtype.removeprefix("torch.")
        points = [p for p in self.matmul if p.dtype == name]
        if not points:
            return flops / (self.spec.peak_flops(name) * self.spec.matmul_efficiency.value) * 1e9
        if flops <= points[0].flops:
            return flops / points[0].flops * points[0].ns
        for low, high in itertools.pairwise(points):
            if flops <= high.flops:
                return low.ns + (flops - low.flops) / (high.flops - low.flops) * (high.ns - low.ns)
        return flops / points[-1].flops * points[-1].ns

    def layout(self, ranks: tuple[int, ...]) -> GroupLayout:
        """The layout of a group of global ranks on this profile's hosts."""
        # By the tuple itself: its hash takes as long as the group is large, and this is asked for every bucket.
        known: dict[int, tuple[tuple[int, ...], GroupLayout]] = self.__dict__.setdefault("_layouts", {})
        ours, layout = known.get(id(ranks), (None, None))
        if layout is None or ours is not ranks:
            layout = GroupLayout.of(ranks, self.ranks_per_host)
            if len(known) >= _MOST_LAYOUTS:
                known.clear()
            known[id(ranks)] = ranks, layout
        return layout

    def link(self, ranks: tuple[int, ...]) -> str:
        """Name of the physical link that the group uses; equal names exclude each other."""
        layout = self.layout(ranks)
        exact = next((g for g in self.groups if g.layout == layout), None)
        if exact is not None:
            return exact.link
        similar = next((g for g in self.groups if g.layout.link == layout.link), None)
        return similar.link if similar is not None else layout.link

    def communication_ns(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> int:
        """Time on the link of one collective over the group of global ``ranks``.

        Args:
            kind: one of ``communication.KINDS``.
            input_bytes / output_bytes: what this rank puts in and gets out (sums for coalesced forms).
            ranks: the group's global ranks.

        Raises:
            ValueError: unknown kind or a negative size.
        """
        key = kind, input_bytes, output_bytes, self.layout(ranks)
        return self._once(key, lambda: self.communication_estimate(kind, input_bytes, output_bytes, ranks)[0])

    def _once(self, key: tuple[Any, ...], compute: Callable[[], int]) -> int:
        """Asked again and again for the same few collectives. Kept here because hashing a profile takes longer."""
        known: dict[tuple[Any, ...], int] = self.__dict__.setdefault("_known", {})
        if key not in known:
            known[key] = compute()
        return known[key]

    def communication_estimate(
        self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]
    ) -> tuple[int, str]:
        """As :meth:`communication_ns`, with the name of the algorithm or ``measured``/``scaled`` for a
        calibrated one.
        """
        layout = self.layout(ranks)
        estimate, algorithm = communication_estimate(kind, input_bytes, output_bytes, layout, self.spec)
        if layout.ranks == 1:
            return estimate, algorithm
        cost, hops_ratio = self._measured(kind, layout)
        if cost is None:
            return estimate, algorithm
        wire = wire_bytes(kind, input_bytes, output_bytes, layout.ranks)
        duration = round(cost.alpha_ns * hops_ratio + cost.beta_ns_per_byte * wire)
        return duration, "measured" if hops_ratio == 1 else "scaled"

    def issue_ns(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> int:
        """Host time in ns that issuing the collective takes from the compute thread; see :meth:`communication_ns`."""
        key = kind, input_bytes, output_bytes, self.layout(ranks)
        return self._once(("issue", *key), lambda: self._modelled_issue_ns(*key))

    def _modelled_issue_ns(self, kind: str, input_bytes: int, output_bytes: int, layout: GroupLayout) -> int:
        cost, _ = self._measured(kind, layout)
        if cost is None:
            return default_issue_ns(kind, input_bytes, output_bytes, layout, self.spec)
        full = message_bytes(kind, input_bytes, output_bytes, layout.ranks)
        return round(cost.issue_ns + cost.issue_ns_per_byte * full)

    def slowdown_percent(self, kind: str, ranks: tuple[int, ...]) -> int:
        """By how many percent kernels take longer while the collective transfers; 0 where nobody measured it."""
        cost, _ = self._measured(kind, self.layout(ranks))
        return 0 if cost is None else round(100 * cost.slowdown)

    def _measured(self, kind: str, layout: GroupLayout) -> tuple[CollectiveCost | None, float]:
        """The measurement that serves ``kind`` on ``layout``, and what to multiply its alpha with.

        The same layout first; else another layout on the same kind of link, its latency scaled by the hops of
        a ring.
        """
        kind_of(kind)
        for group in self.groups:
            if group.layout == layout and (cost := group.cost(kind)):
                return cost, 1.0
        for group in self.groups:
            if group.layout.link == layout.link and (cost := group.cost(kind)):
                return cost, max(1, layout.ranks - 1) / max(1, group.layout.ranks - 1)
        return None, 1.0

    def hash(self) -> str:
        """SHA-256 (first 16 hex digits) of everything that influences an answer: the profile and its device spec."""
        data = self.to_json()
        del data["name"]
        for cost in (c for group in data["groups"] for c in group["costs"] if not c["slowdown"]):
            del cost["slowdown"]  # as before there were any
        data["spec"] = {k: c.value for k, c in self.spec.constants().items()}
        return hashlib.sha256(json.dumps(data, separators=(",", ":"), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain data with ``schema_version``."""
        return {"schema_version": SCHEMA_VERSION, **plain(self)}

    @staticmethod
    def from_json(data: object) -> CostProfile:
        """Inverse of :meth:`to_json`.

        Raises:
            ProfileError: other schema version, missing or unknown key, wrong type, value out of range; it
                names the place in the file.
        """
        data = _as_today(data)
        try:
            top = check_version(data, SCHEMA_VERSION, "cost profile")
            rest = {key: value for key, value in top.items() if key != "schema_version"}
            return convert(rest, CostProfile, "the cost profile", keys="all")
        except RecordError as error:
            raise ProfileError(str(error)) from None

    @staticmethod
    def load(path: str | Path) -> CostProfile:
        """Read a profile.

        Raises:
            ProfileError: no such file, larger than 16 MiB, not JSON, or not a valid profile; it names the
            file.
        """
        try:
            return CostProfile.from_json(read(Path(path), "a cost profile", max_bytes=MAX_FILE_BYTES))
        except RecordError as error:
            raise ProfileError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, as a whole or not at all."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        write_whole(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))


class RecordedProfile(CostProfile):
    """Durations of kernels and transfers that a CUDA graph replays: the host issues none of them.

    Not in files: it is made of the profile of the same device (:meth:`of`) where a graph is planned.
    """

    @staticmethod
    def of(profile: CostProfile) -> RecordedProfile:
        """``profile`` without what the host takes."""
        values = {field.name: getattr(profile, field.name) for field in dataclasses.fields(profile)}
        return RecordedProfile(**{**values, "name": f"{profile.name}, recorded"})

    def issue_ns(self, kind: str, input_bytes: int, output_bytes: int, ranks: tuple[int, ...]) -> int:
        """0."""
        return 0

    def hash(self) -> str:
        """Another one than that of the profile of which it is made."""
        return hashlib.sha256(f"recorded {super().hash()}".encode()).hexdigest()[:16]


def _as_today(data: object) -> object:
    """A profile of schema version 1 (without shapes) or 2 (without slowdowns) as one of today's."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(version) is not int or version not in (1, 2):
        return data
    groups = data.get("groups")
    if isinstance(groups, list):
        groups = [_with_slowdowns(group) for group in groups]
    added: dict[str, Any] = {"shapes": []} if data["schema_version"] == 1 and "shapes" not in data else {}
    return {**data, **added, "groups": groups, "schema_version": SCHEMA_VERSION}


def _with_slowdowns(group: object) -> object:
    if not isinstance(group, dict) or not isinstance(group.get("costs"), list):
        return group
    return {**group, "costs": [{"slowdown": 0.0, **c} if isinstance(c, dict) else c for c in group["costs"]]}
